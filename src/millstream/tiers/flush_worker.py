"""The process that does the jobs of large flushes; `flush_process.py` starts it and says what they tell each other.

    python -m millstream.tiers.flush_worker SOCKET CATALOG OWNER idle|normal

It ends with the process that started it, which holds its standard input open and never writes to it. What it still does
in the moment before it notices is harmless: it writes nothing but the catalog, and that refuses whoever does not write
on behalf of its last owner.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from array import array
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import pyarrow as arrow

from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import decode_checkpoint
from millstream.tiers.channel import Channel, ChannelClosed
from millstream.tiers.flush_jobs import Growth, changed_streams, rows_of
from millstream.tiers.flush_process import Priority, SegmentHead, encode
from millstream.tiers.hot import Unflushed
from millstream.tiers.segment_encoder import Owners, encode_segments
from millstream.tiers.stream_rows import decode_captured
from millstream.units import Incarnation

# At normal priority. Requests go first; but of one processor for all, a quarter is enough to keep up with them.
NICENESS: Final = 5
# What is made of tens of thousands of streams is no garbage before the job is done.
GARBAGE_THRESHOLDS: Final = (50_000, 20, 50)
_decode_removed: Final = msgspec.msgpack.Decoder(list[Incarnation]).decode
# Only glibc's allocator has it, and only it needs it.
_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Worker:
    def __init__(self, channel: Channel, catalog: Path, owner: int) -> None:
        self._channel = channel
        self._directory = catalog
        self._owner = owner
        self._shard = 0
        self._owners = Owners([], [])
        self._jobs: dict[bytes, Callable[..., None]] = {
            b"begin": self._begin,
            b"slab": self._slab,
            b"write": self._write,
        }

    def run(self) -> None:
        """Do what is asked until nobody asks any more."""
        try:
            while True:
                self._answer(*self._channel.receive())
                _give_back_memory()
        except ChannelClosed:
            return

    def _answer(self, word: memoryview, *parts: memoryview) -> None:
        try:
            self._jobs[word.tobytes()](*parts)
        except ChannelClosed:
            raise
        except Exception as error:
            self._channel.send(b"error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode())

    def _begin(self, shard: memoryview, captured: memoryview, removed: memoryview, *growth: memoryview) -> None:
        columns: list[memoryview[Any]] = [column.cast("q") for column in growth]
        grown = Growth(*columns)
        with closing(Catalog(self._directory, self._owner)) as catalog:
            streams = changed_streams(catalog, decode_captured(captured), _decode_removed(removed), grown)
        rows = rows_of(streams)
        self._shard, self._owners = msgspec.msgpack.decode(shard), Owners(streams, rows.trimmed)
        self._channel.send(b"rows", rows.streams, encode(rows.trimmed))

    def _slab(self, *parts: memoryview) -> None:
        *columns, joined = parts
        messages = Unflushed()
        into: tuple[array[int], ...] = (
            messages.incarnations,
            messages.starts,
            messages.ends,
            messages.positions,
            messages.times,
        )
        for values, column in zip(into, columns, strict=True):
            values.frombytes(column)
        first, last = messages.positions[0], messages.positions[-1]
        for one in encode_segments(messages, first, last + 1, self._owners, self._shard, joined):
            head = SegmentHead(one.checksum, one.footer_bytes, one.footer_checksum, one.info)
            self._channel.send(b"segment", encode(head), one.extents, one.data)
        self._channel.send(b"done")

    def _write(self, position: memoryview, checkpoint: memoryview) -> None:
        self._owners = Owners([], [])
        # As long as it is open, LMDB keeps the memory of its largest transaction.
        with closing(Catalog(self._directory, self._owner)) as catalog:
            catalog.position = msgspec.msgpack.decode(position)
            catalog.write(decode_checkpoint(checkpoint))
        self._channel.send(b"done")


def _give_back_memory() -> None:
    """Allocators keep what was freed, and this process may have nothing to do for a while."""
    arrow.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)


def _end_with_parent() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(0)


def _lower_priority(priority: Priority) -> None:
    """Of this thread and those it starts."""
    os.nice(NICENESS)
    if priority is Priority.IDLE and hasattr(os, "SCHED_IDLE"):
        # Not just slower: a processor with only such work counts as free for whoever wakes up, the log and the loop.
        with suppress(OSError):  # a sandbox may not let us
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    # A terminal's signals and a service manager's stop reach this process too, while the one that started it still
    # wants its last flush.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor, directory, owner, priority = sys.argv[1:]
    _lower_priority(Priority(priority))
    Worker(Channel(socket.socket(fileno=int(descriptor))), Path(directory), int(owner)).run()


if __name__ == "__main__":
    main()
