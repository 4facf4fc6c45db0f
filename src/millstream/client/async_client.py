"""The client for asyncio: the same streams, buckets and producers as `sync_client`, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.client import calls
from millstream.client.async_connections import AsyncPool
from millstream.client.async_driver import AsyncFollowing, run
from millstream.client.async_producer import AsyncIdempotentProducer
from millstream.client.conversation import Call, Settings, converse, parse_url, settings_of
from millstream.client.errors import BadRequest, Conflict
from millstream.client.live import Mode, Position, feed_items, follow, follow_feed
from millstream.client.messages import AsyncValue, AsyncValues
from millstream.client.producing import ProducerOptions, ProducerState
from millstream.client.results import (
    Appended,
    Bootstrap,
    BucketInfo,
    Chunk,
    Created,
    FeedPage,
    Producer,
    RawFeedPage,
    Readiness,
    Snapshot,
    StreamEntry,
    StreamInfo,
)
from millstream.client.retries import Attempts, RetryPolicy
from millstream.clock import Clock, SystemClock
from millstream.protocol.content_types import OCTET_STREAM

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")


class AsyncClient:
    """A server and the connections to it. Threads may share one; close it, or use it in a `with` statement."""

    def __init__(
        self,
        url: str | Sequence[str],
        token: AsyncValue | None = None,
        *,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
        timeout: float = 30.0,
        live_timeout: float = 90.0,
        retries: int | RetryPolicy = 8,
        patience: int | RetryPolicy = 150,
        ssl_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`url` may name several nodes of a cluster, as a list or separated by commas. `headers` and `params` are sent
        with every request; they and the token may be functions, which are called for each request. `timeout` limits
        every wait for the server, `live_timeout` the silence of a live read. A call is retried at most `retries` times,
        and followers and producers at most `patience` times in a row; a RetryPolicy sets this in detail."""
        self.url = url if isinstance(url, str) else ",".join(url)
        settings = settings_of(url, token, retries, patience, clock or SystemClock())
        self._settings = settings.adding(headers, params)
        self._pool = AsyncPool(timeout, live_timeout, ssl_context)

    def stream(
        self,
        path: str | None = None,
        *,
        bucket: str | None = None,
        name: str | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
        content_type: str | None = None,
    ) -> AsyncStream:
        """A handle on a stream; nothing is sent. `stream("a/b")` is /v1/stream/a/b; `stream(bucket="team", name="b")`
        is /team/b, in a bucket that must exist; `stream("http://…")` is the stream at that URL, on a server of this
        client. If the content type is given, the server need not be asked for it."""
        if path is not None and calls.is_url(path):
            address: calls.Address | calls.UrlAddress = calls.url_address(path)
            if not self._settings.places.include(parse_url(calls.origin_of(path)).origin):
                raise BadRequest(f"{path!r} is not on {self.url}", hint="make a Stream of the URL itself")
        else:
            address = calls.address_of(path, bucket=bucket, name=name)
        return AsyncStream(address, self, headers=headers, params=params, content_type=content_type)

    def bucket(self, name: str) -> AsyncBucket:
        return AsyncBucket(self, name)

    def producer(
        self,
        stream: AsyncStream | str,
        id: str,
        epoch: int = 0,
        *,
        linger: float = 0.005,
        batch_bytes: int = 256 << 10,
        batch_messages: int | None = None,
        in_flight: int = 4,
        buffer_bytes: int = 32 << 20,
        concatenate: bool = False,
        claim: bool = False,
        content_type: str | None = None,
    ) -> AsyncIdempotentProducer:
        """A producer on an existing stream. Messages are gathered for `linger` seconds or up to `batch_bytes` or
        `batch_messages`; at most `in_flight` batches are sent at once, and `append` waits while `buffer_bytes` are
        unacknowledged. `claim` takes the next free epoch, from `epoch` on, for a producer that starts anew and repeats
        nothing."""
        options = ProducerOptions(
            id, epoch, linger, batch_bytes, in_flight, buffer_bytes, concatenate, claim, batch_messages
        )
        handle = self.stream(stream) if isinstance(stream, str) else stream
        state = ProducerState(options, content_type or handle._content_type)
        return AsyncIdempotentProducer(handle.path, state, handle._settings, self._pool)

    async def health(self) -> dict[str, Any]:
        return await self.call(calls.document("/healthz"))

    async def readiness(self, *, of_cluster: bool = False) -> Readiness:
        """Whether the server accepts writes; `of_cluster` asks whether its whole cluster is ready."""
        return await self.call(calls.readiness(of_cluster=of_cluster))

    async def stats(self) -> dict[str, Any]:
        """How much data is where: hot and cold bytes, the flush backlog, backpressure."""
        return await self.call(calls.document("/cluster/hot-cold-stats"))

    async def buckets(self) -> list[str]:
        """The names of all buckets; with access control this needs the admin scope."""
        return await self.call(calls.buckets())

    async def call(self, call: Call[T], policy: RetryPolicy | None = None) -> T:
        """The result of a call, retried by the given policy or else the client's."""
        attempts = Attempts(policy, self._settings.clock, can_repeat=call.can_repeat) if policy is not None else None
        return await run(converse(call, self._settings, attempts), self._pool)

    async def _converse(self, call: Call[T], settings: Settings) -> T:
        return await run(converse(call, settings), self._pool)

    async def close(self) -> None:
        await self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _follow_feed(self, bucket: str, position: Position, prefix: str, mode: Mode) -> AsyncFollowing[FeedPage]:
        return AsyncFollowing(follow_feed(bucket, position, prefix, mode, self._settings), self._pool, position)


