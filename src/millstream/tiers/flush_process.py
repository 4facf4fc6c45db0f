"""The jobs of a large flush, done by a process of its own (`flush_worker.py`), from the side that asks.

Going through tens of thousands of streams takes the interpreter for as long as it lasts, and a thread that does it
takes it from requests. The process is started when it is first needed, and has one thing at a time to do. What is said
over the socket between them (`channel.py`), each line one message, its first part a word:

    begin, shard, streams, removed, growth: incarnations, tails, times  → rows, streams, trimmed
    slab, incarnations, starts, ends, positions, times, messages        → segment, head, extents, data (some); done
    write, the catalog's position so far, checkpoint                    → done

A slab's messages belong to the streams of the last `begin`; there is never more than one in memory over there. Instead
of any answer there may be `error` with a text, and then the process takes the next message.

The process runs at idle priority: it takes processor time that nobody else wants, and is put aside at once when
somebody does. Where all processors are busy that can be next to nothing, so its answers are waited for only briefly,
and whoever knows that a flush must get on asks for normal priority, at which it competes with the others.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from enum import Enum
from typing import Final

import msgspec

from millstream.errors import Unavailable
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, encode_checkpoint
from millstream.tiers.channel import Channel, ChannelClosed, Part
from millstream.tiers.flush_jobs import FlushInput, Rows, Segments, captured_array, growth_of
from millstream.tiers.segment_encoder import EncodedSegment, slabs
from millstream.tiers.segments import SegmentInfo
from millstream.units import Incarnation, Offset

WORKER: Final = "millstream.tiers.flush_worker"
BUFFER_BYTES: Final = 1 << 20
# How long one answer may take at idle and at normal priority, and how long the process may take to end.
IDLE_ANSWER_SECONDS_MAX: Final = 10.0
NORMAL_ANSWER_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 5.0


class Priority(Enum):
    IDLE = "idle"
    NORMAL = "normal"


class SegmentHead(msgspec.Struct, array_like=True, frozen=True):
    """An `EncodedSegment` without its extents and its data."""

    checksum: int
    footer_bytes: int
    footer_checksum: int
    info: SegmentInfo


encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(SegmentHead).decode
_decode_trimmed: Final = msgspec.msgpack.Decoder(list[tuple[Incarnation, Offset]]).decode


class FlushProcess:
    """Must be used from one thread at a time, which waits; only `interrupt` may be called from another."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._owes_segments = False
        # Of the process that runs, and of the one that is to do the next job.
        self._runs_at = Priority.IDLE
        self._priority = Priority.IDLE
        # The system does not let us start one.
        self.is_impossible = False

    def set_priority(self, priority: Priority) -> None:
        """From the next job on. A process cannot leave idle priority, so another one is started."""
        self._priority = priority

    def begin(self, flush: FlushInput) -> tuple[Rows, Segments]:
        self._prepare()
        growth = [column.cast("B") for column in growth_of(flush.messages)]
        self._send(b"begin", encode(flush.shard), captured_array(flush.streams), encode(flush.removed), *growth)
        _, streams, trimmed = self._receive()
        return Rows(bytes(streams), _decode_trimmed(trimmed)), self._segments(flush)

    def _segments(self, flush: FlushInput) -> Segments:
        messages = flush.messages
        columns = messages.incarnations, messages.starts, messages.ends, messages.positions, messages.times
        for slab in slabs(messages, None, flush.first_position, flush.position):
            numbers = [memoryview(column).cast("B")[8 * slab.first : 8 * slab.stop] for column in columns]
            self._send(b"slab", *numbers, messages.messages[slab.first : slab.stop])
            self._owes_segments = True
            while (answer := self._receive())[0].tobytes() != b"done":
                _, head, extents, data = answer
                found = _decode_head(head)
                yield EncodedSegment(
                    data, found.checksum, found.footer_bytes, found.footer_checksum, found.info, bytes(extents)
                )
            self._owes_segments = False

    def write(self, checkpoint: Checkpoint) -> None:
        self._prepare()
        try:
            self._send(b"write", encode(self._catalog.position), encode_checkpoint(checkpoint))
            self._receive()
        finally:
            self._catalog.refresh()

    # -- the process -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """End a process that has more to say of a flush that was given up, or runs at another priority."""
        if self._owes_segments or self._runs_at is not self._priority:
            self.close()

    def _send(self, *parts: Part) -> None:
        channel = self._channel or self._start()
        try:
            channel.send(*parts)
        except ChannelClosed as error:
            raise self._ended(error) from None

    def _receive(self) -> list[memoryview]:
        if self._channel is None:
            raise Unavailable("the process that flushes was stopped", code="flush_failed")
        try:
            answer = self._channel.receive()
        except ChannelClosed as error:
            raise self._ended(error) from None
        if answer[0].tobytes() == b"error":
            self._owes_segments = False
            raise Unavailable(f"the process that flushes failed: {bytes(answer[1]).decode()}", code="flush_failed")
        return answer

    def _ended(self, error: ChannelClosed) -> Unavailable:
        self.close()
        return Unavailable(f"the process that flushes is gone: {error}", code="flush_failed")

    def _start(self) -> Channel:
        ours, theirs = socket.socketpair()
        self._runs_at = self._priority
        with theirs:
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            command += [str(self._catalog.directory), str(self._catalog.owner)]
            command += [self._runs_at.value]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                ours.close()
                self.is_impossible = True
                raise Unavailable(f"no process can be started for a flush: {error}", code="flush_failed") from None
        ours.settimeout(NORMAL_ANSWER_SECONDS_MAX if self._runs_at is Priority.NORMAL else IDLE_ANSWER_SECONDS_MAX)
        self._channel = Channel(ours)
        return self._channel

    def interrupt(self) -> None:
        """From any thread: whoever waits for the process need not wait any longer."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, whatever it is doing; the next job starts another."""
        process, self._process = self._process, None
        self._owes_segments = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if process is not None:
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_SECONDS_MAX)
