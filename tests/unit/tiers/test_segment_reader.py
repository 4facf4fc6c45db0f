"""The one reader of segment files: the same rows from a folder and from a store whose ranges are fetched."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from millstream.errors import Corrupt, NotFound
from millstream.streams.records import SegmentRef
from millstream.tiers import segment_reader
from millstream.tiers.objects import Objects
from millstream.tiers.segment_reader import FetchedFile, FetchedRange, SegmentReader
from millstream.tiers.segments import SCHEMA
from support.segments import encode_segment, run_of, segment_ref

RUNS = [run_of(f"stream-{n}", n + 1, 7, [os.urandom(40_000) for _ in range(60)], 1 + 60 * n) for n in range(5)]
ENCODED = encode_segment("b", 0, RUNS)
WHOLE = parquet.read_table(io.BytesIO(ENCODED.data))
REF = segment_ref("segments/x.parquet", ENCODED)
GROUPS = parquet.read_metadata(io.BytesIO(ENCODED.data)).num_row_groups


def in_folder(folder: Path, data: bytes) -> SegmentReader:
    (folder / "segments").mkdir(exist_ok=True)
    (folder / REF.path).write_bytes(data)
    return SegmentReader(Objects(None, folder))


def in_store(data: bytes) -> SegmentReader:
    store = MemoryStore()
    store.put(REF.path, data)
    return SegmentReader(Objects(store, None))


@pytest.fixture(scope="module", params=["folder", "store"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SegmentReader:
    data = bytes(ENCODED.data)
    return in_folder(tmp_path_factory.mktemp("cold"), data) if request.param == "folder" else in_store(data)


def rows_of(groups: list[int], columns: list[str]) -> arrow.Table:
    file = parquet.ParquetFile(io.BytesIO(ENCODED.data))
    return file.read_row_groups(groups, columns=columns)


@given(
    groups=st.lists(st.integers(0, GROUPS - 1), min_size=1, unique=True).map(sorted),
    columns=st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True).map(sorted),
)
def test_every_way_to_read_gives_the_rows_of_the_file(
    reader: SegmentReader, groups: list[int], columns: list[str]
) -> None:
    metadata = reader.footer(REF).metadata
    expected = rows_of(groups, columns).to_pylist()
    batches = list(reader.tables(REF, metadata, groups, columns))
    assert [group for some, _ in batches for group in some] == groups
    tables = [table for _, table in batches]
    assert arrow.concat_tables(tables).to_pylist() == expected
    each = list(reader.row_groups(REF, metadata, groups, columns))
    assert [group for group, _ in each] == groups
    assert arrow.concat_tables([table for _, table in each]).to_pylist() == expected
    for group in groups[:2]:
        found = reader.row_group(REF, metadata, group, columns)
        assert found.to_pylist() == rows_of([group], columns).to_pylist()


def test_tables_hold_a_bounded_number_of_row_groups(reader: SegmentReader) -> None:
    metadata = reader.footer(REF).metadata
    tables = [table for _, table in reader.tables(REF, metadata, range(GROUPS), ["payload"])]
    assert len(tables) > GROUPS // 3
    assert max(table.nbytes for table in tables) <= segment_reader.BATCH_BYTES + (1 << 20)


def test_footers_come_in_the_order_of_the_segments(reader: SegmentReader) -> None:
    refs = [REF] * 40
    found = list(reader.footers(refs))
    assert [ref for ref, _ in found] == refs
    assert all(footer.info == ENCODED.info for _, footer in found)
    first = reader.footers(refs)
    next(first)
    first.close()  # type: ignore[attr-defined]


def missing_from(reader: SegmentReader) -> SegmentRef:
    return segment_ref("segments/gone.parquet", ENCODED)


def test_missing_segment_is_not_found(reader: SegmentReader) -> None:
    gone = missing_from(reader)
    metadata = reader.footer(REF).metadata
    with pytest.raises(NotFound, match=r"gone\.parquet"):
        reader.footer(gone)
    with pytest.raises(NotFound, match=r"gone\.parquet"):
        list(reader.footers([REF, gone]))
    with pytest.raises(NotFound, match=r"gone\.parquet"):
        list(reader.tables(gone, metadata, [0], ["payload"]))
    with pytest.raises(NotFound, match=r"gone\.parquet"):
        reader.row_group(gone, metadata, 0, ["payload"])


@pytest.mark.parametrize("place", ["folder", "store"])
def test_damaged_and_truncated_segments_are_corrupt(tmp_path: Path, place: str) -> None:
    good = in_store(bytes(ENCODED.data))
    metadata = good.footer(REF).metadata
    at = metadata.row_group(1).column(SCHEMA.get_field_index("payload")).data_page_offset + 200
    flipped = bytearray(ENCODED.data)
    flipped[at] ^= 1
    for data in (bytes(flipped), bytes(ENCODED.data[:at])):
        reader = in_folder(tmp_path, data) if place == "folder" else in_store(data)
        with pytest.raises(Corrupt, match="row group 1"):
            reader.row_group(REF, metadata, 1, ["payload"])
        with pytest.raises(Corrupt):
            list(reader.tables(REF, metadata, [1], ["payload"]))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_fetched_file_gives_what_was_fetched_and_nothing_else(data: bytes, draw: st.DataObject) -> None:
    start = draw.draw(st.integers(0, len(data) - 1))
    end = draw.draw(st.integers(start + 1, len(data)))
    file = FetchedFile([FetchedRange(start, data[start:end])])
    assert file.seek(0, io.SEEK_END) == end
    at, size = draw.draw(st.integers(0, len(data) + 5)), draw.draw(st.integers(0, 50))
    file.seek(at)
    if start <= at <= end:
        assert file.read(size) == data[at : min(at + size, end)]
    else:
        with pytest.raises(OSError, match="was not fetched"):
            file.read(size)
