"""The client's results: plain, frozen values. Offsets are the server's tokens, to be passed back unchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from millstream.client.errors import BadAnswer
from millstream.errors import InvalidRequest
from millstream.protocol.content_types import is_json
from millstream.protocol.json_messages import split_messages
from millstream.protocol.producers import ProducerClaim as Producer

__all__ = [
    "Appended",
    "Bootstrap",
    "BucketInfo",
    "Chunk",
    "Created",
    "FeedItem",
    "FeedPage",
    "Producer",
    "RawFeedPage",
    "Snapshot",
    "StreamEntry",
    "StreamInfo",
]


class Created(NamedTuple):
    is_new: bool
    next_offset: str
    content_type: str
    closed: bool
    etag: str | None


class Appended(NamedTuple):
    """`duplicate`: this producer had appended the batch before, so nothing was written; then `next_offset` is empty if
    the server does not return it. `producer_seq` is the highest sequence number that the server has of this
    producer."""

    next_offset: str
    duplicate: bool
    closed: bool
    etag: str | None = None
    producer_seq: int | None = None


class StreamInfo(NamedTuple):
    next_offset: str
    content_type: str
    closed: bool
    etag: str | None
    ttl_seconds: int | None
    expires_at: str | None
    snapshot_offset: str | None
    earliest_offset: str | None


class Chunk(NamedTuple):
    """A run of whole messages; reading continues at `next_offset`.

    For a JSON stream `data` is one array whose elements are the messages; for other streams it is the concatenated
    bytes of the messages.
    """

    data: bytes
    content_type: str
    next_offset: str
    up_to_date: bool
    closed: bool
    cursor: str | None = None

    def messages(self) -> list[bytes]:
        """The messages of a JSON stream, byte for byte as they were appended; for other streams, all data as one
        message."""
        if not self.data or not is_json(self.content_type):
            return [self.data] if self.data else []
        try:
            return split_messages(self.data)
        except InvalidRequest as error:
            raise BadAnswer(f"what was read is not a JSON array: {error}") from None

    def json(self) -> list[Any]:
        """The messages of a JSON stream, decoded."""
        try:
            return msgspec.json.decode(self.data, type=list[Any]) if self.data else []
        except msgspec.DecodeError as error:
            raise BadAnswer(f"what was read is not a JSON array: {error}") from None


class Snapshot(NamedTuple):
    data: bytes
    content_type: str
    offset: str
    up_to_date: bool


class Bootstrap(NamedTuple):
    """A snapshot, if there is one, and every message after it; following continues at `next_offset`."""

    snapshot: Snapshot | None
    messages: list[bytes]
    content_type: str | None
    next_offset: str
    closed: bool


class BucketInfo(NamedTuple):
    name: str
    streams: int
    created_at_ms: int


class StreamEntry(NamedTuple):
    """One line of a bucket's listing; `tail_offset` is a number of bytes here."""

    name: str
    closed: bool
    content_type: str
    tail_offset: int
    created_at_ms: int
    last_write_at_ms: int


class FeedItem(NamedTuple):
    """A message, or an event of a stream: created, closed, deleted, expired, snapshot."""

    event: str
    bucket: str
    stream: str
    offset: str
    next_offset: str
    position: int
    appended_at_ms: int
    content_type: str
    payload: bytes | None

    def json(self) -> Any:
        return msgspec.json.decode(self.payload) if self.payload is not None else None


class FeedPage(NamedTuple):
    """Items in commit order; the feed continues after `token`."""

    items: list[FeedItem]
    token: str
    up_to_date: bool


class RawFeedPage(NamedTuple):
    """The same as the server sent it: NDJSON, or an Arrow stream."""

    body: bytes
    content_type: str
    token: str
    up_to_date: bool


class Readiness(NamedTuple):
    """Whether a server accepts writes, and if not, why."""

    is_ready: bool
    problems: tuple[str, ...]


class UrlToken(NamedTuple):
    """A token for a stream's URL, and when it expires."""

    token: str
    expires_at_ms: int
