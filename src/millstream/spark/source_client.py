"""What the data source asks a server: where history lies, the feed, and appends. The client does the talking.

What may pass (a restart, a change of leader, 429 and 503) is tried again until the option `serverTimeout` is used up;
what will not is an error that names the option to change. Refused appends keep the client's errors: only the writer
can say what they mean for its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as arrow

from millstream.client import (
    Appended,
    BadAnswer,
    Client,
    ClientError,
    ConnectionFailed,
    Created,
    Forbidden,
    Gone,
    NotFound,
    OutcomeUnknown,
    Producer,
    RawFeedPage,
    Unauthorized,
    Unavailable,
    calls,
)
from millstream.client.conversation import Call
from millstream.client.messages import Request, Response
from millstream.client.retries import RetryPolicy
from millstream.clock import Clock, SystemClock
from millstream.protocol.content_types import OCTET_STREAM
from millstream.protocol.keys import StreamKey
from millstream.protocol.offsets import format_offset
from millstream.spark.errors import SourceError
from millstream.spark.options import Connection
from millstream.streams.records import SegmentRef

T = TypeVar("T")

REQUEST_SECONDS: Final = 60.0
FIRST_CONTACT_SECONDS: Final = 3.0
# How long one look for news waits for some; Spark asks again at once, and a query that is stopped waits this long.
NEWS_SECONDS: Final = 1.0
ATTEMPTS_MAX: Final = 10_000
INCARNATIONS_AT_ONCE: Final = 50_000
_ONCE: Final = RetryPolicy(retries=0)


class ShardListing(msgspec.Struct, frozen=True):
    """One shard's part of a bucket, as of one moment: through `flushed` in segments, then in the feed."""

    shard: int
    earliest: int
    flushed: int
    latest: int
    unflushed_bytes: int
    segments: list[dict[str, Any]]

    def refs(self) -> list[SegmentRef]:
        return [SegmentRef(**segment) for segment in self.segments]


class StoreLocation(msgspec.Struct, frozen=True):
    backend: str
    path: str
    options: dict[str, str]


class ColdListing(msgspec.Struct, frozen=True):
    bucket: str
    store: StoreLocation
    shards: list[ShardListing]

    def segments(self) -> set[str]:
        return {segment["path"] for shard in self.shards for segment in shard.segments}


class FeedPage(NamedTuple):
    table: arrow.Table
    position: int
    is_up_to_date: bool


