"""The catalog: stream rows survive exactly, a checkpoint is all or nothing, and listings are in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import lmdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import Corrupt, OtherFormat
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.slices import batched
from millstream.streams.records import ForkPoint, SegmentRef
from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import (
    Checkpoint,
    SealedFlush,
    SealedReplacement,
    SealedSegment,
)
from millstream.tiers.manifests import ManifestStream, encode_manifest_streams
from millstream.tiers.segments import Extent, encode_extents
from millstream.tiers.stream_rows import (
    COMMON_TYPES,
    NO_EXTENTS,
    OWN_EXTENTS_MAX,
    decode_key,
    decode_stream,
    encode_key,
    encode_stream,
    pack_stream,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position

number = st.integers(0, 2**62)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
keys = st.builds(StreamKey, text, text)
expiries = st.one_of(
    st.just(Expiry()),
    st.builds(Expiry, number, st.none(), st.none()),
    st.builds(Expiry, st.none(), text, number),
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    fork = draw(st.none() | st.builds(ForkPoint, number, number, number, number))
    content_type = draw(st.sampled_from([*COMMON_TYPES, "application/json; x", "a/b"]))
    stream = Stream.created(
        Incarnation(draw(number)), draw(keys), content_type, Milliseconds(draw(number)), draw(expiries), fork
    )
    stream.last_write_at_ms, stream.last_access_ms = Milliseconds(draw(number)), Milliseconds(draw(number))
    stream.tail = Offset(draw(number))
    stream.closed = draw(st.booleans())
    if draw(st.booleans()):  # of most there is nothing more to say
        return stream
    stream.closed_by = draw(st.none() | st.builds(ProducerClaim, text, number, number))
    stream.seq = draw(st.none() | text)
    stream.forks = draw(number)
    stream.soft_deleted = stream.deleted = draw(st.booleans())
    return stream


def packed(encoded: ManifestStream) -> bytes:
    return pack_stream(encoded.incarnation, NO_EXTENTS, encoded.row)


def fields(stream: Stream) -> dict[str, object]:
    return {name: getattr(stream, name) for name in Stream.__struct_fields__}


@given(streams())
def test_a_stream_survives_the_round_trip(stream: Stream) -> None:
    encoded = encode_stream(stream)
    assert decode_key(encoded.name) == stream.key
    assert encoded.incarnation == stream.incarnation
    assert fields(decode_stream(stream.key, packed(encoded))) == fields(stream)
    assert encoded.expires == (stream.expiry != Expiry())


def test_a_stream_of_which_there_is_little_to_say_takes_few_bytes() -> None:
    one = Stream.created(
        Incarnation(1_000_000), StreamKey("b", "s"), "application/json", Milliseconds(1_790_000_000_000)
    )
    one.tail, one.last_write_at_ms, one.last_access_ms = (
        Offset(4096),
        Milliseconds(1_790_500_000_000),
        Milliseconds(1_790_500_000_000),
    )
    assert len(encode_stream(one).row) <= 20


@given(streams(), st.data())
def test_a_row_cut_short_is_an_error(stream: Stream, data: st.DataObject) -> None:
    row = encode_stream(stream).row
    cut = row[: data.draw(st.integers(0, len(row) - 1))]
    with pytest.raises(msgspec.MsgspecError):
        decode_stream(stream.key, pack_stream(stream.incarnation, NO_EXTENTS, cut))


@given(streams(), st.data())
def test_a_row_with_a_byte_flipped_is_an_error_or_a_stream_never_a_crash(stream: Stream, data: st.DataObject) -> None:
    row = bytearray(encode_stream(stream).row)
    row[data.draw(st.integers(0, len(row) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_stream(stream.key, pack_stream(stream.incarnation, NO_EXTENTS, bytes(row)))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert found.key == stream.key


@given(keys, keys)
def test_keys_keep_buckets_apart_and_together(one: StreamKey, other: StreamKey) -> None:
    assert decode_key(encode_key(one)) == one
    if one.bucket == other.bucket:
        assert (encode_key(one) < encode_key(other)) == (one.stream.encode() < other.stream.encode())
    else:
        assert not encode_key(one).startswith(encode_key(StreamKey(other.bucket, "")))


# -- on disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog")
    yield opened
    opened.close()


def stream(incarnation: int, bucket: str, name: str, **values: object) -> Stream:
    made = Stream.created(Incarnation(incarnation), StreamKey(bucket, name), "text/plain", Milliseconds(1))
    for field, value in values.items():
        setattr(made, field, value)
    return made


def checkpoint(position: int, *saved: Stream, removed: tuple[Stream, ...] = ()) -> Checkpoint:
    empty: dict[str, Any] = {
        name: {} if name == "singletons" else []
        for name in Checkpoint._fields
        if name not in ("position", "streams", "removed")
    }
    return Checkpoint(
        position=Position(position),
        streams=encode_manifest_streams([encode_stream(one) for one in saved]),
        removed=[(one.incarnation.to_bytes(8, "big"), encode_key(one.key)) for one in removed],
        **empty,
    )


def test_a_saved_stream_is_found_by_name_and_by_incarnation(catalog: Catalog) -> None:
    saved = stream(7, "logs", "a", tail=5)
    catalog.write(checkpoint(20, saved))
    by_name, by_incarnation = catalog.load_key(saved.key), catalog.load_incarnation(Incarnation(7))
    assert by_name is not None
    assert by_incarnation is not None
    assert fields(by_name) == fields(by_incarnation) == fields(saved)
    assert catalog.load_key(StreamKey("logs", "b")) is None
    assert catalog.load_incarnation(Incarnation(8)) is None
    assert catalog.position == 20


class WrittenMeanwhile:
    """An environment in which a checkpoint is committed just after the next transaction has begun."""

    def __init__(self, environment: lmdb.Environment, write: Callable[[], None]) -> None:
        self._environment = environment
        self._write: Callable[[], None] | None = write

    def begin(self, **options: Any) -> lmdb.Transaction:
        transaction = self._environment.begin(**options)
        if self._write is not None:
            write, self._write = self._write, None
            other = Thread(target=write)
            other.start()
            other.join()
        return transaction

    def close(self) -> None:
        self._environment.close()


def test_a_lookup_that_begins_just_before_a_checkpoint_does_not_show_the_past_from_then_on(catalog: Catalog) -> None:
    saved = stream(7, "logs", "a", tail=5)
    catalog.write(checkpoint(20, saved))
    saved.tail = Offset(9)
    later = checkpoint(30, saved)
    environment: Any = WrittenMeanwhile(catalog._environment, lambda: catalog.write(later))
    catalog._environment = environment
    for _ in range(2):
        found = catalog.load_key(saved.key)
        assert found is not None
        assert found.tail == 9


def test_a_removed_stream_is_gone_and_its_successor_stays(catalog: Catalog) -> None:
    old, new = stream(7, "logs", "a"), stream(9, "logs", "a", tail=3)
    catalog.write(checkpoint(8, old))
    catalog.write(checkpoint(10, new, removed=(old,)))
    assert catalog.load_incarnation(Incarnation(7)) is None
    found = catalog.load_incarnation(Incarnation(9))
    assert found is not None
    assert found.tail == 3
    catalog.write(checkpoint(11, removed=(new,)))
    assert catalog.load_key(new.key) is None


def test_what_was_written_is_there_after_reopening_with_its_position(tmp_path: Path) -> None:
    first = Catalog(tmp_path)
    assert first.position == 1
    first.write(checkpoint(42, stream(7, "logs", "a")))
    first.close()
    second = Catalog(tmp_path)
    assert second.position == 42
    assert second.load_incarnation(Incarnation(7)) is not None
    second.close()


def test_a_checkpoint_that_fails_leaves_everything_as_it_was(catalog: Catalog) -> None:
    catalog.write(checkpoint(8, stream(7, "logs", "a", tail=1)))
    with pytest.raises(Exception, match="MDB_BAD_VALSIZE"):
        catalog.write(checkpoint(20, stream(7, "logs", "a", tail=2), stream(9, "logs", "x" * 2000)))
    found = catalog.load_incarnation(Incarnation(7))
    assert found is not None
    assert (found.tail, catalog.position) == (1, 8)


def test_a_scan_is_in_order_within_its_prefix_and_behind_its_start(catalog: Catalog) -> None:
    names = ["a", "ab", "b", "b/c", "é"]
    saved = [stream(number + 1, bucket, name) for bucket in ("log", "logs") for number, name in enumerate(names)]
    saved = [stream(number, one.key.bucket, one.key.stream) for number, one in enumerate(saved, 1)]
    catalog.write(checkpoint(99, *saved))

    def listed(prefix: bytes, after: bytes = b"") -> list[str]:
        return [str(decode_key(name)) for name, _ in catalog.scan(prefix, after)]

    assert listed(b"logs\0") == ["logs/a", "logs/ab", "logs/b", "logs/b/c", "logs/é"]
    assert listed(b"logs\0a") == ["logs/a", "logs/ab"]
    assert listed(b"logs\0", b"logs\0ab") == ["logs/b", "logs/b/c", "logs/é"]
    assert listed(b"logs\0", b"logs\0aa") == ["logs/ab", "logs/b", "logs/b/c", "logs/é"]
    assert len(listed(b"")) == 10
    assert listed(b"none\0") == []


def test_only_streams_with_a_deadline_are_listed_as_expiring(catalog: Catalog) -> None:
    window = stream(1, "logs", "window", expiry=Expiry(ttl_seconds=60), last_access_ms=1_000)
    fixed = stream(2, "logs", "fixed", expiry=Expiry(None, "x", Milliseconds(5_000)))
    catalog.write(checkpoint(9, window, fixed, stream(3, "logs", "ever")))
    assert sorted(catalog.expiring()) == [(1, 61_000), (2, 5_000)]
    catalog.write(checkpoint(10, removed=(fixed,)))
    assert list(catalog.expiring()) == [(1, 61_000)]


# -- where cold messages lie ------------------------------------------------------------------------------------


def segment_ref(number: int, extents: list[Extent]) -> SegmentRef:
    size = sum(one.offset_end - one.offset_start for one in extents)
    return SegmentRef(
        f"segment-{number}",
        "logs",
        1,
        0,
        len(extents),
        size,
        Position(number),
        Position(number),
        Milliseconds(0),
        Milliseconds(0),
        0,
        0,
    )


class Model:
    """What a catalog should know of a few streams after any number of flushes, trims and deletions."""

    def __init__(self) -> None:
        self.streams = {name: stream(number, "logs", name) for number, name in enumerate("abc", 1)}
        self.extents: dict[int, list[tuple[int, int, int]]] = {1: [], 2: [], 3: []}
        self.gone: list[Stream] = []
        self.segments: dict[int, int] = {}  # their live bytes
        self.position = 4

    def flush(self, sizes: dict[str, list[int]]) -> SealedFlush:
        """Append messages, a row group for each, in a segment for every two of them."""
        self.position += 10
        found: list[Extent] = []
        for name, lengths in sorted(sizes.items()):
            owner = self.streams[name]
            for length in lengths:
                found.append(Extent(name, owner.incarnation, owner.tail, owner.tail + length, len(found), 0, 1))
                owner.tail += length
        sealed = []
        for some in batched(found, 2):
            number = len(self.segments) + 1
            self.segments[number] = sum(one.offset_end - one.offset_start for one in some)
            sealed.append(SealedSegment(segment_ref(number, list(some)), encode_extents(list(some))))
            for one in some:
                self.extents[one.incarnation].append((one.offset_start, one.offset_end, number))
        return SealedFlush(Position(self.position), Position(self.position - 10), "", sealed)

    def drop(self, incarnation: int, before: int) -> None:
        for start, end, number in self.extents[incarnation]:
            if end <= before:
                self.segments[number] -= end - start
        self.extents[incarnation] = [one for one in self.extents[incarnation] if one[1] > before]

    def trim(self, name: str, share: float) -> None:
        owner = self.streams[name]
        bounds = [0, *(end for _, end, _ in self.extents[owner.incarnation])]
        owner.earliest = Offset(max(owner.earliest, bounds[int(share * (len(bounds) - 1))]))
        self.drop(owner.incarnation, owner.earliest)

    def replace(self, name: str) -> Stream:
        old = self.streams[name]
        self.drop(old.incarnation, old.tail)
        del self.extents[old.incarnation]
        self.gone.append(old)
        self.streams[name] = stream(self.position - 1, "logs", name)
        self.extents[self.position - 1] = []
        return old

    def save(self, catalog: Catalog, *flushes: SealedFlush, removed: tuple[Stream, ...] = ()) -> None:
        trimmed = [(one.incarnation, one.earliest) for one in self.streams.values() if one.earliest]
        saved = checkpoint(self.position, *self.streams.values(), removed=removed)
        catalog.write(saved._replace(flushes=list(flushes), trimmed=trimmed, now_ms=Milliseconds(NOW_MS)))

    def check(self, catalog: Catalog) -> None:
        for owner in self.streams.values():
            loaded = catalog.load_key(owner.key)
            assert loaded is not None
            assert fields(loaded) == fields(owner)
            for offset in range(owner.tail + 1):
                expected = next((one for one in self.extents[owner.incarnation] if one[1] > offset), None)
                found = catalog.extent_at(owner.incarnation, Offset(offset))
                assert (found and (found.offset_start, found.row.offset_end, found.row.segment)) == expected
            for start, end, number in self.extents[owner.incarnation]:
                exact = catalog.extent_of(owner.incarnation, Offset(start))
                assert exact is not None
                assert (exact.offset_end, exact.segment) == (end, number)
        for owner in self.gone:
            assert catalog.load_incarnation(owner.incarnation) is None
            assert catalog.extent_at(owner.incarnation, Offset(0)) is None
        assert {number: row.live_bytes for number, row in catalog.segments()} == self.segments
        assert set(catalog.dead_segments(Milliseconds(NOW_MS))) == {
            number for number, live in self.segments.items() if not live
        }


NOW_MS = 5
lengths = st.lists(st.integers(1, 3), max_size=4)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), lengths),
            st.dictionaries(st.sampled_from("abc"), st.floats(0, 1), max_size=1),
            st.sampled_from(["", "", "", "a", "b"]),
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_index_is_as_if_every_extent_were_on_its_own(
    steps: list[tuple[dict[str, list[int]], dict[str, float], str]],
) -> None:
    model = Model()
    with TemporaryDirectory() as directory:
        catalog = Catalog(Path(directory))
        model.save(catalog)
        for sizes, trims, replaced in steps:
            flush = model.flush(sizes)
            for name, share in trims.items():
                model.trim(name, share)
            removed = (model.replace(replaced),) if replaced else ()
            model.save(catalog, flush, removed=removed)
            model.check(catalog)
        catalog.close()


def test_extents_are_found_wherever_they_are_kept(catalog: Catalog) -> None:
    model = Model()
    model.save(catalog)
    for _ in range(2 * OWN_EXTENTS_MAX + 3):
        model.save(catalog, model.flush({"a": [1]}))
        model.check(catalog)


def test_a_compaction_stands_for_what_rows_and_the_table_hold(catalog: Catalog) -> None:
    model = Model()
    model.save(catalog)
    for _ in range(OWN_EXTENTS_MAX + 3):
        model.save(catalog, model.flush({"a": [2], "b": [1]}))
    ends = {name: model.streams[name].tail for name in "ab"}
    extents = [Extent(name, Incarnation(number), Offset(0), ends[name], 0, 0, 1) for number, name in enumerate("ab", 1)]
    whole = SealedReplacement(
        [f"segment-{number}" for number in model.segments],
        [SealedSegment(segment_ref(99, extents), encode_extents(extents))],
    )
    model.position += 1
    catalog.write(checkpoint(model.position)._replace(replacements=[whole], now_ms=Milliseconds(NOW_MS)))
    number = len(model.segments) + 1
    model.segments = dict.fromkeys(model.segments, 0) | {number: sum(ends.values())}
    model.extents |= {incarnation: [(0, ends[name], number)] for incarnation, name in enumerate("ab", 1)}
    model.check(catalog)
    model.save(catalog, model.flush({"a": [3]}))
    model.check(catalog)


def test_what_footers_list_of_streams_that_are_gone_or_trimmed_is_dropped(catalog: Catalog) -> None:
    model = Model()
    flush = model.flush({"a": [1, 1], "b": [1]})
    model.streams["a"].earliest = Offset(1)
    kept = [model.streams["a"], model.streams["c"]]
    catalog.write(checkpoint(model.position, *kept)._replace(flushes=[flush]))
    catalog.drop_dead_extents(Milliseconds(NOW_MS))
    assert catalog.extent_at(Incarnation(2), Offset(0)) is None
    found = catalog.extent_at(Incarnation(1), Offset(0))
    assert found is not None
    assert found.offset_start == 1
    assert [row.live_bytes for _, row in catalog.segments()] == [1, 0]


@pytest.mark.parametrize("written", [1, 4, 99])
def test_a_catalog_of_another_format_is_refused(tmp_path: Path, written: int) -> None:
    with lmdb.open(str(tmp_path), max_dbs=8) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(write=True, db=meta) as transaction:
            transaction.put(b"format", str(written).encode())
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(OtherFormat, match=f"format {written}"):
        Catalog(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_catalog_that_is_no_database_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(Corrupt) as caught:
        Catalog(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
