"""Journals: what is added comes back in order, from any position on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.tiers.journal import Entry, Journal, Journals, Note
from millstream.units import Incarnation, Milliseconds, Offset, Position

# Records as they come: how many positions each takes, of which stream it is, and how many notes it leaves.
records = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2)), max_size=30)


def filled(taken: list[tuple[int, int, int]]) -> tuple[Journal, list[Entry], list[int]]:
    """A journal, its entries, and where each record ends."""
    journal, entries, ends = Journal(), [], []
    position = 1
    for span, incarnation, notes in taken:
        made = tuple(
            Note("created", f"s{incarnation}", Milliseconds(position), Offset(index), "text/plain")
            for index in range(notes)
        )
        journal.add(Position(position), Incarnation(incarnation), *made)
        entries.append(Entry(Position(position), Incarnation(incarnation), made))
        position += span
        ends.append(position)
    return journal, entries, ends


@given(records, st.integers(0, 200))
def test_entries_after_a_position_miss_no_record_that_reaches_beyond_it(
    taken: list[tuple[int, int, int]], after: int
) -> None:
    journal, entries, ends = filled(taken)
    found = list(journal.entries(Position(after)))
    needed = [entry for entry, end in zip(entries, ends, strict=True) if end - 1 > after]
    assert found[max(len(found) - len(needed), 0) :] == needed
    assert len(found) <= len(needed) + 1, "one record too many at most: the one that may end behind the position"


@given(records)
def test_entries_from_the_start_are_all_that_was_added(taken: list[tuple[int, int, int]]) -> None:
    journal, entries, _ = filled(taken)
    assert list(journal.entries(Position(0))) == entries


def test_entry_that_holds_the_position_itself_is_given_again() -> None:
    journal = Journal()
    journal.add(Position(10), Incarnation(1))  # an append of several messages: positions 11, 12, 13
    journal.add(Position(14), Incarnation(2))
    assert [entry.position for entry in journal.entries(Position(12))] == [10, 14]
    assert [entry.position for entry in journal.entries(Position(14))] == [14]


def test_journal_of_nothing_has_no_entries() -> None:
    assert list(Journal().entries(Position(0))) == []
    assert list(Journal().entries(Position(99))) == []


def test_each_bucket_has_one_journal_of_its_own() -> None:
    journals = Journals()
    journals.add("one", Position(1), Incarnation(1))
    journals.add("two", Position(2), Incarnation(2))
    assert [entry.position for entry in journals.of("one").entries(Position(0))] == [1]
    assert [entry.position for entry in journals.of("two").entries(Position(0))] == [2]
    assert list(journals.of("three").entries(Position(0))) == []


def test_journals_that_are_only_asked_for_take_no_memory() -> None:
    journals = Journals()
    assert list(journals.of("nobody").entries(Position(0))) == []
    assert (journals.buckets(), journals.bytes) == ([], 0)


@given(
    st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), st.integers(0, 2)), max_size=30), st.integers(1, 40)
)
def test_what_is_dropped_no_longer_counts(taken: list[tuple[str, int]], start: int) -> None:
    whole, rest = Journals(), Journals()
    for position, (bucket, notes) in enumerate(taken, 1):
        made = [Note("created", "s", Milliseconds(position), Offset(0), "text/plain")] * notes
        whole.add(bucket, Position(position), Incarnation(1), *made)
        if position >= start:
            rest.add(bucket, Position(position), Incarnation(1), *made)
    whole.start_at(Position(start))
    whole.drop(whole.buckets())
    assert (sorted(whole.buckets()), whole.bytes) == (sorted(rest.buckets()), rest.bytes)


def test_journal_holds_positions_beyond_32_bits() -> None:
    journal = Journal()
    journal.add(Position(2**40), Incarnation(2**33))
    assert list(journal.entries(Position(2**39))) == [Entry(Position(2**40), Incarnation(2**33), ())]
