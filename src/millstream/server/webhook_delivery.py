"""Calling webhooks: one POST to an address that was judged, with limits on everything.

The name is resolved here, every address it resolves to is judged, and the connection goes to that very address,
so a name cannot point elsewhere between the check and the call. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

import httptools

from millstream import __version__
from millstream.errors import MillstreamError, Unavailable
from millstream.protocol.webhooks import checked_url, is_development_host, is_forbidden_address
from millstream.tasks import end

logger = logging.getLogger("millstream.webhooks")

TIMEOUT_SECONDS: Final = 10.0
CONCURRENT_MAX: Final = 64
ANSWER_BYTES_MAX: Final = 64 << 10


class WebhookDelivery:
    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context()

    def post(
        self,
        url: str,
        body: bytes,
        signature: str,
        *,
        succeeded: Callable[[bytes], None],
        failed: Callable[[], None],
    ) -> None:
        """Deliver in the background; `succeeded` gets the answer's body after a 2xx, anything else `failed`."""
        task = asyncio.get_running_loop().create_task(self._run(url, body, signature, succeeded, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        await end(*self._tasks)

    async def _run(
        self,
        url: str,
        body: bytes,
        signature: str,
        succeeded: Callable[[bytes], None],
        failed: Callable[[], None],
    ) -> None:
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    status, answer = await self._call(url, body, signature)
            except (OSError, TimeoutError, MillstreamError, httptools.HttpParserError, EOFError) as error:
                logger.warning("webhook %s failed: %s", url, error or type(error).__name__)
                failed()
                return
        if 200 <= status < 300:
            succeeded(answer)
        else:
            logger.warning("webhook %s answered %d", url, status)
            failed()

    async def _call(self, url: str, body: bytes, signature: str) -> tuple[int, bytes]:
        parts = checked_url(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = await self._resolve(host, port, is_local=parts.scheme == "http")
        tls = self._tls if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            address, port, ssl=tls, server_hostname=host if tls is not None else None
        )
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            head = (
                f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nwebhook-signature: {signature}\r\n"
                f"user-agent: millstream/{__version__}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            return await _read_answer(reader)
        finally:
            writer.close()

    @staticmethod
    async def _resolve(host: str, port: int, *, is_local: bool) -> str:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=1)  # SOCK_STREAM
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if is_local and is_development_host(host):
                allowed = ipaddress.ip_address(address.partition("%")[0]).is_loopback
            else:
                allowed = not is_forbidden_address(address.partition("%")[0])
            if not allowed:
                raise Unavailable(f"{host} resolves to {address}, which webhooks must not reach")
        if not addresses:
            raise Unavailable(f"{host} has no address")
        # Loopback names often list ::1 first while receivers listen on IPv4 only.
        return next((address for address in addresses if ":" not in address), addresses[0])


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    answer = _Answer()
    parser: Any = httptools.HttpResponseParser(answer)
    while not answer.is_complete:
        data = await reader.read(16_384)
        if not data:
            if answer.headers_done:
                break  # a body that ends with the connection
            raise EOFError("the connection was closed without an answer")
        parser.feed_data(data)
        if answer.size > ANSWER_BYTES_MAX:
            raise Unavailable("the answer is too large")
    return parser.get_status_code(), b"".join(answer.chunks)


class _Answer:
    """Collects what the response parser finds."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.headers_done = False
        self.is_complete = False

    def on_headers_complete(self) -> None:
        self.headers_done = True

    def on_body(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.is_complete = True
