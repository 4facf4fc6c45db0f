"""The catalog: the state of every stream as of a checkpoint, in LMDB.

Streams are found by name or by incarnation and load on demand; listing is a range scan. A checkpoint replaces what
changed since the last one together with the log position it reflects, in one transaction, so the catalog is always
exactly the log up to `position`, and the cold tier covers exactly that.

The tables are described in `catalog_tables.py`; `catalog_writer.py` writes to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import lmdb

from millstream.errors import Conflict, Corrupt, OtherFormat
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef, SnapshotRef, StoreClaimed
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import (
    MANIFEST_DIGEST,
    STORE_CLAIM,
    Checkpoint,
    ColdTotals,
    ExtentRow,
    FlushRow,
    FoundExtent,
    Kept,
    PlacedExtent,
    SegmentRow,
    decode_claim,
    decode_extent,
    decode_flush,
    decode_own,
    decode_producer,
    decode_segment,
    encode_row,
    pack_pair,
    producer_key,
    restore_singletons,
    shared_key,
    u32,
    u64,
)
from millstream.tiers.catalog_tables import REBUILT_HINT, Tables, check_format
from millstream.tiers.catalog_writer import CatalogWriter
from millstream.tiers.manifests import FORMAT as MANIFEST_FORMAT
from millstream.tiers.manifests import (
    Manifest,
    ManifestFlush,
    ManifestStream,
    Replacement,
    decode_manifest_streams,
)
from millstream.tiers.segments import SHARED
from millstream.tiers.stream_rows import (
    decode_key,
    decode_stream,
    encode_key,
    encode_stream,
    own_extents,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position

# Address space, not disk: LMDB grows the file as it fills.
MAP_BYTES: Final = 64 << 30

# Where a full manifest begins, and that it says nothing of a time.
_FULL: Final = Position(0)
_UNTIMED: Final = Milliseconds(0)


class Catalog:
    """Whoever opens it owns it from then on, by a number; `owner` is for a process that writes on an owner's behalf.

    Such a process may outlive the one that started it by a moment. What it still wants to write then is refused.
    """

    def __init__(self, directory: Path, owner: int | None = None) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._environment = lmdb.open(str(directory), map_size=MAP_BYTES, max_dbs=16, max_readers=64)
        except lmdb.Error as error:
            raise Corrupt(f"the catalog {directory} cannot be opened: {error}", hint=REBUILT_HINT) from None
        # Of a process that was killed while it read: what it saw could not be reused as long as it counts as a reader.
        self._environment.reader_check()
        try:
            check_format(self._environment, directory)
        except OtherFormat:
            self._environment.close()
            raise
        self._tables = Tables(self._environment)
        with self._environment.begin(db=self._tables.meta) as transaction:
            self.position = Position(transaction.get(b"position", b"1"))
        self.owner = self._take_over() if owner is None else owner
        # For loading streams: to begin a transaction takes as long as to look something up. Whoever has written lets
        # go of it; it ends when nobody uses it any more.
        self._reading: Any = None
        self._writes = 0

    def _take_over(self) -> int:
        try:
            with self._environment.begin(write=True, db=self._tables.meta) as transaction:
                owner = self._stored_owner(transaction) + 1
                transaction.put(b"owner", str(owner).encode())
                self.position = self._stored_position(transaction)
        except lmdb.DiskError:
            # A full disk is no reason not to serve. A predecessor's process is not fenced then, but if it should still
            # have written something, the position is not what it was, and nothing is written over that.
            with self._environment.begin() as transaction:
                owner, self.position = self._stored_owner(transaction), self._stored_position(transaction)
        return owner

    def _stored_owner(self, transaction: Any) -> int:
        return int(transaction.get(b"owner", b"0", db=self._tables.meta))

    # -- StateSource -----------------------------------------------------------------------------------------

    def load_key(self, key: StreamKey) -> Stream | None:
        lookups = self._reading or self._lookups()
        packed = lookups.get(encode_key(key))
        return decode_stream(key, packed) if packed is not None else None

    def load_incarnation(self, incarnation: Incarnation) -> Stream | None:
        return self._load(self._reading or self._lookups(), incarnation)

    def _load(self, transaction: Any, incarnation: Incarnation) -> Stream | None:
        name, packed = self._tables.packed(transaction, u64(incarnation))
        return decode_stream(decode_key(name), packed) if packed is not None else None

    def load_producer(self, incarnation: Incarnation, producer_id: str) -> ProducerState | None:
        if incarnation >= self.position:
            return None  # the catalog has not heard of the stream yet
        packed = (self._reading or self._lookups()).get(
            producer_key(incarnation, producer_id), db=self._tables.producers
        )
        return decode_producer(packed) if packed is not None else None

    def producer_count(self, incarnation: Incarnation) -> int:
        return self._tables.producer_count(self._reading or self._lookups(), incarnation)

    def producers(self) -> Iterator[tuple[Incarnation, str, ProducerState]]:
        """All there are, in the order of incarnations."""
        with self._environment.begin() as transaction:
            yield from self._producers(transaction)

    def _producers(self, transaction: Any) -> Iterator[tuple[Incarnation, str, ProducerState]]:
        for key, packed in transaction.cursor(db=self._tables.producers):
            if len(key) > 8:
                yield Incarnation(int.from_bytes(key[:8], "big")), key[8:].decode("latin-1"), decode_producer(packed)

    def load_all(self, incarnations: Iterable[Incarnation]) -> Iterator[Stream | None]:
        """As of one moment, and on any thread: the others share a transaction, which is the loop's."""
        with self._environment.begin() as transaction:
            for incarnation in incarnations:
                yield self._load(transaction, incarnation)

    def _lookups(self) -> Any:
        while (transaction := self._reading) is None:
            # A thread that writes meanwhile may have let go just before this one began: then it shows what was.
            writes = self._writes
            self._reading = self._environment.begin(db=self._tables.streams)
            if self._writes != writes:
                self._reading = None
        return transaction

    def _written(self) -> None:
        self._writes += 1
        self._reading = None

    def restore(self, machine: StateMachine) -> None:
        """Fill in the state that is always in memory."""
        with self._environment.begin(db=self._tables.singletons) as transaction:
            restore_singletons(machine, self.position, transaction.get)

    @property
    def manifest_digest(self) -> bytes:
        """The digest of the manifest that led to this position; nothing at the beginning."""
        with self._environment.begin(db=self._tables.singletons) as transaction:
            return bytes(transaction.get(MANIFEST_DIGEST, b""))

    def note_claim(self, claim: StoreClaimed) -> None:
        """Remember a claim of the object store that no log tells of: a restore has made it."""
        with self._environment.begin(write=True) as transaction:
            transaction.put(STORE_CLAIM, encode_row(claim), db=self._tables.singletons)
        self._written()

    def scan(self, prefix: bytes, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Names and rows in order, of the names with this prefix that sort behind `after`."""
        with self._environment.begin(db=self._tables.streams) as transaction, transaction.cursor() as cursor:
            found = cursor.set_range(max(prefix, after))
            while found:
                name, packed = cursor.item()
                if not name.startswith(prefix):
                    return
                if name > after:
                    yield name, packed
                found = cursor.next()

    def expiring(self) -> Iterator[tuple[Incarnation, Milliseconds]]:
        """The incarnation and the deadline of every stream that has one."""
        with self._environment.begin() as transaction, transaction.cursor(db=self._tables.expiring) as cursor:
            for incarnation, name in cursor:
                packed = transaction.get(name, db=self._tables.streams)
                if packed is not None:
                    stream = decode_stream(decode_key(name), packed)
                    deadline_ms = stream.expiry.deadline_ms(stream.last_access_ms)
                    if deadline_ms is not None:
                        yield Incarnation(int.from_bytes(incarnation, "big")), deadline_ms

    def refers_to_blob(self, name: str) -> bool:
        with self._environment.begin(db=self._tables.blobs) as transaction:
            return transaction.get(name.encode()) is not None

    def snapshots(self) -> Iterator[SnapshotRef]:
        """The snapshots that streams have, on any thread."""
        with self._environment.begin() as transaction:
            if transaction.stat(self._tables.blobs)["entries"] == 0:
                return
            for name, packed in transaction.cursor(db=self._tables.streams):
                snapshot = decode_stream(decode_key(name), packed).snapshot
                if snapshot is not None:
                    yield snapshot

    # -- checkpoints -----------------------------------------------------------------------------------------

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace what has changed, all or nothing."""
        # In the order of their tree: neighbours share a page, and it is found and copied once.
        streams = sorted(decode_manifest_streams(checkpoint.streams), key=attrgetter("name"))
        with self._environment.begin(write=True) as transaction:
            self._check_owner(transaction)
            CatalogWriter(self._tables, transaction, self.position, checkpoint.now_ms).write(checkpoint, streams)
        self._written()
        self.position = checkpoint.position

    def refresh(self) -> None:
        """Another process may have written a checkpoint on this one's behalf: go on from there."""
        with self._environment.begin() as transaction:
            self.position = self._stored_position(transaction)
        self._written()

    def _stored_position(self, transaction: Any) -> Position:
        return Position(transaction.get(b"position", b"1", db=self._tables.meta))

    def _check_owner(self, transaction: Any) -> None:
        if self._stored_owner(transaction) != self.owner:
            raise Conflict("the catalog was opened by another process since: it is no longer this one's to write")
        if self._stored_position(transaction) != self.position:
            raise Conflict("the catalog was written by another process since", hint="restart the server")

    def kept(self, incarnation: Incarnation) -> Kept | None:
        """From which offset on an incarnation's messages count; None if it is gone."""
        with self._environment.begin() as transaction:
            return self._tables.kept(transaction, u64(incarnation))

    def dump(self, rows_per_part: int, shard: int = 0) -> Iterator[Manifest]:
        """Everything, as of one moment, as the parts of a full manifest (all but the last without their count)."""
        with self._environment.begin() as transaction:
            position = Position(transaction.get(b"position", b"1", db=self._tables.meta))
            segments = {
                number: decode_segment(data).segment for number, data in transaction.cursor(db=self._tables.segments)
            }
            flushes = []
            compacted: dict[str, SegmentRef] = {}
            unlisted = {segment.path for segment in segments.values()}
            for through, data in transaction.cursor(db=self._tables.flushes):
                flush = decode_flush(data)
                at = Position(int.from_bytes(through, "big"))
                listed = [segments[u32(number)] for number in flush.segments if u32(number) in segments]
                unlisted.difference_update(segment.path for segment in listed)
                kept = [one for one in listed if is_within(one, flush.first_position, at)]
                compacted.update({one.path: one for one in listed if not is_within(one, flush.first_position, at)})
                flushes.append(ManifestFlush(flush.first_position, at, flush.notes, kept))
            replacements = [Replacement([], list(compacted.values()))] if compacted else []
            retired = sorted(unlisted)
            singletons = {name.decode(): bytes(row) for name, row in transaction.cursor(db=self._tables.singletons)}
            part = 1
            rows: list[ManifestStream] = []
            for name, packed in transaction.cursor(db=self._tables.streams):
                rows.append(encode_stream(decode_stream(decode_key(name), packed)))
                if len(rows) == rows_per_part:
                    yield Manifest(MANIFEST_FORMAT, shard, _FULL, position, _UNTIMED, part, 0, [], [], rows, [], [], {})
                    part, rows = part + 1, []
            producers: dict[Incarnation, dict[str, ProducerState]] = {}
            for count, (incarnation, producer_id, state) in enumerate(self._producers(transaction), 1):
                producers.setdefault(incarnation, {})[producer_id] = state
                if count % rows_per_part == 0:
                    yield Manifest(
                        MANIFEST_FORMAT,
                        shard,
                        _FULL,
                        position,
                        _UNTIMED,
                        part,
                        0,
                        [],
                        [],
                        [],
                        [],
                        [],
                        {},
                        producers=list(producers.items()),
                    )
                    part, producers = part + 1, {}
            yield Manifest(
                MANIFEST_FORMAT,
                shard,
                _FULL,
                position,
                _UNTIMED,
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
                producers=list(producers.items()),
            )

    def drop_dead_extents(self, now_ms: Milliseconds) -> None:
        """Forget cold messages of incarnations that are gone and before earliest offsets: footers still list them."""
        with self._environment.begin(write=True) as transaction:
            CatalogWriter(self._tables, transaction, self.position, now_ms).drop_dead_extents()
        self._written()

    # -- the cold index ----------------------------------------------------------------------------------------

    def extent_at(self, incarnation: Incarnation, offset: Offset) -> FoundExtent | None:
        """The extent that holds the message after an offset, if it is cold."""
        with self._environment.begin() as transaction:
            found = [one for one in self._own_extents(transaction, incarnation) if one.offset_end > offset][:1]
            return min(
                [FoundExtent(one.offset_start, one.row) for one in found]
                + self._listed_extents(transaction, u64(incarnation), offset),
                default=None,
                key=lambda one: one.offset_start,
            )

    def _own_extents(self, transaction: Any, incarnation: Incarnation) -> list[PlacedExtent]:
        """Those in the stream's row."""
        _, packed = self._tables.packed(transaction, u64(incarnation))
        return decode_own(own_extents(packed, incarnation))

    def _listed_extents(self, transaction: Any, incarnation: bytes, offset: Offset) -> list[FoundExtent]:
        """The first in the table of extents that ends beyond an offset, or none."""
        with transaction.cursor(db=self._tables.extents) as cursor:
            is_behind = cursor.set_range(incarnation + u64(offset + 1))
            found = (cursor.prev() or cursor.first()) if is_behind else cursor.last()
            while found and cursor.key()[:8] <= incarnation:
                key, value = cursor.item()
                if key.startswith(incarnation):
                    row = decode_extent(value)
                    if row.offset_end > offset:
                        return [FoundExtent(Offset(int.from_bytes(key[8:], "big")), row)]
                found = cursor.next()
        return []

    def extent_of(self, incarnation: Incarnation, offset_start: Offset) -> ExtentRow | None:
        """The extent that starts exactly there."""
        with self._environment.begin() as transaction:
            data = transaction.get(pack_pair(incarnation, offset_start), db=self._tables.extents)
            if data is not None:
                return decode_extent(data)
            own = self._own_extents(transaction, incarnation)
            return next((one.row for one in own if one.offset_start == offset_start), None)

    def segment(self, number: int) -> SegmentRef | None:
        with self._environment.begin(db=self._tables.segments) as transaction:
            data = transaction.get(u32(number))
            return decode_segment(data).segment if data is not None else None

    def segments(self) -> Iterator[tuple[int, SegmentRow]]:
        with self._environment.begin(db=self._tables.segments) as transaction, transaction.cursor() as cursor:
            for number, data in cursor:
                yield int.from_bytes(number, "big"), decode_segment(data)

    def segments_of(self, bucket: str, after: Position) -> tuple[Position, list[SegmentRef]]:
        """The catalog's position and, as of it, the bucket's segments that reach beyond another."""
        with self._environment.begin() as transaction:
            position = Position(transaction.get(b"position", b"1", db=self._tables.meta))
            shared = self._shared_with(transaction, bucket)
            rows = ((number, decode_segment(data)) for number, data in transaction.cursor(db=self._tables.segments))
            # Those with nothing alive in them are dead, or were replaced by compaction: their messages are elsewhere.
            live = ((number, row.segment) for number, row in rows if row.live_bytes > 0)
            return position, [
                segment
                for number, segment in live
                if (segment.bucket == bucket or number in shared) and segment.last_position > after
            ]

    def _shared_with(self, transaction: Any, bucket: str) -> set[bytes]:
        """The numbers of the segments that a bucket shares with others."""
        prefix, found = shared_key(bucket), set()
        with transaction.cursor(db=self._tables.shared) as cursor:
            is_there = cursor.set_range(prefix)
            while is_there and cursor.key().startswith(prefix):
                found.add(cursor.key()[len(prefix) :])
                is_there = cursor.next()
        return found

    def holds(self, number: int, segment: SegmentRef, bucket: str) -> bool:
        """Whether a segment has messages of a bucket."""
        if segment.bucket != SHARED:
            return segment.bucket == bucket
        with self._environment.begin(db=self._tables.shared) as transaction:
            return transaction.get(shared_key(bucket) + u32(number)) is not None

    def cold_totals(self) -> ColdTotals:
        count = payload = stored = 0
        for _, row in self.segments():
            count, payload, stored = count + 1, payload + row.live_bytes, stored + row.segment.size
        return ColdTotals(count, payload, stored)

    def flush_after(self, position: Position) -> tuple[Position, FlushRow] | None:
        """The first flush that covers positions beyond this one."""
        with self._environment.begin(db=self._tables.flushes) as transaction, transaction.cursor() as cursor:
            if not cursor.set_range(u64(position + 2)):
                return None
            through, data = cursor.item()
            return Position(int.from_bytes(through, "big")), decode_flush(data)

    def flushes(self) -> Iterator[tuple[Position, FlushRow]]:
        with self._environment.begin(db=self._tables.flushes) as transaction, transaction.cursor() as cursor:
            for through, data in cursor:
                yield Position(int.from_bytes(through, "big")), decode_flush(data)

    def retired(self) -> set[int]:
        """The segments that were replaced and wait for their deletion: no flush lists them any more."""
        listed = {number for _, flush in self.flushes() for number in flush.segments}
        with self._environment.begin(db=self._tables.dead) as transaction, transaction.cursor() as cursor:
            return {int.from_bytes(number, "big") for number, _ in cursor} - listed

    def dead_segments(self, noticed_before_ms: Milliseconds) -> list[int]:
        with self._environment.begin(db=self._tables.dead) as transaction, transaction.cursor() as cursor:
            return [int.from_bytes(number, "big") for number, at in cursor if int(at) <= noticed_before_ms]

    def forget_segment(self, number: int) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.delete(u32(number), db=self._tables.segments)
            transaction.delete(u32(number), db=self._tables.dead)
            prefix = b"s" + u32(number)
            with transaction.cursor(db=self._tables.shared) as cursor:
                found = cursor.set_range(prefix)
                while found and cursor.key().startswith(prefix):
                    bucket = cursor.key()[len(prefix) :].decode()
                    found = cursor.delete()
                    transaction.delete(shared_key(bucket) + u32(number), db=self._tables.shared)
        self._written()

    def close(self) -> None:
        self._reading = None
        self._environment.close()


def stored_claim(directory: Path) -> tuple[Position, StoreClaimed | None]:
    """The position of a catalog and the last claim it knows, for those who only look."""
    try:
        with lmdb.open(str(directory), readonly=True, lock=False, create=False, max_dbs=16) as environment:
            meta, singletons = (environment.open_db(name, create=False) for name in (b"meta", b"singletons"))
            with environment.begin() as transaction:
                position = Position(transaction.get(b"position", b"1", db=meta))
                return position, decode_claim(transaction.get(STORE_CLAIM, db=singletons))
    except lmdb.Error:
        return Position(1), None  # there is none


def is_within(segment: SegmentRef, first: Position, through: Position) -> bool:
    """Whether all of a segment lies in a flush; a compacted one may not."""
    return first <= segment.first_position and segment.last_position < through
