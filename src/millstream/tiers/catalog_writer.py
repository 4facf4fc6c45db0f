"""Writing to the catalog: what a checkpoint, a compaction or a restore does to its tables, in one transaction.

Segments are numbered here, and their live bytes are counted: when nothing in one is alive any more, it is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from millstream.protocol.producers import ProducerState
from millstream.slices import batched
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog_rows import (
    Checkpoint,
    ExtentRow,
    FlushRow,
    SealedFlush,
    SealedReplacement,
    SegmentRow,
    decode_extent,
    decode_flush,
    decode_own,
    decode_placed,
    decode_producer,
    decode_segment,
    encode_row,
    pack_pair,
    producer_key,
    shared_key,
    u32,
    u64,
)
from millstream.tiers.catalog_tables import FORMAT, Tables
from millstream.tiers.manifests import ManifestStream
from millstream.tiers.segments import Extent, decode_extents
from millstream.tiers.stream_rows import (
    NO_EXTENTS,
    decode_key,
    decode_stream,
    own_extents,
    pack_stream,
    row_of,
    with_extents,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position

# Rows that are handed to LMDB together.
SLICE_ROWS: Final = 1024

Fresh = dict[Incarnation, list[bytes]]
"""What a checkpoint adds to the index, by incarnation: encoded as a stream's row would hold them."""


