"""SIGTERM: live reads end, requests in flight finish, the exit code is 0, and the data is there afterwards."""

from __future__ import annotations

import re
import signal
import threading
import time
from itertools import count
from pathlib import Path

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess

PATH = "/v1/stream/stop/stream"
TEXT = {"content-type": "text/plain"}
STOP_SECONDS = 6.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_with_open_live_reads_is_quick_clean_and_keeps_the_data(tmp_path: Path, number: signal.Signals) -> None:
    with ServerProcess(tmp_path / "data") as server:
        assert server.process is not None
        assert httpx.put(server.url + PATH, content=b"kept", headers=TEXT).status_code == 201
        followers = [RawConnection(server.url) for _ in range(5)]
        pollers = [RawConnection(server.url) for _ in range(5)]
        idle = RawConnection(server.url)
        half_sent = RawConnection(server.url)
        everyone = [*followers, *pollers, idle, half_sent]
        try:
            for one in followers:
                one.send(one.request("GET", f"{PATH}?offset=-1&live=sse"))
                assert one.head()[0] == 200
                assert b"kept" in (one.chunk() or b"")
            for one in pollers:
                one.send(one.request("GET", f"{PATH}?offset=now&live=long-poll"))
            assert idle.exchange("GET", "/healthz").status == 200
            half_sent.send(b"POST /v1/stream/stop/stream HTTP/1.1\r\nHost: x\r\n")
            started = time.monotonic()
            server.process.send_signal(number)
            assert server.wait_for_exit(20) == 0
            assert time.monotonic() - started < STOP_SECONDS
            for one in everyone:
                one.rest()  # every one of them is let go
        finally:
            for one in everyone:
                one.socket.close()
        assert "Traceback" not in server.stderr()
        server.start()
        assert httpx.get(server.url + PATH).content == b"kept"
        assert server.stop() == 0


def test_sse_that_is_open_at_stop_ends_as_a_whole_body(tmp_path: Path) -> None:
    """A last chunk tells the client that nothing is missing, so that it reconnects instead of reporting an error."""
    with ServerProcess(tmp_path / "data") as server, RawConnection(server.url) as follower:
        assert httpx.put(server.url + PATH, content=b"kept", headers=TEXT).status_code == 201
        follower.send(follower.request("GET", f"{PATH}?offset=-1&live=sse"))
        assert follower.head()[0] == 200
        assert b"kept" in (follower.chunk() or b"")
        assert server.stop() == 0
        while follower.chunk() is not None:
            pass
        follower.assert_ended()


def test_long_poll_that_is_open_at_stop_gets_an_answer(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, RawConnection(server.url) as poller:
        assert httpx.put(server.url + PATH, content=b"kept", headers=TEXT).status_code == 201
        # Both on one connection: the second answer cannot be awaited, but the first says the server is at it.
        poller.send(
            poller.request("GET", f"{PATH}?offset=-1") + poller.request("GET", f"{PATH}?offset=now&live=long-poll")
        )
        assert poller.answer().body == b"kept"
        assert server.stop() == 0
        assert poller.answer().status in (204, 503)


def test_appends_in_flight_at_stop_are_kept_if_acknowledged_and_refused_cleanly_if_not(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with httpx.Client(base_url=server.url) as client:
            for number in range(4):
                assert client.put(f"{PATH}-{number}", headers=TEXT).status_code == 201
        acknowledged: list[list[bytes]] = [[] for _ in range(4)]
        flowing = threading.Barrier(5)

        def write(number: int) -> None:
            with httpx.Client(base_url=server.url) as client:
                for index in count():
                    message = b"%d;" % index
                    try:
                        answer = client.post(f"{PATH}-{number}", content=message, headers=TEXT)
                    except httpx.TransportError:
                        return
                    assert answer.status_code == 204
                    acknowledged[number].append(message)
                    if index == 20:
                        flowing.wait(20)

        writers = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(4)]
        for writer in writers:
            writer.start()
        flowing.wait(20)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < STOP_SECONDS
        for writer in writers:
            writer.join(20)
            assert not writer.is_alive()
        assert "Traceback" not in server.stderr()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            for number, messages in enumerate(acknowledged):
                stored = client.get(f"{PATH}-{number}").content
                expected = b"".join(messages)
                assert stored[: len(expected)] == expected
                # At most the one append that was under way and got no answer.
                assert stored[len(expected) :] in (b"", b"%d;" % len(messages))
        assert server.stop() == 0


def test_restart_after_a_clean_stop_replays_next_to_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        assert httpx.put(server.url + PATH, content=b"kept", headers=TEXT).status_code == 201
        for _ in range(20):
            assert httpx.post(server.url + PATH, content=b"!", headers=TEXT).status_code == 204
        assert server.stop() == 0
        server.start()
        replayed = re.search(r"recovered: (\d+) records replayed", server.stderr().splitlines()[-1])
        assert replayed is not None and int(replayed[1]) <= 1  # the record of the last flush itself
        assert httpx.get(server.url + PATH).content == b"kept" + b"!" * 20
