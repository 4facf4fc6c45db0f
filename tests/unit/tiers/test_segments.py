"""Segments: any messages survive the round trip, in order, and damage of any kind is noticed."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import Corrupt
from millstream.tiers import segment_encoder as encoder
from millstream.tiers import segments as module
from millstream.tiers.segment_encoder import EncodedSegment
from millstream.tiers.segment_reader import FetchedRange, decode_columns
from millstream.tiers.segments import (
    BYTES_COLUMNS,
    FORMAT,
    ORDER_COLUMNS,
    SCHEMA,
    Footer,
    RowGroup,
    SegmentInfo,
    decode_extents,
    decode_footer,
    footer_bytes,
    row_group_range,
)
from millstream.units import Milliseconds, Position
from support.segments import START_MS, Run, encode_segment, run_of

BUCKET = "a bucket é%"
COLUMNS = [
    "bucket",
    "stream",
    "offset_start",
    "offset_end",
    "shard",
    "position",
    "appended_at",
    "content_type",
    "payload",
]
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


@st.composite
def some_runs(draw: st.DrawFn) -> list[Run]:
    """Streams whose messages were appended in turns."""
    keys = draw(st.lists(st.tuples(NAMES, st.integers(1, 2**40)), min_size=1, max_size=8, unique_by=lambda key: key[1]))
    runs = []
    for stream, incarnation in keys:
        start = draw(st.sampled_from([0, 7, 2**45]))
        messages = draw(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=12))
        runs.append(Run(stream, incarnation, start, messages, [], []))
    position = draw(st.integers(1, 2**40))
    for run in draw(st.permutations([one for one in runs for _ in one.messages])):
        position += draw(st.integers(1, 2))
        run.positions.append(position)
        run.times.append(START_MS + len(run.times))
    return runs


def decoded(footer: Footer, group: int, fetched: FetchedRange, path: str) -> RowGroup:
    return RowGroup(decode_columns(footer.metadata, group, fetched, path, [*BYTES_COLUMNS, *ORDER_COLUMNS]))


def row_groups(encoded: EncodedSegment, path: str = "p") -> list[RowGroup]:
    footer = decode_footer(bytes(encoded.data[-encoded.footer_bytes :]), path, encoded.footer_checksum)
    groups = []
    for group in range(footer.metadata.num_row_groups):
        start, end = row_group_range(footer.metadata, group)
        groups.append(decoded(footer, group, FetchedRange(start, bytes(encoded.data[start:end])), path))
    return groups


def check_round_trip(runs: list[Run], encoded: EncodedSegment) -> None:
    """Every stream's messages, found by the index of the footer alone, are what went in."""
    footer = decode_footer(bytes(encoded.data[-encoded.footer_bytes :]), "p", encoded.footer_checksum)
    assert footer.extents == decode_extents(encoded.extents)
    assert footer.info == encoded.info
    groups = row_groups(encoded)
    for run in runs:
        mine = [one for one in footer.extents if (one.stream, one.incarnation) == (run.stream, run.incarnation)]
        assert mine[0].offset_start == run.start
        assert mine[-1].offset_end == run.ends[-1]
        assert all(before.offset_end == after.offset_start for before, after in pairwise(mine))
        found: list[bytes] = []
        joined = b""
        ends: list[int] = []
        positions: list[int] = []
        times: list[int] = []
        for extent in mine:
            group, first, stop = groups[extent.row_group], extent.row_start, extent.row_start + extent.rows
            found += group.messages(first, stop)
            joined += group.bytes_of(first, stop)
            ends += group.ends[first:stop]
            positions += group.positions[first:stop]
            times += group.times[first:stop]
        assert found == run.messages
        assert joined == b"".join(run.messages)
        assert (ends, positions, times) == (run.ends, run.positions, run.times)


@given(some_runs())
def test_any_runs_survive_the_round_trip_through_a_segment(runs: list[Run]) -> None:
    encoded = encode_segment(BUCKET, 3, runs)
    check_round_trip(runs, encoded)
    assert encoded.info == SegmentInfo(
        FORMAT,
        3,
        BUCKET,
        Position(min(run.positions[0] for run in runs)),
        Position(max(run.positions[-1] for run in runs)),
        Milliseconds(min(run.times[0] for run in runs)),
        Milliseconds(max(run.times[-1] for run in runs)),
        sum(len(run.messages) for run in runs),
        sum(map(len, (message for run in runs for message in run.messages))),
    )


