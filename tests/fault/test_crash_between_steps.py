"""Crashes between each pair of steps in the life of an append lose nothing acknowledged and repeat nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import httpx
import pytest

from support.crashing_server import FLUSH_POINTS, POINTS, ROLL_POINTS
from support.raw_http import ConnectionEnded, RawConnection
from support.server import PYTHON, ServerProcess

LAUNCHER = (PYTHON, str(Path(__file__).parent.parent / "support" / "crashing_server.py"))
# Nothing stays in memory once it is flushed, so a read after a crash also proves what was flushed.
SETTINGS = ("cold.flush_interval=200ms", "hot.keep_bytes=0", "read.long_poll_timeout=500ms")
CRASH_SECONDS = 120.0
JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}
# What a process has written survives its death, synced or not: only the first steps leave nothing behind.
NOT_STORED = ("before the write", "half the frame written", *ROLL_POINTS)
APPEND_POINTS = tuple(point for point in POINTS if point not in (*FLUSH_POINTS, *ROLL_POINTS))


def _mostly_soak(*usual: str) -> list[object]:
    """The points of an append: these in every run, the others in the long one."""
    return [point if point in usual else pytest.param(point, marks=pytest.mark.soak) for point in APPEND_POINTS]


class Tail(threading.Thread):
    """Follows a stream by SSE until the server dies, and keeps every event it got."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(daemon=True)
        self.received = b""
        self._connection = RawConnection(url, seconds=60)
        self._connection.send(self._connection.request("GET", f"{path}?offset=-1&live=sse"))
        assert self._connection.head()[0] == 200
        self._connection.chunk()
        self.start()

    def run(self) -> None:
        with self._connection:
            try:
                while (chunk := self._connection.chunk()) is not None:
                    self.received += chunk
            except (ConnectionEnded, OSError):
                return

    def messages(self) -> list[object]:
        self.join(30)
        assert not self.is_alive()
        found: list[object] = []
        for event in self.received.split(b"\n\n"):
            if b"\nevent: data\ndata:" in event:
                found += json.loads(event.partition(b"\ndata:")[2])
        return found


def crashing(data_dir: Path, point: str, after: int = 0, segment_bytes: str = "64MiB") -> ServerProcess:
    environment = {
        "CRASH_POINT": point,
        "CRASH_FILE": str(arm_of(data_dir)),
        "CRASH_AFTER": str(after),
    }
    # Only where a flush is what is tried: any other writes to the log too, and would crash in an append's place.
    flushing = () if point in FLUSH_POINTS else ("cold.flush_interval=1h",)
    settings = (*SETTINGS, *flushing, f"log.segment_bytes={segment_bytes}")
    return ServerProcess(data_dir, settings=settings, command=LAUNCHER, environment=environment)


def arm_of(data_dir: Path) -> Path:
    return data_dir.parent / "armed"


def produce(client: httpx.Client, path: str, seq: int, message: object) -> int:
    headers = {**JSON, "producer-id": "p", "producer-epoch": "0", "producer-seq": str(seq)}
    return client.post(path, content=json.dumps(message), headers=headers).status_code


def produce_until_crash(
    client: httpx.Client, path: str, server: ServerProcess, payload: Callable[[int], object]
) -> int:
    """How many appends were acknowledged before the server died.

    How many there are in a flush depends on the machine: a busy one may take seconds to start the process that flushes.
    """
    deadline = time.monotonic() + CRASH_SECONDS
    for seq in count():
        try:
            assert produce(client, path, seq, payload(seq)) == 200
        except httpx.TransportError:
            assert server.wait_for_exit() == 137
            return seq
        assert time.monotonic() < deadline, "the server never reached its crash"
    raise AssertionError


@pytest.mark.parametrize(
    ("point", "after"),
    [
        *((point, 0) for point in (*APPEND_POINTS, *FLUSH_POINTS)),
        *(
            pytest.param(point, after, marks=pytest.mark.soak)
            for point in (*APPEND_POINTS, *FLUSH_POINTS)
            for after in (1, 2, 3, 5, 8)
        ),
    ],
)
def test_crash_during_an_append_keeps_what_was_acknowledged_and_deduplicates_the_retry(
    tmp_path: Path, point: str, after: int
) -> None:
    data_dir, path = tmp_path / "data", "/v1/stream/crash/json"
    with crashing(data_dir, point, after) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.put(path, headers=JSON).status_code == 201
        tail = Tail(server.url, path)
        arm_of(data_dir).touch()
        acknowledged = produce_until_crash(client, path, server, lambda seq: {"n": seq})
        seen = tail.messages()
    with ServerProcess(data_dir) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        recovered = client.get(path).json()
        expected = [{"n": seq} for seq in range(acknowledged)]
        assert recovered[:acknowledged] == expected
        assert len(recovered) <= acknowledged + 1
        if point not in (*FLUSH_POINTS, "answered"):  # there the client may have gone on meanwhile
            assert (len(recovered) == acknowledged) is (point in NOT_STORED)
        assert seen == recovered[: len(seen)], "a reader saw what is not there"
        if acknowledged:
            assert produce(client, path, acknowledged - 1, {"n": "a repeat"}) == 204
        was_stored = len(recovered) > acknowledged
        assert produce(client, path, acknowledged, {"n": acknowledged}) == (204 if was_stored else 200)
        assert produce(client, path, acknowledged + 1, {"n": acknowledged + 1}) == 200
        assert client.get(path).json() == [{"n": seq} for seq in range(acknowledged + 2)]
        assert server.stop() == 0


