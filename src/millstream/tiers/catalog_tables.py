"""The tables of the catalog, and what its readers and its writer both look up in them.

    meta           "position" → first position not reflected, which is also the first the log must hold;
                   "format" → 3; "owner" → how often the catalog was opened: the last to open it may write
    streams        bucket \\0 stream → incarnation, where its newest cold messages lie, StoredRow (`pack_stream`)
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

from typing import Any, Final

from millstream.tiers.catalog_rows import Kept, decode_key, decode_stream

FORMAT: Final = 3


class Tables:
    def __init__(self, environment: Any) -> None:
        self.meta = environment.open_db(b"meta")
        self.streams = environment.open_db(b"streams")
        self.incarnations = environment.open_db(b"incarnations")
        self.expiring = environment.open_db(b"expiring")
        self.extents = environment.open_db(b"extents")
        self.segments = environment.open_db(b"segments")
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
        return Kept(0 if stream.forks else stream.earliest, stream.content_type)
