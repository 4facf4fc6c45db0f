"""Records: exact round trips, positions, and bytes that are damaged or from another version."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Corrupt
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.streams.records import (
    AnyRecord,
    Appended,
    BucketCreated,
    BucketDeleted,
    ForkPoint,
    SecretsCreated,
    StreamCreated,
    StreamDeleted,
    StreamsTouched,
    StreamTrimmed,
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
    decode_batch,
    encode_batch,
    encode_record,
    span,
)
from millstream.units import Incarnation, Milliseconds, Offset

text = st.text(st.characters(codec="utf-8"), max_size=12)
number = st.integers(0, 2**62)
messages = st.lists(st.binary(max_size=20), max_size=4)
claims = st.none() | st.builds(ProducerClaim, text, number, number)
wakes = st.none() | st.builds(Wake, text, number, st.dictionaries(text, number, max_size=3), st.none() | text)
links = st.dictionaries(text, st.tuples(st.lists(text, max_size=2), st.integers(-1, 2**62)), max_size=3)
optional = st.none() | text
configs = st.builds(
    SubscriptionConfig, text, optional, st.lists(text, max_size=2), optional, optional, number, optional
)

records = st.one_of(
    st.builds(BucketCreated, text, number),
    st.builds(BucketDeleted, text, number),
    st.builds(
        StreamCreated,
        text,
        text,
        number,
        text,
        messages,
        st.booleans(),
        st.none() | number,
        optional,
        st.none() | number,
        st.none() | st.builds(ForkPoint, number, number, number, number),
        optional,
        claims,
    ),
    st.builds(Appended, number, number, number, messages, st.booleans(), optional, claims),
    st.builds(StreamDeleted, number, number, st.builds(StreamKey, text, text), st.booleans()),
    st.builds(StreamsTouched, st.dictionaries(number, number, max_size=4)),
    st.builds(SecretsCreated, st.binary(max_size=32), st.binary(max_size=32)),
    st.builds(SubscriptionCreated, text, number, text, configs, links),
    st.builds(SubscriptionDeleted, text, number),
    st.builds(StreamTrimmed, number, number, number),
    st.builds(
        SubscriptionChanged,
        text,
        number,
        number,
        wakes,
        number,
        st.none() | number,
        links,
        st.lists(text, max_size=2),
        st.dictionaries(text, number, max_size=2),
    ),
)
batches = st.lists(records, max_size=4)


def encoded(batch: list[object]) -> bytes:
    return encode_batch([encode_record(record) for record in batch])


@given(batches)
def test_a_batch_survives_the_round_trip(batch: list[object]) -> None:
    assert decode_batch(encoded(batch)) == batch


@given(batches.filter(bool), st.data())
def test_a_batch_cut_short_is_corrupt(batch: list[object], data: st.DataObject) -> None:
    payload = encoded(batch)
    with pytest.raises(Corrupt):
        decode_batch(payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(batches, st.binary(min_size=1, max_size=8))
def test_a_batch_with_bytes_behind_it_is_corrupt(batch: list[object], extra: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_batch(encoded(batch) + extra)


@given(batches.filter(bool), st.data())
def test_a_batch_with_a_byte_flipped_is_corrupt_or_other_records_never_a_crash(
    batch: list[object], data: st.DataObject
) -> None:
    # The frame's checksum finds damage; here it must only not end in an error of another kind.
    payload = bytearray(encoded(batch))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_batch(bytes(payload))
    except Corrupt as error:
        assert error.hint
    else:
        assert isinstance(found, list)


@given(st.binary(max_size=60))
def test_whatever_the_bytes_the_answer_is_records_or_corrupt(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except Corrupt:
        return


@given(batches)
def test_a_record_takes_one_position_one_for_each_message_and_one_for_closing(batch: list[AnyRecord]) -> None:
    for record in batch:
        closes = getattr(record, "close", False) or getattr(record, "closed", False)
        assert span(record) == 1 + len(getattr(record, "messages", [])) + closes


def test_a_record_from_an_older_version_gets_the_defaults_of_newer_fields() -> None:
    older = msgspec.msgpack.encode([[4, 7, 0, 99, [b"x"]], [3, "b", "s", 5, "text/plain", []]])
    appended, created = decode_batch(older)
    assert appended == Appended(Incarnation(7), Offset(0), Milliseconds(99), [b"x"])
    assert created == StreamCreated("b", "s", Milliseconds(5), "text/plain", [])


def test_a_record_of_an_unknown_kind_is_corrupt_and_says_what_to_do() -> None:
    with pytest.raises(Corrupt, match="cannot read") as caught:
        decode_batch(msgspec.msgpack.encode([[60_000, 1]]))
    assert caught.value.hint is not None
    assert "newer" in caught.value.hint


def test_tags_are_what_they_have_always_been() -> None:
    # A tag is never reused: files written by any earlier version depend on these.
    assert {
        kind: kind.__struct_config__.tag
        for kind in (BucketCreated, BucketDeleted, StreamCreated, Appended, StreamDeleted, StreamsTouched)
    } == {BucketCreated: 1, BucketDeleted: 2, StreamCreated: 3, Appended: 4, StreamDeleted: 5, StreamsTouched: 6}
    assert [
        kind.__struct_config__.tag
        for kind in (SecretsCreated, SubscriptionCreated, SubscriptionDeleted, SubscriptionChanged)
    ] == [7, 8, 9, 10]
    assert StreamTrimmed.__struct_config__.tag == 14
