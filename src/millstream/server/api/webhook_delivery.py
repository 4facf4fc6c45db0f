"""Calling webhooks: one POST to an address that was judged, with limits on everything.

The name is resolved here, every address it resolves to is judged, and the connection goes to that very address,
so a name cannot point elsewhere between the check and the call. Redirects are not followed. Every delivery ends in
exactly one of two ways, whatever the URL, the network or the answer: success, or a failure that is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

import httptools

from millstream import __version__
from millstream.errors import Unavailable
from millstream.protocol.webhook_targets import PrivateTargets, checked_url, host_of
from millstream.tasks import end

logger = logging.getLogger("millstream.webhooks")

TIMEOUT_SECONDS: Final = 10.0
CONCURRENT_MAX: Final = 64
ANSWER_BYTES_MAX: Final = 64 << 10


class WebhookDelivery:
    def __init__(self, allowed: PrivateTargets) -> None:
        self._allowed = allowed
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
        failed: Callable[[str], None],
    ) -> None:
        """Deliver in the background; `succeeded` gets the answer's body after a 2xx, else `failed` the reason."""
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
        failed: Callable[[str], None],
    ) -> None:
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    status, answer = await self._call(url, body, signature)
                reason = "" if 200 <= status < 300 else f"it answered {status}"
            except TimeoutError:
                answer, reason = b"", f"it took longer than {TIMEOUT_SECONDS:.0f} seconds"
            except Exception as error:
                # Not only what networks do: a label that is too long is a UnicodeError, a 101 has its own exception.
                answer, reason = b"", str(error) or type(error).__name__
        if reason:
            logger.warning("webhook %s failed: %s", url, reason)
            failed(reason)
        else:
            succeeded(answer)

    async def _call(self, url: str, body: bytes, signature: str) -> tuple[int, bytes]:
        parts = checked_url(url, self._allowed)
        host = host_of(parts)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = await self._resolve(host, port)
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

    async def _resolve(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=1)  # SOCK_STREAM
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses:
            raise Unavailable(f"{host} has no address")
        if not all(self._allowed.may_reach(host, address) for address in addresses):
            raise Unavailable(f"{host} resolves to an address that webhooks must not reach")
        # Loopback names often list ::1 first while receivers listen on IPv4 only.
        return next((address for address in addresses if ":" not in address), addresses[0])


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    answer = _Answer()
    answer.parser = parser = httptools.HttpResponseParser(answer)
    while not answer.is_complete:
        data = await reader.read(16_384)
        if not data:
            if answer.status:
                break  # a body that ends with the connection
            raise EOFError("the connection was closed without an answer")
        parser.feed_data(data)
        if answer.size > ANSWER_BYTES_MAX:
            raise Unavailable("the answer is too large")
    return answer.status, b"".join(answer.chunks)


class _Answer:
    """Collects what the response parser finds: the first answer that is not an interim one (1xx)."""

    def __init__(self) -> None:
        self.parser: Any = None
        self.chunks: list[bytes] = []
        self.size = 0
        self.status = 0
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.size += len(name) + len(value)

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            status = self.parser.get_status_code()
            self.status = status if status >= 200 else 0

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        if not self.is_complete:
            self.chunks.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = self.status != 0
