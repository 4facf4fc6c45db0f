"""Every request of the API, built from its arguments, with the interpretation of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from millstream.client.conversation import Call, parse_url
from millstream.client.errors import BadAnswer, BadRequest
from millstream.client.messages import Request, Response
from millstream.client.results import (
    Appended,
    Bootstrap,
    BucketInfo,
    Chunk,
    Created,
    Producer,
    RawFeedPage,
    Readiness,
    Snapshot,
    StreamEntry,
    StreamInfo,
    UrlToken,
)
from millstream.protocol.content_types import JSON, OCTET_STREAM, is_json
from millstream.protocol.keys import DEFAULT_BUCKET
from millstream.protocol.multipart import decode_parts

T = TypeVar("T")

PAGE_STREAMS_MAX: Final = 1000
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"

_SAFE: Final = "-_.~!$&'()*+,;=:@"


class UrlAddress(NamedTuple):
    """A stream at any URL."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> str:
        return self.url

    @property
    def bucketed_path(self) -> str:
        return self.url

    @property
    def header(self) -> str:
        return urlsplit(self.url).path or "/"


class Address(NamedTuple):
    """The path of a stream in URLs: below `/v1/stream/`, or as `/{bucket}/{stream}`."""

    bucket: str
    name: str
    is_bucketed: bool

    def __str__(self) -> str:
        return self.name if self.bucket == DEFAULT_BUCKET and not self.is_bucketed else f"{self.bucket}/{self.name}"

    @property
    def path(self) -> str:
        if self.is_bucketed:
            return f"/{_quoted(self.bucket)}/{_quoted(self.name)}"
        return f"/v1/stream/{quote(str(self), safe=_SAFE + '/')}"

    @property
    def bucketed_path(self) -> str:
        """Snapshots and bootstrap exist only under this path; a slash in the name is percent-encoded."""
        return f"/{_quoted(self.bucket)}/{_quoted(self.name)}"

    @property
    def header(self) -> str:
        """The stream's name in a header."""
        return self.path


def url_address(url: str) -> UrlAddress:
    """The address of a stream by its whole URL."""
    parts = urlsplit(url)
    parse_url(origin_of(url))
    if parts.fragment:
        raise BadRequest(f"{url!r} has a fragment", hint="leave out # and what follows")
    path = quote(parts.path or "/", safe=_SAFE + "/%")
    query = f"?{quote(parts.query, safe=_SAFE + '/%?')}" if parts.query else ""
    return UrlAddress(f"{parts.scheme}://{parts.netloc}{path}{query}")


def origin_of(url: str) -> str:
    """The URL of the server in a stream's URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def address_of(path: str | None = None, *, bucket: str | None = None, name: str | None = None) -> Address:
    """`path` is the part below /v1/stream/; bucket and name address a stream in a bucket that exists."""
    if path is not None and bucket is None and name is None:
        head, slash, rest = path.removeprefix("/").partition("/")
        address = Address(head, rest, False) if slash else Address(DEFAULT_BUCKET, head, False)
    elif path is None and bucket is not None and name is not None:
        address = Address(bucket, name, True)
    else:
        raise BadRequest("a stream is named by a path, or by bucket and name")
    if not address.bucket or not address.name:
        raise BadRequest(f"{path if path is not None else str(address)!r} names no stream", hint="write bucket/stream")
    return address


def _quoted(segment: str) -> str:
    return quote(segment, safe=_SAFE)


def with_query(path: str, **query: str | int | None) -> str:
    """Sorted by name, so that equal requests are equal to caches (§8.1)."""
    given = sorted((name, value) for name, value in query.items() if value is not None and value != "")
    if not given:
        return path
    return f"{path}{'&' if '?' in path else '?'}{urlencode(given)}"


def encode_body(data: object, content_type: str) -> bytes:
    """Bytes are sent as they are; on a JSON stream other values are encoded, elsewhere text is UTF-8."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    if is_json(content_type):
        return msgspec.json.encode(data)
    if isinstance(data, str):
        return data.encode()
    raise BadRequest(
        f"a {type(data).__name__} cannot be appended to a stream of {content_type}",
        hint=f"pass bytes or text, or create the stream with {JSON}",
    )


