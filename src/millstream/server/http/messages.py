"""Requests and responses as handlers see them, independent of the adapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from itertools import count
from typing import Final, Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from millstream.access.scopes import Principal
from millstream.caches import cached
from millstream.clock import SystemClock
from millstream.errors import InvalidRequest
from millstream.pending import Pending
from millstream.server.http.metrics import RouteSeries

Fields = bytes
"""Header fields as they go on the wire: `name: value\\r\\n`, lower case, any number of them."""

_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_HOST: Final = re.compile(r"[A-Za-z0-9._~%-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")

HOST_BYTES_MAX: Final = 300
QUERY_BYTES_CACHED_MAX: Final = 256

# A client's request id is kept if it is safe to write into a log.
_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")
_ID_PREFIX: Final = SystemClock().random_bytes(5).hex().encode()
_ID_NUMBERS: Final = count(1)

STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}

# Fields of every response (§10.7). CORS fields do not depend on the request, so a shared cache may keep them.
COMMON_FIELDS: Final = (
    b"x-content-type-options: nosniff\r\n"
    b"cross-origin-resource-policy: cross-origin\r\n"
    b"access-control-allow-origin: *\r\n"
    b"access-control-expose-headers: *\r\n"
)


# Streams and snapshots hold content that clients chose, under content types that clients chose. These fields make a
# browser show it as a sandboxed document: no script in it runs, and none runs with the console's origin.
SANDBOX: Final = b"content-security-policy: sandbox\r\n"


class Request(msgspec.Struct, eq=False):
    """One request, body included. `headers` has lower-case names; a repeated header is joined with commas.

    It is a struct, like Response, because that takes a third of the time that a class with slots takes to create.
    """

    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    _base_url: str | None = None
    client: Client | None = None
    # Where a large body was stored while it arrived; `body` is empty then.
    upload: Upload | None = None
    # When handling began, if the request is timed.
    started: float = 0.0
    # The series that counts the request; None until it is routed.
    series: RouteSeries | None = None
    # Whether the request needs no token although others do; then shared caches may keep its answer.
    is_open: bool = False
    # The principal, as the gate determined it.
    principal: Principal | None = None
    # In a cluster: gives this node's role header when the answer is sent.
    role: Callable[[], Fields] | None = None

    @property
    def id(self) -> str:
        """The request's id in logs: the client's X-Request-Id, or one that the connection generated."""
        name = given_id(self.headers) or (self.client.request_id() if self.client is not None else b"")
        return name.decode("latin-1")

    @property
    def address(self) -> str:
        """The address of the connection's other end."""
        return self.client.address if self.client is not None else ""

    @property
    def base_url(self) -> str:
        """The URL by which the client reached the server, without a path."""
        return self._base_url or base_url_of("http", self.headers.get(b"host", b"localhost"))

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None


class Client(Protocol):
    """The sender of a request, as its adapter knows it."""

    @property
    def address(self) -> str: ...

    def request_id(self) -> bytes:
        """The generated id of the request that is being handled, used if the client gave none."""
        ...


def given_id(headers: dict[bytes, bytes]) -> bytes | None:
    """The X-Request-Id that a client sent, if it is safe to write into a log."""
    given = headers.get(b"x-request-id")
    return given if given is not None and _SANE_ID.fullmatch(given) is not None else None


def new_id() -> bytes:
    """An id that is unique over all runs of the server."""
    return b"%b-%x" % (_ID_PREFIX, next(_ID_NUMBERS))


class Sink(Protocol):
    """Where a streamed body goes."""

    def write(self, data: bytes) -> bool:
        """Send data; False asks to wait for `BodyStream.resume` before writing more."""
        ...

    def finish(self) -> None:
        """The body is complete."""
        ...

    def abort(self) -> None:
        """The body cannot be completed: break the connection, so that no client takes the body for complete."""
        ...


class BodyStream(Protocol):
    """A body that is produced while it is being sent."""

    def start(self, sink: Sink) -> None: ...

    def resume(self) -> None:
        """The client has read what was buffered."""
        ...

    def cancel(self) -> None:
        """The client has disconnected; write nothing more."""
        ...


class Upload(Protocol):
    """Where a large request body goes while it arrives; the request then has it as `upload` and no `body`."""

    @property
    def size(self) -> int: ...

    def write(self, chunk: bytes) -> None: ...

    def discard(self) -> None:
        """The body did not arrive completely, or is not needed."""
        ...


class Response(msgspec.Struct, eq=False):
    """An answer. `length` is the size of a streamed body, if it is known in advance."""

    status: int
    fields: Fields = b""
    body: bytes | BodyStream = b""
    length: int | None = None


Answer = Response | Pending[Response]
"""What a handler returns: a response, or a pending one."""


def base_url_of(scheme: str, host: bytes) -> str:
    if len(host) > HOST_BYTES_MAX:
        raise InvalidRequest(f"the Host header is longer than {HOST_BYTES_MAX} bytes", code="invalid_host")
    return _base_url_of(scheme, host)


@cached("hosts", 4096)
def _base_url_of(scheme: str, host: bytes) -> str:
    text = host.decode("latin-1")
    if _HOST.fullmatch(text) is None:
        raise InvalidRequest(f"the Host header {text[:80]!r} is not a host", code="invalid_host")
    return f"{scheme}://{text}"


def parse_query(raw: bytes) -> dict[str, str]:
    """The parameters of a query; a repeated or malformed parameter is refused."""
    return _parse_query(raw) if len(raw) <= QUERY_BYTES_CACHED_MAX else _parse_query.__wrapped__(raw)


@cached("queries", 4096)
def _parse_query(raw: bytes) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for pair in raw.split(b"&"):
        if not pair:
            continue
        raw_name, _, raw_value = pair.partition(b"=")
        name, value = _decode(raw_name), _decode(raw_value)
        if name in parameters:
            raise InvalidRequest(f"the query parameter {name[:40]!r} is repeated", code="invalid_query")
        parameters[name] = value
    return parameters


def _decode(raw: bytes) -> str:
    if _BAD_ESCAPE.search(raw) is not None:
        raise InvalidRequest("the query has a malformed percent-encoding", code="invalid_query")
    try:
        return unquote_to_bytes(raw.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the query is not valid UTF-8", code="invalid_query") from None
