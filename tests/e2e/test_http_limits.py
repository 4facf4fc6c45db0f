"""Slow, silent and greedy clients are cut off by the limits, and nobody else notices them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve

# What it checks is how long things take.
pytestmark = pytest.mark.alone

# The sockets of the server's process are counted.
ADAPTERS = ("native",)
BINARY = ("Content-Type", "application/octet-stream")
LIMIT_SECONDS = 1.0
# The limits are looked at twice a second, on a machine that is shared.
SLACK_SECONDS = 6.0


@pytest.fixture(scope="module")
def limited(serve: Serve) -> ServerProcess:
    """A server whose every timeout is a second."""
    server = serve(
        "http.header_timeout=1s",
        "http.body_timeout=1s",
        "http.idle_timeout=1s",
        "http.send_timeout=1s",
        "http.write_buffer_bytes_max=64KiB",
        "http.pipelined_requests_max=8",
        "read.live_readers_per_stream_max=4",
        "read.long_poll_timeout=20s",
    )
    assert isinstance(server, ServerProcess)
    return server


def open_sockets(server: ServerProcess) -> int:
    """How many sockets the server's process holds."""
    assert server.process is not None
    count = 0
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def wait_for_sockets(server: ServerProcess, expected: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS * 2 + SLACK_SECONDS
    while (now := open_sockets(server)) > expected:
        assert time.monotonic() < deadline, f"{now - expected} connections were never let go"
        time.sleep(0.05)


def test_slow_header_sender_gets_408(limited: ServerProcess) -> None:
    with RawConnection(limited.url) as connection:
        started = time.monotonic()
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        answer = connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert LIMIT_SECONDS * 0.5 <= time.monotonic() - started < LIMIT_SECONDS + SLACK_SECONDS
        connection.assert_ended()


def test_header_sender_that_drips_gets_408_all_the_same(limited: ServerProcess) -> None:
    """A byte now and then does not buy more time."""
    with RawConnection(limited.url) as connection:
        deadline = time.monotonic() + LIMIT_SECONDS + SLACK_SECONDS
        connection.socket.settimeout(0.2)
        connection.socket.sendall(b"GET /healthz HTTP/1.1\r\nX-Drip: ")
        received = b""
        while not received:
            assert time.monotonic() < deadline, "the connection is still open"
            connection.socket.sendall(b"x")
            try:
                received = connection.socket.recv(4096)
            except TimeoutError:
                continue
    assert received.startswith(b"HTTP/1.1 408 ")


def test_slow_body_sender_gets_408_and_nothing_is_stored(limited: ServerProcess) -> None:
    path = "/v1/stream/limits/slow-body"
    assert httpx.put(limited.url + path).status_code == 201
    with RawConnection(limited.url) as connection:
        connection.send(connection.request("POST", path, [BINARY], b"abcdef")[:-3])
        answer = connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        connection.assert_ended()
    assert httpx.get(limited.url + path).content == b""


def test_slow_sender_of_trailers_gets_408(limited: ServerProcess) -> None:
    with RawConnection(limited.url) as connection:
        head = connection.request("POST", "/v1/stream/limits/none", [BINARY, ("Transfer-Encoding", "chunked")])
        connection.send(head + b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\n")
        assert connection.answer().status == 408


def test_connection_that_sends_nothing_is_closed(limited: ServerProcess) -> None:
    with RawConnection(limited.url) as connection:
        connection.assert_ended()


def test_idle_connection_is_closed_after_its_last_answer(limited: ServerProcess) -> None:
    with RawConnection(limited.url) as connection:
        assert connection.exchange("GET", "/healthz").status == 200
        connection.assert_ended()


def test_waiting_long_poll_is_not_idle(limited: ServerProcess) -> None:
    """A reader waits far beyond the idle timeout and still gets its message."""
    path = "/v1/stream/limits/patient"
    assert httpx.put(limited.url + path, headers={"content-type": "text/plain"}).status_code == 201
    with RawConnection(limited.url, seconds=20) as reader:
        reader.send(reader.request("GET", f"{path}?offset=-1&live=long-poll"))
        # Another connection's life measures the idle timeout twice over.
        for _ in range(2):
            with RawConnection(limited.url) as idle:
                idle.assert_ended()
        posted = httpx.post(limited.url + path, content=b"at last", headers={"content-type": "text/plain"})
        assert posted.status_code == 204
        assert reader.answer().body == b"at last"


def test_sse_reader_that_never_reads_is_cut_off_and_slows_nobody(limited: ServerProcess) -> None:
    path = "/v1/stream/limits/deaf"
    headers = {"content-type": "application/octet-stream"}
    with httpx.Client(base_url=limited.url, timeout=10) as writer:
        assert writer.put(path, headers=headers).status_code == 201
        before = open_sockets(limited)
        with (
            RawConnection(limited.url, receive_buffer_bytes=4096) as deaf,
            RawConnection(limited.url, seconds=20) as reader,
        ):
            for one in (deaf, reader):
                one.send(one.request("GET", f"{path}?offset=-1&live=sse"))
            status, _ = reader.head()
            assert status == 200
            message, sent, slowest = os.urandom(256 * 1024), 0, 0.0
            deadline = time.monotonic() + 30
            # Loopback buffers are large: write until the deaf one is cut off.
            while open_sockets(limited) >= before + 2:
                assert time.monotonic() < deadline, "the reader that never reads is still connected"
                started = time.monotonic()
                assert writer.post(path, content=message, headers=headers).status_code == 204
                slowest = max(slowest, time.monotonic() - started)
                sent += len(message)
                received = reader.chunk()
                assert received is not None
                if sent > 24 * len(message):
                    time.sleep(0.1)
            assert slowest < 2.0
            # The one that reads is served on.
            assert writer.post(path, content=b"still here", headers=headers).status_code == 204
            while b"c3RpbGwgaGVyZQ==" not in (received or b""):
                received = reader.chunk()


@pytest.mark.parametrize("buffer", ["64KiB", "64MiB"])
def test_reader_that_never_reads_its_large_answer_is_cut_off(tmp_path: Path, buffer: str) -> None:
    """Also when what waits to be sent is less than the buffer's limit, so that writing was never paused."""
    settings = ("http.idle_timeout=1s", "http.send_timeout=1s", f"http.write_buffer_bytes_max={buffer}")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        without_clients = open_sockets(server)
        headers = {"content-type": "application/octet-stream"}
        created = httpx.put(f"{server.url}/v1/stream/limits/unread", content=bytes(7 << 20), headers=headers)
        assert created.status_code == 201
        with RawConnection(server.url, receive_buffer_bytes=4096) as deaf:
            deaf.send(deaf.request("GET", "/v1/stream/limits/unread?offset=-1"))
            assert deaf.head()[0] == 200
            wait_for_sockets(server, without_clients)


def test_more_live_readers_than_allowed_get_503(limited: ServerProcess) -> None:
    path = "/v1/stream/limits/crowded"
    assert httpx.put(limited.url + path).status_code == 201
    readers = [RawConnection(limited.url) for _ in range(5)]
    try:
        for reader in readers:
            reader.send(reader.request("GET", f"{path}?offset=-1&live=sse"))
        statuses = sorted(reader.head()[0] for reader in readers)
    finally:
        for reader in readers:
            reader.socket.close()
    assert statuses == [200, 200, 200, 200, 503]
    # Those who left have made room.
    deadline = time.monotonic() + 10
    while True:
        with RawConnection(limited.url) as reader:
            reader.send(reader.request("GET", f"{path}?offset=-1&live=sse"))
            if reader.head()[0] == 200:
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_more_pipelined_requests_than_allowed_are_all_answered(limited: ServerProcess) -> None:
    """The limit stops the reading, not the requests."""
    path = "/v1/stream/limits/pipelined"
    with RawConnection(limited.url) as connection:
        connection.send(connection.request("PUT", path, [BINARY]))
        assert connection.answer().status == 201
        messages = [b"%d;" % number for number in range(100)]
        for message in messages:
            connection.send(connection.request("POST", path, [BINARY], message))
        assert [connection.answer().status for _ in messages] == [204] * len(messages)
        assert connection.exchange("GET", f"{path}?offset=-1").body == b"".join(messages)


def test_more_connections_than_allowed_get_503_until_one_leaves(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("http.connections_max=3",)) as server:
        held = [RawConnection(server.url) for _ in range(3)]
        try:
            for connection in held:
                assert connection.exchange("GET", "/healthz").status == 200
            with RawConnection(server.url) as refused:
                answer = refused.answer()
                assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
            assert held[0].exchange("GET", "/healthz").status == 200
            held.pop().socket.close()
            deadline = time.monotonic() + 10
            while True:
                with RawConnection(server.url) as admitted:
                    admitted.send(admitted.request("GET", "/healthz"))
                    if admitted.answer().status == 200:
                        return
                assert time.monotonic() < deadline
        finally:
            for connection in held:
                connection.socket.close()


def resident_bytes(server: ServerProcess) -> int:
    assert server.process is not None
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("part", ["path", "query", "host", "content type"])
def test_thousands_of_distinct_long_values_are_not_kept_in_memory(tmp_path: Path, part: str) -> None:
    """What a client sends and nobody stores must not stay behind in a cache."""
    padding = "x" * 28_000
    with ServerProcess(tmp_path / "data") as server:
        assert httpx.put(f"{server.url}/v1/stream/limits/cached", headers=dict([BINARY])).status_code == 201
        flood(server.url, part, padding, range(200))
        before = resident_bytes(server)
        flood(server.url, part, padding, range(1000, 4000))
        assert resident_bytes(server) - before < 24 << 20


def flood(url: str, part: str, padding: str, numbers: range) -> None:
    """A request for each number, which makes one part of it unlike any other."""
    connection = RawConnection(url)
    try:
        for number in numbers:
            value = f"{number}{padding}"
            path = f"/{value}" if part == "path" else "/v1/stream/limits/cached"
            query = f"?offset=now&q={value}" if part == "query" else "?offset=now"
            kind = f"text/plain; q={value}" if part == "content type" else "text/plain"
            headers = [("Host", value if part == "host" else "x"), ("Content-Type", kind)]
            method = "POST" if part == "content type" else "GET"
            connection.send(connection.request(method, path + query, headers, b"x", host=False))
            answer = connection.answer()
            assert answer.status < 500
            if answer.headers.get("connection") == "close":
                connection.socket.close()
                connection = RawConnection(url)
    finally:
        connection.socket.close()


@pytest.mark.parametrize("stays", [True, False], ids=["stays connected", "leaves"])
def test_body_that_was_refused_is_not_kept_in_memory(tmp_path: Path, stays: bool) -> None:
    """Neither by its idle connection nor by one that is gone."""
    with ServerProcess(tmp_path / "data") as server:
        clients: list[RawConnection] = []
        try:
            before = resident_bytes(server)
            for _ in range(50):
                client = RawConnection(server.url)
                clients.append(client)
                assert client.exchange("POST", "/v1/stream/limits/none", [BINARY], bytes(4 << 20)).status == 404
                if not stays:
                    client.socket.close()
            # One body at a time passes through, with room for what the allocator keeps.
            assert resident_bytes(server) - before < 60 << 20
        finally:
            for client in clients:
                client.socket.close()
