"""The catalog: the state of every stream as of a checkpoint, in LMDB.

Streams are found by name or by incarnation and load on demand; listing is a range scan. A checkpoint replaces what
changed since the last one together with the log position it reflects, in one transaction, so the catalog is always
exactly the log up to `position`, and the cold tier covers exactly that.

    meta           "position" → first position not reflected, which is also the first the log must hold;
                   "format" → 2
    streams        bucket \\0 stream → incarnation, where its newest cold messages lie, StreamRow (`pack_stream`)
    incarnations   u64, big-endian → bucket \\0 stream
    expiring       the same, only for streams with a deadline
    extents        incarnation, first offset (u64s, big-endian) → ExtentRow: where the other cold messages lie
    segments       number (u32, big-endian) → SegmentRow
    dead           number of a segment nothing refers to → when that was noticed, in milliseconds
    flushes        position a flush reached (u64, big-endian) → FlushRow
    blobs          the names of the blobs that snapshots refer to
    singletons     "buckets", "subscriptions", "secrets" → rows

A flush of very many streams writes a page or two for each of them, which lie anywhere. So that it is one, what the
flush adds to a stream's index goes into the row that it writes in any case; when that has become many, to `extents`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from millstream.errors import Corrupt
from millstream.protocol.keys import StreamKey
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import (
    NO_EXTENTS,
    Checkpoint,
    ColdTotals,
    ExtentRow,
    FlushRow,
    FoundExtent,
    Kept,
    PlacedExtent,
    SealedFlush,
    SealedReplacement,
    SegmentRow,
    decode_extent,
    decode_flush,
    decode_key,
    decode_own,
    decode_placed,
    decode_segment,
    decode_stream,
    decode_stream_row,
    encode_key,
    encode_row,
    encode_stream,
    own_extents,
    pack_pair,
    pack_stream,
    restore_singletons,
    row_of,
    u32,
    u64,
    with_extents,
)
from millstream.tiers.columns import binaries, numbers, order_of
from millstream.tiers.manifests import FORMAT as MANIFEST_FORMAT
from millstream.tiers.manifests import Manifest, ManifestFlush, ManifestStream, Replacement, manifest_format
from millstream.tiers.segments import Extent

logger = logging.getLogger("millstream.catalog")

T = TypeVar("T")

FORMAT: Final = 2
# Address space, not disk: LMDB grows the file as it fills.
MAP_BYTES: Final = 64 << 30
# About a millisecond of writing; to hand each to the thread and hear of it takes a fifth of one.
SLICE_ROWS: Final = 256
SLICE_EXTENTS: Final = 1024


Fresh = dict[int, list[bytes]]
"""What a checkpoint adds to the index, by incarnation: encoded as a stream's row would hold them."""