@pytest.mark.parametrize("point", ROLL_POINTS)
def test_crash_while_a_segment_begins_keeps_what_was_acknowledged(tmp_path: Path, point: str) -> None:
    data_dir, path = tmp_path / "data", "/v1/stream/crash/rolled"
    with (
        crashing(data_dir, point, 1, segment_bytes="64KiB") as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        assert client.put(path, headers=JSON).status_code == 201
        arm_of(data_dir).touch()
        acknowledged = produce_until_crash(client, path, server, lambda seq: {"n": seq, "pad": "x" * 5000})
    assert acknowledged > 20, "no segment was rolled before the crash"
    with (
        ServerProcess(data_dir, settings=("log.segment_bytes=64KiB",)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        assert produce(client, path, acknowledged - 1, {"n": "a repeat"}) == 204
        assert produce(client, path, acknowledged, {"n": acknowledged, "pad": ""}) == 200
        assert [message["n"] for message in client.get(path).json()] == list(range(acknowledged + 1))
        assert server.stop() == 0


@pytest.mark.parametrize("point", _mostly_soak("half the frame written", "synced but not applied"))
def test_crash_during_a_create_leaves_the_stream_whole_or_absent(tmp_path: Path, point: str) -> None:
    data_dir, path = tmp_path / "data", "/v1/stream/crash/created"
    with crashing(data_dir, point) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        arm_of(data_dir).touch()
        status = _status(lambda: client.put(path, content=b"[1,2]", headers=JSON))
        assert status == (201 if point == "answered" else None)
        assert server.wait_for_exit() == 137
    with ServerProcess(data_dir) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        retried = client.put(path, content=b"[1,2]", headers=JSON)
        assert retried.status_code == (201 if point in NOT_STORED else 200)
        assert client.get(path).content == b"[1,2]"


@pytest.mark.parametrize("point", _mostly_soak("half the frame written", "synced but not applied"))
def test_crash_during_append_and_close_commits_bytes_sequence_and_closure_together(tmp_path: Path, point: str) -> None:
    data_dir, path = tmp_path / "data", "/v1/stream/crash/closed"
    producer = {"producer-id": "p", "producer-epoch": "0", "producer-seq": "0"}
    last = {**TEXT, **producer, "stream-seq": "b", "stream-closed": "true"}
    with crashing(data_dir, point) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.put(path, headers=TEXT).status_code == 201
        assert client.post(path, content=b"first ", headers={**TEXT, "stream-seq": "a"}).status_code == 204
        arm_of(data_dir).touch()
        status = _status(lambda: client.post(path, content=b"last", headers=last))
        assert status == (200 if point == "answered" else None)
        assert server.wait_for_exit() == 137
    with ServerProcess(data_dir) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        found = client.get(path)
        was_stored = point not in NOT_STORED
        assert found.content == (b"first last" if was_stored else b"first ")
        assert ("stream-closed" in found.headers) is was_stored
        retried = client.post(path, content=b"last", headers=last)
        assert retried.status_code == (204 if was_stored else 200)
        assert retried.headers["stream-closed"] == "true"
        assert client.get(path).content == b"first last"
        refused = client.post(path, content=b"more", headers=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_closed")


@pytest.mark.parametrize("point", _mostly_soak("synced but not applied"))
def test_crash_during_a_delete_leaves_the_stream_whole_or_gone(tmp_path: Path, point: str) -> None:
    data_dir, path = tmp_path / "data", "/v1/stream/crash/deleted"
    with crashing(data_dir, point) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.put(path, content=b"old", headers=TEXT).status_code == 201
        arm_of(data_dir).touch()
        _status(lambda: client.delete(path))
        assert server.wait_for_exit() == 137
    with ServerProcess(data_dir) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        if point in NOT_STORED:
            assert client.get(path).content == b"old"
        else:
            assert client.get(path).status_code == 404
            assert client.put(path, content=b"new", headers=TEXT).status_code == 201
            assert client.get(path).content == b"new"


def _status(request: Callable[[], httpx.Response]) -> int | None:
    try:
        return request().status_code
    except httpx.TransportError:
        return None