class AsyncStream:
    """A handle on one stream. It caches the stream's content type, which never changes, and nothing else.

    `Stream("http://host/any/path")` is a stream at any URL of any server, with connections of its own: `disconnect` or
    leaving a `with` block closes them. Every method takes `headers` and `params` for its own requests.
    """

    def __init__(
        self,
        url: str | calls.Address | calls.UrlAddress,
        client: AsyncClient | None = None,
        *,
        token: AsyncValue | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
        content_type: str | None = None,
    ) -> None:
        self._address = calls.url_address(url) if isinstance(url, str) else url
        if client is not None and token is not None:
            raise BadRequest("the token is the client's", hint="pass it to the client")
        self._owns_client = client is None
        self._client = AsyncClient(calls.origin_of(str(self._address)), token) if client is None else client
        self._settings = self._client._settings.adding(headers, params)
        self._content_type = content_type
        self.path = self._address.path

    def __str__(self) -> str:
        return str(self._address)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    async def disconnect(self) -> None:
        """Close the connections of a stream that was made from a URL; the stream on the server is not changed."""
        if self._owns_client:
            await self._client.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    async def _call(self, call: Call[T], headers: AsyncValues | None = None, params: AsyncValues | None = None) -> T:
        return await self._client._converse(call, self._settings.adding(headers, params))

    async def create(
        self,
        *,
        content_type: str | None = None,
        ttl: int | None = None,
        expires_at: str | None = None,
        closed: bool = False,
        body: object = None,
        fork_from: AsyncStream | str | None = None,
        fork_offset: str | None = None,
        fork_sub_offset: int | None = None,
        only_if_absent: bool = False,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
    ) -> Created:
        """Create the stream. If it exists with the same configuration, that is a success, unless `only_if_absent`."""
        source = self._client.stream(fork_from) if isinstance(fork_from, str) else fork_from
        call = calls.create(
            self._address,
            content_type=content_type,
            ttl=ttl,
            expires_at=expires_at,
            closed=closed,
            body=body,
            fork_from=source._address.header if source is not None else None,
            fork_offset=fork_offset,
            fork_sub_offset=fork_sub_offset,
            only_if_absent=only_if_absent,
        )
        created = await self._call(call, headers, params)
        self._content_type = created.content_type
        return created

    async def append(
        self,
        data: object,
        *,
        seq: str | None = None,
        producer: Producer | None = None,
        once: bool = False,
        close: bool = False,
        if_match: str | None = None,
        content_type: str | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
    ) -> Appended:
        """Append durably. Bytes are sent as they are; on a JSON stream any other value is encoded, and a list is
        several messages. If the answer is lost, OutcomeUnknown is raised and the append is not retried, unless it has a
        `producer`. `once` uses a new producer for this append, which the server remembers."""
        if once:
            if producer is not None:
                raise BadRequest("an append with a producer is written once anyway")
            producer = Producer(f"once-{self._settings.clock.random_bytes(16).hex()}", 0, 0)
        kind = content_type or await self.content_type()
        body = calls.encode_body(data, kind)
        call = calls.append(self.path, body, kind, seq=seq, producer=producer, close=close, if_match=if_match)
        return await self._call(call, headers, params)

    async def close(
        self,
        *,
        producer: Producer | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
    ) -> Appended:
        """Close the stream: nothing more can be appended, and readers see the end. Closing again has no effect."""
        return await self._call(calls.append(self.path, b"", None, producer=producer, close=True), headers, params)

    async def read(
        self,
        offset: str = "-1",
        *,
        max_bytes: int | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
    ) -> AsyncIterator[Chunk]:
        """Everything from an offset until the stream's end is reached, chunk by chunk."""
        while True:
            chunk = await self._call(calls.read(self.path, offset, max_bytes), headers, params)
            yield chunk
            if chunk.up_to_date:
                return
            calls.check_progress(offset, chunk)
            offset = chunk.next_offset

    async def read_json(self, offset: str = "-1") -> AsyncIterator[Any]:
        """The messages of a JSON stream, decoded, one by one."""
        async for chunk in self.read(offset):
            for value in chunk.json():
                yield value

    async def read_all(self, offset: str = "-1") -> bytes:
        """The bytes of a stream that is not JSON, in one piece."""
        return b"".join([chunk.data async for chunk in self.read(offset)])

    def follow(
        self,
        offset: str = "-1",
        mode: Mode = "auto",
        *,
        until_up_to_date: bool = False,
        timeout: float | None = None,
        headers: AsyncValues | None = None,
        params: AsyncValues | None = None,
    ) -> AsyncFollowing[Chunk]:
        """Everything from an offset on, as it is appended, until the stream is closed; `now` starts at its end.

        With `until_up_to_date` it ends when it has reached the stream's end; with `timeout`, that many seconds after
        its start.
        """
        position = Position(offset)
        settings = self._settings.adding(headers, params)
        conversation = follow(
            self.path, position, mode, self._content_type, settings, until_up_to_date=until_up_to_date
        )
        return AsyncFollowing(conversation, self._client._pool, position, timeout)

    async def head(self, *, headers: AsyncValues | None = None, params: AsyncValues | None = None) -> StreamInfo:
        info = await self._call(calls.head(self.path), headers, params)
        self._content_type = info.content_type
        return info

    async def content_type(self) -> str:
        """The stream's content type, requested once."""
        return self._content_type or (await self.head()).content_type

    async def delete(self, *, headers: AsyncValues | None = None, params: AsyncValues | None = None) -> None:
        self._content_type = None
        await self._call(calls.delete(self.path), headers, params)

    async def publish_snapshot(
        self, data: bytes, offset: str, content_type: str = OCTET_STREAM, *, incarnation: int | None = None
    ) -> None:
        """Publish a snapshot that represents everything before `offset`; older messages can no longer be read.

        With an incarnation, only if the stream of this name still has that incarnation.
        """
        await self._call(calls.publish_snapshot(self._address, data, offset, content_type, incarnation))

    async def snapshot(self, offset: str | None = None) -> Snapshot:
        """The latest snapshot, or the one at an offset."""
        return await self._call(calls.snapshot(self._address, offset))

    async def delete_snapshot(self, offset: str) -> None:
        await self._call(calls.delete_snapshot(self._address, offset))

    async def bootstrap(self) -> Bootstrap:
        """The latest snapshot and every message after it, as of one moment."""
        return await self._call(calls.bootstrap(self._address))


