"""Connections that ask for more than they read, send too slowly, come in crowds, or mean two things at once."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.access.forward_marks import MARK, make_mark
from millstream.access.scopes import Principal, parse_scopes
from millstream.asgi import MillstreamApp
from millstream.config import Config, load
from millstream.errors import TooManyRequests
from millstream.protocol.keys import parse_v1_path
from millstream.server.api.gate import Gate
from millstream.server.api.routes import Kind, Route
from millstream.server.http.messages import Request
from millstream.server.http.metrics import Metrics
from millstream.server.node.settings import open_gate
from support.fake_time import FakeClock
from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve

# Memory is measured: the process must be the server's alone.
ADAPTERS = ("native",)
TEXT = {"content-type": "text/plain"}
MIB = 1 << 20
CHUNK = "/v1/stream/abuse/chunk"
UNSENT_BYTES_MAX = 8 * MIB
INCOMING_BYTES_MAX = 8 * MIB
CONNECTIONS_MAX = 60
# The limits are looked at twice a second, on a machine that is shared.
SLACK_SECONDS = 15.0


@pytest.fixture(scope="module")
def server(serve: Serve) -> ServerProcess:
    running = serve(
        "http.body_timeout=1s",
        f"http.unsent_bytes_max={UNSENT_BYTES_MAX}B",
        f"http.incoming_bytes_max={INCOMING_BYTES_MAX}B",
        "limits.exempt_loopback=false",
        "limits.address_bytes_per_second=0B",
        f"limits.address_connections_max={CONNECTIONS_MAX}",
    )
    assert isinstance(running, ServerProcess)
    assert httpx.put(running.url + CHUNK, headers=TEXT, content=bytes(MIB)).status_code == 201
    return running


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[RawConnection]:
    with RawConnection(server.url) as one:
        yield one


def resident_bytes(server: ServerProcess) -> int:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return float(re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[0])


# -- answers that nobody reads ---------------------------------------------------------------------------------


def test_two_thousand_pipelined_reads_that_nobody_reads_take_the_memory_of_a_few(server: ServerProcess) -> None:
    """Each asks for a megabyte: the next is begun only when the one before is being read."""
    before = resident_bytes(server)
    with RawConnection(server.url, receive_buffer_bytes=64 << 10, seconds=60) as greedy:
        greedy.send(greedy.request("GET", CHUNK) * 2000)
        worst = 0
        for _ in range(10):
            time.sleep(0.1)
            assert httpx.get(f"{server.url}/healthz", timeout=30).status_code == 200
            worst = max(worst, resident_bytes(server) - before)
        assert worst < 64 * MIB, f"{worst / MIB:.0f} MiB for one connection"
        assert metric(server, "millstream_unsent_bytes") <= 2 * MIB
        for _ in range(300):  # and they are answered, in order, to whoever reads them
            answer = greedy.answer()
            assert (answer.status, len(answer.body)) == (200, MIB)


def test_pipelined_requests_of_a_client_that_half_closes_are_all_answered(connection: RawConnection) -> None:
    connection.send(connection.request("GET", CHUNK) * 20)
    connection.socket.shutdown(socket.SHUT_WR)
    for _ in range(20):
        assert len(connection.answer().body) == MIB
    connection.assert_ended()


def test_unread_answers_of_many_connections_are_bounded_together_and_those_who_read_go_on(
    server: ServerProcess,
) -> None:
    dropped = metric(server, "millstream_slow_readers_dropped_total")
    with ExitStack() as stack:
        silent = [stack.enter_context(RawConnection(server.url, receive_buffer_bytes=32 << 10)) for _ in range(40)]
        for one in silent:
            one.send(one.request("GET", CHUNK) * 20)  # the kernel takes some megabytes of its own
        deadline = time.monotonic() + SLACK_SECONDS
        while metric(server, "millstream_slow_readers_dropped_total") == dropped:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert metric(server, "millstream_unsent_bytes") <= UNSENT_BYTES_MAX
        assert len(httpx.get(server.url + CHUNK, timeout=30).content) == MIB
    deadline = time.monotonic() + SLACK_SECONDS
    while metric(server, "millstream_unsent_bytes"):
        assert time.monotonic() < deadline, "what is unsent of connections that are gone still counts"
        time.sleep(0.05)


# -- bodies that are never complete ------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [False, True], ids=["incomplete", "behind a long-poll"])
def test_bodies_of_many_connections_that_no_handler_has_yet_are_bounded_together(
    server: ServerProcess, waiting: bool
) -> None:
    """Each connection may send a body of 8 MiB, and there may be 20,000 connections."""
    head = [("Content-Type", "text/plain"), ("Content-Length", str(MIB if waiting else 2 * MIB))]
    with ExitStack() as stack:
        crowd = [stack.enter_context(RawConnection(server.url, seconds=30)) for _ in range(20)]
        for one in crowd:
            before = one.request("GET", f"{CHUNK}?offset=now&live=long-poll") if waiting else b""
            with suppress(ConnectionError):
                one.send(before + one.request("POST", CHUNK, head) + bytes(MIB))
        # What comes in one piece is not held up. It also ends the long-polls.
        assert httpx.post(server.url + CHUNK, headers=TEXT, content=b"x", timeout=30).status_code == 204
        answers = [[one.answer() for _ in range(1 + waiting)][-1] for one in crowd]
        refused = [one for one in answers if one.status == 503]
        assert len(refused) >= 20 - 2 * INCOMING_BYTES_MAX // MIB
        assert all(b"too_much_incoming" in one.body for one in refused)
        assert {one.status for one in answers} == {503, 204 if waiting else 408}
    deadline = time.monotonic() + SLACK_SECONDS
    while httpx.post(server.url + CHUNK, headers=TEXT, content=bytes(MIB), timeout=30).status_code != 204:
        assert time.monotonic() < deadline, "what came from connections that are gone still counts"
        time.sleep(0.05)


# -- crowds and slow senders -----------------------------------------------------------------------------------


def test_a_body_that_drips_is_cut_off_though_it_never_pauses_for_long(connection: RawConnection) -> None:
    """A byte now and then put the deadline off for ever; now the whole of it must come at a pace."""
    started = time.monotonic()
    connection.send(connection.request("POST", CHUNK, [("Content-Type", "text/plain"), ("Content-Length", "100000")]))
    connection.socket.settimeout(0.2)
    received = b""
    while not received:
        assert time.monotonic() - started < 2.0 + SLACK_SECONDS, "the connection is still open"
        connection.socket.sendall(b"x")
        try:
            received = connection.socket.recv(4096)
        except TimeoutError:
            continue
    assert received.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_at_a_pace_may_take_longer_than_any_timeout(server: ServerProcess) -> None:
    with RawConnection(server.url, seconds=30) as steady:
        steady.send(steady.request("POST", CHUNK, [("Content-Type", "text/plain"), ("Content-Length", "40000")]))
        for _ in range(20):
            time.sleep(0.15)
            steady.send(b"x" * 2000)
        assert steady.answer().status == 204
    httpx.delete(server.url + CHUNK)
    httpx.put(server.url + CHUNK, headers=TEXT, content=bytes(MIB))


def connect_from(server: ServerProcess, address: str) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10, source_address=(address, 0))


def test_connections_of_one_address_are_bounded_and_others_are_served(server: ServerProcess) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect_from(server, "127.0.0.66")) for _ in range(CONNECTIONS_MAX)]
        for one in crowd:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(4096).startswith(b"HTTP/1.1 200 ")
        with connect_from(server, "127.0.0.66") as refused:
            assert refused.recv(4096).startswith(b"HTTP/1.1 429 ")
        with connect_from(server, "127.0.0.67") as another:
            another.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert another.recv(4096).startswith(b"HTTP/1.1 200 ")
    deadline = time.monotonic() + SLACK_SECONDS
    while True:  # and when they are gone, the address is as good as any
        with connect_from(server, "127.0.0.66") as late:
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            if late.recv(4096).startswith(b"HTTP/1.1 200 "):
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- limits that are on by default -----------------------------------------------------------------------------


KEY = b"k" * 32


def asked(gate: Gate, address: str, count: int, mark: bytes | None = None) -> int:
    """How many of so many requests the gate lets pass."""
    headers = {} if mark is None else {MARK: mark}

    class Client:
        def __init__(self) -> None:
            self.address = address

        def request_id(self) -> bytes:
            return b"x"

    passed = 0
    for _ in range(count):
        request = Request("POST", CHUNK.encode(), b"", headers, b"x", client=Client())
        try:
            gate.admit(request, Route(Kind.STREAM))
            passed += 1
        except TooManyRequests:
            continue
    return passed


def gate_of(*settings: str) -> Gate | None:
    config: Config = load(None, {}, list(settings))
    return open_gate(config, Metrics(), FakeClock(), {}, lambda: KEY)


def test_limits_protect_by_default_and_leave_this_machine_alone() -> None:
    gate = gate_of("server.listen=0.0.0.0:4437", "server.insecure=true")
    assert gate is not None
    assert 10_000 <= asked(gate, "203.0.113.7", 30_000) < 30_000
    assert asked(gate, "203.0.113.8", 100) == 100, "another address has its own"
    assert asked(gate, "127.0.0.1", 30_000) == asked(gate, "::1", 1000) * 30 == 30_000
    strict = gate_of("server.listen=0.0.0.0:4437", "server.insecure=true", "limits.exempt_loopback=false")
    assert strict is not None and asked(strict, "127.0.0.1", 30_000) < 30_000


def test_a_server_that_only_this_machine_reaches_has_no_gate_unless_a_proxy_stands_before_it() -> None:
    assert gate_of("server.listen=127.0.0.1:4437") is None
    assert gate_of("server.listen=[::1]:4437") is None
    behind = gate_of("server.listen=127.0.0.1:4437", "server.trusted_proxies=127.0.0.1")
    assert behind is not None
    assert gate_of("server.listen=127.0.0.1:4437", "limits.exempt_loopback=false") is not None


def test_what_a_node_passes_on_counts_as_its_clients_and_nobody_else_can_say_whose_it_is() -> None:
    gate = gate_of("server.listen=0.0.0.0:4437", "server.insecure=true", "limits.address_requests_per_second=10")
    assert gate is not None
    for client in ("203.0.113.1", "203.0.113.2", "2001:db8::1"):
        assert 20 <= asked(gate, "10.0.0.3", 500, make_mark(KEY, 3, client)) < 500, client
    assert asked(gate, "203.0.113.1", 500) < 20, "it has used that up, wherever it asks"
    assert asked(gate, "10.0.0.3", 10) == 10, "the passing node has used nothing"
    forged = [
        make_mark(b"another key", 3, "198.51.100.%d"),
        make_mark(None, 3, "198.51.100.%d"),
        b"3 198.51.100.%d",
        b"",
        b" ",
        b"3 198.51.100.%d " + b"A" * 43,
        make_mark(KEY, 3, "203.0.113.1").replace(b"203", b"204"),
        make_mark(KEY, 3, "203.0.113.1")[:-1],
        "3 ö ü".encode(),
    ]
    passed = sum(
        asked(gate, "192.0.2.9", 1, mark.replace(b"%d", b"%d" % number)) for number in range(100) for mark in forged
    )
    assert 20 <= passed < 100, "they all count as the sender's own"


class Everybody:
    """Lets everybody in; the gate's memory is what is looked at."""

    def principal(self, shown: bytes | None) -> Principal:
        return Principal("token 1", "one", parse_scopes(["admin:*"]))