@given(some_runs())
@settings(max_examples=40)
def test_any_engine_sees_the_rows_sorted_by_stream_incarnation_and_offset(runs: list[Run]) -> None:
    table = parquet.read_table(io.BytesIO(encode_segment(BUCKET, 3, runs).data))
    assert table.schema.names[: len(COLUMNS)] == COLUMNS
    assert table.schema.remove_metadata().equals(SCHEMA)
    rows = table.to_pylist()
    keys = [(row["stream"], row["incarnation"], row["offset_start"]) for row in rows]
    assert keys == sorted(keys)
    assert {(row["bucket"], row["shard"]) for row in rows} == {(BUCKET, 3)}
    assert all(row["offset_end"] - row["offset_start"] == len(row["payload"]) for row in rows)
    expected = [
        (run.stream, run.content_type, run.ends[index], run.positions[index], run.times[index], message)
        for run in sorted(runs, key=lambda run: (run.stream, run.incarnation))
        for index, message in enumerate(run.messages)
    ]
    found = [
        (
            row["stream"],
            row["content_type"],
            row["offset_end"],
            row["position"],
            round(row["appended_at"].timestamp() * 1000),
            row["payload"],
        )
        for row in rows
    ]
    assert found == expected


@given(some_runs(), st.integers(1, 200), st.integers(1, 9))
def test_row_groups_of_any_size_hold_everything_once(runs: list[Run], size: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "ROW_GROUP_BYTES", size)
        patch.setattr(encoder, "ROW_GROUP_ROWS", rows)
        encoded = encode_segment(BUCKET, 0, runs)
    check_round_trip(runs, encoded)
    footer = decode_footer(bytes(encoded.data[-encoded.footer_bytes :]), "p", encoded.footer_checksum)
    for group in range(footer.metadata.num_row_groups):
        mine = [extent for extent in footer.extents if extent.row_group == group]
        assert sum(extent.rows for extent in mine) == footer.metadata.row_group(group).num_rows <= rows
        assert len(mine) == 1 or sum(extent.offset_end - extent.offset_start for extent in mine) <= size


def test_messages_larger_than_a_row_group_get_one_each_and_small_ones_share() -> None:
    large = random.Random(1).randbytes(3 << 20)
    runs = [run_of("large", 1, 0, [large, b"x", large]), run_of("small", 2, 0, [b"y"] * 20_000, 10)]
    encoded = encode_segment(BUCKET, 0, runs)
    check_round_trip(runs, encoded)
    extents = decode_extents(encoded.extents)
    assert [(one.row_group, one.rows) for one in extents if one.stream == "large"] == [(0, 1), (1, 1), (2, 1)]


def test_text_that_repeats_is_compressed() -> None:
    encoded = encode_segment(BUCKET, 0, [run_of("s", 1, 0, [b"the same again " * 70] * 1000)])
    assert len(encoded.data) < encoded.info.payload_bytes / 20
    metadata = parquet.read_metadata(io.BytesIO(encoded.data))
    assert {metadata.row_group(0).column(one).compression for one in range(metadata.num_columns)} == {"ZSTD"}


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoded() -> EncodedSegment:
    chance = random.Random(5)
    runs = [
        run_of(f"stream-{number}", number + 1, 0, [chance.randbytes(chance.randrange(1, 90)) for _ in range(40)])
        for number in range(5)
    ]
    return encode_segment(BUCKET, 0, runs)


def read_everything(data: bytes, written: EncodedSegment) -> object:
    footer = decode_footer(data[-written.footer_bytes :], "the-path", written.footer_checksum)
    found = []
    for group in range(footer.metadata.num_row_groups):
        start, end = row_group_range(footer.metadata, group)
        rows = decoded(footer, group, FetchedRange(start, data[start:end]), "the-path")
        count = len(rows.ends)
        found.append((rows.messages(0, count), rows.ends, rows.positions, rows.times))
    return footer.info, footer.extents, found