def _parsed(parse: Callable[[Response], T]) -> Callable[[Response], T]:
    """The same, with a clear error where the answer lacks what the protocol promises."""

    def checked(response: Response) -> T:
        try:
            return parse(response)
        except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
            raise BadAnswer(
                f"the answer ({response.status}) is not one of a durable streams server: {error!r}",
                hint="check the URL",
                status=response.status,
            ) from None

    return checked


def nothing(_: Response) -> None:
    return None


# -- streams ---------------------------------------------------------------------------------------------------


def create(
    address: Address | UrlAddress,
    *,
    content_type: str | None = None,
    ttl: int | None = None,
    expires_at: str | None = None,
    closed: bool = False,
    body: object = None,
    fork_from: str | None = None,
    fork_offset: str | None = None,
    fork_sub_offset: int | None = None,
    only_if_absent: bool = False,
) -> Call[Created]:
    headers: dict[str, str] = {}
    if content_type is not None:
        headers["content-type"] = content_type
    if ttl is not None:
        headers["stream-ttl"] = str(ttl)
    if expires_at is not None:
        headers["stream-expires-at"] = expires_at
    if closed:
        headers["stream-closed"] = "true"
    if fork_from is not None:
        headers["stream-forked-from"] = fork_from
    if fork_offset is not None:
        headers["stream-fork-offset"] = fork_offset
    if fork_sub_offset is not None:
        headers["stream-fork-sub-offset"] = str(fork_sub_offset)
    if only_if_absent:
        headers["if-none-match"] = "*"
    payload = b"" if body is None else encode_body(body, content_type or OCTET_STREAM)
    return Call(Request("PUT", address.path, headers, payload), _created, can_repeat=not only_if_absent)


@_parsed
def _created(response: Response) -> Created:
    headers = response.headers
    return Created(
        response.status == 201,
        headers["stream-next-offset"],
        headers.get("content-type", OCTET_STREAM),
        response.is_true("stream-closed"),
        headers.get("etag"),
    )


def append(
    path: str,
    body: bytes,
    content_type: str | None,
    *,
    seq: str | None = None,
    producer: Producer | None = None,
    close: bool = False,
    if_match: str | None = None,
) -> Call[Appended]:
    headers: dict[str, str] = {}
    if content_type is not None:
        headers["content-type"] = content_type
    if seq is not None:
        headers["stream-seq"] = seq
    if producer is not None:
        headers["producer-id"] = producer.id
        headers["producer-epoch"] = str(producer.epoch)
        headers["producer-seq"] = str(producer.seq)
    if close:
        headers["stream-closed"] = "true"
    if if_match is not None:
        headers["if-match"] = if_match
    is_only_closing = not body and close and if_match is None and seq is None
    can_repeat = producer is not None or is_only_closing
    # Only the status of an append with data says whether it was new (§5.2.1).
    parse = _produced if producer is not None and body else _appended
    return Call(Request("POST", path, headers, body), parse, can_repeat)


@_parsed
def _appended(response: Response) -> Appended:
    headers = response.headers
    return Appended(headers["stream-next-offset"], False, "stream-closed" in headers, headers.get("etag"))


@_parsed
def _produced(response: Response) -> Appended:
    headers = response.headers
    is_repeat = response.status == 204
    # Some servers do not return the offset for a repeat.
    offset = headers.get("stream-next-offset", "") if is_repeat else headers["stream-next-offset"]
    highest = int(headers["producer-seq"]) if "producer-seq" in headers else None
    return Appended(offset, is_repeat, "stream-closed" in headers, headers.get("etag"), highest)


