"""Manifests and notes: their codecs, and which manifests make up the history that counts."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Corrupt, OtherFormat
from millstream.protocol.producers import ProducerState
from millstream.streams.records import SegmentRef
from millstream.tiers.checked import seal
from millstream.tiers.manifests import (
    FORMAT,
    FeedNote,
    Manifest,
    ManifestFlush,
    ManifestHead,
    ManifestStream,
    Replacement,
    decode_notes,
    encode_manifest,
    encode_notes,
    find_chain,
    read_head,
    read_manifest,
)
from millstream.units import Milliseconds, Position

NUMBERS = st.integers(0, 2**60)
TEXTS = st.text(max_size=20)
SEGMENTS = st.builds(SegmentRef, TEXTS, TEXTS, *[NUMBERS] * 10)
PRODUCERS = st.builds(ProducerState, NUMBERS, NUMBERS, NUMBERS)
MANIFESTS = st.builds(
    Manifest,
    st.just(FORMAT),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.lists(st.builds(ManifestFlush, NUMBERS, NUMBERS, TEXTS, st.lists(SEGMENTS, max_size=3)), max_size=3),
    st.lists(TEXTS, max_size=3),
    st.lists(
        st.builds(ManifestStream, NUMBERS, st.binary(), st.binary(), st.booleans(), st.none() | st.binary()),
        max_size=3,
    ),
    st.lists(st.tuples(NUMBERS, st.binary(max_size=20)), max_size=3),
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3),
    st.dictionaries(TEXTS, st.binary(max_size=20), max_size=3),
    st.lists(st.builds(Replacement, st.lists(TEXTS, max_size=3), st.lists(SEGMENTS, max_size=2)), max_size=2),
    st.lists(TEXTS, max_size=3),
    NUMBERS,
    st.binary(max_size=16),
    st.lists(st.tuples(NUMBERS, st.dictionaries(TEXTS, PRODUCERS, max_size=2)), max_size=2),
)
NOTES = st.lists(st.builds(FeedNote, TEXTS, NUMBERS, TEXTS, TEXTS, NUMBERS, NUMBERS, TEXTS), max_size=5)


@given(MANIFESTS)
def test_any_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    assert read_manifest(encode_manifest(manifest), "p")[0] == manifest


@given(MANIFESTS)
def test_the_head_of_a_manifest_is_the_same_whether_the_rest_is_decoded_or_not(manifest: Manifest) -> None:
    encoded = encode_manifest(manifest)
    head = read_head(encoded, "p")
    assert head == read_manifest(encoded, "p")[1]
    assert (head.first, head.through, head.epoch, head.previous) == (
        manifest.first,
        manifest.through,
        manifest.epoch,
        manifest.previous,
    )


@given(MANIFESTS, st.data())
def test_the_head_of_a_damaged_manifest_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    encoded = bytearray(encode_manifest(manifest))
    with pytest.raises(Corrupt, match="the-path"):
        read_head(bytes(encoded[: data.draw(st.integers(0, len(encoded) - 1))]), "the-path")
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt, match="the-path"):
        read_head(bytes(encoded), "the-path")


@given(NOTES)
def test_any_notes_survive_the_round_trip(notes: list[FeedNote]) -> None:
    assert decode_notes(encode_notes(notes), "p") == notes


@given(MANIFESTS, st.data())
def test_a_truncated_manifest_is_refused_by_its_name(manifest: Manifest, data: st.DataObject) -> None:
    encoded = encode_manifest(manifest)
    with pytest.raises(Corrupt, match="the-path"):
        read_manifest(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "the-path")


@given(NOTES.filter(bool), st.data())
def test_truncated_notes_are_refused_by_their_name(notes: list[FeedNote], data: st.DataObject) -> None:
    encoded = encode_notes(notes)
    with pytest.raises(Corrupt, match="the-path"):
        decode_notes(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "the-path")


@given(MANIFESTS, st.data())
def test_a_flipped_bit_in_a_manifest_is_always_refused(manifest: Manifest, data: st.DataObject) -> None:
    damaged = bytearray(encode_manifest(manifest))
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(Corrupt, match="the-path"):
        read_manifest(bytes(damaged), "the-path")[0]


@given(NOTES, st.data())
def test_a_flipped_bit_in_notes_is_always_refused(notes: list[FeedNote], data: st.DataObject) -> None:
    damaged = bytearray(encode_notes(notes))
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(Corrupt, match="the-path"):
        decode_notes(bytes(damaged), "the-path")


def test_a_manifest_of_a_later_format_is_refused_by_its_number() -> None:
    manifest = Manifest(99, 0, Position(1), Position(2), Milliseconds(0), 1, 1, [], [], [], [], [], {})
    with pytest.raises(OtherFormat, match="99"):
        read_manifest(encode_manifest(manifest), "p")[0]


def test_a_manifest_of_another_format_is_not_taken_for_damaged_whatever_follows_its_number() -> None:
    with pytest.raises(OtherFormat, match="99"):
        read_manifest(seal(msgspec.msgpack.encode([99, "another", {"shape": 1}])), "p")


# -- which ones count --------------------------------------------------------------------------------------------


def step(first: int, through: int, name: str = "") -> ManifestHead:
    return ManifestHead(name or f"{first}-{through}", Position(first), Position(through), 1, 1)


def full(through: int, parts: int = 1) -> list[ManifestHead]:
    """As a flusher writes them: it knows how many parts there are only when it is at the last."""
    numbers = range(1, parts + 1)
    return [
        ManifestHead(f"full-{through}.{n}", Position(0), Position(through), n, parts if n == parts else 0)
        for n in numbers
    ]


def chain(*heads: ManifestHead) -> list[str]:
    """The names of the chain, which must not depend on the order of a listing."""
    found = [head.path for head in find_chain(list(heads)).heads]
    for seed in range(6):
        shuffled = random.Random(seed).sample(heads, len(heads))
        assert [head.path for head in find_chain(shuffled).heads] == found
    return found


def test_no_manifests_make_no_chain() -> None:
    assert chain() == []


def test_steps_from_the_beginning_follow_one_another() -> None:
    assert chain(step(1, 5), step(5, 9), step(9, 12)) == ["1-5", "5-9", "9-12"]


def test_a_step_that_does_not_join_is_left_out() -> None:
    assert chain(step(1, 5), step(6, 9)) == ["1-5"]


def test_steps_without_a_beginning_are_nothing() -> None:
    assert chain(step(5, 9)) == []


def test_of_two_steps_from_one_place_the_one_that_leads_further_counts() -> None:
    assert chain(step(1, 5), step(5, 9), step(5, 7), step(7, 30)) == ["1-5", "5-7", "7-30"]


def test_an_unsealed_step_beside_its_successor_is_left_out() -> None:
    assert chain(step(1, 5), step(5, 8, "unsealed"), step(5, 11), step(11, 14)) == ["1-5", "5-11", "11-14"]


def test_a_full_manifest_replaces_the_steps_up_to_it() -> None:
    assert chain(*full(9), step(9, 12)) == ["full-9.1", "9-12"]
    assert chain(step(1, 5), step(5, 9), *full(9), step(9, 12)) == ["full-9.1", "9-12"]


def test_the_latest_of_several_full_manifests_is_enough() -> None:
    assert chain(*full(5), *full(9), step(5, 9), step(9, 12)) == ["full-9.1", "9-12"]


def test_a_full_manifest_in_parts_counts_when_all_are_there() -> None:
    assert chain(*full(9, 3), step(9, 12)) == ["full-9.1", "full-9.2", "full-9.3", "9-12"]


def test_a_full_manifest_that_lacks_a_part_is_left_out_for_the_steps() -> None:
    for missing in range(3):
        parts = full(9, 3)
        del parts[missing]
        assert chain(*parts, step(1, 5), step(5, 9), step(9, 12)) == ["1-5", "5-9", "9-12"]


# -- links, epochs and holes -------------------------------------------------------------------------------------


def linked(first: int, through: int, name: str, previous: str = "", epoch: int = 1) -> ManifestHead:
    return ManifestHead(
        name, Position(first), Position(through), 1, 1, Milliseconds(0), epoch, name.encode(), previous.encode()
    )


def names_of(heads: list[ManifestHead]) -> list[str]:
    return [head.path for head in heads]


A, B, C, D = (
    linked(1, 5, "a"),
    linked(5, 9, "b", "a"),
    linked(9, 12, "c", "b"),
    linked(12, 20, "d", "c"),
)


@pytest.mark.parametrize("missing", [A, B, C])
def test_what_lies_behind_a_missing_manifest_is_told(missing: ManifestHead) -> None:
    heads = [A, B, C, D]
    found = find_chain([head for head in heads if head is not missing])
    assert found.heads == heads[: heads.index(missing)]
    assert found.beyond == heads[heads.index(missing) + 1 :]
    assert found.passed == []


def test_a_leftover_of_a_crash_is_passed_over_and_no_hole() -> None:
    unsealed = linked(5, 8, "unsealed", "a")
    assert find_chain([A, unsealed, B, C]) == ([A, B, C], [], [unsealed])
    last = linked(12, 14, "last", "c")
    assert find_chain([A, B, C, last, D]) == ([A, B, C, D], [], [last])


def test_a_leftover_does_not_stand_in_for_a_missing_manifest() -> None:
    """It ends at the same position, and the next one does not name it."""
    twin = linked(5, 9, "twin", "a")
    found = find_chain([A, twin, C, D])
    assert (found.heads, found.beyond) == ([A, twin], [C, D])


def test_the_later_owner_is_right_however_far_the_earlier_one_went_on() -> None:
    late, later = linked(5, 50, "late", "a"), linked(50, 60, "later", "late")
    new = linked(5, 7, "new", "a", epoch=2)
    found = find_chain([A, late, later, new])
    assert (found.heads, found.beyond, found.passed) == ([A, new], [], [late, later])


def test_a_full_manifest_goes_on_where_the_one_that_it_repeats_did() -> None:
    whole = ManifestHead("full", Position(0), Position(12), 1, 1, Milliseconds(0), 1, b"full", b"c")
    assert find_chain([whole, D]).heads == [whole, D]
    assert find_chain([A, B, C, whole, D]) == ([whole, D], [], [A, B, C])
    stranger = linked(12, 20, "stranger", "not c")
    assert find_chain([whole, stranger]) == ([whole], [stranger], [])


def test_a_full_manifest_that_lacks_a_part_and_its_predecessors_is_a_hole() -> None:
    parts = [
        ManifestHead(f"full-{n}", Position(0), Position(12), n, 3 if n == 3 else 0, Milliseconds(0), 1, b"", b"c")
        for n in (1, 3)
    ]
    found = find_chain([*parts, D])
    assert found.heads == []
    assert names_of(found.beyond) == ["full-1", "full-3", "d"]


@given(st.integers(2, 12), st.data())
def test_any_missing_manifest_is_noticed_unless_it_is_the_last(count: int, data: st.DataObject) -> None:
    heads = [linked(1 + 3 * n, 4 + 3 * n, str(n), str(n - 1) if n else "") for n in range(count)]
    leftovers = [
        linked(head.first, head.through - data.draw(st.integers(0, 2)), f"left-{head.path}", head.previous.decode())
        for head in heads
        if data.draw(st.booleans())
    ]
    missing = data.draw(st.sampled_from(heads[:-1]))
    there = data.draw(st.permutations([*(head for head in heads if head is not missing), *leftovers]))
    found = find_chain(list(there))
    assert set(found.beyond) >= set(heads[heads.index(missing) + 1 :])
    # Without its successor, a manifest and a leftover that reaches as far look the same.
    before = heads[: max(heads.index(missing) - 1, 0)]
    assert found.heads[: len(before)] == before
