"""The states of a connection, one transition at a time, without a socket: bytes are fed and time is moved by hand."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.server.http.messages import Response
from millstream.server.http.native.connection import Connection
from millstream.server.http.native.reading import RequestReader
from millstream.server.http.native.states import Answering, Reading
from support.fake_time import FakeClock, run, turns
from support.native_http import FakeBody, FakeClient, Wire, get, post, request

Scenario = Callable[[Wire], Awaitable[None]]


def play(scenario: Scenario, *settings: str, is_secure: bool = False) -> None:
    """Run a scenario in time of its own."""

    async def main() -> None:
        await scenario(Wire(clock, *settings, is_secure=is_secure))

    clock = FakeClock()
    run(main(), clock)


def states(client: FakeClient) -> tuple[Reading, Answering]:
    return client.connection._reader.state, client.connection.state


# -- reading -----------------------------------------------------------------------------------------------------


def test_a_request_passes_through_head_and_body_and_back_to_idle() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        assert states(client) == (Reading.IDLE, Answering.READY)
        client.send(b"POST /a HT")
        assert states(client) == (Reading.HEAD, Answering.READY)
        client.send(b"TP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab")
        assert states(client) == (Reading.BODY, Answering.READY)
        client.send(b"c")
        assert states(client) == (Reading.IDLE, Answering.HANDLING)
        assert client.answer().body == b"abc"
        assert states(client) == (Reading.IDLE, Answering.READY)
        assert client.statuses() == [204]

    play(scenario)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.lists(st.integers(0, 400), max_size=8), st.data())
def test_requests_are_the_same_however_the_bytes_are_cut(
    bodies: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    """Cut anywhere, with the answers given at any time in between: the same requests, in order, all answered."""
    sent = b"".join(post(f"/{number}?q={number}", body) for number, body in enumerate(bodies))
    bounds = sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})
    answers_early = data.draw(st.booleans())

    async def scenario(wire: Wire) -> None:
        client = wire.open()
        seen = []
        for start, end in pairwise(bounds):
            client.send(sent[start:end])
            while answers_early and wire.app.requests:
                seen.append(client.answer())
                await turns(2)
        while wire.app.requests:
            seen.append(client.answer())
            await turns(2)
        assert [(one.path, one.query, one.body) for one in seen] == [
            (b"/%d" % number, b"q=%d" % number, body) for number, body in enumerate(bodies)
        ]
        assert client.statuses() == [204] * len(bodies)
        assert states(client) == (Reading.IDLE, Answering.READY)
        assert wire.shared.incoming_bytes == 0

    play(scenario)


def test_expect_with_nothing_before_it_is_invited_at_once() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(post("/a", b"abc", "Expect: 100-continue")[:-3])
        assert client.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert states(client) == (Reading.BODY, Answering.READY)

    play(scenario)


def test_expect_behind_a_request_at_work_is_invited_after_its_answer() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/first") + post("/second", b"abc", "Expect: 100-continue")[:-3])
        assert client.read() == b""
        assert states(client) == (Reading.EXPECTING, Answering.HANDLING)
        client.answer()
        assert client.statuses() == [204, 100]
        assert states(client) == (Reading.BODY, Answering.READY)
        client.send(b"abc")
        assert client.answer().body == b"abc"

    play(scenario)


def test_expect_of_a_client_that_does_not_wait_gets_no_100() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/first") + post("/second", b"abc", "Expect: 100-continue"))
        assert states(client) == (Reading.IDLE, Answering.HANDLING)
        client.answer()
        await turns(2)
        client.answer()
        assert client.statuses() == [204, 204]

    play(scenario)


def test_refusal_within_a_request_cuts_it_off() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(request("POST", "/a", "Content-Length: 11"))
        assert client.statuses() == [413]
        assert states(client) == (Reading.CUT_OFF, Answering.CLOSING)
        client.send(b"x" * 11)
        assert wire.app.requests == []

    play(scenario, "http.body_bytes_max=10B")


def test_half_closed_client_gets_its_answers_and_is_closed_after_the_last() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/first") + get("/second"))
        assert client.connection.eof_received()
        assert states(client) == (Reading.ENDED, Answering.HANDLING)
        client.answer()
        await turns(2)
        client.answer()
        written = client.read()
        assert (written.count(b" 204 "), written.count(b"connection: close")) == (2, 1)
        assert states(client) == (Reading.ENDED, Answering.CLOSING)

    play(scenario)


def test_half_closed_idle_client_is_let_go() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        assert not client.connection.eof_received()

    play(scenario)


def test_half_closed_client_gets_the_refusal_of_what_it_sent_last() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/first") + b"\x00garbage\r\n\r\n")
        assert client.connection.eof_received()
        client.answer()
        assert client.statuses() == [204, 400]

    play(scenario)


def test_nothing_is_held_of_what_arrives_after_a_refusal() -> None:
    """However large the pieces are: those are otherwise kept until the slices before them are parsed."""

    async def scenario(wire: Wire) -> None:
        client = wire.open()
        for _ in range(3):
            client.send(b"\x00" * 200_000)
        assert client.statuses() == [400]
        assert client.connection._held == b""

    play(scenario)


def test_a_piece_full_of_upgrades_is_a_piece_full_of_requests() -> None:
    """RFC 9110 §7.8: an upgrade that is not offered is ignored. There may be more in a piece than frames on a stack."""

    async def scenario(wire: Wire) -> None:
        wire.app.immediate[b"/"] = Response(204)
        client = wire.open()
        client.send(get("/", "Connection: upgrade", "Upgrade: h2c") * 1000 + b"GET /")
        assert client.statuses() == [204] * 1000
        assert states(client) == (Reading.HEAD, Answering.READY)
        client.send(b"a HTTP/2.0\r\n\r\n")
        assert client.statuses() == [505]

    play(scenario)


def test_garbage_behind_an_upgrade_is_refused() -> None:
    async def scenario(wire: Wire) -> None:
        wire.app.immediate[b"/"] = Response(204)
        client = wire.open()
        client.send(get("/", "Connection: upgrade", "Upgrade: h2c") + request("GET", "/", "Expect: something"))
        assert client.statuses() == [204, 417]

    play(scenario)


# -- answering ---------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_handled_one_at_a_time_each_in_a_turn_of_its_own() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/1") + get("/2") + get("/3"))
        for number in (1, 2, 3):
            assert [one.path for one in wire.app.requests] == [b"/%d" % number]
            assert client.connection.state is Answering.HANDLING
            client.answer()
            assert client.connection.state is (Answering.SCHEDULED if number < 3 else Answering.READY)
            await turns(2)

    play(scenario)


def test_reading_pauses_while_enough_requests_wait_and_goes_on_after() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/") * 3)
        assert not client.transport.takes_input
        client.answer()
        await turns(2)
        assert client.transport.takes_input

    play(scenario, "http.pipelined_requests_max=2")


def test_no_request_begins_while_the_client_does_not_read() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.transport.client_reads = False
        client.send(get("/first"))
        client.answer(Response(200, b"", b"x" * 2000))
        assert client.connection.state is Answering.BLOCKED
        client.send(get("/second"))
        await turns(3)
        assert wire.app.requests == []
        client.transport.drain()
        assert client.connection.state is Answering.SCHEDULED
        await turns(2)
        assert [one.path for one in wire.app.requests] == [b"/second"]

    play(scenario, "http.write_buffer_bytes_max=1000B")


def test_blocked_connection_without_requests_in_line_becomes_ready() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.transport.client_reads = False
        client.send(get("/first"))
        client.answer(Response(200, b"", b"x" * 2000))
        client.transport.drain()
        assert client.connection.state is Answering.READY

    play(scenario, "http.write_buffer_bytes_max=1000B")


def test_refusal_waits_for_the_requests_in_line() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/1") + get("/2") + b"\x00\r\n\r\n")
        assert states(client) == (Reading.CUT_OFF, Answering.HANDLING)
        for _ in range(2):
            assert client.statuses() == []
            client.answer()
            assert client.statuses()[0] == 204
            await turns(2)
        assert states(client)[1] is Answering.CLOSING

    play(scenario)


def test_connection_close_ends_our_side_and_waits_two_seconds_for_the_client() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/", "Connection: close"))
        client.answer()
        assert states(client) == (Reading.ENDED, Answering.CLOSING)
        assert client.transport.has_ended and not client.transport.is_closed
        await wire.advance(1.5)
        assert not client.transport.is_closed
        await wire.advance(1.0)
        assert client.transport.is_closed and not client.transport.is_aborted
        assert client.connection.state is Answering.CLOSED

    play(scenario)


@pytest.mark.parametrize(("is_cut_off", "closes_at_once"), [(True, False), (False, True)])
def test_tls_closes_at_once_unless_the_client_is_still_sending(is_cut_off: bool, closes_at_once: bool) -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        wire.app.immediate[b"/"] = Response(204)
        client.send(post("/", b"x" * 11) if is_cut_off else get("/", "Connection: close"))
        assert client.connection.state is Answering.CLOSING
        assert client.transport.is_closed == closes_at_once

    play(scenario, "http.body_bytes_max=10B", is_secure=True)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_stopping_server_answers_the_request_at_work_and_begins_no_other(is_immediate: bool) -> None:
    async def scenario(wire: Wire) -> None:
        if is_immediate:
            wire.app.immediate[b"/"] = Response(204)
        client = wire.open()
        wire.shared.is_stopping = True
        client.send(get("/") + get("/"))
        if not is_immediate:
            client.answer()
            await turns(3)
        assert client.read().count(b"connection: close") == 1
        assert client.connection.state is Answering.CLOSING
        assert len(wire.app.requests) == is_immediate

    play(scenario)


def test_retired_connection_begins_nothing_when_its_client_reads_at_last() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.transport.client_reads = False
        client.send(get("/first") + get("/second"))
        wire.shared.is_stopping = True
        client.connection.retire()
        client.answer(Response(200, b"", b"x" * 2000))
        assert client.connection.state is Answering.CLOSING
        client.transport.drain()
        await turns(3)
        assert wire.app.requests == []

    play(scenario, "http.write_buffer_bytes_max=1000B")


def test_idle_connection_is_closed_at_once_when_the_server_stops() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.connection.retire()
        assert client.transport.is_closed

    play(scenario)


# -- streamed answers --------------------------------------------------------------------------------------------


def test_streamed_answer_is_chunked_paused_and_resumed_with_its_client() -> None:
    async def scenario(wire: Wire) -> None:
        client, body = wire.open(), FakeBody()
        client.send(get("/"))
        client.answer(Response(200, b"", body))
        assert client.connection.state is Answering.STREAMING
        assert body.sink is not None and body.sink.write(b"abc")
        assert client.read().endswith(b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        client.transport.client_reads = False
        assert not body.sink.write(b"x" * 2000)
        client.transport.drain()
        assert body.resumed == 1
        client.transport.client_reads = True
        body.sink.finish()
        assert client.read().endswith(b"0\r\n\r\n")
        assert client.connection.state is Answering.READY

    play(scenario, "http.write_buffer_bytes_max=1000B")


@pytest.mark.parametrize(
    ("version", "length", "framing", "stays_open"),
    [
        ("1.1", None, b"transfer-encoding: chunked\r\n", True),
        ("1.1", 3, b"content-length: 3\r\n", True),
        ("1.0", 3, b"connection: keep-alive\r\ncontent-length: 3\r\n", True),
        ("1.0", None, b"connection: close\r\n", False),
    ],
)
def test_streamed_answer_is_framed_as_its_client_understands(
    version: str, length: int | None, framing: bytes, stays_open: bool
) -> None:
    async def scenario(wire: Wire) -> None:
        client, body = wire.open(), FakeBody()
        client.send(request("GET", "/", "Connection: keep-alive", version=version))
        client.answer(Response(200, b"", body, length=length))
        assert framing + b"\r\n" in client.read()
        assert body.sink is not None
        body.sink.write(b"abc")
        body.sink.finish()
        assert client.connection.state is (Answering.READY if stays_open else Answering.CLOSING)

    play(scenario)


def test_streamed_answer_ends_with_its_connection() -> None:
    async def scenario(wire: Wire) -> None:
        client, body = wire.open(), FakeBody()
        client.send(get("/"))
        client.answer(Response(200, b"", body))
        assert not client.connection.eof_received(), "a live read whose client has gone is over"
        client.transport.lose()
        assert body.is_cancelled
        assert body.sink is not None
        body.sink.finish()
        assert client.connection.state is Answering.CLOSED

    play(scenario)


# -- the connection is lost --------------------------------------------------------------------------------------


def test_request_at_work_is_told_that_its_client_is_gone_and_its_answer_is_dropped() -> None:
    async def scenario(wire: Wire) -> None:
        wire.app.is_live = True
        client = wire.open()
        client.send(get("/"))
        client.transport.lose()
        assert wire.app.abandoned == wire.app.requests != []
        client.answer()
        assert client.read() == b""
        assert wire.shared.connections == {}

    play(scenario)


@pytest.mark.parametrize("answers", [0, 1])
def test_uploads_of_requests_that_never_began_are_discarded(answers: int) -> None:
    """In line, about to begin, or incomplete."""

    async def scenario(wire: Wire) -> None:
        client = wire.open()
        put = request("PUT", "/upload", "Content-Length: 3") + b"abc"
        client.send(get("/") + put + put[:-1])
        for _ in range(answers):
            client.answer()
        client.transport.lose()
        await turns(3)
        assert [(one.content, one.is_discarded) for one in wire.app.uploads] == [(b"abc", True), (b"ab", True)]

    play(scenario)


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_lost_connection_leaves_no_cycle_behind() -> None:
    async def scenario(wire: Wire) -> None:
        with no_collections():
            for sent in (b"", get("/"), get("/") * 3, b"POST /", b"\x00", get("/", "Connection: close")):
                client = wire.open()
                client.send(sent)
                client.transport.lose()
                wire.app.requests.clear()
                wire.app.pending.clear()
                await turns(3)
            del client
            found = [one for one in gc.get_objects() if isinstance(one, Connection | RequestReader)]
            left = [one for one in found if one._shared is wire.shared]  # other tests may have servers of their own
        assert left == []

    play(scenario)


# -- time --------------------------------------------------------------------------------------------------------

TIMEOUTS = ("http.header_timeout=3s", "http.body_timeout=4s", "http.idle_timeout=5s", "http.send_timeout=6s")


@pytest.mark.parametrize(
    ("sent", "seconds", "statuses"),
    [
        pytest.param(b"", 3, [], id="nothing at all"),
        pytest.param(b"GET / HT", 3, [408], id="part of a head"),
        pytest.param(post("/", b"abc")[:-1], 4, [408], id="part of a body"),
        pytest.param(get("/now"), 5, [204], id="nothing after an answer"),
    ],
)
def test_client_that_keeps_the_server_waiting_is_closed_in_time(sent: bytes, seconds: int, statuses: list[int]) -> None:
    async def scenario(wire: Wire) -> None:
        wire.app.immediate[b"/now"] = Response(204)
        client = wire.open()
        client.send(sent)
        await wire.advance(seconds - 0.5)
        assert states(client)[1] is Answering.READY
        await wire.advance(1)
        assert client.transport.is_closed or states(client)[1] is Answering.CLOSING
        assert client.statuses() == statuses

    play(scenario, *TIMEOUTS)


def test_body_that_drips_is_refused_when_it_is_too_slow_on_the_whole() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(request("POST", "/", "Content-Length: 1000"))
        for _ in range(10):
            client.send(b"x")
            await wire.advance(0.5)
        assert client.statuses() == [408]

    play(scenario, *TIMEOUTS, "http.body_bytes_per_second_min=100B")


def test_request_at_work_may_take_its_time() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/"))
        await wire.advance(60)
        client.answer()
        assert client.statuses() == [204]
        assert client.connection.state is Answering.READY

    play(scenario, *TIMEOUTS)


def test_head_that_began_during_the_answer_before_it_has_the_time_of_a_head_from_then_on() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.send(get("/") + b"GET /")
        await wire.advance(60)
        client.answer()
        await wire.advance(2.5)
        assert states(client) == (Reading.HEAD, Answering.READY)
        await wire.advance(1)
        assert client.statuses() == [204, 408]

    play(scenario, *TIMEOUTS)


def test_client_that_reads_nothing_is_cut_off() -> None:
    async def scenario(wire: Wire) -> None:
        client = wire.open()
        client.transport.client_reads = False
        client.send(get("/", "Connection: close"))
        client.answer(Response(200, b"", FakeBody()))
        await wire.advance(6)
        assert not client.transport.is_aborted
        await wire.advance(1)
        assert client.transport.is_aborted

    play(scenario, *TIMEOUTS)


# -- totals over all connections ---------------------------------------------------------------------------------


def test_bodies_that_are_arriving_are_limited_over_all_connections() -> None:
    async def scenario(wire: Wire) -> None:
        clients = [wire.open() for _ in range(3)]
        for client in clients:
            client.send(request("POST", "/", "Content-Length: 1000") + b"x" * 900)
        assert [client.statuses() for client in clients] == [[], [], [503]]
        assert wire.shared.incoming_bytes == 1800
        for client in clients:
            client.transport.lose()
        assert wire.shared.incoming_bytes == 0

    play(scenario, "http.incoming_bytes_max=2000B")


def test_of_clients_that_do_not_read_the_slowest_is_dropped_first() -> None:
    async def scenario(wire: Wire) -> None:
        clients = [wire.open() for _ in range(3)]
        for client in clients:
            client.transport.client_reads = False
            client.send(get("/"))
            client.answer(Response(200, b"", b"x" * 2000))
        await turns(2)
        assert [client.transport.is_aborted for client in clients] == [True, False, False]
        assert wire.app.metrics.slow_readers_dropped == 1

    play(scenario, "http.write_buffer_bytes_max=1000B", "http.unsent_bytes_max=5000B")


def test_connections_of_an_address_are_limited_first_with_a_word_then_without() -> None:
    async def scenario(wire: Wire) -> None:
        clients = [wire.open() for _ in range(6)]
        assert [client.statuses() for client in clients] == [[], [], [429], [429], [], []]
        assert [client.transport.is_aborted for client in clients] == [False] * 4 + [True] * 2
        assert wire.open("198.51.100.7").statuses() == []
        for client in clients:
            client.transport.lose()
        assert wire.open().statuses() == []

    play(scenario, "limits.address_connections_max=2")


def test_connections_are_limited_in_all() -> None:
    async def scenario(wire: Wire) -> None:
        clients = [wire.open(f"192.0.2.{number}") for number in range(3)]
        assert [client.statuses() for client in clients] == [[], [], [503]]
        await asyncio.sleep(0)

    play(scenario, "http.connections_max=2")
