"""The tables of the catalog, and what its readers and its writer both look up in them.

    meta           "position" → first position not reflected, which is also the first the log must hold;
                   "format" → 5; "owner" → how often the catalog was opened: the last to open it may write
    streams        bucket \\0 stream → incarnation, where its newest cold messages lie, StreamRow (`pack_stream`)
    incarnations   u64, big-endian → bucket \\0 stream
    expiring       the same, only for streams with a deadline
    producers      incarnation (u64, big-endian), producer id → ProducerState; incarnation alone → how many it has
    extents        incarnation, first offset (u64s, big-endian) → ExtentRow: where the other cold messages lie
    segments       number (u32, big-endian) → SegmentRow
    shared         "b", bucket, \\0, number and "s", number, bucket: the segments that buckets share
    dead           number of a segment nothing refers to → when that was noticed, in milliseconds
    flushes        position a flush reached (u64, big-endian) → FlushRow
    blobs          the names of the blobs that snapshots refer to
    singletons     "buckets", "subscriptions", "secrets", "store_claim" → rows; "manifest" → the digest of the manifest
                   that led to this position

A flush of very many streams writes a page or two for each of them, which lie anywhere. So that it is one, what the
flush adds to a stream's index goes into the row that it writes in any case; when that has become many, to `extents`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import lmdb

from millstream.errors import Corrupt, OtherFormat
from millstream.protocol.offsets import START
from millstream.tiers.catalog_rows import Kept, u64
from millstream.tiers.stream_rows import decode_key, decode_stream
from millstream.units import Incarnation

FORMAT: Final = 5
REBUILT_HINT: Final = "move it away: it is rebuilt from the log if the log is whole"


def check_format(environment: Any, directory: Path) -> None:
    """Refuse another version's catalog, before anything in it is changed."""
    meta = environment.open_db(b"meta")
    with environment.begin(db=meta) as transaction:
        found = int(transaction.get(b"format", str(FORMAT).encode()))
    if found != FORMAT:
        raise OtherFormat(f"the catalog {directory}", found=found, known=FORMAT)


def check_stored_format(directory: Path) -> None:
    """The same for a catalog that no process has open."""
    if (directory / "data.mdb").exists():
        try:
            with lmdb.open(str(directory), max_dbs=1, readonly=True) as environment:
                check_format(environment, directory)
        except lmdb.Error as error:
            raise Corrupt(f"the catalog {directory} cannot be opened: {error}", hint=REBUILT_HINT) from None


class Tables:
    def __init__(self, environment: Any) -> None:
        self.meta = environment.open_db(b"meta")
        self.streams = environment.open_db(b"streams")
        self.incarnations = environment.open_db(b"incarnations")
        self.expiring = environment.open_db(b"expiring")
        self.producers = environment.open_db(b"producers")
        self.extents = environment.open_db(b"extents")
        self.segments = environment.open_db(b"segments")
        self.shared = environment.open_db(b"shared")
        self.dead = environment.open_db(b"dead")
        self.flushes = environment.open_db(b"flushes")
        self.blobs = environment.open_db(b"blobs")
        self.singletons = environment.open_db(b"singletons")

    def packed(self, transaction: Any, incarnation: bytes) -> tuple[bytes, bytes | None]:
        """The name and the row of an incarnation, if it is there."""
        name = transaction.get(incarnation, b"", db=self.incarnations)
        packed = transaction.get(name, db=self.streams) if name else None
        return name, packed if packed is not None and packed.startswith(incarnation) else None

    def kept(self, transaction: Any, incarnation: bytes) -> Kept | None:
        """From which offset on an incarnation's messages count; None if it is gone."""
        name, packed = self.packed(transaction, incarnation)
        if packed is None:
            return None
        stream = decode_stream(decode_key(name), packed)
        return Kept(START if stream.forks else stream.earliest, stream.content_type, stream.key)

    def producer_count(self, transaction: Any, incarnation: Incarnation) -> int:
        """How many producers an incarnation has."""
        return int(transaction.get(u64(incarnation), b"0", db=self.producers))