class CatalogWriter:
    """`position` is the catalog's before the transaction: what was created from there on is not in it yet."""

    def __init__(self, tables: Tables, transaction: Any, position: Position, now_ms: Milliseconds) -> None:
        self._tables = tables
        self._transaction = transaction
        self._position = position
        self._now_ms = now_ms

    def write(self, checkpoint: Checkpoint, streams: Sequence[ManifestStream]) -> None:
        """Write a checkpoint, its streams in the order of their names."""
        transaction, tables = self._transaction, self._tables
        fresh: Fresh = {}
        for flush in checkpoint.flushes:
            self._add_flush(flush, fresh)
        # Before what is removed goes: a stream's producers may come with its end.
        for number, states in sorted(checkpoint.producers, key=itemgetter(0)):
            if states:
                self._put_producers(number, states)
            else:
                self._drop_producers(number, checkpoint.producers_before_ms)
        gone = (Incarnation(int.from_bytes(incarnation, "big")) for incarnation, _ in checkpoint.removed)
        self._put_extents({incarnation: fresh.pop(incarnation, []) for incarnation in gone})
        for incarnation, name in checkpoint.removed:
            self._remove(incarnation, name)
        for blob in checkpoint.freed_blobs:
            transaction.delete(blob, db=tables.blobs)
        self._put_streams(streams, fresh)
        self._put_extents(fresh)
        for number, earliest in checkpoint.trimmed:
            self._drop_extents(number, earliest)
        for name, row in checkpoint.singletons.items():
            transaction.put(name, row, db=tables.singletons)
        # Last: which of the new segments' messages are alive is a question to the rows as they are now.
        for replacement in checkpoint.replacements:
            self._replace(replacement)
        transaction.put(b"format", str(FORMAT).encode(), db=tables.meta)
        transaction.put(b"position", str(checkpoint.position).encode(), db=tables.meta)

    # -- streams ---------------------------------------------------------------------------------------------

    def _put_streams(self, streams: Sequence[ManifestStream], fresh: Fresh) -> None:
        """Write rows, each with what is fresh of its stream; `fresh` is left with what found no row."""
        transaction, table = self._transaction, self._tables.streams
        with transaction.cursor(db=table) as cursor:
            for some in batched(streams, SLICE_ROWS):
                rows, crowded = [], {}
                for stream in some:
                    is_new = stream.incarnation >= self._position
                    own = (
                        NO_EXTENTS
                        if is_new
                        else own_extents(transaction.get(stream.name, db=table), stream.incarnation)
                    )
                    added = fresh.pop(stream.incarnation, None)
                    if added is not None:
                        extended = with_extents(own, added)
                        if extended is None:
                            crowded[stream.incarnation] = [*map(encode_row, decode_own(own)), *added]
                        own = extended or NO_EXTENTS
                    rows.append((stream.name, pack_stream(stream.incarnation, own, stream.row)))
                    # An incarnation keeps its name, and the catalog has it since the checkpoint after its creation.
                    if is_new or stream.expires or stream.blob is not None:
                        self._put_references(stream)
                cursor.putmulti(rows)
                self._put_extents(crowded)

    def _put_references(self, stream: ManifestStream) -> None:
        transaction, tables = self._transaction, self._tables
        if stream.blob is not None:
            transaction.put(stream.blob, b"", db=tables.blobs)
        incarnation = u64(stream.incarnation)
        transaction.put(incarnation, stream.name, overwrite=False, db=tables.incarnations)
        if stream.expires:
            transaction.put(incarnation, stream.name, overwrite=False, db=tables.expiring)

    def _remove(self, incarnation: bytes, name: bytes) -> None:
        transaction, tables = self._transaction, self._tables
        self._drop_extents(Incarnation(int.from_bytes(incarnation, "big")), None)
        # The name may belong to a successor by now; its row is then in this same checkpoint.
        transaction.delete(name, db=tables.streams)
        transaction.delete(incarnation, db=tables.incarnations)
        transaction.delete(incarnation, db=tables.expiring)
        with transaction.cursor(db=tables.producers) as cursor:
            found = cursor.set_range(incarnation)
            while found and cursor.key().startswith(incarnation):
                found = cursor.delete()

    # -- producers -------------------------------------------------------------------------------------------

    def _put_producers(self, incarnation: Incarnation, states: dict[str, ProducerState]) -> None:
        transaction, table = self._transaction, self._tables.producers
        added = 0
        for producer_id in sorted(states):
            key = producer_key(incarnation, producer_id)
            added += transaction.get(key, db=table) is None
            transaction.put(key, encode_row(states[producer_id]), db=table)
        self._count_producers(incarnation, added)

    def _drop_producers(self, incarnation: Incarnation, before_ms: Milliseconds) -> None:
        """Forget those that wrote last before a time."""
        prefix, removed = u64(incarnation), 0
        with self._transaction.cursor(db=self._tables.producers) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                if len(cursor.key()) > len(prefix) and decode_producer(cursor.value()).at_ms < before_ms:
                    removed += 1
                    found = cursor.delete()
                else:
                    found = cursor.next()
        self._count_producers(incarnation, -removed)

    def _count_producers(self, incarnation: Incarnation, more: int) -> None:
        if more:
            count = self._tables.producer_count(self._transaction, incarnation) + more
            self._transaction.put(u64(incarnation), str(count).encode(), db=self._tables.producers)

    # -- extents ---------------------------------------------------------------------------------------------

    def _put_extents(self, extents: Fresh) -> None:
        """There may be as many as messages."""
        with self._transaction.cursor(db=self._tables.extents) as cursor:
            for incarnations in batched(sorted(extents), SLICE_ROWS):
                encoded = [(incarnation, one) for incarnation in incarnations for one in extents[incarnation]]
                for some in batched(encoded, SLICE_ROWS):
                    placed = [(incarnation, decode_placed(one)) for incarnation, one in some]
                    cursor.putmulti(
                        [(pack_pair(incarnation, one.offset_start), encode_row(one.row)) for incarnation, one in placed]
                    )

    def _empty_row(self, incarnation: Incarnation) -> None:
        """Move the extents that a stream's row holds to the table of extents."""
        name, packed = self._tables.packed(self._transaction, u64(incarnation))
        own = own_extents(packed, incarnation)
        if packed is not None and own != NO_EXTENTS:
            self._put_extents({incarnation: [*map(encode_row, decode_own(own))]})
            self._transaction.put(name, pack_stream(incarnation, NO_EXTENTS, row_of(packed)), db=self._tables.streams)

    def _drop_extents(self, incarnation: Incarnation, before: Offset | None) -> None:
        """Forget an incarnation's cold messages, or those before an offset; note segments that die of it."""
        freed: dict[int, int] = {}
        prefix = u64(incarnation)
        with self._transaction.cursor(db=self._tables.extents) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                row = decode_extent(cursor.value())
                if before is not None and row.offset_end > before:
                    break
                start = int.from_bytes(cursor.key()[8:], "big")
                freed[row.segment] = freed.get(row.segment, 0) + row.offset_end - start
                found = cursor.delete()
        name, packed = self._tables.packed(self._transaction, prefix)
        placed = decode_own(own_extents(packed, incarnation))
        left = [one for one in placed if before is not None and one.offset_end > before]
        if packed is not None and len(left) < len(placed):
            for one in placed[: len(placed) - len(left)]:
                freed[one.segment] = freed.get(one.segment, 0) + one.offset_end - one.offset_start
            own = with_extents(NO_EXTENTS, [*map(encode_row, left)]) or NO_EXTENTS
            self._transaction.put(name, pack_stream(incarnation, own, row_of(packed)), db=self._tables.streams)
        self._count_freed(freed)

    def _count_freed(self, freed: dict[int, int]) -> None:
        for number, size in freed.items():
            data = self._transaction.get(u32(number), db=self._tables.segments)
            if data is not None:
                segment = decode_segment(data)
                self._put_segment(number, SegmentRow(segment.segment, segment.live_bytes - size))

    def drop_dead_extents(self) -> None:
        """Forget cold messages of incarnations that are gone and before earliest offsets: footers still list them."""
        transaction, tables = self._transaction, self._tables
        gone = []
        with transaction.cursor(db=tables.extents) as cursor:
            found = cursor.first()
            while found:
                incarnation = cursor.key()[:8]
                number = Incarnation(int.from_bytes(incarnation, "big"))
                if tables.packed(transaction, incarnation)[1] is None:
                    gone.append(number)
                found = cursor.set_range(u64(number + 1))
        cursor = transaction.cursor(db=tables.streams)
        streams = (decode_stream(decode_key(name), packed) for name, packed in cursor)
        trimmed = [(one.incarnation, one.earliest) for one in streams if one.earliest and not one.forks]
        for number in gone:
            self._drop_extents(number, None)
        for number, earliest in trimmed:
            self._drop_extents(number, earliest)

    # -- segments --------------------------------------------------------------------------------------------

    def _add_flush(self, flush: SealedFlush, fresh: Fresh) -> None:
        """Note a flush and its segments; where their messages lie goes into `fresh`."""
        number = self._last_segment()
        numbers = []
        for segment, extents, shared_by in flush.segments:
            number += 1
            numbers.append(number)
            self._share(number, shared_by)
            self._transaction.put(
                u32(number), encode_row(SegmentRow(segment, segment.payload_bytes)), db=self._tables.segments
            )
            for one in decode_extents(extents):
                placed = one.offset_start, one.offset_end, number, one.row_group, one.row_start, one.rows
                fresh.setdefault(one.incarnation, []).append(encode_row(placed))
        row = FlushRow(flush.first_position, flush.notes, numbers)
        self._transaction.put(u64(flush.through), encode_row(row), db=self._tables.flushes)

    def _share(self, number: int, buckets: Sequence[str]) -> None:
        for bucket in buckets:
            self._transaction.put(shared_key(bucket) + u32(number), b"", db=self._tables.shared)
            self._transaction.put(b"s" + u32(number) + bucket.encode(), b"", db=self._tables.shared)

    def _last_segment(self) -> int:
        with self._transaction.cursor(db=self._tables.segments) as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else 0

    def _put_segment(self, number: int, row: SegmentRow) -> None:
        """Write a segment's row, and note it if it is dead."""
        self._transaction.put(u32(number), encode_row(row), db=self._tables.segments)
        if row.live_bytes <= 0:
            self._transaction.put(u32(number), str(self._now_ms).encode(), db=self._tables.dead)

    def _replace(self, replacement: SealedReplacement) -> None:
        """Let new segments stand for old ones, which are dead from then on."""
        wanted = set(replacement.replaced)
        old: dict[int, SegmentRef] = {}
        if wanted:
            for key, data in self._transaction.cursor(db=self._tables.segments):
                segment = decode_segment(data).segment
                if segment.path in wanted:
                    old[int.from_bytes(key, "big")] = segment
        number = self._last_segment()
        new: dict[int, SegmentRef] = {}
        for segment, extents, shared_by in replacement.segments:
            number += 1
            self._share(number, shared_by)
            new[number] = segment
            self._put_segment(
                number, SegmentRow(segment, self._index_replacement(number, decode_extents(extents), set(old)))
            )
        self._relink_flushes(old, new)
        for number, segment in old.items():
            self._put_segment(number, SegmentRow(segment, 0))

    def _index_replacement(self, number: int, extents: list[Extent], old: set[int]) -> int:
        """Point the index at a compacted segment wherever its messages are alive; returns how many bytes that is."""
        live_bytes = 0
        incarnation, kept = -1, None
        with self._transaction.cursor(db=self._tables.extents) as cursor:
            for extent in extents:
                if extent.incarnation != incarnation:
                    incarnation = extent.incarnation
                    kept = self._tables.kept(self._transaction, u64(incarnation))
                    self._empty_row(incarnation)
                if old:
                    _drop_old(cursor, extent, old)
                if kept is None or extent.offset_end <= kept.earliest:
                    continue
                where = ExtentRow(extent.offset_end, number, extent.row_group, extent.row_start, extent.rows)
                cursor.put(pack_pair(incarnation, extent.offset_start), encode_row(where))
                live_bytes += extent.offset_end - extent.offset_start
        return live_bytes

    def _relink_flushes(self, old: dict[int, SegmentRef], new: dict[int, SegmentRef]) -> None:
        """A compacted segment belongs to every flush whose positions it overlaps: there the feed looks for it."""
        affected = [*old.values(), *new.values()]
        if not affected:
            return
        last = max(segment.last_position for segment in affected)
        with self._transaction.cursor(db=self._tables.flushes) as cursor:
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


def _drop_old(cursor: Any, extent: Extent, old: set[int]) -> None:
    """Forget the extents of replaced segments that a new one covers, one that starts before it included."""
    prefix = u64(extent.incarnation)
    start = prefix + u64(extent.offset_start)
    is_before = cursor.prev() if cursor.set_range(start) else cursor.last()
    found = is_before if is_before and cursor.key().startswith(prefix) else cursor.set_range(start)
    while found and cursor.key().startswith(prefix) and cursor.key() < prefix + u64(extent.offset_end):
        found = cursor.delete() if decode_extent(cursor.value()).segment in old else cursor.next()
