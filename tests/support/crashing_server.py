"""A server that fails where it is told to: started like `millstream serve`, steered by the environment.

CRASH_POINT   where to end the process, as `kill -9` would; one of POINTS
CRASH_FILE    the crash is armed once this file exists, so that a test can set the scene in peace
CRASH_AFTER   how many times the armed point is passed unharmed (default 0)
SYNC_FAILS    the log's sync fails with EIO from the moment CRASH_FILE exists
FSIZE_LIMIT   no file may grow beyond this many bytes (the soft limit, so that a test can raise it again)
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from millstream import config as configuration
from millstream.errors import MillstreamError
from millstream.log.disk import Disk
from millstream.server.node.run import serve
from millstream.server.node.standalone import Node

POINTS = (
    "before the write",
    "half the frame written",
    "written but not synced",
    "synced but not applied",
    "applied but not answered",
    "answered",
    "before an object is stored",
    "after an object is stored",
    "before the checkpoint",
    "after the checkpoint",
    "after the trim",
    "segment made but empty",
    "segment header half written",
    "segment header not synced",
    "segment begun",
)
ROLL_POINTS = tuple(point for point in POINTS if point.startswith("segment"))
FLUSH_POINTS = (
    "before an object is stored",
    "after an object is stored",
    "before the checkpoint",
    "after the checkpoint",
    "after the trim",
)


class Fuse:
    """Ends the process at its point, once armed and passed often enough."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.point = environment.get("CRASH_POINT")
        self._armed = Path(environment.get("CRASH_FILE", "/nonexistent"))
        self._left = int(environment.get("CRASH_AFTER", "0"))

    def is_armed(self) -> bool:
        return self._armed.exists()

    def is_due(self, point: str) -> bool:
        if point != self.point or not self.is_armed():
            return False
        self._left -= 1
        return self._left < 0

    def pass_by(self, point: str) -> None:
        if self.is_due(point):
            os._exit(137)


class FaultyDisk(Disk):
    def __init__(self, fuse: Fuse, sync_fails: bool) -> None:
        self._fuse = fuse
        self._sync_fails = sync_fails
        self._is_new_segment = False

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        fuse = self._fuse
        fuse.pass_by("before the write")
        if fuse.is_due("half the frame written"):
            self.write(descriptor, data[: len(data) // 2], at)
            os._exit(137)
        if fuse.is_due("written but not synced"):
            self.write(descriptor, data, at)
            os._exit(137)
        if self._sync_fails and fuse.is_armed():
            self.write(descriptor, data, at)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write_durably(descriptor, data, at)
        fuse.pass_by("synced but not applied")

    def write(self, descriptor: int, data: bytes, at: int) -> None:
        self._is_new_segment = at == 0
        if self._is_new_segment:
            self._fuse.pass_by("segment made but empty")
            if self._fuse.is_due("segment header half written"):
                super().write(descriptor, data[: len(data) // 2], at)
                os._exit(137)
        super().write(descriptor, data, at)

    def sync(self, descriptor: int) -> None:
        if self._is_new_segment:
            self._fuse.pass_by("segment header not synced")
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._fuse.pass_by("segment begun")


def wire(node: Node, fuse: Fuse) -> None:
    """Put the fuse around the steps that are not the disk's."""
    committer: Any = node.shard.committer
    catalog: Any = node.shard._catalog
    objects: Any = node.shard.cold.objects
    log: Any = node.shard._log
    apply_batch, finish, write = committer._apply_batch, committer._finish, catalog.write
    put, trim = objects.put, log.trim

    def apply_and_crash(batch: object) -> None:
        apply_batch(batch)
        fuse.pass_by("applied but not answered")

    def finish_and_crash(batch: object) -> None:
        finish(batch)
        if fuse.is_due("answered"):
            # The answer is with the transport; the loop sends it at the end of this turn.
            committer._loop.call_later(0.05, os._exit, 137)

    def write_and_crash(checkpoint: object) -> None:
        fuse.pass_by("before the checkpoint")
        write(checkpoint)
        fuse.pass_by("after the checkpoint")

    async def put_and_crash(path: str, data: object) -> None:
        fuse.pass_by("before an object is stored")
        await put(path, data)
        fuse.pass_by("after an object is stored")

    def trim_and_crash(position: int) -> None:
        trim(position)
        fuse.pass_by("after the trim")

    objects.put = put_and_crash
    log.trim = trim_and_crash
    committer._apply_batch = apply_and_crash
    committer._finish = finish_and_crash
    catalog.write = write_and_crash


async def run(config: configuration.Config, announce: Callable[[str], None]) -> None:
    fuse = Fuse(dict(os.environ))
    node = Node(config, disk=FaultyDisk(fuse, "SYNC_FAILS" in os.environ))
    wire(node, fuse)
    await serve(config, announce, node=node)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    assignments = [*options.set, f"server.listen={options.listen}", f"server.data_dir={options.data_dir}"]
    config = configuration.load(None, os.environ, assignments)
    if "FSIZE_LIMIT" in os.environ:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FSIZE_LIMIT"]), hard))
    try:
        uvloop.run(run(config, lambda line: print(line, flush=True)))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
