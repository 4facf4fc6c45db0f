"""Forwards a request to the node that can answer it, for clients that do not follow redirects.

A few connections to each node are kept and reused; they are the client library's (`millstream.client`). A request is
sent once and never retried here. If the connection breaks, the client finds out whether the request was carried out by
repeating it as a producer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple

from millstream.access.forward_marks import MARK
from millstream.client import messages
from millstream.client.async_connections import AsyncPool
from millstream.client.conversation import parse_url
from millstream.client.errors import BadRequest, ClientError, ConnectionFailed
from millstream.errors import InvalidRequest, MillstreamError, OutcomeUnknown, Unavailable
from millstream.server.http.messages import Request, Response

CONNECTIONS_MAX: Final = 256
TIMEOUT_SECONDS: Final = 30.0
ANSWER_BYTES_MAX: Final = 16 << 20

_FORWARDED_FOR: Final = b"x-forwarded-for"
_NOT_PASSED_ON: Final = frozenset(
    {b"connection", b"keep-alive", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"}
)
# The HTTP adapter adds these fields to every answer itself.
_NOT_PASSED_BACK: Final = frozenset(name.decode() for name in _NOT_PASSED_ON) | {
    "date",
    "x-content-type-options",
    "cross-origin-resource-policy",
    "access-control-allow-origin",
    "access-control-expose-headers",
}


class Outgoing(NamedTuple):
    """A request to forward. Header names are lower case; `address` is the client's address."""

    method: str
    target: bytes
    headers: Mapping[bytes, bytes]
    body: bytes
    address: str


class Answer(NamedTuple):
    """The answer of the other node: `fields` are header lines as they go on the wire."""

    status: int
    fields: bytes
    body: bytes


class Forwarder:
    """`tls` verifies nodes whose addresses are https."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._pool = AsyncPool(
            TIMEOUT_SECONDS, TIMEOUT_SECONDS, tls, idle_max=CONNECTIONS_MAX, answer_bytes_max=ANSWER_BYTES_MAX
        )
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def forward(self, request: Request, base_url: str, mark: bytes) -> Response:
        target = request.path + (b"?" + request.query if request.query else b"")
        outgoing = Outgoing(request.method, target, request.headers, request.body, request.address)
        return Response(*await self.send(outgoing, base_url, mark))

    async def send(self, outgoing: Outgoing, base_url: str, mark: bytes) -> Answer:
        """The answer of the node at a URL. An error says whether the node may have carried out the request."""
        origin = parse_url(base_url).origin
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    answer = await self._pool.exchange(origin, _request(outgoing, mark))
            except (ClientError, TimeoutError) as error:
                raise _failure(base_url, error) from None
        return Answer(answer.status, _fields(answer), answer.body)

    def close(self) -> None:
        self._pool.close_soon()


def _request(outgoing: Outgoing, mark: bytes) -> messages.Request:
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in outgoing.headers.items()
        if name not in _NOT_PASSED_ON
    }
    hops = outgoing.headers.get(_FORWARDED_FOR)
    address = outgoing.address.encode()
    headers[_FORWARDED_FOR.decode()] = (address if hops is None else hops + b", " + address).decode("latin-1")
    headers[MARK.decode()] = mark.decode("latin-1")
    return messages.Request(outgoing.method, outgoing.target.decode("latin-1"), headers, outgoing.body)


def _fields(answer: messages.Response) -> bytes:
    kept = (f"{name}: {value}\r\n" for name, value in answer.headers.items() if name not in _NOT_PASSED_BACK)
    return "".join(kept).encode("latin-1")


def _failure(base_url: str, error: ClientError | TimeoutError) -> MillstreamError:
    if isinstance(error, BadRequest):
        return InvalidRequest(error.message, hint=error.hint)
    if isinstance(error, ConnectionFailed) and not error.was_sent:
        return Unavailable(f"the leader at {base_url} cannot be reached: {error}")
    return OutcomeUnknown(
        f"the leader at {base_url} did not answer: {error or type(error).__name__}",
        code="forward_failed",
        hint="it may or may not have been written; repeat it with the same producer sequence",
    )
