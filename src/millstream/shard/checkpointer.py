"""Checkpoints: the state at one position, written to the catalog while the shard goes on.

The state is frozen without stopping anything: a stream that is about to change while a checkpoint is being taken
is encoded first (`StateMachine.before_change`), the others in slices between requests.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Final

from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.tiers.catalog import (
    Catalog,
    Checkpoint,
    EncodedStream,
    encode_key,
    encode_singletons,
    encode_stream,
)

SLICE_STREAMS: Final = 256


class Checkpointer:
    def __init__(self, machine: StateMachine, catalog: Catalog, committer: Committer, executor: Executor) -> None:
        self._machine = machine
        self._catalog = catalog
        self._committer = committer
        self._executor = executor
        self._lock = asyncio.Lock()

    async def checkpoint(self) -> int:
        """Bring the catalog up to the present; returns the position it then reflects."""
        async with self._lock:
            machine = self._machine
            position = self._committer.applied_position
            if position == self._catalog.position and not machine.dirty:
                return position
            rows: list[EncodedStream] = []
            frozen = machine.frozen = dict(machine.dirty)
            machine.freezing, machine.dirty = machine.dirty, {}
            machine.removing, machine.removed = machine.removed, {}
            machine.before_change = lambda stream: rows.append(encode_stream(stream))
            singletons = encode_singletons(machine)
            freed_blobs, machine.unlisted_blobs = machine.unlisted_blobs, []
            removed = [
                (incarnation.to_bytes(8, "big"), encode_key(key)) for incarnation, key in machine.removing.items()
            ]
            while machine.freezing:
                for _ in range(min(SLICE_STREAMS, len(machine.freezing))):
                    rows.append(encode_stream(machine.freezing.popitem()[1]))
                await asyncio.sleep(0)
            checkpoint = Checkpoint(position, rows, removed, [blob.encode() for blob in freed_blobs], singletons)
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, self._catalog.write, checkpoint)
            except BaseException:
                # Nothing was written: all of it is still to be written.
                machine.removed = machine.removing | machine.removed
                machine.unlisted_blobs = freed_blobs + machine.unlisted_blobs
                kept = {i: stream for i, stream in frozen.items() if i not in machine.removed}
                machine.dirty = kept | machine.dirty
                raise
            finally:
                machine.removing = {}
                machine.frozen = {}
            return position
