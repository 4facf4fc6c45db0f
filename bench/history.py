"""Catch-up from the cold tier: replay of history that is wholly Parquet, and what live readers notice of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event

from bench import filling
from bench.client import Client
from bench.live import subscribed
from bench.measurement import OURS, YARDSTICK, Figures, Invalid, Plan, Results, progress, record
from bench.peers import Server, millstream
from bench.replay import replay

MIB = 1 << 20
# All of each fits into the cache of row groups. Byte messages are appended one by one, so that there are fewer.
HISTORY_MIB = {"bytes, 1 KiB messages": 64, "bytes, 100 B messages": 32, "JSON, 1 KiB messages": 96}
HISTORY_MIB |= {"JSON, 100 B messages": 64}
QUICK_DIVISOR = 8
LIVE_MESSAGES = 1000
LIVE_MESSAGES_QUICK = 50
START_SECONDS_MAX = 30.0

Fill = Callable[[Server, str, int, int], None]
HISTORIES: dict[str, tuple[str, int, Fill]] = {
    "bytes, 1 KiB messages": ("application/octet-stream", 1024, filling.append_messages),
    "bytes, 100 B messages": ("application/octet-stream", 100, filling.append_messages),
    "JSON, 1 KiB messages": ("application/json", 1024, filling.append_json),
    "JSON, 100 B messages": ("application/json", 100, filling.append_json),
}
# The first read after a restart is the process's first as well; from the files, it has a cache that is small beside any
# history, and has read before.
FIRST_READ, FILES_READ, LATER_READ = "after a restart", "from the files", "cached"
WITHOUT_CACHE = "cold.cache_bytes=8MiB"
LIVE_CASE = "append to SSE during catch-ups"


def read_case(history: str, when: str) -> str:
    return f"{history}, {when}"


READ_CASES = [read_case(history, when) for history in HISTORIES for when in (FIRST_READ, FILES_READ, LATER_READ)]
GOAL_CASES = [case for case in READ_CASES if not case.endswith(FIRST_READ)]


def measure(results: Results, servers: Sequence[Server], plan: Plan, settings: Sequence[str]) -> None:
    """The first server keeps nothing in memory that it can have from Parquet, the second everything."""
    cold, hot = servers
    uncached = Server(millstream(OURS, *settings, WITHOUT_CACHE), cold.data.parent)
    for server in servers:
        _fill(server, QUICK_DIVISOR if plan.is_quick else 1)
    stats = filling.await_flushed(cold)
    if stats["hot_bytes"]:
        raise Invalid(f"{stats['hot_bytes']} bytes are still in memory")
    for turn in range(plan.rounds):
        for history in HISTORIES:
            cold.stop()
            cold.start()
            first, later = read_case(history, FIRST_READ), read_case(history, LATER_READ)
            record(results.cell(first, OURS), lambda history=history: _replay(cold, history))
            record(results.cell(later, OURS), lambda history=history: _replay(cold, history))
            record(results.cell(later, YARDSTICK), lambda history=history: _replay(hot, history))
            results.cells[first][YARDSTICK] = results.cell(later, YARDSTICK)
            cells = (results.cell(first, OURS), results.cell(later, OURS), results.cell(later, YARDSTICK))
            rates = ", ".join(f"{cell.samples[-1]['megabytes_per_second']:,.0f}" for cell in cells if cell.samples)
            progress(f"cold: {history}, round {turn + 1} of {plan.rounds}: first, later, from memory: {rates}")
        cold.stop()
        _measure_files(results, uncached)
        cold.start()
        _measure_live(results, cold, plan, turn)


def _measure_files(results: Results, uncached: Server) -> None:
    uncached.start()
    try:
        for history in HISTORIES:
            _replay(uncached, history)
            files, later = read_case(history, FILES_READ), read_case(history, LATER_READ)
            record(results.cell(files, OURS), lambda history=history: _replay(uncached, history))
            results.cells[files][YARDSTICK] = results.cell(later, YARDSTICK)
            if results.cell(files, OURS).samples:
                rate = results.cell(files, OURS).samples[-1]["megabytes_per_second"]
                progress(f"cold: {history}, {FILES_READ}: {rate:,.0f}")
    finally:
        uncached.stop()


def _fill(server: Server, divisor: int) -> None:
    for history, (content_type, size, fill) in HISTORIES.items():
        with Client(server) as client:
            client.request("PUT", server.path(_stream(history)), None, content_type)
        fill(server, _stream(history), size, HISTORY_MIB[history] * MIB // divisor)
        progress(f"cold: {server.name}: filled {history}")


def _stream(history: str) -> str:
    return history.replace(",", "").replace(" ", "-")


def _replay(server: Server, history: str) -> Figures:
    before, begin, busy = server.cpu_seconds(), time.perf_counter(), time.thread_time()
    length, requests = replay(server, stream=_stream(history))
    elapsed, busy = time.perf_counter() - begin, time.thread_time() - busy
    return {
        "megabytes_per_second": length / elapsed / 1e6,
        "requests": requests,
        "client_busy": busy / elapsed,
        "server_cpu_ms_per_megabyte": (server.cpu_seconds() - before) * 1e9 / length,
    }


# -- live readers meanwhile --------------------------------------------------------------------------------------


def _measure_live(results: Results, cold: Server, plan: Plan, turn: int) -> None:
    """Latency with a reader that catches up again and again beside it, and without one."""
    messages = LIVE_MESSAGES_QUICK if plan.is_quick else LIVE_MESSAGES

    def latency(name: str) -> Figures:
        with subscribed(cold, f"live-{turn}-{name}", 1) as audience:
            figures = audience.measure(messages)
        return {"p50_ms": figures["p50_ms"], "p99_ms": figures["p99_ms"]}

    def beside_catch_ups() -> Figures:
        with _catching_up(cold, "bytes, 1 KiB messages"):
            return latency(OURS)

    record(results.cell(LIVE_CASE, YARDSTICK), lambda: latency(YARDSTICK))
    record(results.cell(LIVE_CASE, OURS), beside_catch_ups)
    shown = ", ".join(f"{n} {c.samples[-1]['p99_ms']:.1f}" for n, c in results.cells[LIVE_CASE].items() if c.samples)
    progress(f"cold: {LIVE_CASE}, round {turn + 1} of {plan.rounds}: p99, ms: {shown}")


@contextlib.contextmanager
def _catching_up(server: Server, history: str) -> Iterator[None]:
    """A process of its own reads a history again and again."""
    context = multiprocessing.get_context("spawn")
    running, ends = context.Event(), context.Event()
    reader = context.Process(target=_read_until, args=(_Address(server), _stream(history), running, ends))
    reader.start()
    try:
        if not running.wait(START_SECONDS_MAX):
            raise Invalid("the reader that catches up did not start")
        yield
        if not reader.is_alive():
            raise Invalid("the reader that catches up ended early")
    finally:
        ends.set()
        reader.join(START_SECONDS_MAX)
        reader.kill()


class _Address:
    """What a reader in another process needs to know of a server."""

    def __init__(self, server: Server) -> None:
        self.port = server.port
        self._prefix = server.path("")

    def path(self, stream: str) -> str:
        return self._prefix + stream


def _read_until(server: _Address, stream: str, running: Event, ends: Event) -> None:
    replay(server, stream=stream)
    running.set()
    while not ends.is_set():
        replay(server, stream=stream)
