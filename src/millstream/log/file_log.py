"""The file log: CRC-framed batches in segment files, one `fdatasync` per batch.

Its own thread writes and syncs, so the caller gathers the next batch meanwhile. If the caller has nothing to gather and
the disk is fast, the caller's thread writes instead, which saves two thread switches. Owns `<dir>/*.log`, named by the
first position they hold. Invariant: a frame is written only when everything before it is durable, and `done` is called
with None only after `fdatasync` returned.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from millstream.clock import Clock
from millstream.descriptors import Descriptor
from millstream.errors import Corrupt, MillstreamError, OtherFormat, OutcomeUnknown, Unavailable
from millstream.log.disk import ALLOCATION_BYTES, Disk
from millstream.log.frames import (
    SEGMENT_HEADER_BYTES,
    VERSION,
    SegmentHeader,
    decode_frame,
    decode_segment_header,
    encode_frame,
    encode_segment_header,
    find_frame,
)
from millstream.log.interface import BATCH_BYTES_MAX, Done, LogBatch
from millstream.measures import SYNC_SECONDS, Histogram

SEGMENT_BYTES_DEFAULT: Final = 64 << 20
# A frame has 32 bits for its length; reading one takes twice its size in memory.
RECORD_BYTES_MAX: Final = 1 << 30
CLOSE_SECONDS: Final = 5.0
BLOCK_SECONDS_DEFAULT: Final = 0.001
# One slow sync among this many fast ones still counts as a slow disk.
SYNC_MEMORY: Final = 16


def stored_batches(directory: Path) -> Iterator[LogBatch]:
    """The batches of a log, read only: nothing is truncated or repaired."""
    for path in sorted(directory.glob("*.log")):
        data = memoryview(path.read_bytes())
        header = decode_segment_header(data)
        at = SEGMENT_HEADER_BYTES
        while header is not None and (found := decode_frame(data, at, header.salt)) is not None:
            batch, at = found
            yield batch


class FileLog:
    window = 1
    batch_bytes_max = BATCH_BYTES_MAX
    record_bytes_max = RECORD_BYTES_MAX

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        shard: int = 0,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        block_seconds_max: float = BLOCK_SECONDS_DEFAULT,
        disk: Disk | None = None,
        sync_seconds: Histogram | None = None,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._shard = shard
        self._segment_bytes = segment_bytes
        self._block_seconds_max = block_seconds_max
        self._sync_average = block_seconds_max  # moving average of a sync's time; starts pessimistic
        self._disk = disk or Disk()
        self._sync_seconds = sync_seconds or Histogram(SYNC_SECONDS)
        self.notices: list[str] = []
        self.failure: str | None = None
        self._file: Descriptor | None = None
        self._salt = 0
        self._end = 0  # where the next frame goes
        self._allocated = 0  # up to where the file holds zeros
        self._jobs: SimpleQueue[tuple[LogBatch, Done] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._deliver: Callable[..., object] = lambda *args: None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def exists(self) -> bool:
        return bool(self.segments())

    def segments(self) -> list[Path]:
        return sorted(self._directory.glob("*.log"))

    # -- start-up ------------------------------------------------------------------------------------------

    def read(self) -> Iterator[LogBatch]:
        segments = self.segments()
        expected: int | None = None
        for path in segments:
            is_last = path == segments[-1]
            data = memoryview(path.read_bytes())
            header = decode_segment_header(data)
            if header is None:
                if is_last and (len(data) <= SEGMENT_HEADER_BYTES or not _holds_data(data)):
                    # The process crashed while it created this segment, so the segment holds nothing.
                    path.unlink()
                    self._disk.sync_directory(self._directory)
                    return
                raise self._damage(path, 0, "its header does not check")
            self._check_header(path, header, expected)
            at, expected = SEGMENT_HEADER_BYTES, header.first
            while (found := decode_frame(data, at, header.salt)) is not None:
                batch, end = found
                if batch.first != expected:
                    raise self._damage(path, at, f"positions jump from {expected} to {batch.first}")
                yield batch
                at, expected = end, batch.next
            self._check_end(path, data, at, header, is_last)

    def _check_header(self, path: Path, header: SegmentHeader, expected: int | None) -> None:
        if header.version != VERSION:
            raise OtherFormat(f"the log file {path}", found=header.version, known=VERSION)
        if header.shard != self._shard:
            raise Corrupt(f"{path} belongs to shard {header.shard}, not {self._shard}")
        if expected is not None and header.first != expected:
            raise self._damage(path, 0, f"it starts at position {header.first}, the one before it ended at {expected}")

    def _check_end(self, path: Path, data: memoryview, at: int, header: SegmentHeader, is_last: bool) -> None:
        """Check what follows the last valid frame: zeros, a torn frame, or damage."""
        rest = data[at:]
        if _holds_data(rest):
            later = find_frame(data, at + 1, header.salt)
            if later is not None or not is_last:
                raise self._damage(path, at, f"a frame does not check, but records follow it at byte {later or at}")
            self.notices.append(
                f"the log's last batch was torn by a crash and is cut: {path.name} at byte {at}"
                " (it was never acknowledged)"
            )
        if is_last:
            self._file = Descriptor(path, os.O_RDWR)
            self._disk.truncate(self._file.number, at)
            self._disk.sync(self._file.number)
            self._salt, self._end, self._allocated = header.salt, at, at

    def _damage(self, path: Path, at: int, what: str) -> Corrupt:
        return Corrupt(
            f"the log is damaged: {path} at byte {at}: {what}",
            hint="restore this file from a copy, or move the data directory away and restore from a backup;"
            " starting without these records would lose acknowledged data",
        )

    # -- appending -----------------------------------------------------------------------------------------

    def start(self, first_position: int, deliver: Callable[..., object]) -> None:
        if self._file is None:
            self._open_segment(first_position)
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="millstream-log", daemon=True)
        self._thread.start()

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None:
        # With a window of one the thread is idle whenever an append arrives.
        if may_block and self._sync_average < self._block_seconds_max:
            done(self._store(batch))
        else:
            self._jobs.put((batch, done))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, done = job
            self._deliver(done, self._store(batch))

    def _store(self, batch: LogBatch) -> MillstreamError | None:
        if self.failure is not None:
            return _stopped(self.failure)
        frame = encode_frame(batch, self._salt)
        try:
            if self._end + len(frame) > self._segment_bytes and self._end > SEGMENT_HEADER_BYTES:
                self._open_segment(batch.first)
                frame = encode_frame(batch, self._salt)
            if self._end + len(frame) > self._allocated:
                size = max(len(frame), min(ALLOCATION_BYTES, self._segment_bytes - self._end))
                self._disk.allocate(self._open_file.number, self._end, size)
                self._allocated = self._end + size
        except OSError as error:
            return self._undo_write(error)
        started = self._clock.monotonic()
        try:
            self._disk.write_durably(self._open_file.number, frame, self._end)
        except OSError as error:
            # The kernel may have dropped the pages it could not write, and says so only once. Trying again
            # would report success for bytes that are not there.
            self.failure = f"fdatasync failed: {error.strerror}"
            return _stopped(self.failure)
        took = self._clock.monotonic() - started
        self._sync_seconds.observe(took)
        self._sync_average += (took - self._sync_average) / SYNC_MEMORY
        self._end += len(frame)
        return None

    def _undo_write(self, error: OSError) -> MillstreamError:
        """Remove what a failed write left behind, so that the log can continue when there is space again."""
        reason = error.strerror or str(error)
        try:
            self._disk.truncate(self._open_file.number, self._end)
            self._allocated = self._end
        except OSError as second:
            self.failure = f"a write failed ({reason}) and could not be undone ({second.strerror})"
            return _stopped(self.failure)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return Unavailable(
            f"the log cannot be written: {reason}; nothing was stored",
            code="disk_full" if is_full else "log_write_failed",
            hint="free space on the disk that holds the data directory" if is_full else None,
            retry_after_seconds=5,
        )

    def _open_segment(self, first: int) -> None:
        salt = int.from_bytes(self._clock.random_bytes(4), "little")
        path = self._directory / f"{first:020d}.log"
        file = Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            header = encode_segment_header(SegmentHeader(VERSION, self._shard, first, salt))
            self._disk.write(file.number, header, 0)
            self._disk.sync(file.number)
            self._disk.sync_directory(self._directory)
        except OSError:
            file.close()
            path.unlink()
            raise
        former, self._file, self._salt = self._file, file, salt
        self._end = self._allocated = SEGMENT_HEADER_BYTES
        if former is not None:
            former.close()

    @property
    def _open_file(self) -> Descriptor:
        assert self._file is not None
        return self._file

    # -- trimming and closing ---------------------------------------------------------------------------------

    def trim(self, position: int) -> None:
        segments = self.segments()
        for path, successor in pairwise(segments):
            if int(successor.stem) > position:
                break
            path.unlink()
        self._disk.sync_directory(self._directory)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                return  # a disk that does not answer keeps the file open; the process's end closes it
            self._thread = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _holds_data(data: memoryview) -> bool:
    return bool(data.tobytes().lstrip(b"\0"))


def _stopped(reason: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the log has stopped: {reason}; this write may or may not be stored",
        code="log_stopped",
        hint="reads go on; check the disk and restart the server, which recovers everything acknowledged",
    )
