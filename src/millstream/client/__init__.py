"""The client: `Client` for threads, `AsyncClient` for asyncio, over one core that does no I/O.

    with Client("http://127.0.0.1:4437") as client:
        stream = client.stream("agents/run-42")
        stream.create(content_type="application/json")
        stream.append({"step": 1})
        for chunk in stream.follow():
            print(chunk.json(), chunk.next_offset)

Imports the protocol's rules and nothing of the server. What a user needs is exported here; the rest may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.client.conversation import Call
from millstream.client.errors import (
    BadAnswer,
    BadRequest,
    ClientError,
    Conflict,
    ConnectionFailed,
    Forbidden,
    Gone,
    NotFound,
    OffsetTrimmed,
    OutcomeUnknown,
    PayloadTooLarge,
    PreconditionFailed,
    ProducerFenced,
    SequenceGap,
    ServerError,
    StreamClosed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from millstream.client.messages import AsyncValue, AsyncValues, Request, Value, Values
from millstream.client.results import (
    Appended,
    Bootstrap,
    BucketInfo,
    Chunk,
    Created,
    FeedItem,
    FeedPage,
    Producer,
    RawFeedPage,
    Readiness,
    Snapshot,
    StreamEntry,
    StreamInfo,
)
from millstream.client.retries import RetryPolicy
from millstream.client.sync_client import Bucket, Client, Stream
from millstream.client.sync_driver import Following
from millstream.client.sync_producer import IdempotentProducer

if TYPE_CHECKING:
    from millstream.client.async_client import AsyncBucket, AsyncClient, AsyncStream
    from millstream.client.async_driver import AsyncFollowing
    from millstream.client.async_producer import AsyncIdempotentProducer

_ASYNC = {
    "AsyncBucket": "async_client",
    "AsyncClient": "async_client",
    "AsyncFollowing": "async_driver",
    "AsyncIdempotentProducer": "async_producer",
    "AsyncStream": "async_client",
}


def __getattr__(name: str) -> Any:
    """Import the asynchronous names lazily, so that blocking programs do not wait for asyncio's import."""
    if name in _ASYNC:
        from importlib import import_module

        return getattr(import_module(f"millstream.client.{_ASYNC[name]}"), name)
    raise AttributeError(f"module 'millstream.client' has no attribute {name!r}")


__all__ = [
    "Appended",
    "AsyncBucket",
    "AsyncClient",
    "AsyncFollowing",
    "AsyncIdempotentProducer",
    "AsyncStream",
    "AsyncValue",
    "AsyncValues",
    "BadAnswer",
    "BadRequest",
    "Bootstrap",
    "Bucket",
    "BucketInfo",
    "Call",
    "Chunk",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectionFailed",
    "Created",
    "FeedItem",
    "FeedPage",
    "Following",
    "Forbidden",
    "Gone",
    "IdempotentProducer",
    "NotFound",
    "OffsetTrimmed",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "PreconditionFailed",
    "Producer",
    "ProducerFenced",
    "RawFeedPage",
    "Readiness",
    "Request",
    "RetryPolicy",
    "SequenceGap",
    "ServerError",
    "Snapshot",
    "Stream",
    "StreamClosed",
    "StreamEntry",
    "StreamInfo",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "Value",
    "Values",
]
