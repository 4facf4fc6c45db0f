"""A data directory with very many streams: made once in a run, as that takes minutes, and used by all who need it."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import filling
from bench.measurement import OURS, Plan, progress
from bench.peers import Server, millstream

# Few streams in memory, and what is new soon out of it: the streams are many, the memory need not be.
SETTINGS = ("cold.flush_interval=2s", "hot.keep_bytes=0B", "hot.resident_streams_max=20000")
STREAMS_QUICK = 50_000


@dataclass(frozen=True)
class _Made:
    directory: Path
    seconds: float


_made: dict[int, _Made] = {}


def size(plan: Plan) -> int:
    return min(plan.streams, STREAMS_QUICK) if plan.is_quick else plan.streams


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[tuple[Server, float]]:
    """A server with that many streams, named 0, 1, 2 …, and the seconds it took to create them."""
    streams = size(plan)
    if streams not in _made:
        _made[streams] = _make(plan.data_parent, streams)
    made = _made[streams]
    server = Server(millstream(OURS, *SETTINGS), made.directory)
    try:
        server.start(server.path(streams - 1))
        yield server, made.seconds
    finally:
        server.stop()


def _make(parent: Path, streams: int) -> _Made:
    directory = Path(tempfile.mkdtemp(prefix="millstream-bench-", dir=parent))
    atexit.register(shutil.rmtree, directory)
    server = Server(millstream(OURS, *SETTINGS), directory)
    try:
        server.start()
        progress(f"creating {streams:,} streams")
        seconds = filling.create_streams(server, streams)
        filling.await_flushed(server)
    finally:
        server.stop()
    progress(f"created {streams:,} streams in {seconds:.0f} s")
    return _Made(directory, seconds)
