"""The catalog: stream rows survive exactly, a checkpoint is all or nothing, and listings are in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Corrupt
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim, ProducerState
from millstream.streams.records import ForkPoint
from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, decode_key, decode_stream, encode_key, encode_stream

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
    content_type = draw(st.sampled_from(["text/plain", "application/json; x", "a/b"]))
    stream = Stream.created(draw(number), draw(keys), content_type, draw(number), draw(expiries), fork)
    stream.last_write_at_ms, stream.last_access_ms = draw(number), draw(number)
    stream.tail = draw(number)
    stream.closed = draw(st.booleans())
    stream.closed_by = draw(st.none() | st.builds(ProducerClaim, text, number, number))
    stream.seq = draw(st.none() | text)
    stream.producers = draw(st.dictionaries(text, st.builds(ProducerState, number, number), max_size=3))
    stream.forks = draw(number)
    stream.soft_deleted = stream.deleted = draw(st.booleans())
    return stream


def fields(stream: Stream) -> dict[str, object]:
    return {name: getattr(stream, name) for name in Stream.__struct_fields__}


@given(streams())
def test_a_stream_survives_the_round_trip(stream: Stream) -> None:
    encoded = encode_stream(stream)
    assert decode_key(encoded.name) == stream.key
    assert encoded.incarnation == stream.incarnation
    assert fields(decode_stream(stream.key, encoded.row)) == fields(stream)
    assert encoded.expires == (stream.expiry != Expiry())


@given(streams(), st.data())
def test_a_row_cut_short_is_an_error(stream: Stream, data: st.DataObject) -> None:
    row = encode_stream(stream).row
    with pytest.raises(msgspec.MsgspecError):
        decode_stream(stream.key, row[: data.draw(st.integers(0, len(row) - 1))])


@given(streams(), st.data())
def test_a_row_with_a_byte_flipped_is_an_error_or_a_stream_never_a_crash(stream: Stream, data: st.DataObject) -> None:
    row = bytearray(encode_stream(stream).row)
    row[data.draw(st.integers(0, len(row) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_stream(stream.key, bytes(row))
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
    made = Stream.created(incarnation, StreamKey(bucket, name), "text/plain", 1)
    for field, value in values.items():
        setattr(made, field, value)
    return made


def checkpoint(position: int, *saved: Stream, removed: tuple[Stream, ...] = ()) -> Checkpoint:
    empty = {
        name: {} if name == "singletons" else []
        for name in Checkpoint._fields
        if name not in ("position", "streams", "removed")
    }
    return Checkpoint(
        position=position,
        streams=[encode_stream(one) for one in saved],
        removed=[(one.incarnation.to_bytes(8, "big"), encode_key(one.key)) for one in removed],
        **empty,
    )


def test_a_saved_stream_is_found_by_name_and_by_incarnation(catalog: Catalog) -> None:
    saved = stream(7, "logs", "a", tail=5)
    catalog.write(checkpoint(20, saved))
    by_name, by_incarnation = catalog.load_key(saved.key), catalog.load_incarnation(7)
    assert by_name is not None
    assert by_incarnation is not None
    assert fields(by_name) == fields(by_incarnation) == fields(saved)
    assert catalog.load_key(StreamKey("logs", "b")) is None
    assert catalog.load_incarnation(8) is None
    assert catalog.position == 20


def test_a_removed_stream_is_gone_and_its_successor_stays(catalog: Catalog) -> None:
    old, new = stream(7, "logs", "a"), stream(9, "logs", "a", tail=3)
    catalog.write(checkpoint(8, old))
    catalog.write(checkpoint(10, new, removed=(old,)))
    assert catalog.load_incarnation(7) is None
    found = catalog.load_incarnation(9)
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
    assert second.load_incarnation(7) is not None
    second.close()


def test_a_checkpoint_that_fails_leaves_everything_as_it_was(catalog: Catalog) -> None:
    catalog.write(checkpoint(8, stream(7, "logs", "a", tail=1)))
    good = checkpoint(20, stream(7, "logs", "a", tail=2))
    too_long = msgspec.structs.replace(good.streams[0], name=b"x" * 2000)
    with pytest.raises(Exception, match="MDB_BAD_VALSIZE"):
        catalog.write(good._replace(streams=[*good.streams, too_long]))
    found = catalog.load_incarnation(7)
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
    fixed = stream(2, "logs", "fixed", expiry=Expiry(None, "x", 5_000))
    catalog.write(checkpoint(9, window, fixed, stream(3, "logs", "ever")))
    assert sorted(catalog.expiring()) == [(1, 61_000), (2, 5_000)]
    catalog.write(checkpoint(10, removed=(fixed,)))
    assert list(catalog.expiring()) == [(1, 61_000)]


def test_a_catalog_of_another_format_is_refused(tmp_path: Path) -> None:
    import lmdb

    with lmdb.open(str(tmp_path), max_dbs=8) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(write=True, db=meta) as transaction:
            transaction.put(b"format", b"99")
    with pytest.raises(Corrupt, match="format 99"):
        Catalog(tmp_path)


def test_a_catalog_that_is_no_database_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(Corrupt) as caught:
        Catalog(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