def read(path: str, offset: str, max_bytes: int | None = None) -> Call[Chunk]:
    if not offset:
        raise BadRequest("an offset is empty", hint="-1 is the beginning of a stream, now its end")
    return Call(Request("GET", with_query(path, offset=offset, max_bytes=max_bytes)), chunk_of)


@_parsed
def chunk_of(response: Response) -> Chunk:
    headers = response.headers
    closed = response.is_true("stream-closed")
    return Chunk(
        response.body,
        headers.get("content-type", OCTET_STREAM),
        headers["stream-next-offset"],
        response.is_true("stream-up-to-date") or closed,
        closed,
        headers.get("stream-cursor"),
    )


def check_progress(offset: str, chunk: Chunk) -> None:
    """Refuse a chunk that neither ends at the tail nor advances: it would be read for ever."""
    if chunk.next_offset == offset:
        raise BadAnswer(f"the server has no more after {offset} and does not say that this is the end")


def head(path: str) -> Call[StreamInfo]:
    return Call(Request("HEAD", path), _info)


@_parsed
def _info(response: Response) -> StreamInfo:
    headers = response.headers
    return StreamInfo(
        headers["stream-next-offset"],
        headers.get("content-type", OCTET_STREAM),
        response.is_true("stream-closed"),
        headers.get("etag"),
        int(headers["stream-ttl"]) if "stream-ttl" in headers else None,
        headers.get("stream-expires-at"),
        headers.get("stream-snapshot-offset"),
        headers.get("stream-earliest-offset"),
    )


def delete(path: str) -> Call[None]:
    return Call(Request("DELETE", path), nothing, done_if_repeated=frozenset({404, 410}))


# -- snapshots ---------------------------------------------------------------------------------------------------


def publish_snapshot(
    address: Address | UrlAddress, data: bytes, offset: str, content_type: str, incarnation: int | None = None
) -> Call[None]:
    target = f"{address.bucketed_path}/snapshot/{_quoted(offset)}"
    headers = {"content-type": content_type}
    if incarnation is not None:
        headers["stream-incarnation"] = str(incarnation)
    return Call(Request("PUT", target, headers, data), nothing)


def snapshot(address: Address | UrlAddress, offset: str | None) -> Call[Snapshot]:
    target = f"{address.bucketed_path}/snapshot"
    return Call(Request("GET", target if offset is None else f"{target}/{_quoted(offset)}"), _snapshot)


@_parsed
def _snapshot(response: Response) -> Snapshot:
    headers = response.headers
    return Snapshot(
        response.body,
        headers["content-type"],
        headers["stream-snapshot-offset"],
        response.is_true("stream-up-to-date"),
    )


def delete_snapshot(address: Address | UrlAddress, offset: str) -> Call[None]:
    target = f"{address.bucketed_path}/snapshot/{_quoted(offset)}"
    return Call(Request("DELETE", target), nothing, done_if_repeated=frozenset({404}))


def bootstrap(address: Address | UrlAddress) -> Call[Bootstrap]:
    return Call(Request("GET", f"{address.bucketed_path}/bootstrap"), _bootstrap)


@_parsed
def _bootstrap(response: Response) -> Bootstrap:
    headers = response.headers
    _, _, boundary = headers["content-type"].partition("boundary=")
    (content_type, data), *parts = decode_parts(boundary.strip('"'), response.body)
    offset = headers["stream-snapshot-offset"]
    return Bootstrap(
        Snapshot(data, content_type, offset, not parts) if offset != "-1" else None,
        [payload for _, payload in parts],
        parts[0][0] if parts else None,
        headers["stream-next-offset"],
        response.is_true("stream-closed"),
    )


def url_token(address: Address | UrlAddress, seconds: int | None = None) -> Call[UrlToken]:
    """A URL token that reads this stream, for the given time or the server's default."""
    wish = {"stream": address.path, **({"seconds": seconds} if seconds is not None else {})}
    return Call(Request("POST", "/v1/tokens", {"content-type": JSON}, msgspec.json.encode(wish)), _url_token)


