"""lib0 framing: round trips, the specification's own examples, and bytes that are not framed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.protocol.lib0 import check_updates, encode_varuint, frame_update, read_varuint, split_frames

UPDATES = st.lists(st.binary(max_size=300), max_size=20)


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (2**53 - 1, None)]
)
def test_varuints_are_the_specifications(number: int, encoded: bytes | None) -> None:
    assert encoded is None or encode_varuint(number) == encoded
    assert read_varuint(encode_varuint(number) + b"rest", 0) == (number, len(encode_varuint(number)))


@given(st.integers(0, 2**53 - 1), st.binary(max_size=5), st.binary(max_size=5))
def test_varuint_round_trip(number: int, before: bytes, after: bytes) -> None:
    encoded = encode_varuint(number)
    assert read_varuint(before + encoded + after, len(before)) == (number, len(before) + len(encoded))


@given(UPDATES)
def test_frames_round_trip(updates: list[bytes]) -> None:
    assert split_frames(b"".join(map(frame_update, updates))) == updates


@given(UPDATES.filter(bool), st.data())
def test_truncated_frames_are_refused_unless_cut_between_two(updates: list[bytes], data: st.DataObject) -> None:
    frames = [frame_update(update) for update in updates]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole) - 1))
    ends = [sum(map(len, frames[:count])) for count in range(len(frames))]
    if cut in ends:
        assert split_frames(whole[:cut]) == updates[: ends.index(cut)]
    else:
        with pytest.raises(InvalidRequest) as refusal:
            split_frames(whole[:cut])
        assert refusal.value.code == "invalid_framing"
        assert "byte" in refusal.value.message and refusal.value.hint is not None


@given(st.binary(max_size=400))
def test_any_bytes_are_split_without_loss_or_refused(data: bytes) -> None:
    try:
        updates = split_frames(data)
    except InvalidRequest:
        return
    # A length may be written longer than it need be; the updates are what must not change.
    assert split_frames(b"".join(map(frame_update, updates))) == updates
    assert sum(map(len, updates)) + len(updates) <= len(data)


@given(UPDATES.filter(bool), st.data())
def test_a_flipped_byte_is_refused_or_stays_in_its_place(updates: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(frame_update, updates)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        split = split_frames(bytes(whole))
    except InvalidRequest:
        return
    assert split != updates


def test_a_length_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 8 bytes"):
        split_frames(b"\x80" * 8 + b"\x00")
    with pytest.raises(InvalidRequest, match="cut off"):
        split_frames(b"\x80\x80")


def test_empty_updates_are_not_updates() -> None:
    check_updates(frame_update(b"\0\0") + frame_update(b"x" * 200))
    with pytest.raises(InvalidRequest, match="at byte 3 is empty"):
        check_updates(frame_update(b"\0\0") + frame_update(b""))
