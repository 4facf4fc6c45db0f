"""Compaction: merges a document's updates into a snapshot, so that new readers need not read them all (Yjs §8).

Documents are compacted one at a time. A separate process merges; this module only passes bytes to it, in slices between
requests. A snapshot counts once the record that names it is durable, and only that record replaces the snapshot before
it, so a crash at any point leaves the old one. History is kept, unless `retention` limits its age. A failure is logged,
and retried when the document has grown by the threshold again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from millstream.errors import MillstreamError, NotFound
from millstream.protocol.content_types import OCTET_STREAM
from millstream.protocol.offsets import format_offset
from millstream.shard.reader import ColdPiece
from millstream.shard.shard import Shard
from millstream.streams.records import SnapshotRef
from millstream.streams.state import Stream
from millstream.tasks import end
from millstream.tiers.blobs import Upload
from millstream.tiers.hot import Messages
from millstream.units import Incarnation, Offset
from millstream.yjs.pipe import LENGTH, pack_records

logger = logging.getLogger("millstream.yjs")

WAITING_MAX: Final = 10_000
MERGE_SECONDS_MAX: Final = 300.0
SLICE_MESSAGES: Final = 1_000
PIECE_BYTES: Final = 256 << 10
HEAD_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    threshold_bytes: int = 1 << 20
    # How long history stays readable after a snapshot covers it; None keeps it for ever.
    retention_seconds: float | None = None
    snapshot_bytes_max: int = 128 << 20
    # The address space limit of the merging process.
    merging_bytes_max: int = 1 << 30


class CompactionFailed(MillstreamError):
    code = "compaction_failed"


def is_possible() -> bool:
    return importlib.util.find_spec("pycrdt") is not None


class Compactor:
    def __init__(self, shard: Shard, limits: CompactionLimits) -> None:
        self._shard = shard
        self.limits = limits
        self._is_possible = is_possible()
        # The incarnations of documents that are queued or being compacted.
        self._waiting: deque[Incarnation] = deque()
        self._known: set[Incarnation] = set()
        # The tail that a document must reach before a failed compaction is retried.
        self._postponed: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None

    def consider(self, stream: Stream) -> None:
        """Queue a document for compaction if it has grown enough since its snapshot."""
        if stream.tail - _covered(stream) < self.limits.threshold_bytes or not self._is_possible:
            return
        incarnation = stream.incarnation
        if incarnation in self._known or stream.tail < self._postponed.get(incarnation, 0):
            return
        if len(self._waiting) >= WAITING_MAX:
            return  # the document's next update calls this again
        self._known.add(incarnation)
        self._waiting.append(incarnation)
        if self._task is None:
            self._task = self._shard.supervisor.start("yjs compaction", self._run)

    async def stop(self) -> None:
        """Cancel the current compaction. Nothing is lost: the next update after a restart queues the document again."""
        await end(self._task)

    async def _run(self) -> None:
        while self._waiting:
            incarnation = self._waiting.popleft()
            stream = self._shard.namespace.by_incarnation(incarnation)
            try:
                if stream is not None and not stream.deleted:
                    await self._try(stream)
            finally:
                self._known.discard(incarnation)
            if stream is not None and not stream.deleted:
                self.consider(stream)  # it may have grown by the threshold again meanwhile
        self._task = None

    async def _try(self, stream: Stream) -> None:
        try:
            await self._compact(stream)
            self._postponed.pop(stream.incarnation, None)
            return
        except NotFound:
            return  # deleted meanwhile
        except (MillstreamError, OSError) as error:
            logger.warning("document %s was not compacted, its updates stay as they are: %s", stream.key, error)
        except Exception:
            # A defect that one document triggers must not stop the compaction of the others in the queue.
            logger.exception("document %s was not compacted, its updates stay as they are", stream.key)
        if len(self._postponed) >= WAITING_MAX:
            self._postponed.clear()
        self._postponed[stream.incarnation] = stream.tail + self.limits.threshold_bytes

    async def _compact(self, stream: Stream) -> None:
        start, end, snapshot = _covered(stream), stream.tail, stream.snapshot
        # These messages stay readable even if the document is trimmed or deleted meanwhile.
        cut = self._shard.reader.cut(stream, start, end)
        upload = self._shard.blobs.begin(self._shard.clock.random_bytes(16))
        try:
            head = await self._merge(self._input(snapshot, cut), upload)
            self._log_skipped(stream, start, head)
            size = upload.size
            await self._publish(stream, end, upload)
        finally:
            upload.discard()
        self._shard.measures.compactions["yjs"] += 1
        logger.info(
            "compacted document %s: a snapshot of %d bytes at offset %s stands for %d bytes of updates more",
            stream.key,
            size,
            format_offset(end),
            end - start,
        )
        await self._trim(stream, end)

    async def _merge(self, pieces: AsyncIterator[bytes], upload: Upload) -> dict[str, Any]:
        command = [sys.executable, "-m", "millstream.yjs.merging", str(self.limits.merging_bytes_max)]
        # In its own process group, with its children, so that all of them can be killed together.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=PIECE_BYTES, start_new_session=True
        )
        try:
            async with asyncio.timeout(MERGE_SECONDS_MAX):
                await self._feed(process, pieces)
                head = await self._receive(process, upload)
                code = await process.wait()
        except TimeoutError:
            raise CompactionFailed(f"merging took longer than {MERGE_SECONDS_MAX:.0f} seconds") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code != 0:
            raise CompactionFailed(f"the merging process ended with code {code}")
        return head

    @staticmethod
    async def _feed(process: Process, pieces: AsyncIterator[bytes]) -> None:
        assert process.stdin is not None
        try:
            async for piece in pieces:
                process.stdin.write(piece)
                await process.stdin.drain()
            process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process ended early; its exit code says why

    async def _input(self, snapshot: SnapshotRef | None, cut: list[Messages | ColdPiece]) -> AsyncIterator[bytes]:
        """The current snapshot and the messages after it, in the format that the merging process reads."""
        yield LENGTH.pack(snapshot.size if snapshot is not None else 0)
        if snapshot is not None:
            async for piece in await self._shard.blobs.open(snapshot):
                yield piece
        for place in cut:
            messages = await self._shard.reader.fetch(place)
            for first in range(0, len(messages), SLICE_MESSAGES):
                yield pack_records(messages[first : first + SLICE_MESSAGES])

    async def _receive(self, process: Process, upload: Upload) -> dict[str, Any]:
        output = process.stdout
        assert output is not None
        try:
            (length,) = LENGTH.unpack(await output.readexactly(LENGTH.size))
            head: dict[str, Any] = json.loads(await output.readexactly(min(length, HEAD_BYTES_MAX)))
        except asyncio.IncompleteReadError:
            raise CompactionFailed(f"the merging process ended with code {await process.wait()}") from None
        if "error" in head:
            raise CompactionFailed(f"merging failed: {head['error']}")
        while piece := await output.read(PIECE_BYTES):
            if upload.size + len(piece) > self.limits.snapshot_bytes_max:
                raise CompactionFailed(
                    f"the snapshot is larger than {self.limits.snapshot_bytes_max} bytes",
                    hint="raise read.snapshot_bytes_max",
                )
            upload.write(piece)
        return head

    @staticmethod
    def _log_skipped(stream: Stream, start: int, head: dict[str, Any]) -> None:
        for place, reason in head["skipped"]:
            logger.warning(
                "document %s has a malformed update at offset %s, which its snapshot leaves out: %s",
                stream.key,
                format_offset(start + place),
                reason,
            )
        more = head["skipped_count"] - len(head["skipped"])
        if more:
            logger.warning("document %s has %d more malformed updates", stream.key, more)

    async def _publish(self, stream: Stream, offset: Offset, upload: Upload) -> None:
        await self._shard.publish_snapshot(
            stream.key, offset, OCTET_STREAM, upload, trims=False, incarnation=stream.incarnation
        )

    async def _trim(self, stream: Stream, snapshot_offset: Offset) -> None:
        """Trim history that is older than the retention, but nothing that no snapshot covers."""
        if self.limits.retention_seconds is None:
            return
        oldest_ms = self._shard.expiry_clock.now_ms() - int(self.limits.retention_seconds * 1000)
        boundary = self._shard.reader.oldest_since(stream, oldest_ms, snapshot_offset)
        if boundary > stream.earliest:
            self._shard.trim(stream, boundary)


def _covered(stream: Stream) -> Offset:
    """The offset up to which the document's snapshot covers its updates."""
    return stream.snapshot.offset if stream.snapshot is not None else stream.earliest
