"""A server that ends itself at a chosen step of a flush: started like `millstream serve`, steered by the environment.

CRASH_POINT           where to end the process, as `kill -9` would; one of POINTS
CRASH_FILE            the crash is armed once this file exists
CRASH_SIGNAL          a signal to send itself there instead, such as SIGSTOP's number
CRASH_AFTER           how many times the armed point is passed unharmed (default 0)
MANIFESTS_PER_FULL    overrides the flusher's constant, so that a test sees full manifests soon
FULL_PART_STREAMS     the same for the size of their parts
PROCESS_ROWS          the same for what a flush needs a process of its own for
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from millstream import config as configuration
from millstream.errors import MillstreamError
from millstream.pending import Pending
from millstream.server.node.run import serve
from millstream.server.node.standalone import Node
from millstream.shard.flush import full_manifests, workers
from millstream.streams.records import AnyRecord, SegmentSealed, SegmentsReplaced

STEPS = ("segment put", "notes put", "manifest put", "seal", "catalog write", "trim")
POINTS = tuple(f"{when} the {step}" for step in STEPS for when in ("before", "after"))
# The steps of a compaction's commit; the flush that follows it has those of any flush.
COMPACTION_POINTS = (
    "before the replacement",
    "after the replacement",
    "before the manifest put",
    "after the seal",
    "before the catalog write",
    "after the catalog write",
)
LAUNCHER = (sys.executable, str(Path(__file__).resolve()))


class Fuse:
    def __init__(self) -> None:
        self._point = os.environ.get("CRASH_POINT")
        self._armed = Path(os.environ.get("CRASH_FILE", "/nonexistent"))
        self._left = int(os.environ.get("CRASH_AFTER", "0"))
        self._signal = int(os.environ.get("CRASH_SIGNAL", "0"))

    def pass_by(self, point: str) -> None:
        assert point in POINTS + COMPACTION_POINTS, point
        if point == self._point and self._armed.exists():
            self._left -= 1
            if self._left < 0 and self._signal:
                os.kill(os.getpid(), self._signal)
            elif self._left < 0:
                os._exit(137)


def wire(node: Node, fuse: Fuse) -> None:
    """Put the fuse before and after each step of a flush."""
    shard: Any = node.shard
    objects, committer, log = shard.cold.objects, shard.committer, shard._log
    put, commit, trim = objects.put, committer.commit, log.trim
    kinds = {"segments": "segment", "notes": "notes", "manifests": "manifest"}

    async def put_between(path: str, data: bytes | Path) -> None:
        kind = kinds.get(path.partition("/")[0])
        if kind is not None:
            fuse.pass_by(f"before the {kind} put")
        await put(path, data)
        if kind is not None:
            fuse.pass_by(f"after the {kind} put")

    def commit_between(record: AnyRecord) -> Pending[None]:
        step = {SegmentsReplaced: "the replacement", SegmentSealed: "the seal"}.get(type(record))
        if step is not None:
            fuse.pass_by(f"before {step}")
        committed: Pending[None] = commit(record)
        return committed if step is None else committed.then(lambda _: fuse.pass_by(f"after {step}"))

    def around(write: Callable[[object], None]) -> Callable[[object], None]:
        def write_between(checkpoint: object) -> None:
            fuse.pass_by("before the catalog write")
            write(checkpoint)
            fuse.pass_by("after the catalog write")

        return write_between

    def trim_between(position: int) -> None:
        fuse.pass_by("before the trim")
        trim(position)
        fuse.pass_by("after the trim")

    objects.put = put_between
    committer.commit = commit_between
    for jobs in (shard.flusher.workers.local, shard.flusher.workers.process):
        jobs.write = around(jobs.write)
    log.trim = trim_between


async def run(config: configuration.Config) -> None:
    node = Node(config)
    wire(node, Fuse())
    await serve(config, lambda line: print(line, flush=True), node=node)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    constants = {"MANIFESTS_PER_FULL": full_manifests, "FULL_PART_STREAMS": full_manifests, "PROCESS_ROWS": workers}
    for name, module in constants.items():
        if name in os.environ:
            setattr(module, name, int(os.environ[name]))
    assignments = [*options.set, f"server.listen={options.listen}", f"server.data_dir={options.data_dir}"]
    try:
        uvloop.run(run(configuration.load(None, os.environ, assignments)))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
