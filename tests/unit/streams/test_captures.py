"""Captures: what is captured is the state of that moment, and a capture that fails loses and repeats nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.streams.captures import Capture
from millstream.streams.machine import StateMachine
from millstream.streams.namespace import Namespace
from millstream.streams.records import Appended, SnapshotPublished, SnapshotRef, StreamCreated, StreamDeleted
from millstream.streams.state import Stream
from millstream.units import Incarnation, Milliseconds, Offset, Position

NOW = 1_800_000_000_000


class Nothing:
    """A catalog that holds nothing yet."""

    def load_key(self, key: object) -> None:
        return None

    def load_incarnation(self, incarnation: int) -> None:
        return None

    def load_producer(self, incarnation: int, producer_id: str) -> None:
        return None

    def producer_count(self, incarnation: int) -> int:
        return 0


class Bed:
    def __init__(self) -> None:
        self.namespace = Namespace(Nothing())
        self.machine = StateMachine(self.namespace)
        self.position = 1

    def apply(self, record: Any) -> int:
        position, self.position = self.position, self.position + 10
        self.machine.apply(record, Position(position))
        return position

    def create(self, name: str) -> int:
        return self.apply(StreamCreated("b", name, Milliseconds(NOW), "text/plain", [], False))

    def stream(self, incarnation: int) -> Stream:
        found = self.namespace.if_resident(Incarnation(incarnation))
        assert found is not None
        return found

    def close(self, incarnation: int) -> None:
        self.apply(
            Appended(Incarnation(incarnation), self.stream(incarnation).tail, Milliseconds(NOW), [b"x"], close=True)
        )

    def snapshot(self, incarnation: int, blob: str) -> None:
        self.apply(
            SnapshotPublished(
                Incarnation(incarnation), Milliseconds(NOW), SnapshotRef(Offset(0), "text/plain", blob, 1, 1), False
            )
        )

    def delete(self, incarnation: int) -> None:
        self.apply(StreamDeleted(Incarnation(incarnation), Milliseconds(NOW), self.stream(incarnation).key))


def encoder(stream: Stream) -> bytes:
    return f"{stream.incarnation}:{stream.tail}:{stream.closed}".encode()


def unsaved(namespace: Namespace) -> set[int]:
    return {stream.incarnation for stream in namespace.unsaved()}


def test_a_stream_that_changes_after_the_capture_is_encoded_as_it_was() -> None:
    bed = Bed()
    closed, grown, still = bed.create("closed"), bed.create("grown"), bed.create("still")
    capture = bed.namespace.begin_capture(encoder)
    bed.close(closed)
    bed.apply(Appended(Incarnation(grown), Offset(0), Milliseconds(NOW), [b"more"]))
    assert sorted(capture.encoded) == sorted(f"{one}:0:False".encode() for one in (closed, grown))
    assert not capture.encode_some(10)
    assert sorted(capture.encoded) == sorted(f"{one}:0:False".encode() for one in (closed, grown, still))
    assert set(bed.namespace.changed) == {closed}, "what only grew is told by its messages"


def test_streams_are_encoded_some_at_a_time() -> None:
    bed = Bed()
    for number in range(5):
        bed.create(f"s{number}")
    capture = bed.namespace.begin_capture(encoder)
    assert [capture.encode_some(2) for _ in range(3)] == [True, True, False]
    assert len(capture.encoded) == 5


def test_committed_changes_are_not_captured_again() -> None:
    bed = Bed()
    kept, gone = bed.create("kept"), bed.create("gone")
    bed.snapshot(gone, "blob")
    bed.delete(gone)
    capture = bed.namespace.begin_capture()
    assert (set(capture.changed), set(capture.removed), capture.freed_blobs) == ({kept}, {gone}, ["blob"])
    assert unsaved(bed.namespace) == {kept} and bed.namespace.is_removed(Incarnation(gone))
    bed.namespace.commit(capture)
    assert unsaved(bed.namespace) == set() and not bed.namespace.is_removed(Incarnation(gone))
    after = bed.namespace.begin_capture()
    assert (after.changed, after.removed, after.freed_blobs) == ({}, {}, [])


def test_a_stream_removed_while_its_capture_is_stored_stays_removed_when_that_fails() -> None:
    bed = Bed()
    gone, kept = bed.create("gone"), bed.create("kept")
    capture = bed.namespace.begin_capture(encoder)
    bed.delete(gone)
    assert unsaved(bed.namespace) == {kept}
    bed.namespace.roll_back(capture)
    assert set(bed.namespace.changed) == {kept} and set(bed.namespace.removed) == {gone}
    bed.close(kept)
    assert capture.encoded == [f"{gone}:0:False".encode()], "a capture that is rolled back encodes nothing more"


def test_only_the_newest_capture_can_be_rolled_back() -> None:
    bed = Bed()
    older = bed.namespace.begin_capture()
    bed.namespace.begin_capture()
    with pytest.raises(AssertionError):
        bed.namespace.roll_back(older)


STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "close", "snapshot", "delete", "produce", "capture"]), st.integers(0, 5)),
    max_size=30,
)


def replay(steps: list[tuple[str, int]], captures: list[Capture] | None) -> Bed:
    """Do what the steps say; where captures are wanted, begin one at each step that says so."""
    bed = Bed()
    by_name: dict[int, int] = {}
    for number, (step, name) in enumerate(steps):
        if step == "capture":
            bed.position += 10
            if captures is not None:
                captures.append(bed.namespace.begin_capture())
        elif step == "create" and name not in by_name:
            by_name[name] = bed.create(f"s{name}")
        elif name in by_name:
            incarnation = by_name[name]
            if step == "close":
                bed.close(incarnation)
            elif step == "snapshot":
                bed.snapshot(incarnation, f"blob-{number}")
            elif step == "produce":
                claim = ProducerClaim(f"p{number % 3}", 0, number)
                tail = bed.stream(incarnation).tail
                bed.apply(Appended(Incarnation(incarnation), tail, Milliseconds(NOW), [b"x"], False, None, claim))
            elif step == "delete":
                bed.delete(by_name.pop(name))
    return bed


@given(STEPS, st.integers(0, 10))
def test_after_some_captures_are_committed_and_the_others_rolled_back_only_the_committed_is_missing(
    steps: list[tuple[str, int]], committed: int
) -> None:
    captures: list[Capture] = []
    bed = replay(steps, captures)
    whole = replay(steps, None)
    assert unsaved(bed.namespace) == set(whole.namespace.changed)
    saved: dict[Incarnation, Stream] = {}
    removed: dict[Incarnation, StreamKey] = {}
    freed: list[str] = []
    for capture in captures[:committed]:
        saved |= capture.changed
        removed |= capture.removed
        freed += capture.freed_blobs
        bed.namespace.commit(capture)
    for capture in reversed(captures[committed:]):
        bed.namespace.roll_back(capture)
    namespace = bed.namespace
    assert (saved.keys() - namespace.removed.keys() - removed.keys()) | namespace.changed.keys() == set(
        whole.namespace.changed
    )
    assert removed | namespace.removed == whole.namespace.removed
    assert not removed.keys() & namespace.removed.keys()
    assert freed + namespace.freed_blobs == whole.namespace.freed_blobs
    assert namespace.captured == {} and namespace.captured_removals == {}
    if not committed:
        assert namespace.producers._changed.states == whole.namespace.producers._changed.states
        assert namespace.producers._changed.count == whole.namespace.producers._changed.count
