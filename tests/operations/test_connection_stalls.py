"""No connection holds the loop for more than 100 ms, whatever it sends and however little it reads."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from millstream import config as configuration
from millstream.server.http.limits import http_limits
from millstream.server.http.native import NativeServer
from millstream.server.node.run import open_listener
from millstream.server.node.standalone import Node
from support.application import ask
from support.stalls import STALL_SECONDS_MAX, Stalls, measured_stalls

MIB = 1 << 20
TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/stalls/s"


def measure(directory: Path, clients: list[Callable[[int], object]]) -> Stalls:
    """Let clients, each on a thread of its own, do what they do to a real server on this loop."""

    async def main() -> Stalls:
        config = configuration.load(None, {}, (f"server.data_dir={directory}",))
        node = Node(config)
        app = await node.start()
        listening = open_listener(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = NativeServer(app, http_limits(config))
        await server.start(listening)
        try:
            assert (await ask(app, "PUT", PATH, bytes(MIB), TEXT)).status == 201
            async with measured_stalls() as stalls:
                work: list[Awaitable[object]] = [asyncio.to_thread(client, port) for client in clients]
                await asyncio.gather(*work)
            return stalls
        finally:
            await server.stop(0.0)
            await node.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def sends(data: bytes, *, reads: bytes = b"") -> Callable[[int], object]:
    """A client that sends and then waits for an answer that begins so, or reads nothing for a second."""

    def client(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.settimeout(60 if reads else 1)
            try:
                connection.sendall(data)
                if reads:
                    assert connection.recv(256).startswith(reads)
                else:
                    time.sleep(1.0)
            except TimeoutError:
                assert not reads

    return client


def request(head: str, body: bytes = b"") -> bytes:
    return f"{head} HTTP/1.1\r\nHost: x\r\n".encode() + body


CHUNKED = "Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "clients",
    [
        pytest.param([sends(request(f"GET {PATH}", b"\r\n") * 2000)] * 4, id="pipelined reads of a megabyte, unread"),
        pytest.param([sends(request("GET /healthz", b"\r\n") * 100_000)], id="very many tiny requests, unread"),
        pytest.param(
            [
                sends(
                    request(f"POST {PATH}", CHUNKED.encode() + b"2\r\nab\r\n" * (2 * MIB) + b"0\r\n\r\n"),
                    reads=b"HTTP/1.1 204 ",
                )
            ],
            id="a body in chunks of two bytes",
        ),
        pytest.param(
            [sends(request("GET /healthz", b"x: y\r\n" * 5000 + b"\r\n"), reads=b"HTTP/1.1 ")],
            id="very many headers",
        ),
    ],
)
def test_a_connection_does_not_hold_the_loop(tmp_path: Path, clients: list[Callable[[int], object]]) -> None:
    stalls = measure(tmp_path, clients)
    assert stalls.beats > 0
    assert stalls.worst_seconds < STALL_SECONDS_MAX
