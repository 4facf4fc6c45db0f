"""The bytes of a log segment file. See docs/formats/log.md.

Segment header, 32 bytes, little-endian:

    0   8  magic "MSTRMLOG"
    8   2  format version, 1
    10  2  zero
    12  4  shard
    16  8  first position
    24  4  salt
    28  4  CRC-32 of bytes 0–27

Then frames, each one batch, then zeros (the file is allocated ahead):

    0   4  magic: CRC-32 of "MSBF", seeded with the segment's salt
    4   4  payload bytes
    8   8  first position
    16  8  next position
    24  4  CRC-32 of bytes 4–23 and the payload, seeded with the segment's salt
    28     payload

A batch is written only after the one before it is durable. So an invalid frame with no valid frame after it was torn by
a crash and never acknowledged; an invalid frame with a valid one after it is damage. The salt prevents that bytes
stored by a client are taken for a frame or its start.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

from millstream.log.interface import LogBatch

VERSION: Final = 1
SEGMENT_MAGIC: Final = b"MSTRMLOG"

_SEGMENT: Final = struct.Struct("<8sHHIQI")
_CHECKSUM: Final = struct.Struct("<I")
_FRAME: Final = struct.Struct("<4sIQQI")
_FRAME_CHECKED: Final = struct.Struct("<IQQ")

SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CHECKSUM.size
FRAME_HEADER_BYTES: Final = _FRAME.size


class SegmentHeader(NamedTuple):
    version: int
    shard: int
    first: int
    salt: int


def encode_segment_header(header: SegmentHeader) -> bytes:
    fields = _SEGMENT.pack(SEGMENT_MAGIC, header.version, 0, header.shard, header.first, header.salt)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def decode_segment_header(data: bytes | memoryview) -> SegmentHeader | None:
    """The header, or None if these bytes are not one."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    magic, version, _, shard, first, salt = _SEGMENT.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _SEGMENT.size)
    if magic != SEGMENT_MAGIC or checksum != zlib.crc32(data[: _SEGMENT.size]):
        return None
    return SegmentHeader(version, shard, first, salt)


def frame_magic(salt: int) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(b"MSBF", salt))


def encode_frame(batch: LogBatch, salt: int) -> bytes:
    checked = _FRAME_CHECKED.pack(len(batch.payload), batch.first, batch.next)
    checksum = zlib.crc32(batch.payload, zlib.crc32(checked, salt))
    return b"".join((frame_magic(salt), checked, _CHECKSUM.pack(checksum), batch.payload))


def decode_frame(data: memoryview, at: int, salt: int) -> tuple[LogBatch, int] | None:
    """The frame at this place and where the next one starts, or None if there is no valid frame."""
    if at + FRAME_HEADER_BYTES > len(data):
        return None
    magic, length, first, following, checksum = _FRAME.unpack_from(data, at)
    end = at + FRAME_HEADER_BYTES + length
    if magic != frame_magic(salt) or end > len(data) or following <= first:
        return None
    payload = data[at + FRAME_HEADER_BYTES : end]
    if zlib.crc32(payload, zlib.crc32(data[at + 4 : at + 24], salt)) != checksum:
        return None
    return LogBatch(first, following, bytes(payload)), end


def find_frame(data: memoryview, at: int, salt: int) -> int | None:
    """Where the next valid frame at or after this place starts, if there is one."""
    haystack = data.obj if isinstance(data.obj, bytes) else bytes(data)
    magic = frame_magic(salt)
    while (at := haystack.find(magic, at)) >= 0:
        if decode_frame(data, at, salt) is not None:
            return at
        at += 1
    return None