class AsyncBucket:
    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def stream(self, name: str) -> AsyncStream:
        return self._client.stream(bucket=self.name, name=name)

    async def create(self, *, exist_ok: bool = False) -> None:
        try:
            await self._client.call(calls.create_bucket(self.name))
        except Conflict:
            if not exist_ok:
                raise

    async def delete(self) -> None:
        """Delete the bucket, which must be empty."""
        await self._client.call(calls.delete_bucket(self.name))

    async def info(self) -> BucketInfo:
        return await self._client.call(calls.bucket_info(self.name))

    async def list(self, prefix: str = "", *, page_size: int = calls.PAGE_STREAMS_MAX) -> AsyncIterator[StreamEntry]:
        """The bucket's streams in the order of their names, fetched page by page."""
        after: str | None = None
        while True:
            entries, after = await self._client.call(calls.list_page(self.name, prefix, after, page_size))
            for entry in entries:
                yield entry
            if after is None:
                return

    def feed(self, after: str | None = None, *, prefix: str = "", live: Mode | None = None) -> AsyncIterator[FeedPage]:
        """All messages and events of the bucket after a token, in commit order; with `live`, also future ones."""
        if live is not None:
            return self.follow_feed(after, prefix=prefix, mode=live)
        return self._feed(after, prefix)

    async def _feed(self, after: str | None, prefix: str) -> AsyncIterator[FeedPage]:
        while True:
            page = await self.feed_page(after, prefix=prefix)
            yield FeedPage(feed_items(page.body), page.token, page.up_to_date)
            if page.up_to_date:
                return
            after = page.token

    def follow_feed(
        self, after: str | None = None, *, prefix: str = "", mode: Mode = "auto"
    ) -> AsyncFollowing[FeedPage]:
        return self._client._follow_feed(self.name, Position(after or ""), prefix, mode)

    async def feed_page(
        self, after: str | None = None, *, prefix: str = "", max_bytes: int | None = None, accept: str = calls.NDJSON
    ) -> RawFeedPage:
        """One page as the server sends it; `accept` may ask for `application/vnd.apache.arrow.stream`."""
        return await self._client.call(calls.feed_page(self.name, after, prefix, max_bytes, accept))
