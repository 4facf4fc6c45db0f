"""Webhooks as a way into inner networks: whatever a name resolves to, or an answer says, none is reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millstream.server.webhook_delivery import ANSWER_BYTES_MAX, WebhookDelivery

BODY = b'{"wake": 1}'


class Receiver:
    """Listens on loopback, keeps what arrives, and answers as it is told."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.received: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received.append(await reader.readuntil(BODY))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


def with_receiver(answer: bytes, scenario: Callable[[Receiver], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        receiver = Receiver(answer)
        async with await asyncio.start_server(receiver.serve, "127.0.0.1", 0) as server:
            receiver.port = server.sockets[0].getsockname()[1]
            await scenario(receiver)

    asyncio.run(run())


async def outcome(url: str) -> bytes | None:
    """What a delivery brought back; None if it failed."""
    done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    delivery = WebhookDelivery()
    delivery.post(url, BODY, "signature", succeeded=done.set_result, failed=lambda: done.set_result(None))
    try:
        return await asyncio.wait_for(done, 20)
    finally:
        await delivery.stop()


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Names resolve to these, as whoever owns them can arrange at any moment."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


def test_a_receiver_on_this_machine_is_called_and_answers() -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/hook?x=1") == b"fine"
        (received,) = receiver.received
        assert received.startswith(b"POST /hook?x=1 HTTP/1.1\r\n") and b"webhook-signature: signature\r\n" in received

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine", scenario)


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), ("93.184.216.34", "127.0.0.1"), ("10.0.0.7",), ("169.254.169.254",)]
)
def test_a_public_name_that_resolves_to_an_inner_address_is_not_called(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    async def scenario(receiver: Receiver) -> None:
        resolve_to(monkeypatch, *addresses)
        assert await outcome(f"https://hooks.example.com:{receiver.port}/") is None
        assert receiver.received == []

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", scenario)


def test_a_development_name_that_resolves_elsewhere_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(receiver: Receiver) -> None:
        resolve_to(monkeypatch, "10.0.0.7")
        assert await outcome(f"http://localhost:{receiver.port}/") is None

    with_receiver(b"", scenario)


def test_a_redirect_is_not_followed() -> None:
    async def scenario(receiver: Receiver) -> None:
        receiver.answer = receiver.answer.replace(b"PORT", str(receiver.port).encode())
        assert await outcome(f"http://localhost:{receiver.port}/") is None
        assert len(receiver.received) == 1

    with_receiver(b"HTTP/1.1 307 Moved\r\nlocation: http://localhost:PORT/inner\r\ncontent-length: 0\r\n\r\n", scenario)


def test_an_answer_without_end_is_given_up() -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/") is None

    size = ANSWER_BYTES_MAX + 1
    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size), scenario)
