"""Webhook calls: one POST to a checked address, with limits on everything.

The name is resolved here, every address it resolves to is checked, and the connection uses exactly the checked address,
so a name cannot point elsewhere between check and call. Redirects are not followed. Every delivery ends in exactly one
of two ways, whatever the URL, the network or the answer: success, or a failure that is retried.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from millstream import __version__
from millstream.client.async_connections import AsyncConnection
from millstream.client.messages import Origin, Request, Response
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
                    response = await self._call(url, body, signature)
                answer, status = response.body, response.status
                reason = "" if 200 <= status < 300 else f"it answered {status}"
            except TimeoutError:
                answer, reason = b"", f"it took longer than {TIMEOUT_SECONDS:.0f} seconds"
            except Exception as error:
                # Not only network errors: a label that is too long is a UnicodeError.
                answer, reason = b"", str(error) or type(error).__name__
        if reason:
            logger.warning("webhook %s failed: %s", url, reason)
            failed(reason)
        else:
            succeeded(answer)

    async def _call(self, url: str, body: bytes, signature: str) -> Response:
        parts = checked_url(url, self._allowed)
        origin = Origin(parts.scheme, host_of(parts), parts.port or (443 if parts.scheme == "https" else 80))
        address = await self._resolve(origin.host, origin.port)
        headers = {
            "host": parts.netloc,
            "content-type": "application/json",
            "webhook-signature": signature,
            "user-agent": f"millstream/{__version__}",
            "connection": "close",
        }
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        tls = self._tls if origin.scheme == "https" else None
        connection = await AsyncConnection.connect(origin, TIMEOUT_SECONDS, tls, address)
        try:
            await connection.request(Request("POST", target, headers, body), TIMEOUT_SECONDS)
            return await connection.response(ANSWER_BYTES_MAX)
        finally:
            connection.close()

    async def _resolve(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses:
            raise Unavailable(f"{host} has no address")
        if not all(self._allowed.may_reach(host, address) for address in addresses):
            raise Unavailable(f"{host} resolves to an address that webhooks must not reach")
        # Loopback names often list ::1 first while receivers listen on IPv4 only.
        return next((address for address in addresses if ":" not in address), addresses[0])
