"""Manifests and notes: their codecs, and which manifests make up the history that counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef
from millstream.tiers.manifests import (
    FORMAT,
    FeedNote,
    Manifest,
    ManifestFlush,
    ManifestHead,
    ManifestStream,
    decode_manifest,
    decode_notes,
    encode_manifest,
    encode_notes,
    longest_chain,
)

NUMBERS = st.integers(0, 2**60)
TEXTS = st.text(max_size=20)
SEGMENTS = st.builds(SegmentRef, TEXTS, TEXTS, *[NUMBERS] * 10)
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
)
NOTES = st.lists(st.builds(FeedNote, TEXTS, NUMBERS, TEXTS, TEXTS, NUMBERS, NUMBERS, TEXTS), max_size=5)


@given(MANIFESTS)
def test_any_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest), "p") == manifest


@given(NOTES)
def test_any_notes_survive_the_round_trip(notes: list[FeedNote]) -> None:
    assert decode_notes(encode_notes(notes), "p") == notes


@given(MANIFESTS, st.data())
def test_a_truncated_manifest_is_refused_by_its_name(manifest: Manifest, data: st.DataObject) -> None:
    encoded = encode_manifest(manifest)
    with pytest.raises(Corrupt, match="the-path"):
        decode_manifest(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "the-path")


@given(NOTES.filter(bool), st.data())
def test_truncated_notes_are_refused_by_their_name(notes: list[FeedNote], data: st.DataObject) -> None:
    encoded = encode_notes(notes)
    with pytest.raises(Corrupt, match="the-path"):
        decode_notes(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "the-path")


@given(MANIFESTS, st.data())
def test_a_flipped_bit_in_a_manifest_is_an_error_of_ours_if_it_is_one(manifest: Manifest, data: st.DataObject) -> None:
    damaged = bytearray(encode_manifest(manifest))
    at = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    try:
        decode_manifest(bytes(damaged), "the-path")
    except Corrupt as error:
        assert "the-path" in error.message


def test_a_manifest_of_a_later_format_is_refused_by_its_number() -> None:
    manifest = Manifest(99, 0, 1, 2, 0, 1, 1, [], [], [], [], [], {})
    with pytest.raises(Corrupt, match="99"):
        decode_manifest(encode_manifest(manifest), "p")


# -- which ones count --------------------------------------------------------------------------------------------


def step(first: int, through: int, name: str = "") -> ManifestHead:
    return ManifestHead(name or f"{first}-{through}", first, through, 1, 1)


def full(through: int, parts: int = 1) -> list[ManifestHead]:
    """As a flusher writes them: it knows how many parts there are only when it is at the last."""
    numbers = range(1, parts + 1)
    return [ManifestHead(f"full-{through}.{n}", 0, through, n, parts if n == parts else 0) for n in numbers]


def chain(*heads: ManifestHead) -> list[str]:
    """The names of the chain, which must not depend on the order of a listing."""
    found = [head.path for head in longest_chain(list(heads))]
    for seed in range(6):
        shuffled = random.Random(seed).sample(heads, len(heads))
        assert [head.path for head in longest_chain(shuffled)] == found
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
