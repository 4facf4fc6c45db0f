"""A process of its own for the jobs of a large flush.

    python -m millstream.tiers.flush_process SOCKET CATALOG OWNER

Going through tens of thousands of streams takes the interpreter for as long as it lasts, and a thread that does it
takes it from requests. The process is started when it is first needed and ends with the one that started it: its
standard input is held open by that one and nothing is ever written to it. What it still does in the moment before it
notices is harmless: it writes nothing but the catalog, which refuses whoever is not its last owner's.

What is said over the socket (`channel.py`), each line one message, its first part a word:

    begin, [shard, first position, position], streams, incarnations, starts, ends, positions, times, messages
        → rows, streams, trimmed;  segment, head, extents, data  (as many as there are);  done
    write, checkpoint
        → done

Instead of any answer there may be `error` with a text, and then the process takes the next message.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import pyarrow as arrow

from millstream.errors import Unavailable
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, decode_checkpoint, encode_checkpoint, thaw_streams
from millstream.tiers.channel import Channel, ChannelClosed, Part
from millstream.tiers.flush_jobs import FlushInput, Rows, Segments, frozen_array, rows_of, segments_of
from millstream.tiers.hot import Unflushed
from millstream.tiers.segment_encoder import EncodedSegment
from millstream.tiers.segments import SegmentInfo

BUFFER_BYTES: Final = 1 << 20
# How long one answer may take, and how long the process may take to end.
ANSWER_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 5.0
# Requests go first; but where there is one processor for all, a quarter of it is enough to keep up with them.
NICENESS: Final = 5
# What is made of tens of thousands of streams is no garbage before the job is done.
GARBAGE_THRESHOLDS: Final = (50_000, 20, 50)


class _Span(msgspec.Struct, array_like=True, frozen=True):
    shard: int
    first_position: int
    position: int


class _SegmentHead(msgspec.Struct, array_like=True, frozen=True):
    checksum: int
    footer_bytes: int
    footer_checksum: int
    info: SegmentInfo


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_span: Final = msgspec.msgpack.Decoder(_Span).decode
_decode_head: Final = msgspec.msgpack.Decoder(_SegmentHead).decode
_decode_trimmed: Final = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


# -- on the side that asks -----------------------------------------------------------------------------------------


class FlushProcess:
    """The jobs, done elsewhere. It must be used from one thread at a time, and waits there."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._owes_segments = False

    def begin(self, flush: FlushInput) -> tuple[Rows, Segments]:
        messages = flush.messages
        columns = messages.incarnations, messages.starts, messages.ends, messages.positions, messages.times
        self._send(
            b"begin",
            _encode(_Span(flush.shard, flush.first_position, flush.position)),
            frozen_array(flush.streams),
            *(memoryview(column).cast("B") for column in columns),
            messages.messages,
        )
        _, streams, trimmed = self._receive()
        self._owes_segments = True
        return Rows(bytes(streams), _decode_trimmed(trimmed)), self._segments()

    def _segments(self) -> Segments:
        while (answer := self._receive())[0].tobytes() != b"done":
            _, head, extents, data = answer
            found = _decode_head(head)
            yield EncodedSegment(
                data, found.checksum, found.footer_bytes, found.footer_checksum, found.info, bytes(extents)
            )
        self._owes_segments = False

    def write(self, checkpoint: Checkpoint) -> None:
        try:
            self._send(b"write", encode_checkpoint(checkpoint))
            self._receive()
        finally:
            self._catalog.refresh()

    def _send(self, *parts: Part) -> None:
        if self._owes_segments:
            self.close()  # it has more to say of a flush that was given up
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
        with theirs:
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            command = [sys.executable, "-m", "millstream.tiers.flush_process", str(theirs.fileno())]
            command += [str(self._catalog.directory), str(self._catalog.owner)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        ours.settimeout(ANSWER_SECONDS_MAX)
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


# -- in the process ------------------------------------------------------------------------------------------------


def main() -> None:
    # A terminal's interrupt and a service manager's stop reach this process too, while the one that started it still
    # wants its last flush.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    number, directory, owner = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    channel = Channel(socket.socket(fileno=int(number)))
    catalog = Catalog(Path(directory), int(owner))
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        try:
            if request[0].tobytes() == b"begin":
                _begin(channel, request[1:])
            else:
                catalog.write(decode_checkpoint(request[1]))
        except ChannelClosed:
            return
        except Exception as error:
            channel.send(b"error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode())
        else:
            channel.send(b"done")
        del request
        _give_back_memory()


def _give_back_memory() -> None:
    """Allocators keep what was freed, and this process may have nothing to do for a while."""
    arrow.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)


# Only glibc's allocator has it, and only it needs it.
_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _end_with_parent() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(0)


def _begin(channel: Channel, parts: list[memoryview]) -> None:
    span = _decode_span(parts[0])
    streams = thaw_streams(parts[1])
    rows = rows_of(streams)
    channel.send(b"rows", rows.streams, _encode(rows.trimmed))
    flush = FlushInput(span.shard, span.first_position, span.position, [], _columns(parts[2:7]), parts[7])
    for one in segments_of(flush, streams, rows):
        head = _SegmentHead(one.checksum, one.footer_bytes, one.footer_checksum, one.info)
        channel.send(b"segment", _encode(head), one.extents, one.data)


def _columns(parts: list[memoryview]) -> Unflushed:
    messages = Unflushed()
    columns = messages.incarnations, messages.starts, messages.ends, messages.positions, messages.times
    for values, part in zip(columns, parts, strict=True):
        values.frombytes(part)
    return messages


if __name__ == "__main__":
    main()