class Catalog:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._environment = lmdb.open(str(directory), map_size=MAP_BYTES, max_dbs=16, max_readers=64)
        except lmdb.Error as error:
            raise Corrupt(
                f"the catalog {directory} cannot be opened: {error}",
                hint="move it away: it is rebuilt from the log if the log is whole",
            ) from None
        self._meta = self._environment.open_db(b"meta")
        self._streams = self._environment.open_db(b"streams")
        self._incarnations = self._environment.open_db(b"incarnations")
        self._expiring = self._environment.open_db(b"expiring")
        self._extents = self._environment.open_db(b"extents")
        self._segments = self._environment.open_db(b"segments")
        self._dead = self._environment.open_db(b"dead")
        self._flushes = self._environment.open_db(b"flushes")
        self._blobs = self._environment.open_db(b"blobs")
        self._singletons = self._environment.open_db(b"singletons")
        with self._environment.begin(db=self._meta) as transaction:
            found = int(transaction.get(b"format", str(FORMAT).encode()))
            self.position = int(transaction.get(b"position", b"1"))
        if found == 1:
            self._upgrade()
        elif found != FORMAT:
            raise Corrupt(f"the catalog {directory} has format {found}; this millstream reads format {FORMAT}")
        # For loading streams: to begin a transaction takes as long as to look something up. Whoever has written lets
        # go of it; it ends when nobody uses it any more.
        self._reading: Any = None

    def _upgrade(self) -> None:
        """From format 1, in which rows held no extents."""
        logger.info("the catalog is rewritten in format %d", FORMAT)
        with self._environment.begin(write=True) as transaction, transaction.cursor(db=self._streams) as cursor:
            found = cursor.first()
            while found:
                name, row = cursor.item()
                cursor.put(name, pack_stream(decode_stream_row(row).incarnation, NO_EXTENTS, row))
                found = cursor.next()
            transaction.put(b"format", str(FORMAT).encode(), db=self._meta)

    # -- StateSource -----------------------------------------------------------------------------------------

    def load_key(self, key: StreamKey) -> Stream | None:
        packed = self._lookups().get(encode_key(key))
        return decode_stream(key, row_of(packed)) if packed is not None else None

    def load_incarnation(self, incarnation: int) -> Stream | None:
        lookups = self._lookups()
        name = lookups.get(u64(incarnation), db=self._incarnations)
        packed = lookups.get(name) if name is not None else None
        if packed is None or not packed.startswith(u64(incarnation)):
            return None
        return decode_stream(decode_key(name), row_of(packed))

    def _lookups(self) -> Any:
        transaction = self._reading
        if transaction is None:
            transaction = self._reading = self._environment.begin(db=self._streams)
        return transaction

    def restore(self, machine: StateMachine) -> None:
        """Fill in the state that is always in memory."""
        with self._environment.begin(db=self._singletons) as transaction:
            restore_singletons(machine, transaction.get)

    def scan(self, prefix: bytes, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Names and rows in order, of the names with this prefix that sort behind `after`."""
        with self._environment.begin(db=self._streams) as transaction, transaction.cursor() as cursor:
            found = cursor.set_range(max(prefix, after))
            while found:
                name, packed = cursor.item()
                if not name.startswith(prefix):
                    return
                if name > after:
                    yield name, row_of(packed)
                found = cursor.next()

    def expiring(self) -> Iterator[tuple[int, int]]:
        """The incarnation and the deadline of every stream that has one."""
        with self._environment.begin() as transaction, transaction.cursor(db=self._expiring) as cursor:
            for incarnation, name in cursor:
                packed = transaction.get(name, db=self._streams)
                if packed is not None:
                    stream = decode_stream(decode_key(name), row_of(packed))
                    deadline_ms = stream.expiry.deadline_ms(stream.last_access_ms)
                    if deadline_ms is not None:
                        yield int.from_bytes(incarnation, "big"), deadline_ms

    def refers_to_blob(self, name: str) -> bool:
        with self._environment.begin(db=self._blobs) as transaction:
            return transaction.get(name.encode()) is not None

    # -- checkpoints -----------------------------------------------------------------------------------------

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace what has changed, all or nothing."""
        for _ in self.writing(checkpoint):
            pass

    def writing(self, checkpoint: Checkpoint) -> Generator[bool, None, None]:
        """The same in steps, all of them for one thread: each tells whether the next is short and never waits.

        Every call of LMDB lets go of the interpreter, and a thread has to win it back from a busy loop after each. So
        the loop had better wait for the short ones.
        """
        # In the order of their trees: neighbours share a page, and it is found and copied once. Sorting takes a while,
        # and the loop has not begun to wait yet.
        streams = _sorted(checkpoint.streams, binaries([stream.name for stream in checkpoint.streams]))
        with self._environment.begin(write=True) as transaction:
            yield True
            fresh: Fresh = {}
            for flush in checkpoint.flushes:
                yield from self._add_flush(transaction, flush, fresh)
            numbers_gone = (int.from_bytes(incarnation, "big") for incarnation, _ in checkpoint.removed)
            yield from self._put_extents(transaction, {gone: fresh.pop(gone, []) for gone in numbers_gone})
            for removed in batched(checkpoint.removed, SLICE_ROWS):
                for incarnation, name in removed:
                    self._remove(transaction, incarnation, name, checkpoint.now_ms)
                yield True
            for blob in checkpoint.freed_blobs:
                transaction.delete(blob, db=self._blobs)
            yield from self._put_streams(transaction, streams, fresh)
            yield from self._put_extents(transaction, fresh)
            for trimmed in batched(checkpoint.trimmed, SLICE_ROWS):
                for number, earliest in trimmed:
                    self._drop_extents(transaction, u64(number), earliest, checkpoint.now_ms)
                yield True
            for name, row in checkpoint.singletons.items():
                transaction.put(name, row, db=self._singletons)
            yield False
            # Last: which of the new segments' messages are alive is a question to the rows as they are now.
            for replacement in checkpoint.replacements:
                self._replace(transaction, replacement, checkpoint.now_ms)
            transaction.put(b"format", str(FORMAT).encode(), db=self._meta)
            transaction.put(b"position", str(checkpoint.position).encode(), db=self._meta)
        self._reading = None
        self.position = checkpoint.position

    def _put_streams(self, transaction: Any, streams: Sequence[ManifestStream], fresh: Fresh) -> Iterator[bool]:
        """Write rows, each with what is fresh of its stream; `fresh` is left with what found no row."""
        with transaction.cursor(db=self._streams) as cursor:
            for some in batched(streams, SLICE_ROWS):
                rows, crowded = [], {}
                for stream in some:
                    is_new = stream.incarnation >= self.position
                    packed = None if is_new else transaction.get(stream.name, db=self._streams)
                    own = own_extents(packed, stream.incarnation)
                    added = fresh.pop(stream.incarnation, None)
                    if added is not None:
                        extended = with_extents(own, added)
                        if extended is None:
                            crowded[stream.incarnation] = [*map(encode_row, decode_own(own)), *added]
                        own = extended or NO_EXTENTS
                    rows.append((stream.name, pack_stream(stream.incarnation, own, stream.row)))
                    # An incarnation keeps its name, and the catalog has it since the checkpoint after its creation.
                    if is_new or stream.expires or stream.blob is not None:
                        self._put_references(transaction, stream)
                cursor.putmulti(rows)
                yield True
                yield from self._put_extents(transaction, crowded)

    def _put_references(self, transaction: Any, stream: ManifestStream) -> None:
        if stream.blob is not None:
            transaction.put(stream.blob, b"", db=self._blobs)
        incarnation = u64(stream.incarnation)
        transaction.put(incarnation, stream.name, overwrite=False, db=self._incarnations)
        if stream.expires:
            transaction.put(incarnation, stream.name, overwrite=False, db=self._expiring)

    def _remove(self, transaction: Any, incarnation: bytes, name: bytes, now_ms: int) -> None:
        self._drop_extents(transaction, incarnation, None, now_ms)
        # The name may belong to a successor by now; its row is then in this same checkpoint.
        transaction.delete(name, db=self._streams)
        transaction.delete(incarnation, db=self._incarnations)
        transaction.delete(incarnation, db=self._expiring)

    def _add_flush(self, transaction: Any, flush: SealedFlush, fresh: Fresh) -> Iterator[bool]:
        """Note a flush and its segments; where their messages lie goes into `fresh`."""
        number = self._last_segment(transaction)
        numbers = []
        for segment, extents in flush.segments:
            number += 1
            numbers.append(number)
            row = SegmentRow(segment, segment.payload_bytes)
            transaction.put(u32(number), encode_row(row), db=self._segments)
            for some in batched(extents, SLICE_EXTENTS):
                for one in some:
                    placed = one.offset_start, one.offset_end, number, one.row_group, one.row_start, one.rows
                    fresh.setdefault(one.incarnation, []).append(encode_row(placed))
                yield True
        row_of_flush = FlushRow(flush.first_position, flush.notes, numbers)
        transaction.put(u64(flush.through), encode_row(row_of_flush), db=self._flushes)

    def _put_extents(self, transaction: Any, extents: Fresh) -> Iterator[bool]:
        """There may be as many as messages."""
        with transaction.cursor(db=self._extents) as cursor:
            for incarnations in batched(sorted(extents), SLICE_ROWS):
                encoded = [(incarnation, one) for incarnation in incarnations for one in extents[incarnation]]
                for some in batched(encoded, SLICE_ROWS):
                    placed = [(incarnation, decode_placed(one)) for incarnation, one in some]
                    cursor.putmulti(
                        [(pack_pair(incarnation, one.offset_start), encode_row(one.row)) for incarnation, one in placed]
                    )
                    yield True

    def _last_segment(self, transaction: Any) -> int:
        with transaction.cursor(db=self._segments) as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else 0

    def _replace(self, transaction: Any, replacement: SealedReplacement, now_ms: int) -> None:
        """Let new segments stand for old ones, which are dead from then on."""
        wanted = set(replacement.replaced)
        old: dict[int, SegmentRef] = {}
        if wanted:
            for key, data in transaction.cursor(db=self._segments):
                segment = decode_segment(data).segment
                if segment.path in wanted:
                    old[int.from_bytes(key, "big")] = segment
        number = self._last_segment(transaction)
        new: dict[int, SegmentRef] = {}
        for segment, extents in replacement.segments:
            number += 1
            new[number] = segment
            live_bytes = self._index_replacement(transaction, number, extents, set(old))
            row = SegmentRow(segment, live_bytes)
            transaction.put(u32(number), encode_row(row), db=self._segments)
            if live_bytes == 0:
                transaction.put(u32(number), str(now_ms).encode(), db=self._dead)
        self._relink_flushes(transaction, old, new)
        for key, segment in old.items():
            transaction.put(u32(key), encode_row(SegmentRow(segment, 0)), db=self._segments)
            transaction.put(u32(key), str(now_ms).encode(), db=self._dead)

    def _index_replacement(self, transaction: Any, number: int, extents: list[Extent], old: set[int]) -> int:
        """Point the index at a compacted segment wherever its messages are alive; returns how many bytes that is."""
        live_bytes = 0
        incarnation, kept = -1, None
        with transaction.cursor(db=self._extents) as cursor:
            for extent in extents:
                if extent.incarnation != incarnation:
                    incarnation = extent.incarnation
                    kept = self._kept(transaction, u64(incarnation))
                    self._empty_row(transaction, incarnation)
                if old:
                    _drop_old(cursor, extent, old)
                if kept is None or extent.offset_end <= kept.earliest:
                    continue
                where = ExtentRow(extent.offset_end, number, extent.row_group, extent.row_start, extent.rows)
                key = u64(incarnation) + u64(extent.offset_start)
                transaction.put(key, encode_row(where), db=self._extents)
                live_bytes += extent.offset_end - extent.offset_start
        return live_bytes

    def _empty_row(self, transaction: Any, incarnation: int) -> None:
        """Move the extents that a stream's row holds to the table of extents."""
        name, packed = self._packed(transaction, u64(incarnation))
        own = own_extents(packed, incarnation)
        if packed is not None and own != NO_EXTENTS:
            for _ in self._put_extents(transaction, {incarnation: [*map(encode_row, decode_own(own))]}):
                pass
            transaction.put(name, pack_stream(incarnation, NO_EXTENTS, row_of(packed)), db=self._streams)

    def _packed(self, transaction: Any, incarnation: bytes) -> tuple[bytes, bytes | None]:
        """The name and the row of an incarnation, if it is there."""
        name = transaction.get(incarnation, b"", db=self._incarnations)
        packed = transaction.get(name, db=self._streams) if name else None
        return name, packed if packed is not None and packed.startswith(incarnation) else None

    def _kept(self, transaction: Any, incarnation: bytes) -> Kept | None:
        """From which offset on an incarnation's messages count; None if it is gone."""
        _, packed = self._packed(transaction, incarnation)
        if packed is None:
            return None
        row = decode_stream_row(row_of(packed))
        return Kept(0 if row.forks else row.earliest, row.content_type)

    def kept(self, incarnation: int) -> Kept | None:
        """The same, for those who want to know what is alive."""
        with self._environment.begin() as transaction:
            return self._kept(transaction, u64(incarnation))

    def _relink_flushes(self, transaction: Any, old: dict[int, SegmentRef], new: dict[int, SegmentRef]) -> None:
        """A compacted segment belongs to every flush whose positions it overlaps: there the feed looks for it."""
        affected = [*old.values(), *new.values()]
        if not affected:
            return
        last = max(segment.last_position for segment in affected)
        with transaction.cursor(db=self._flushes) as cursor:
            found = cursor.set_range(u64(min(segment.first_position for segment in affected) + 1))
            while found:
                through, flush = int.from_bytes(cursor.key(), "big"), decode_flush(cursor.value())
                if flush.first_position > last:
                    return
                numbers = [number for number in flush.segments if number not in old]
                numbers += [
                    number
                    for number, segment in new.items()
                    if segment.first_position < through and segment.last_position >= flush.first_position
                ]
                row = FlushRow(flush.first_position, flush.notes, numbers)
                cursor.put(cursor.key(), encode_row(row))
                found = cursor.next()

    def _drop_extents(self, transaction: Any, incarnation: bytes, before: int | None, now_ms: int) -> None:
        """Forget an incarnation's cold messages, or those before an offset; note segments that die of it."""
        freed: dict[int, int] = {}
        with transaction.cursor(db=self._extents) as cursor:
            found = cursor.set_range(incarnation)
            while found and cursor.key().startswith(incarnation):
                row = decode_extent(cursor.value())
                if before is not None and row.offset_end > before:
                    break
                start = int.from_bytes(cursor.key()[8:], "big")
                freed[row.segment] = freed.get(row.segment, 0) + row.offset_end - start
                found = cursor.delete()
        name, packed = self._packed(transaction, incarnation)
        placed = decode_own(own_extents(packed, int.from_bytes(incarnation, "big")))
        left = [one for one in placed if before is not None and one.offset_end > before]
        if packed is not None and len(left) < len(placed):
            for one in placed[: len(placed) - len(left)]:
                freed[one.segment] = freed.get(one.segment, 0) + one.offset_end - one.offset_start
            own = with_extents(NO_EXTENTS, [*map(encode_row, left)]) or NO_EXTENTS
            transaction.put(
                name, pack_stream(int.from_bytes(incarnation, "big"), own, row_of(packed)), db=self._streams
            )
        self._count_freed(transaction, freed, now_ms)

    def _count_freed(self, transaction: Any, freed: dict[int, int], now_ms: int) -> None:
        for number, size in freed.items():
            data = transaction.get(u32(number), db=self._segments)
            if data is not None:
                segment = decode_segment(data)
                left = SegmentRow(segment.segment, segment.live_bytes - size)
                transaction.put(u32(number), encode_row(left), db=self._segments)
                if left.live_bytes <= 0:
                    transaction.put(u32(number), str(now_ms).encode(), db=self._dead)

    def dump(self, rows_per_part: int, shard: int = 0) -> Iterator[Manifest]:
        """Everything, as of one moment, as the parts of a full manifest (all but the last without their count)."""
        with self._environment.begin() as transaction:
            position = int(transaction.get(b"position", b"1", db=self._meta))
            segments = {number: decode_segment(data).segment for number, data in transaction.cursor(db=self._segments)}
            flushes = []
            compacted: dict[str, SegmentRef] = {}
            unlisted = {segment.path for segment in segments.values()}
            for through, data in transaction.cursor(db=self._flushes):
                flush = decode_flush(data)
                at = int.from_bytes(through, "big")
                listed = [segments[u32(number)] for number in flush.segments if u32(number) in segments]
                unlisted.difference_update(segment.path for segment in listed)
                kept = [one for one in listed if is_within(one, flush.first_position, at)]
                compacted.update({one.path: one for one in listed if not is_within(one, flush.first_position, at)})
                flushes.append(ManifestFlush(flush.first_position, at, flush.notes, kept))
            replacements = [Replacement([], list(compacted.values()))] if compacted else []
            retired = sorted(unlisted)
            written_as = manifest_format(replacements, retired)
            singletons = {name.decode(): bytes(row) for name, row in transaction.cursor(db=self._singletons)}
            part = 1
            rows: list[ManifestStream] = []
            for name, packed in transaction.cursor(db=self._streams):
                row = row_of(packed)
                stream = encode_stream(decode_stream(decode_key(name), row))
                rows.append(ManifestStream(stream.incarnation, name, row, stream.expires, stream.blob))
                if len(rows) == rows_per_part:
                    yield Manifest(MANIFEST_FORMAT, shard, 0, position, 0, part, 0, [], [], rows, [], [], {})
                    part, rows = part + 1, []
            yield Manifest(
                written_as,
                shard,
                0,
                position,
                0,
                part,
                part,
                flushes,
                [],
                rows,
                [],
                [],
                singletons,
                replacements,
                retired,
            )

    def drop_dead_extents(self, now_ms: int) -> None:
        """Forget cold messages of incarnations that are gone and before earliest offsets: footers still list them."""
        with self._environment.begin(write=True) as transaction:
            with transaction.cursor(db=self._extents) as cursor:
                gone = []
                found = cursor.first()
                while found:
                    incarnation = cursor.key()[:8]
                    if self._packed(transaction, incarnation)[1] is None:
                        gone.append(incarnation)
                    found = cursor.set_range(u64(int.from_bytes(incarnation, "big") + 1))
            rows = (decode_stream_row(row_of(packed)) for _, packed in transaction.cursor(db=self._streams))
            trimmed = [(row.incarnation, row.earliest) for row in rows if row.earliest and not row.forks]
            for incarnation in gone:
                self._drop_extents(transaction, incarnation, None, now_ms)
            for number, earliest in trimmed:
                self._drop_extents(transaction, u64(number), earliest, now_ms)
        self._reading = None

    # -- the cold index ----------------------------------------------------------------------------------------

    def extent_at(self, incarnation: int, offset: int) -> FoundExtent | None:
        """The extent that holds the message after an offset, if it is cold."""
        with self._environment.begin() as transaction:
            found = [one for one in self._own_extents(transaction, incarnation) if one.offset_end > offset][:1]
            return min(
                [FoundExtent(one.offset_start, one.row) for one in found]
                + self._listed_extents(transaction, u64(incarnation), offset),
                default=None,
                key=lambda one: one.offset_start,
            )

    def _own_extents(self, transaction: Any, incarnation: int) -> list[PlacedExtent]:
        """Those in the stream's row."""
        _, packed = self._packed(transaction, u64(incarnation))
        return decode_own(own_extents(packed, incarnation))

    def _listed_extents(self, transaction: Any, incarnation: bytes, offset: int) -> list[FoundExtent]:
        """The first in the table of extents that ends beyond an offset, or none."""
        with transaction.cursor(db=self._extents) as cursor:
            is_behind = cursor.set_range(incarnation + u64(offset + 1))
            found = (cursor.prev() or cursor.first()) if is_behind else cursor.last()
            while found and cursor.key()[:8] <= incarnation:
                key, value = cursor.item()
                if key.startswith(incarnation):
                    row = decode_extent(value)
                    if row.offset_end > offset:
                        return [FoundExtent(int.from_bytes(key[8:], "big"), row)]
                found = cursor.next()
        return []

    def extent_of(self, incarnation: int, offset_start: int) -> ExtentRow | None:
        """The extent that starts exactly there."""
        with self._environment.begin() as transaction:
            data = transaction.get(pack_pair(incarnation, offset_start), db=self._extents)
            if data is not None:
                return decode_extent(data)
            own = self._own_extents(transaction, incarnation)
            return next((one.row for one in own if one.offset_start == offset_start), None)

    def segment(self, number: int) -> SegmentRef | None:
        with self._environment.begin(db=self._segments) as transaction:
            data = transaction.get(u32(number))
            return decode_segment(data).segment if data is not None else None

    def segments(self) -> Iterator[tuple[int, SegmentRow]]:
        with self._environment.begin(db=self._segments) as transaction, transaction.cursor() as cursor:
            for number, data in cursor:
                yield int.from_bytes(number, "big"), decode_segment(data)

    def segments_of(self, bucket: str, after: int) -> tuple[int, list[SegmentRef]]:
        """The catalog's position and, as of it, the bucket's segments that reach beyond another."""
        with self._environment.begin() as transaction:
            position = int(transaction.get(b"position", b"1", db=self._meta))
            rows = (decode_segment(data) for _, data in transaction.cursor(db=self._segments))
            # Those with nothing alive in them are dead, or were replaced by compaction: their messages are elsewhere.
            live = (row.segment for row in rows if row.live_bytes > 0)
            return position, [segment for segment in live if segment.bucket == bucket and segment.last_position > after]

    def cold_totals(self) -> ColdTotals:
        count = payload = stored = 0
        for _, row in self.segments():
            count, payload, stored = count + 1, payload + row.live_bytes, stored + row.segment.size
        return ColdTotals(count, payload, stored)

    def flush_after(self, position: int) -> tuple[int, FlushRow] | None:
        """The first flush that covers positions beyond this one."""
        with self._environment.begin(db=self._flushes) as transaction, transaction.cursor() as cursor:
            if not cursor.set_range(u64(position + 2)):
                return None
            through, data = cursor.item()
            return int.from_bytes(through, "big"), decode_flush(data)

    def flushes(self) -> Iterator[tuple[int, FlushRow]]:
        with self._environment.begin(db=self._flushes) as transaction, transaction.cursor() as cursor:
            for through, data in cursor:
                yield int.from_bytes(through, "big"), decode_flush(data)

    def retired(self) -> set[int]:
        """The segments that were replaced and wait for their deletion: no flush lists them any more."""
        listed = {number for _, flush in self.flushes() for number in flush.segments}
        with self._environment.begin(db=self._dead) as transaction, transaction.cursor() as cursor:
            return {int.from_bytes(number, "big") for number, _ in cursor} - listed

    def dead_segments(self, noticed_before_ms: int) -> list[int]:
        with self._environment.begin(db=self._dead) as transaction, transaction.cursor() as cursor:
            return [int.from_bytes(number, "big") for number, at in cursor if int(at) <= noticed_before_ms]

    def forget_segment(self, number: int) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.delete(u32(number), db=self._segments)
            transaction.delete(u32(number), db=self._dead)
        self._reading = None

    def close(self) -> None:
        self._reading = None
        self._environment.close()


def _sorted(items: Sequence[T], column: Any) -> list[T]:
    """The items in the order of a column that has a value for each."""
    return [items[index] for index in numbers(order_of(column), "Q")]


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def is_within(segment: SegmentRef, first: int, through: int) -> bool:
    """Whether all of a segment lies in a flush; a compacted one may not."""
    return first <= segment.first_position and segment.last_position < through


def _drop_old(cursor: Any, extent: Extent, old: set[int]) -> None:
    """Forget the extents of replaced segments that a new one covers, one that starts before it included."""
    prefix = u64(extent.incarnation)
    start = prefix + u64(extent.offset_start)
    is_before = cursor.prev() if cursor.set_range(start) else cursor.last()
    found = is_before if is_before and cursor.key().startswith(prefix) else cursor.set_range(start)
    while found and cursor.key().startswith(prefix) and cursor.key() < prefix + u64(extent.offset_end):
        found = cursor.delete() if decode_extent(cursor.value()).segment in old else cursor.next()
