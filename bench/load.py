"""Drives wrk: one run of a Lua script against one server, its figures, and whether they count.

A run counts only if every request was answered with success and no connection failed; otherwise `problem` says
what happened.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.peers import Server

LUA = Path(__file__).parent / "lua"
TIMEOUT_SECONDS = 10
CREATE_CONNECTIONS = 16
# As many as the servers' cores would be missed for: half of the machine drives, half serves.
THREADS = max(1, (os.cpu_count() or 1) // 2)


class LoadGeneratorMissing(Exception):
    def __init__(self) -> None:
        super().__init__("wrk is not installed; on Debian or Ubuntu: apt-get install wrk")


@dataclass(frozen=True)
class Load:
    """What one run of wrk measured."""

    requests: int
    refused: int
    seconds: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    client_busy: float
    problem: str | None

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds

    def figures(self) -> dict[str, float]:
        return {
            "per_second": self.per_second,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "server_cpu_us": self.server_cpu_us,
            "client_busy": self.client_busy,
        }


def version() -> str:
    if shutil.which("wrk") is None:
        raise LoadGeneratorMissing
    return subprocess.run(["wrk", "--version"], capture_output=True, text=True).stdout.split(" Copyright")[0]


def drive(
    server: Server,
    script: str,
    *arguments: object,
    connections: int,
    seconds: int,
    threads: int = 0,
    closes: bool = False,
) -> Load:
    """Run a script of `bench/lua` with its arguments. `closes`: each answer ends its connection."""
    threads = min(threads or THREADS, connections)
    command = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{seconds}s", f"--timeout={TIMEOUT_SECONDS}s"]
    command += ["-s", f"{script}.lua", server.url, "--", *map(str, arguments)]
    server_before, client_before, begin = server.cpu_seconds(), _children_cpu_seconds(), time.perf_counter()
    output = subprocess.run(command, cwd=LUA, capture_output=True, text=True, timeout=seconds + 3 * TIMEOUT_SECONDS)
    elapsed_us = (time.perf_counter() - begin) * 1e6
    client_seconds, server_seconds = _children_cpu_seconds() - client_before, server.cpu_seconds() - server_before
    line = next((line for line in output.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise OSError(f"wrk gave no result: {(output.stderr or output.stdout).strip()[-200:]}")
    found = json.loads(line.removeprefix("RESULT "))
    microseconds = found["microseconds"] or elapsed_us
    return Load(
        requests=found["requests"],
        refused=found["refused"],
        seconds=microseconds / 1e6,
        p50_ms=found["p50_us"] / 1000,
        p99_ms=found["p99_us"] / 1000,
        server_cpu_us=server_seconds * 1e6 / max(1, found["requests"]),
        client_busy=client_seconds * 1e6 / microseconds / threads,
        problem=_problem(found, closes),
    )


def _problem(found: dict[str, int], closes: bool) -> str | None:
    if closes and found["read"] <= found["requests"]:
        # wrk counts an answer that ends with its connection as answered and, as well, as a read error.
        found["read"] = 0
    faults = [f"{found[kind]} {kind} errors" for kind in ("connect", "read", "write", "timeout") if found[kind]]
    if found["refused"]:
        faults.insert(0, f"{found['refused']} of {found['requests']} answers not 2xx")
    if not found["requests"]:
        faults.append("no answers")
    return ", ".join(faults) or None


def _children_cpu_seconds() -> float:
    """Processor time of children that have ended: wrk, since the servers still run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def create_streams(server: Server, count: int, message_bytes: int, seconds_max: int) -> Load:
    """Create streams 0 to `count` - 1, each with one message if it has bytes; stops early when time is up."""
    arguments = (server.path(""), count, message_bytes)
    return drive(server, "create", *arguments, connections=CREATE_CONNECTIONS, seconds=seconds_max, threads=1)
