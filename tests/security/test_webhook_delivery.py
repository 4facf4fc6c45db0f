"""Webhooks as a way into inner networks: whatever a name resolves to, or an answer says, none is reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from millstream.protocol.webhook_targets import NO_PRIVATE_TARGETS, THIS_MACHINE, PrivateTargets
from millstream.server.api.webhook_delivery import ANSWER_BYTES_MAX, WebhookDelivery
from support.authority import Authority

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


def with_receiver(
    answer: bytes, scenario: Callable[[Receiver], Coroutine[Any, Any, None]], tls: ssl.SSLContext | None = None
) -> None:
    async def run() -> None:
        receiver = Receiver(answer)
        async with await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls) as server:
            receiver.port = server.sockets[0].getsockname()[1]
            await scenario(receiver)

    asyncio.run(run())


async def outcome(url: str, allowed: PrivateTargets = THIS_MACHINE) -> bytes | None:
    """What a delivery brought back; None if it failed."""
    done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    delivery = WebhookDelivery(allowed)
    delivery.post(url, BODY, "signature", succeeded=done.set_result, failed=lambda reason: done.set_result(None))
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


def test_a_receiver_on_this_machine_is_not_called_unless_that_is_allowed() -> None:
    async def scenario(receiver: Receiver) -> None:
        for host in ("localhost", "127.0.0.1"):
            for scheme in ("http", "https"):
                assert await outcome(f"{scheme}://{host}:{receiver.port}/", NO_PRIVATE_TARGETS) is None
        assert receiver.received == []

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", scenario)


def test_a_host_that_the_operator_names_is_called_wherever_it_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(receiver: Receiver) -> None:
        resolve_to(monkeypatch, "127.0.0.1")
        url = f"http://hooks.internal:{receiver.port}/"
        assert await outcome(url, PrivateTargets.parse(["hooks.internal"])) == b""
        assert await outcome(url, NO_PRIVATE_TARGETS) is None
        assert len(receiver.received) == 1

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\xff\xfe\x00",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"",
    ],
)
def test_whatever_is_answered_a_delivery_that_did_not_succeed_has_failed(answer: bytes) -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/") is None
        assert len(receiver.received) == 1

    with_receiver(answer, scenario)


@pytest.mark.parametrize("host", [f"{'a' * 64}.example.com", "a..example.com", ".example.com", "xn--.example.com"])
def test_a_name_that_cannot_be_looked_up_is_a_failure_too(host: str) -> None:
    assert asyncio.run(outcome(f"https://{host}/")) is None


def test_an_interim_answer_is_passed_over() -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/") == b"fine"

    final = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine"
    with_receiver(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + final, scenario)


def test_a_redirect_is_not_followed() -> None:
    async def scenario(receiver: Receiver) -> None:
        receiver.answer = receiver.answer.replace(b"PORT", str(receiver.port).encode())
        assert await outcome(f"http://localhost:{receiver.port}/") is None
        assert len(receiver.received) == 1

    with_receiver(b"HTTP/1.1 307 Moved\r\nlocation: http://localhost:PORT/inner\r\ncontent-length: 0\r\n\r\n", scenario)


@pytest.mark.parametrize(("certified", "is_reached"), [("hooks.internal", True), ("other.internal", False)])
def test_the_name_of_the_url_is_what_the_receiver_must_prove(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certified: str, is_reached: bool
) -> None:
    """The connection goes to an address, and the certificate, the server name and the host are those of the name."""
    authority = Authority(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*authority.certificate("receiver", dns_name=certified))
    asked_for: list[str | None] = []
    serving.sni_callback = lambda _, name, __: asked_for.append(name)
    trusting = ssl.create_default_context(cafile=str(authority.path))
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)

    async def scenario(receiver: Receiver) -> None:
        resolve_to(monkeypatch, "127.0.0.1")
        url = f"https://hooks.internal:{receiver.port}/"
        brought = await outcome(url, PrivateTargets.parse(["hooks.internal"]))
        assert brought == (b"fine" if is_reached else None)
        assert asked_for == ["hooks.internal"]
        hosts = [f"host: hooks.internal:{receiver.port}".encode() in received for received in receiver.received]
        assert hosts == ([True] if is_reached else [])

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine", scenario, serving)


def test_an_answer_that_is_cut_short_is_a_failure() -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/") is None

    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\nhalf", scenario)


def test_an_answer_without_end_is_given_up() -> None:
    async def scenario(receiver: Receiver) -> None:
        assert await outcome(f"http://localhost:{receiver.port}/") is None

    size = ANSWER_BYTES_MAX + 1
    with_receiver(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size), scenario)
