"""Scrubbing: whether the object store holds what the catalog names, and every byte of it as it was written.

At the start, and with every round, the store's listing is compared with the catalog: names and sizes. Then every
segment, the notes and the snapshots are read, slowly, and compared with their checksums. How far a round has come is
kept in `scrub.json` beside the catalog, so that a restart goes on there. What is found goes to `Objects.damage`.

Only the node that leads a shard scrubs it.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from millstream.errors import Corrupt, MillstreamError, ObjectMissing, Unavailable
from millstream.shard.parts import ShardParts
from millstream.streams.records import SegmentRef, SnapshotRef
from millstream.tiers.inspection import what_it_holds
from millstream.tiers.manifests import decode_notes
from millstream.tiers.objects import Objects
from millstream.units import Milliseconds

logger = logging.getLogger("millstream.scrub")

IDLE_SECONDS: Final = 5.0
PAUSE_SECONDS_MIN: Final = 0.001


class ScrubLimits(NamedTuple):
    bytes_per_second: int  # 0: only listings are compared
    interval_seconds: float


NO_SCRUBS: Final = ScrubLimits(0, 0.0)


class _Progress(msgspec.Struct):
    """`after` is the path of the last object that was compared in the round under way."""

    after: str = ""
    finished_at_ms: Milliseconds = Milliseconds(0)


class Scrubber:
    def __init__(self, parts: ShardParts, limits: ScrubLimits) -> None:
        self._shard = parts.number
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._blobs = parts.blobs
        self._namespace = parts.machine.namespace
        self._committer = parts.committer
        self._clock = parts.clock
        self._measures = parts.measures
        self._limits = limits
        self._file = parts.catalog.directory.parent / "scrub.json"

    async def run_forever(self) -> None:
        is_compared = False
        while True:
            if self._committer.failure is None:
                try:
                    if not is_compared:
                        await self.compare_listing()
                        is_compared = True
                    if self._is_due():
                        await self.scrub()
                        is_compared = False  # the next round begins with it again
                except Unavailable as error:
                    logger.warning("the object store cannot be scrubbed now: %s", error)
            await asyncio.sleep(IDLE_SECONDS)

    def _is_due(self) -> bool:
        if self._limits.bytes_per_second == 0:
            return False
        progress = self._progress()
        waited_ms = self._clock.now_ms() - progress.finished_at_ms
        # A clock that was set back is no reason to wait for it.
        return bool(progress.after) or not 0 <= waited_ms < self._limits.interval_seconds * 1000

    async def compare_listing(self) -> int:
        """Compare names and sizes; returns how many objects are not as the catalog says."""
        found: dict[str, int] = {}
        for prefix in ("segments/", f"notes/{self._shard:04d}/", f"snapshots/{self._blobs.prefix}"):
            found.update({entry.path: entry.size async for entry in self._cold.objects.list(prefix)})
        wrong = 0
        for path, size in (await asyncio.to_thread(self._named)).items():
            if path not in found or size not in (None, found[path]):
                reason = await self._wrong_with(path, size)
                if reason is not None:
                    self._cold.objects.damage.found(path, reason)
                    wrong += 1
        self.forget_what_nothing_names()
        return wrong

    def _named(self) -> dict[str, int | None]:
        """The objects that the catalog names, and how large each must be if that is known."""
        named: dict[str, int | None] = {segment.path: segment.size for segment in self._segments()}
        named.update({row.notes: None for _, row in self._catalog.flushes() if row.notes})
        named.update({f"snapshots/{one.blob}": one.size for one in self._catalog.snapshots()})
        return named

    async def _wrong_with(self, path: str, size: int | None) -> str | None:
        """What is wrong with an object now: it may have been reclaimed since it was listed, or written."""
        if not self._is_named(path):
            return None
        segment = next((one for one in self._segments() if one.path == path), None)
        held = f" ({what_it_holds(segment)})" if segment is not None else ""
        try:
            found = (await self._cold.objects.head(path)).size
        except Unavailable:
            raise
        except MillstreamError:
            return f"it is not in the object store{held}"
        return None if size in (None, found) else f"it has {found} bytes, not {size}{held}"

    def forget_what_nothing_names(self) -> None:
        damage = self._cold.objects.damage
        if damage.objects:
            named = {segment.path for segment in self._segments()} | {row.notes for _, row in self._catalog.flushes()}
            unsaved = (stream.snapshot for stream in self._namespace.unsaved())
            named |= {f"snapshots/{snapshot.blob}" for snapshot in unsaved if snapshot is not None}
            for path in list(damage.objects):
                if path.startswith("manifests/"):
                    continue  # which no catalog names: see manifest_watch.py
                if path not in named and not (path.startswith("snapshots/") and self._is_named(path)):
                    damage.objects.pop(path, None)

    async def scrub(self) -> int:
        """Read everything behind where the last round was left; returns how many objects were read."""
        progress, count = self._progress(), 0
        async for path, work in self._work(progress.after):
            started = self._clock.monotonic()
            size = 0
            try:
                with self._cold.objects.damage.noticed(path, partial(self._is_named, path)):
                    size = await work
            except ObjectMissing:
                pass  # it is noticed, which is all there is to do
            except Unavailable:
                raise
            except MillstreamError:
                pass
            count += 1
            self._measures.scrubbed_bytes += size
            self._save(_Progress(path, progress.finished_at_ms))
            pause = size / self._limits.bytes_per_second - (self._clock.monotonic() - started)
            await asyncio.sleep(pause if pause >= PAUSE_SECONDS_MIN else 0)
        self._save(_Progress("", self._clock.now_ms()))
        self._measures.scrubs += 1
        if count:
            logger.info("scrubbed %d objects; %d are damaged", count, len(self._cold.objects.damage.objects))
        return count

    async def _work(self, after: str) -> AsyncIterator[tuple[str, Awaitable[int]]]:
        """What is to be read, in the order of paths: notes, segments, snapshots."""
        objects = self._cold.objects
        for notes in sorted(row.notes for _, row in self._catalog.flushes() if row.notes > after):
            yield notes, _read_notes(objects, notes)
        for segment in sorted(self._segments(), key=lambda one: one.path):
            if segment.path > after:
                yield segment.path, _read_segment(objects, segment)
        snapshots = await asyncio.to_thread(lambda: list(self._catalog.snapshots()))
        for snapshot in sorted(snapshots, key=lambda one: one.blob):
            path = f"snapshots/{snapshot.blob}"
            if path > after:
                yield path, self._read_snapshot(snapshot)

    async def _read_snapshot(self, snapshot: SnapshotRef) -> int:
        await self._blobs.verify(snapshot)
        return snapshot.size

    def _is_named(self, path: str) -> bool:
        if path.startswith("snapshots/"):
            return self._catalog.refers_to_blob(path.removeprefix("snapshots/"))
        if path.startswith("notes/"):
            return any(row.notes == path for _, row in self._catalog.flushes())
        return any(segment.path == path for segment in self._segments())

    def _segments(self) -> list[SegmentRef]:
        return [row.segment for _, row in self._catalog.segments() if row.live_bytes > 0]

    def _progress(self) -> _Progress:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Progress)
        except (OSError, msgspec.MsgspecError):
            return _Progress()

    def _save(self, progress: _Progress) -> None:
        unfinished = Path(f"{self._file}.unfinished")
        unfinished.write_bytes(msgspec.json.encode(progress))
        unfinished.rename(self._file)


async def _read_notes(objects: Objects, path: str) -> int:
    data = await objects.get(path)
    decode_notes(data, path)
    return len(data)


async def _read_segment(objects: Objects, segment: SegmentRef) -> int:
    """The whole file against the checksum of when it was written; every other check of a segment follows from it."""
    checksum, size, tail = 0, 0, b""
    async for piece in objects.stream(segment.path, segment.size):
        checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        tail = tail[-segment.footer_bytes :] + piece
        await asyncio.sleep(0)
    if (checksum, size) != (segment.checksum, segment.size):
        raise Corrupt(
            f"segment {segment.path} differs from what was written ({what_it_holds(segment, tail)})",
            code="object_damaged",
        )
    return size
