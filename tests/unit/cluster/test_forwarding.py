"""Passing requests on: what reaches the other node, what comes back, and what a broken exchange is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millstream.cluster import forwarding
from millstream.cluster.forwarding import Answer, Forwarder, Outgoing
from millstream.errors import InvalidRequest, OutcomeUnknown, Unavailable

APPEND = Outgoing(
    "POST",
    b"/v1/stream/a%20b?x=1",
    {
        b"host": b"streams.example.com",
        b"content-type": b"text/plain",
        b"connection": b"keep-alive",
        b"content-length": b"3",
        b"x-name": b"caf\xe9",
        b"x-forwarded-for": b"10.0.0.1",
    },
    b"abc",
    "10.0.0.2",
)
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


class Node:
    """Answers every request on every connection in the same way, and keeps what it was sent."""

    def __init__(self, answer: bytes, *, keeps_connections: bool = True) -> None:
        self.answer = answer
        self.keeps_connections = keeps_connections
        self.requests: list[bytes] = []
        self.url = ""
        self._handlers: list[asyncio.Task[None] | None] = []

    @property
    def connections(self) -> int:
        return len(self._handlers)

    async def end(self) -> None:
        """Once its clients are gone, wait until it has noticed."""
        await asyncio.gather(*(handler for handler in self._handlers if handler is not None))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.append(asyncio.current_task())
        while (request := await reader.read(65536)) != b"":
            self.requests.append(request)
            writer.write(self.answer)
            await writer.drain()
            if not self.keeps_connections:
                break
        writer.close()


def with_node(node: Node, scenario: Callable[[Forwarder], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with await asyncio.start_server(node.serve, "127.0.0.1", 0) as server:
            node.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            forwarder = Forwarder()
            try:
                await scenario(forwarder)
            finally:
                forwarder.close()
                await node.end()

    asyncio.run(run())


def test_a_request_is_passed_on_with_its_fields_and_the_answer_back_without_the_connections_own() -> None:
    node = Node(
        b"HTTP/1.1 200 OK\r\nDate: today\r\ncontent-length: 4\r\nConnection: keep-alive\r\n"
        b"Stream-Next-Offset: 7\r\naccess-control-allow-origin: *\r\n\r\nfine"
    )

    async def scenario(forwarder: Forwarder) -> None:
        answer = await forwarder.send(APPEND, node.url, b"signed")
        assert answer == Answer(200, b"stream-next-offset: 7\r\n", b"fine")

    with_node(node, scenario)
    head, _, body = node.requests[0].partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    assert line == b"POST /v1/stream/a%20b?x=1 HTTP/1.1" and body == b"abc"
    assert sorted(fields) == [
        b"content-length: 3",
        b"content-type: text/plain",
        b"host: streams.example.com",
        b"millstream-forwarded: signed",
        b"x-forwarded-for: 10.0.0.1, 10.0.0.2",
        b"x-name: caf\xe9",
    ]


def test_a_connection_is_used_again_if_the_node_keeps_it() -> None:
    for keeps_connections, connections in ((True, 1), (False, 3)):
        node = Node(NO_CONTENT, keeps_connections=keeps_connections)

        async def scenario(forwarder: Forwarder, node: Node = node) -> None:
            for _ in range(3):
                assert (await forwarder.send(APPEND, node.url, b"")).status == 204
                await asyncio.sleep(0.01)  # for the end of a connection to arrive

        with_node(node, scenario)
        assert (len(node.requests), node.connections) == (3, connections)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"]
)
def test_an_exchange_that_breaks_off_has_an_unknown_outcome_and_is_not_repeated(answer: bytes) -> None:
    node = Node(answer, keeps_connections=False)

    async def scenario(forwarder: Forwarder) -> None:
        with pytest.raises(OutcomeUnknown) as raised:
            await forwarder.send(APPEND, node.url, b"")
        assert raised.value.code == "forward_failed"

    with_node(node, scenario)
    assert len(node.requests) == 1


def test_a_node_that_does_not_answer_in_time_has_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "TIMEOUT_SECONDS", 0.05)

    async def scenario(forwarder: Forwarder) -> None:
        with pytest.raises(OutcomeUnknown):
            await forwarder.send(APPEND, node.url, b"")

    node = Node(b"HTTP/1.1 200 OK\r\n")
    with_node(node, scenario)


def test_an_answer_that_is_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "ANSWER_BYTES_MAX", 3)

    async def scenario(forwarder: Forwarder) -> None:
        with pytest.raises(OutcomeUnknown, match="longer than 3 bytes"):
            await forwarder.send(APPEND, node.url, b"")

    node = Node(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfour")
    with_node(node, scenario)


def test_a_node_that_cannot_be_reached_was_sent_nothing() -> None:
    async def scenario(forwarder: Forwarder) -> None:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await forwarder.send(APPEND, "http://127.0.0.1:1", b"")

    with_node(Node(b""), scenario)


def test_a_field_that_cannot_be_sent_is_the_senders_mistake() -> None:
    node = Node(NO_CONTENT)

    async def scenario(forwarder: Forwarder) -> None:
        with pytest.raises(InvalidRequest):
            await forwarder.send(APPEND._replace(headers={b"x": b"a\x7fb"}), node.url, b"")

    with_node(node, scenario)
    assert node.requests == []