class SourceClient:
    """A server as the options name it. Threads may share one."""

    def __init__(self, connection: Connection, clock: Clock | None = None) -> None:
        self._connection = connection
        self._clock = clock or SystemClock()
        self._client = Client(
            connection.url,
            token=connection.token,
            # A server that takes a request and does not answer is not waited for longer than one that is away.
            timeout=min(REQUEST_SECONDS, max(connection.timeout_seconds, NEWS_SECONDS)),
            live_timeout=NEWS_SECONDS,
            ssl_context=connection.trust(),
            clock=self._clock,
        )
        self._policy = _policy(connection.timeout_seconds)

    def close(self) -> None:
        self._client.close()

    # -- reading ---------------------------------------------------------------------------------------------

    def check_reachable(self) -> None:
        """Whether there is such a server at all: said before anything long begins."""
        self._call(calls.readiness(of_cluster=False), self._first_contact())

    def check_bucket(self, bucket: str) -> None:
        """Whether there is such a server, such a bucket, and leave to read it: said before anything is planned."""
        self._ask(calls.bucket_info(bucket), bucket, self._first_contact())

    def _first_contact(self) -> RetryPolicy:
        return _policy(min(FIRST_CONTACT_SECONDS, self._connection.timeout_seconds))

    def cold(self, bucket: str, after: int | None = None) -> ColdListing:
        start = f"0.{after}" if after is not None and after >= 0 else None
        target = calls.with_query(f"{calls.bucket_path(bucket)}/streams/cold", after=start)
        return self._ask(get_json(target, ColdListing), bucket)

    def alive(self, bucket: str, incarnations: Sequence[int]) -> dict[int, int]:
        """Those of the incarnations that still count, and the offset before which nothing of them does."""
        alive: dict[int, int] = {}
        target = f"{calls.bucket_path(bucket)}/streams/cold"
        for start in range(0, len(incarnations), INCARNATIONS_AT_ONCE):
            question = {"incarnations": incarnations[start : start + INCARNATIONS_AT_ONCE]}
            found = self._ask(post_json(target, question, dict[str, list[tuple[int, int]]]), bucket)
            alive |= dict(found["alive"])
        return alive

    def feed(self, bucket: str, shard: int, after: int, prefix: str, bytes_max: int | None = None) -> FeedPage:
        """What happened in a bucket after a position, events that are no messages included."""
        return _page(self._ask(calls.feed_page(bucket, f"{shard}.{after}", prefix, bytes_max, calls.ARROW), bucket))

    def await_news(self, bucket: str, shard: int, after: int, prefix: str) -> None:
        """Wait until something happens in the bucket after a position, for about `NEWS_SECONDS` at most."""
        begun = self._clock.monotonic()
        try:
            answer = self._client.call(
                calls.feed_page(bucket, f"{shard}.{after}", prefix, 1, calls.ARROW, "long-poll"), _ONCE
            )
            has_news = _page(answer).table.num_rows > 0
        except ClientError:
            has_news = False  # nothing within the time, or no server: the next look will tell
        if not has_news and self._clock.monotonic() - begun < NEWS_SECONDS / 20:
            self.pause()  # that was no wait

    def pause(self) -> None:
        """What keeps those who look for news in several places from asking without end."""
        time.sleep(NEWS_SECONDS / 10)

    def state_of(self, key: StreamKey) -> str:
        """Text that changes whenever a stream does: its entity tag; empty if there is no such stream."""
        try:
            return self._call(calls.head(_address(key).path)).etag or ""
        except (NotFound, Gone):
            return ""
        except ClientError as error:
            raise self._explained(error, key.bucket) from None

    def content_type(self, key: StreamKey) -> str | None:
        """A stream's content type, None if there is no such stream."""
        try:
            return self._call(calls.head(_address(key).path)).content_type
        except (NotFound, Gone):
            return None
        except ClientError as error:
            raise self._explained(error, key.bucket) from None

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, key: StreamKey, content_type: str) -> Created:
        return self._call(calls.create(_address(key), content_type=content_type))

    def append(
        self, key: StreamKey, content_type: str, body: bytes, producer: Producer, seq: str | None = None
    ) -> Appended:
        """An append that may be repeated: whoever sent it first, the server takes it once.

        With `seq` it is refused unless that is greater than the one of the last append that had one.
        """
        return self._call(calls.append(_address(key).path, body, content_type, producer=producer, seq=seq))

    def close_stream(self, key: StreamKey) -> None:
        """Close a stream; one that is closed already is as good."""
        self._call(calls.append(_address(key).path, b"", None, close=True))

    def is_closed(self, key: StreamKey) -> bool:
        return self._call(calls.head(_address(key).path)).closed

    def delete(self, key: StreamKey) -> None:
        self._call(calls.delete(_address(key).path))

    def snapshot(self, key: StreamKey) -> bytes:
        """A stream's snapshot; the client's errors where there is none."""
        return self._call(calls.snapshot(_address(key), None)).data

    def publish_snapshot(self, key: StreamKey, data: bytes, content_type: str) -> None:
        """Make this the snapshot of a stream without messages."""
        self._call(calls.publish_snapshot(_address(key), data, format_offset(0), content_type))

    def check_writing(self, key: StreamKey) -> None:
        """Whether there is leave to write to a stream, asked with an append of nothing, which is never accepted."""
        try:
            self._call(calls.append(_address(key).path, b"", OCTET_STREAM))
        except (Unauthorized, Forbidden) as error:
            raise self._explained(error, key.bucket) from None
        except ClientError:
            pass  # empty, or no such stream: whoever may not write there is told so before either

    # -- calls -----------------------------------------------------------------------------------------------

    def _ask(self, call: Call[T], bucket: str, policy: RetryPolicy | None = None) -> T:
        """The result of a call about a bucket; what is refused is said in terms of the options."""
        try:
            return self._call(call, policy)
        except ClientError as error:
            raise self._explained(error, bucket) from None

    def _call(self, call: Call[T], policy: RetryPolicy | None = None) -> T:
        policy = policy or self._policy
        try:
            return self._client.call(call, policy)
        except (ConnectionFailed, OutcomeUnknown, Unavailable) as error:
            raise SourceError(
                f"no server answers at {self._connection.url} ({error.message}), tried for {policy.seconds_max:.0f} s",
                hint="check the option 'url', and that the server runs and is reachable from here",
            ) from None

    def _explained(self, error: ClientError, bucket: str) -> SourceError:
        url = self._connection.url
        if isinstance(error, Unauthorized | Forbidden):
            fault = "is missing" if self._connection.token is None else "is not accepted"
            return SourceError(
                f"{url} refuses access to bucket {bucket!r}: the option 'token' {fault} ({error.message})",
                hint="give a token that may read and write this bucket",
            )
        if error.code == "bucket_not_found":
            return SourceError(
                f"the option or column 'bucket' is {bucket!r}, and {url} has no such bucket",
                code=error.code,
                hint=f"create it (curl -X PUT {url}/{bucket}), or correct the name",
            )
        if error.code in ("invalid_path", "invalid_bucket"):
            return SourceError(
                f"the option 'bucket' is {bucket!r}: {error.message}", hint="a bucket has 4 to 64 of a-z, 0-9, _ and -"
            )
        if isinstance(error, BadAnswer) or not error.is_servers:
            return SourceError(
                f"what answers at {url} is no millstream server (status {error.status})",
                hint="correct the option 'url'",
            )
        return SourceError(f"{url} answered {error.status} {error.code}: {error.message}", hint=error.hint)


def _policy(seconds: float) -> RetryPolicy:
    return RetryPolicy(ATTEMPTS_MAX, first_pause_seconds=0.05, pause_seconds_max=2.0, seconds_max=seconds)


def get_json(target: str, kind: type[T]) -> Call[T]:
    return Call(Request("GET", target), _decoder(kind))


def post_json(target: str, question: object, kind: type[T]) -> Call[T]:
    """A question that may be asked again, as a JSON object."""
    body = msgspec.json.encode(question)
    return Call(Request("POST", target, {"content-type": "application/json"}, body), _decoder(kind))


def _decoder(kind: type[T]) -> Callable[[Response], T]:
    decoder = msgspec.json.Decoder(kind)

    def decode(response: Response) -> T:
        try:
            return decoder.decode(response.body)
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"the answer is not what it should be: {error}", status=response.status) from None

    return decode


def _address(key: StreamKey) -> calls.Address:
    return calls.Address(key.bucket, key.stream, is_bucketed=False)


def _page(page: RawFeedPage) -> FeedPage:
    with arrow.ipc.open_stream(page.body) as reader:
        return FeedPage(reader.read_all(), int(page.token.partition(".")[2]), page.up_to_date)
