"""Left running: mixed traffic, clients that vanish, slow readers and restarts, after which nothing is left behind."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from millstream.client import Client
from support.server import ServerProcess
from support.traffic import STREAMS, Traffic, name_of

SETTINGS = (
    "cold.flush_interval=1s",
    "hot.keep_bytes=1MiB",
    "cold.cache_bytes=8MiB",
    "http.send_timeout=2s",
    "http.header_timeout=2s",
    "http.body_timeout=2s",
    "http.idle_timeout=5s",
    "http.write_buffer_bytes_max=64KiB",
    "read.long_poll_timeout=2s",
    "read.sse_lifetime=5s",
    "server.stop_timeout=10s",
)
QUIET_SECONDS = 30.0
# What allocators keep in pieces, and what the streams' own history takes in the catalog. A leak of a few KiB for each
# of the thousands of connections would be more.
MEMORY_SLACK_BYTES = 32 << 20
# By then the server has given back what it asked for in a burst (`tiers/cold.py`).
GIVEN_BACK_SECONDS = 10.0


class State(NamedTuple):
    """What a server holds."""

    memory_bytes: int
    files: int
    connections: int
    live_readers: int


def state_of(server: ServerProcess) -> State:
    assert server.process is not None
    process = Path(f"/proc/{server.process.pid}")
    with httpx.Client(base_url=server.url) as client:
        metrics = client.get("/metrics").text
        files = sum(1 for _ in (process / "fd").iterdir()) - 1  # without the socket that asks
    memory = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return State(memory, files, _sum(metrics, "connections") - 1, _sum(metrics, "live_readers"))


def _sum(metrics: str, name: str) -> int:
    """The sum of a metric's samples."""
    return sum(map(int, re.findall(rf"^millstream_{name}(?:{{.*}})? (\d+)$", metrics, re.MULTILINE)))


def settled(server: ServerProcess, baseline: State | None = None) -> State:
    """The server's state once clients are gone, time-outs are over and memory is given back."""
    time.sleep(GIVEN_BACK_SECONDS)
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        state = state_of(server)
        is_quiet = state.connections == 0 and state.live_readers == 0
        if is_quiet and (baseline is None or state.files <= baseline.files):
            return state
        assert time.monotonic() < deadline, f"{state} does not become {baseline}"
        time.sleep(0.25)


def check_content(server: ServerProcess, acknowledged: dict[int, list[bytes]]) -> None:
    with Client(server.url) as client:
        for number in range(STREAMS):
            content = client.stream(name_of(number)).read_all()
            expected = b"".join(acknowledged[number])
            assert content[: len(expected)] == expected, f"stream {number} lost or changed something acknowledged"


def soak(directory: Path, rounds: int, seconds: float) -> None:
    """Rounds of traffic; between them the server is stopped, or killed, and started again."""
    everything: dict[int, list[bytes]] = {number: [] for number in range(STREAMS)}
    with ServerProcess(directory / "data", settings=SETTINGS) as server:
        for number in range(rounds):
            # The first half fills caches, pools and the allocator: what is there afterwards is where it begins.
            baseline: State | None = None
            for half in range(2):
                if half:
                    baseline = settled(server)
                with Traffic(server.url, number, everything) as traffic:
                    time.sleep(seconds)
                assert traffic.problems == []
                assert traffic.counts.keys() >= {"_follow", "_vanish", "_misbehave", "_come_and_go"}
            assert baseline is not None
            after = settled(server, baseline)
            print(f"round {number}: {baseline} -> {after}; {sum(map(len, everything.values()))} messages")
            assert after.memory_bytes - baseline.memory_bytes < MEMORY_SLACK_BYTES
            if number % 2:
                server.kill()
            else:
                assert server.stop() == 0
            assert "Traceback" not in server.stderr()
            server.start()
            check_content(server, everything)
        assert server.stop() == 0


def test_after_mixed_traffic_and_restarts_nothing_is_left_behind(tmp_path: Path) -> None:
    soak(tmp_path, rounds=1, seconds=4)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_after_ten_minutes_of_mixed_traffic_and_restarts_nothing_is_left_behind(tmp_path: Path) -> None:
    soak(tmp_path, rounds=3, seconds=100)
