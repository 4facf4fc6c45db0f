"""Frames and segment headers: exact round trips, and no byte that may change unnoticed."""

from __future__ import annotations

import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st

from millstream.log.frames import (
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    decode_frame,
    decode_segment_header,
    encode_frame,
    encode_segment_header,
    find_frame,
)
from millstream.log.interface import LogBatch
from millstream.units import Position

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(SegmentHeader, st.integers(0, 2**16 - 1), u32, u64, u32)
batches = st.builds(
    lambda first, span, payload: LogBatch(first, first + span, payload),
    st.integers(0, 2**63),
    st.integers(1, 2**20),
    st.binary(max_size=200),
)


@given(headers)
def test_a_segment_header_survives_the_round_trip(header: SegmentHeader) -> None:
    encoded = encode_segment_header(header)
    assert len(encoded) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(encoded) == header
    assert decode_segment_header(memoryview(encoded + b"frames follow")) == header


@given(headers, st.integers(0, SEGMENT_HEADER_BYTES - 1))
def test_a_segment_header_cut_short_is_none(header: SegmentHeader, size: int) -> None:
    assert decode_segment_header(encode_segment_header(header)[:size]) is None


@given(headers, st.integers(0, SEGMENT_HEADER_BYTES - 1), st.integers(1, 255))
def test_a_segment_header_with_a_byte_flipped_is_none(header: SegmentHeader, at: int, mask: int) -> None:
    damaged = bytearray(encode_segment_header(header))
    damaged[at] ^= mask
    assert decode_segment_header(bytes(damaged)) is None


def test_the_header_bytes_are_those_the_format_describes() -> None:
    fields = b"MSTRMLOG" + struct.pack("<HHIQI", 1, 0, 3, 77, 0xDEADBEEF)
    assert encode_segment_header(SegmentHeader(1, 3, 77, 0xDEADBEEF)) == fields + struct.pack("<I", zlib.crc32(fields))


@given(batches, u32, st.binary(max_size=40), st.binary(max_size=40))
def test_a_frame_survives_the_round_trip_between_other_bytes(
    batch: LogBatch, salt: int, before: bytes, after: bytes
) -> None:
    data = memoryview(before + encode_frame(batch, salt) + after)
    assert decode_frame(data, len(before), salt) == (batch, len(data) - len(after))


@given(batches, u32, st.data())
def test_a_frame_cut_short_is_none(batch: LogBatch, salt: int, data: st.DataObject) -> None:
    frame = encode_frame(batch, salt)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert decode_frame(memoryview(frame[:cut]), 0, salt) is None
    # A file is allocated ahead: what is not written yet reads as zeros. A payload that ends in zeros loses nothing.
    torn = frame[:cut].ljust(len(frame), b"\0")
    assert decode_frame(memoryview(torn), 0, salt) == ((batch, len(frame)) if torn == frame else None)


@given(batches, u32, st.data())
def test_a_frame_with_a_byte_flipped_is_none(batch: LogBatch, salt: int, data: st.DataObject) -> None:
    damaged = bytearray(encode_frame(batch, salt))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    assert decode_frame(memoryview(bytes(damaged)), 0, salt) is None


@given(batches, u32, u32)
def test_a_frame_of_another_segment_is_none(batch: LogBatch, salt: int, other: int) -> None:
    found = decode_frame(memoryview(encode_frame(batch, salt)), 0, other)
    assert (found is not None) == (salt == other)


def test_a_frame_that_covers_no_position_is_none() -> None:
    assert decode_frame(memoryview(encode_frame(LogBatch(Position(5), Position(5), b"x"), 1)), 0, 1) is None


@given(batches, u32, st.binary(max_size=60).map(lambda junk: junk.replace(b"MSBF", b"")))
def test_a_frame_is_found_behind_bytes_that_are_none(batch: LogBatch, salt: int, junk: bytes) -> None:
    decoy = b"MSBF" + junk
    frame = encode_frame(batch, salt)
    at = find_frame(memoryview(decoy + frame), 0, salt)
    assert at == len(decoy)
    assert find_frame(memoryview(decoy + frame), len(decoy) + 1, salt) is None or b"MSBF" in batch.payload


def test_a_frame_stored_by_a_client_is_not_taken_for_one() -> None:
    # A client does not know the salt, so the bytes it stores cannot check.
    forged = encode_frame(LogBatch(Position(1), Position(2), b"forged"), 0)
    frame = encode_frame(LogBatch(Position(1), Position(2), forged), 0x5A17)
    assert find_frame(memoryview(frame), 1, 0x5A17) is None
    assert len(frame) == FRAME_HEADER_BYTES + len(forged)