def test_decisions_about_long_paths_are_not_remembered() -> None:
    config: Config = load(None, {}, ["limits.address_requests_per_second=0", "limits.principal_requests_per_second=0"])
    anybody: Any = Everybody()
    gate = Gate(anybody, config.limits, Metrics(), FakeClock(), {})
    key = parse_v1_path("b/s")
    for number in range(1000):
        for path in (b"/v1/stream/b/" + b"%61" * 10_000 + b"%d" % number, b"/v1/stream/b/%d" % number):
            request = Request("GET", path, b"", {b"authorization": b"Bearer x"}, b"")
            gate.admit(request, Route(Kind.STREAM, key, "b"))
    remembered = [path for _, _, path in gate._decisions]
    assert len(remembered) == 1000 and max(map(len, remembered)) < 100


# -- requests that mean two things -----------------------------------------------------------------------------

SMUGGLED = [
    ("content length twice", b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab", (400,)),
    ("content length twice, differing", b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", (400,)),
    ("content length as a list", b"Content-Length: 2, 2\r\n\r\nab", (400,)),
    ("content length with a sign", b"Content-Length: +2\r\n\r\nab", (400,)),
    (
        "content length and transfer encoding",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    ("the other way round", b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", (400,)),
    ("a coding we do not know", b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (501,)),
    ("the same in two fields", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (501,)),
    ("chunked twice", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("chunked not last", b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", (400, 501)),
    ("identity", b"Transfer-Encoding: identity\r\n\r\n", (400, 501)),
    ("almost chunked", b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("a vertical tab before chunked", b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("a folded line", b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("a folded transfer encoding", b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("a bare line feed", b"X: a\nContent-Length: 0\r\n\r\n", (400,)),
    ("a bare carriage return", b"X: a\rContent-Length: 0\r\n\r\n", (400,)),
    ("a space before the colon", b"Content-Length : 2\r\n\r\nab", (400,)),
    ("a name with an odd character", b"X(y): a\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("a name with a NUL", b"X\x00y: a\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("a value with a NUL", b"X: a\x00b\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("no name", b": a\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("a second host", b"Host: other\r\nContent-Length: 0\r\n\r\n", (400,)),
    ("a chunk of negative size", b"Transfer-Encoding: chunked\r\n\r\n-2\r\nab\r\n0\r\n\r\n", (400,)),
    ("a chunk size in another base", b"Transfer-Encoding: chunked\r\n\r\n0x2\r\nab\r\n0\r\n\r\n", (400,)),
    (
        "a chunk size that overflows",
        b"Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\nab\r\n0\r\n\r\n",
        (400, 413),
    ),
    ("a chunk size ended by a line feed", b"Transfer-Encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n", (400,)),
    ("a chunk longer than it says", b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n", (400,)),
]


@pytest.mark.parametrize(("rest", "statuses"), [one[1:] for one in SMUGGLED], ids=[one[0] for one in SMUGGLED])
def test_a_request_whose_end_could_be_disputed_is_refused_and_the_connection_ends(
    connection: RawConnection, rest: bytes, statuses: tuple[int, ...]
) -> None:
    hidden = b"DELETE %b HTTP/1.1\r\nHost: x\r\n\r\n" % CHUNK.encode()
    connection.send(b"POST /v1/stream/abuse/none HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n" + rest + hidden)
    assert connection.answer().status in statuses
    connection.assert_ended()


def test_the_hidden_requests_did_nothing(server: ServerProcess) -> None:
    assert httpx.head(server.url + CHUNK).status_code == 200


@pytest.mark.parametrize("fields", [b"", b"Connection: keep-alive\r\n"])
def test_http_1_0_with_a_transfer_encoding_is_400_and_the_connection_ends(
    connection: RawConnection, fields: bytes
) -> None:
    connection.send(b"POST %b HTTP/1.0\r\n%bTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (CHUNK.encode(), fields))
    assert connection.answer().status == 400
    connection.assert_ended()


def test_http_1_1_without_a_host_is_400(connection: RawConnection) -> None:
    connection.send(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert connection.answer().status == 400


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"\tchunked "])
def test_a_plain_chunked_body_is_taken(server: ServerProcess, connection: RawConnection, coding: bytes) -> None:
    connection.send(
        b"PUT /v1/stream/abuse/chunked HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: %b\r\n\r\n"
        b"2\r\nab\r\n0\r\n\r\n" % coding
    )
    assert connection.answer().status == 201
    assert httpx.get(f"{server.url}/v1/stream/abuse/chunked").content == b"ab"
    httpx.delete(f"{server.url}/v1/stream/abuse/chunked")


def test_a_snapshot_put_in_absolute_form_keeps_its_body(server: ServerProcess, connection: RawConnection) -> None:
    httpx.put(f"{server.url}/abused")
    assert httpx.put(f"{server.url}/abused/s", headers=TEXT, content=b"ab").status_code == 201
    target = f"http://{connection.host}/abused/s/snapshot/{'0' * 16}_{2:016d}"
    assert connection.exchange("PUT", target, [("Content-Type", "text/plain")], b"state").status == 204
    assert httpx.get(f"{server.url}/abused/s/snapshot/{'0' * 16}_{2:016d}").content == b"state"


def test_the_host_of_a_target_in_absolute_form_counts_and_not_the_header(connection: RawConnection) -> None:
    answer = connection.exchange("PUT", "http://named.example:8080/v1/stream/abuse/absolute?x=1", [*TEXT.items()], b"a")
    assert (answer.status, answer.headers["location"]) == (
        201,
        "http://named.example:8080/v1/stream/abuse/absolute",
    )
    assert connection.exchange("GET", "http://user@named.example/healthz").status == 400


# -- ASGI --------------------------------------------------------------------------------------------------------


async def asgi_exchange(app: MillstreamApp, scope: dict[str, Any], body: bytes = b"") -> tuple[int, list[Any]]:
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "query_string": b"", "scheme": "http", "headers": [(b"host", b"x")], **scope}
    await app(whole, receive, send)
    return sent[0]["status"], sent[0]["headers"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/stream/b/a\r\nset-cookie: stolen=1", b"http://x/v1/stream/b/a%0D%0Aset-cookie:%20stolen=1"),
        ("/v1/stream/b/ä 100%?#", b"http://x/v1/stream/b/%C3%A4%20100%25%3F%23"),
    ],
)
def test_asgi_without_raw_path_encodes_what_it_was_given_decoded(tmp_path: Path, path: str, expected: bytes) -> None:
    async def scenario() -> None:
        app = MillstreamApp(tmp_path / "data")
        try:
            headers = [(b"host", b"x"), (b"content-type", b"text/plain")]
            status, fields = await asgi_exchange(app, {"method": "PUT", "path": path, "headers": headers})
            assert status == 201
            assert dict(fields)[b"location"] == expected
            assert all(len(field) == 2 and b"\r" not in field[1] and b"\n" not in field[1] for field in fields)
            assert b"set-cookie" not in dict(fields)
            status, _ = await asgi_exchange(app, {"method": "GET", "path": path})
            assert status == 200
        finally:
            await app.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "scope",
    [
        {"raw_path": b"/v1/stream/b/a\r\nset-cookie: x", "path": "/"},
        {"raw_path": b"/v1/stream/b/a", "path": "/", "query_string": b"x\r\nset-cookie: x"},
        {"raw_path": b"/v1/stream/b/a b", "path": "/"},
    ],
)
def test_asgi_with_a_raw_path_or_query_that_could_not_have_been_sent_is_400(
    tmp_path: Path, scope: dict[str, Any]
) -> None:
    async def scenario() -> None:
        app = MillstreamApp(tmp_path / "data")
        try:
            status, _ = await asgi_exchange(app, {"method": "PUT", **scope})
            assert status == 400
        finally:
            await app.close()

    asyncio.run(scenario())


def test_an_upload_over_asgi_that_is_refused_for_its_host_leaves_no_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = MillstreamApp(tmp_path / "data")
        try:
            path = "/b/s/snapshot/0000000000000000_0000000000000000"
            scope = {"method": "PUT", "path": path, "raw_path": path.encode(), "headers": [(b"host", b"a b")]}
            status, _ = await asgi_exchange(app, scope, b"state")
            assert status == 400
            assert list((tmp_path / "data" / "uploads").iterdir()) == []
        finally:
            await app.close()

    asyncio.run(scenario())
