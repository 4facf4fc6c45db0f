"""What the figures depend on besides the servers: machine, disk, versions."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import millstream
from bench import load
from bench.measurement import Plan

SYNC_PROBES = 200


def describe(plan: Plan) -> dict[str, str]:
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "-m", "bench", *sys.argv[1:]]),
        "rounds": f"{plan.rounds}, {plan.seconds} s each; medians over the rounds",
        "processor": f"{_processor()}, {os.cpu_count()} cores; load average at the start {os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "disk": f"{_filesystem(plan.data_parent)}; 4 KiB write and fdatasync: {_sync_us(plan.data_parent):.0f} µs",
        "millstream": f"{millstream.__version__} ({_revision()}), Python {platform.python_version()}",
        "node": _output("node", "--version"),
        "load generator": f"{load.version()}, {load.THREADS} thread",
    }


def note_change(described: dict[str, str]) -> None:
    """Say so if the millstream that is measured is no longer the one that was described: others may work on it."""
    if f"({_revision()})" not in described["millstream"] and "changed" not in described["millstream"]:
        described["millstream"] += f"; changed to {_revision()} during the run"


def is_clean() -> bool:
    """Whether what is measured is a commit: nobody could measure anything else again."""
    return not _output(
        "git", "-C", str(Path(__file__).parents[1]), "status", "--porcelain", "--", ".", ":!bench/results"
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return "absent"


def _revision() -> str:
    """The commit of the millstream that runs, `-dirty` if its files differ from it."""
    source = str(Path(millstream.__file__).parent)
    return _output("git", "-C", source, "describe", "--always", "--dirty") or "not from a repository"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(path: Path) -> str:
    return _output("stat", "--file-system", "--format=%T", str(path))


def _sync_us(parent: Path) -> float:
    """The median time of a small write and its fdatasync: what a durable append cannot be faster than, alone."""
    with tempfile.TemporaryFile(dir=parent) as file:
        times = []
        for _ in range(SYNC_PROBES):
            begin = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6
