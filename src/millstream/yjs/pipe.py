"""The format in which the server and the merging process exchange data, byte by byte.

To the process: records, each a length (4 bytes, little-endian) and that many bytes. The first record is the current
snapshot, empty if there is none; each further one is a message of the stream. From the process: one such record with
JSON (`skipped`: pairs of place and reason, `skipped_count`; or `error`), then the new snapshot until the end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

LENGTH: Final = struct.Struct("<I")


def pack_records(records: Sequence[bytes | memoryview]) -> bytes:
    pack = LENGTH.pack
    return b"".join([part for record in records for part in (pack(len(record)), record)])


def unpack_records(data: bytes) -> list[bytes]:
    records: list[bytes] = []
    position = 0
    while position < len(data):
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        records.append(data[position : position + length])
        position += length
    return records