@_parsed
def _url_token(response: Response) -> UrlToken:
    answer = msgspec.json.decode(response.body)
    return UrlToken(str(answer["token"]), int(answer["expires_at_ms"]))


# -- buckets and the server --------------------------------------------------------------------------------------


def bucket_path(name: str) -> str:
    if not name:
        raise BadRequest("a bucket needs a name", hint="4 to 64 of a-z, 0-9, _ and -")
    return f"/{_quoted(name)}"


def create_bucket(name: str) -> Call[None]:
    return Call(Request("PUT", bucket_path(name)), nothing, done_if_repeated=frozenset({409}))


def delete_bucket(name: str) -> Call[None]:
    return Call(Request("DELETE", bucket_path(name)), nothing, done_if_repeated=frozenset({404}))


def buckets() -> Call[list[str]]:
    return Call(Request("GET", "/cluster/cold"), _buckets)


@_parsed
def _buckets(response: Response) -> list[str]:
    return [str(name) for name in msgspec.json.decode(response.body)["buckets"]]


def bucket_info(name: str) -> Call[BucketInfo]:
    return Call(Request("GET", bucket_path(name)), _bucket)


@_parsed
def _bucket(response: Response) -> BucketInfo:
    found = msgspec.json.decode(response.body)
    return BucketInfo(found["bucket_id"], found["streams"], found["created_at_ms"])


def list_page(name: str, prefix: str, after: str | None, limit: int) -> Call[tuple[list[StreamEntry], str | None]]:
    """A page of a bucket's streams, and where the next one starts if there is one."""
    target = with_query(f"{bucket_path(name)}/streams", prefix=prefix, after=after, limit=limit)
    return Call(Request("GET", target), _page)


@_parsed
def _page(response: Response) -> tuple[list[StreamEntry], str | None]:
    found = msgspec.json.decode(response.body)
    entries = [
        StreamEntry(
            one["stream_id"],
            one["status"] == "Closed",
            one["content_type"],
            one["tail_offset"],
            one["created_at_ms"],
            one["last_write_at_ms"],
        )
        for one in found["streams"]
    ]
    return entries, found["next_cursor"] if found["has_more"] else None


def feed_page(
    name: str, after: str | None, prefix: str, max_bytes: int | None, accept: str, live: str | None = None
) -> Call[RawFeedPage]:
    target = with_query(f"{bucket_path(name)}/streams/feed", after=after, prefix=prefix, max_bytes=max_bytes, live=live)
    return Call(Request("GET", target, {"accept": accept}), raw_page, is_live=live is not None)


@_parsed
def raw_page(response: Response) -> RawFeedPage:
    return RawFeedPage(
        response.body,
        response.headers["content-type"],
        response.headers["stream-feed-token"],
        response.is_true("stream-up-to-date"),
    )


def document(path: str) -> Call[dict[str, Any]]:
    """A JSON object at one of the server's own paths, such as its health."""
    return Call(Request("GET", path), _document)


def order(path: str, **what: object) -> Call[dict[str, Any]]:
    """An action of a server or its cluster; the answer says what was done."""
    body = msgspec.json.encode({name: value for name, value in what.items() if value is not None})
    return Call(Request("POST", path, {"content-type": JSON}, body), _document, can_repeat=False)


def readiness(*, of_cluster: bool) -> Call[Readiness]:
    request = Request("GET", "/readyz/cluster" if of_cluster else "/readyz/local")
    return Call(request, _readiness, answers=frozenset({503}))


@_parsed
def _readiness(response: Response) -> Readiness:
    answer = msgspec.json.decode(response.body, type=dict[str, Any])
    if response.status == 503:
        return Readiness(False, tuple(map(str, answer["problems"])))
    return Readiness(answer["status"] == "ready", ())


@_parsed
def _document(response: Response) -> dict[str, Any]:
    return msgspec.json.decode(response.body, type=dict[str, Any])