def test_a_flipped_bit_in_a_page_never_changes_what_is_read(encoded: EncodedSegment) -> None:
    whole = read_everything(bytes(encoded.data), encoded)
    pages = len(encoded.data) - footer_bytes(encoded.data[-8:], "p")
    noticed = 0
    for at in range(4, pages, 7):
        damaged = bytearray(encoded.data)
        damaged[at] ^= 1 << at % 8
        try:
            assert read_everything(bytes(damaged), encoded) == whole, f"byte {at} was flipped and the content changed"
        except Corrupt as error:
            assert "the-path" in error.message
            noticed += 1
    assert noticed > pages / 7 / 4, "only the columns nobody reads may be damaged unnoticed"


def test_a_flipped_bit_in_the_footer_is_always_noticed(encoded: EncodedSegment) -> None:
    for at in range(len(encoded.data) - encoded.footer_bytes, len(encoded.data), 11):
        damaged = bytearray(encoded.data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(Corrupt, match="the-path"):
            read_everything(bytes(damaged), encoded)


@pytest.mark.parametrize("kept", [0, 3, 7, 8, 100, -1, -4, -8, -200])
def test_a_truncated_file_is_refused(encoded: EncodedSegment, kept: int) -> None:
    with pytest.raises(Corrupt, match="the-path"):
        read_everything(bytes(encoded.data[:kept]), encoded)


def test_a_parquet_file_of_another_program_is_refused() -> None:
    sink = io.BytesIO()
    parquet.write_table(parquet.read_table(io.BytesIO(encode_segment("b", 0, [run_of("s", 1, 0, [b"x"])]).data)), sink)
    data = sink.getvalue()
    metadata = parquet.read_metadata(io.BytesIO(data)).metadata or {}
    if b"millstream.index" in metadata:
        pytest.skip("this pyarrow carries foreign metadata over")
    with pytest.raises(Corrupt, match="the-path"):
        tail = data[-footer_bytes(data[-8:], "the-path") :]
        decode_footer(tail, "the-path", zlib.crc32(tail))


def test_a_segment_of_a_later_format_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 99)
    later = encode_segment(BUCKET, 0, [run_of("s", 1, 0, [b"x"])])
    monkeypatch.undo()
    with pytest.raises(Corrupt, match="99"):
        decode_footer(bytes(later.data[-later.footer_bytes :]), "p", later.footer_checksum)


def test_the_checksum_is_that_of_the_whole_file(encoded: EncodedSegment) -> None:
    assert encoded.checksum == zlib.crc32(encoded.data)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(encoded.info), type=SegmentInfo) == encoded.info


@given(some_runs(), st.sampled_from([b"", b",", b"--"]), st.data())
def test_joined_messages_are_the_messages_joined(runs: list[Run], separator: bytes, data: st.DataObject) -> None:
    for group in row_groups(encode_segment(BUCKET, 0, runs)):
        first = data.draw(st.integers(0, len(group.ends) - 1))
        stop = data.draw(st.integers(first + 1, len(group.ends)))
        assert bytes(group.joined(first, stop, separator)) == separator.join(group.messages(first, stop))


def output_of(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    return outcome.stdout.strip()


def test_writing_and_reading_segments_imports_no_pandas(tmp_path: Path) -> None:
    """Arrow imports it when it is given Python values in some ways; in the server that would be a second's pause."""
    script = f"""
import sys
from pathlib import Path
from millstream.tiers.objects import Objects
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import BYTES_COLUMNS, RowGroup
from support.segments import encode_segment, run_of, segment_ref

runs = [run_of("a", 1, 0, [b"x"] * 3), run_of("b", 2, 0, [b"x"], 9), run_of("c", 3, 0, [b"x"], 10)]
for some in (runs, runs[:2], runs[1:2]):
    encoded = encode_segment("b", 0, some)
    folder = Path({str(tmp_path)!r})
    (folder / "segment").write_bytes(encoded.data)
    reader = SegmentReader(Objects(None, folder))
    ref = segment_ref("segment", encoded)
    group = RowGroup(reader.row_group(ref, reader.footer(ref).metadata, 0, BYTES_COLUMNS))
    assert bytes(group.joined(0, len(group.ends), b",")) == b",".join([b"x"] * len(group.ends))
print("pandas" in sys.modules)
"""
    assert output_of(script) == "False"


def test_a_server_starts_without_pandas() -> None:
    script = "import sys, millstream.server.node.run; print('pandas' in sys.modules)"
    assert output_of(script) == "False"
