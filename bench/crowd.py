"""Data directories that take minutes to make: made once in a run and used by all who need them.

With `--prepared DIR` they are made there and stay, and later runs find them.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import filling
from bench.measurement import OURS, Plan, progress
from bench.peers import Server, millstream

STREAMS_QUICK = 50_000
MADE = "made"  # a file that says a directory is complete

_temporary: dict[str, Path] = {}


def size(plan: Plan) -> int:
    return min(plan.streams, STREAMS_QUICK) if plan.is_quick else plan.streams


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[tuple[Server, float]]:
    """A server with that many streams, named 0, 1, 2 …, and the seconds it took to create them (0 if not now)."""
    streams = size(plan)
    directory = _directory(plan, f"{streams}-streams")
    server = Server(millstream(OURS), directory)
    try:
        seconds = 0.0
        if not (directory / MADE).exists():
            server.start()
            progress(f"creating {streams:,} streams")
            seconds = filling.create_streams(server, streams)
            filling.await_flushed(server)
            server.stop()
            (directory / MADE).touch()
            progress(f"created {streams:,} streams in {seconds:.0f} s")
        server.start(server.path(streams - 1))
        yield server, seconds
    finally:
        server.stop()


@contextlib.contextmanager
def large(plan: Plan, settings: Sequence[str]) -> Iterator[Server]:
    """A server for one large stream, which may be there already."""
    server = Server(millstream(OURS, *settings), _directory(plan, "large"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _directory(plan: Plan, name: str) -> Path:
    if plan.prepared is not None:
        directory = plan.prepared / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    if name not in _temporary:
        _temporary[name] = Path(tempfile.mkdtemp(prefix="millstream-bench-", dir=plan.data_parent))
        atexit.register(shutil.rmtree, _temporary[name])
    return _temporary[name]
