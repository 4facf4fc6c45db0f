"""Producers: the highest sequence that each producer of each stream has had accepted.

They stay as long as their stream, and a stream may have very many; so they are no part of its state but rows of their
own. In memory are those that changed since the last capture, and those of captures that are not in the catalog yet
(`ProducerChanges`); the others are looked up in the catalog one by one. A checkpoint writes what changed, nothing else.

A producer that has not written for `producer_expiry_ms`, if that is set, counts as one that was never seen. Its row
stays until its stream has no room for another producer; then a checkpoint removes the rows of all that have expired.
"""

from __future__ import annotations

from typing import Protocol

from millstream.errors import Conflict
from millstream.protocol.producers import ProducerState
from millstream.streams.limits import StreamLimits
from millstream.units import Incarnation, Milliseconds

States = dict[str, ProducerState]


class ProducerSource(Protocol):
    """The catalog's rows, as of the last checkpoint."""

    def load_producer(self, incarnation: Incarnation, producer_id: str) -> ProducerState | None: ...

    def producer_count(self, incarnation: Incarnation) -> int: ...


class ProducerChanges:
    """Changes by incarnation, how many of them the catalog does not have, and streams that have no room for more."""

    __slots__ = ("added", "count", "full", "states")

    def __init__(self) -> None:
        self.states: dict[Incarnation, States] = {}
        self.added: dict[Incarnation, int] = {}
        self.full: set[Incarnation] = set()
        self.count = 0

    def rows(self) -> list[tuple[Incarnation, States]]:
        """For a checkpoint. An entry without states asks for the stream's expired producers to be removed."""
        return [*self.states.items(), *((incarnation, {}) for incarnation in self.full)]


class Producers:
    def __init__(self, source: ProducerSource, limits: StreamLimits) -> None:
        self.limits = limits
        self._source = source
        self._changed = ProducerChanges()
        # Newest first: of a flush under way, or, where another node flushes, of several captures.
        self._captured: list[ProducerChanges] = []

    def __len__(self) -> int:
        """How many are in memory."""
        return self._changed.count + sum(changes.count for changes in self._captured)

    @property
    def has_changes(self) -> bool:
        return bool(self._changed.states or self._changed.full)

    def get(self, incarnation: Incarnation, producer_id: str) -> ProducerState | None:
        for changes in (self._changed, *self._captured):
            states = changes.states.get(incarnation)
            if states is not None and (state := states.get(producer_id)) is not None:
                return state
        return self._source.load_producer(incarnation, producer_id)

    def put(self, incarnation: Incarnation, producer_id: str, state: ProducerState) -> None:
        changed = self._changed
        states = changed.states.get(incarnation)
        if states is None:
            states = changed.states[incarnation] = {}
        if producer_id not in states:
            changed.count += 1
            if self.get(incarnation, producer_id) is None:
                changed.added[incarnation] = changed.added.get(incarnation, 0) + 1
        states[producer_id] = state

    def drop(self, incarnation: Incarnation) -> None:
        """The stream is gone. What a checkpoint has of it already goes with the next one."""
        self._changed.count -= len(self._changed.states.pop(incarnation, ()))
        self._changed.added.pop(incarnation, None)
        self._changed.full.discard(incarnation)

    def count(self, incarnation: Incarnation) -> int:
        """How many producers a stream has, those that have expired included."""
        added = sum(changes.added.get(incarnation, 0) for changes in (self._changed, *self._captured))
        return self._source.producer_count(incarnation) + added

    def is_expired(self, state: ProducerState, now_ms: Milliseconds) -> bool:
        expiry_ms = self.limits.producer_expiry_ms
        return expiry_ms is not None and state.at_ms + expiry_ms < now_ms

    def check_room(self, incarnation: Incarnation, producer_id: str, in_flight: int) -> None:
        """Refuse a producer that a stream has no row for, if it has too many."""
        if self.count(incarnation) + in_flight < self.limits.producers_max or self.get(incarnation, producer_id):
            return
        if self.limits.producer_expiry_ms is not None:
            self._changed.full.add(incarnation)
        raise Conflict(
            f"the stream has {self.limits.producers_max:,} producers, which is as many as it may have",
            code="too_many_producers",
            hint="use a producer id again with a higher epoch, or another stream; streams.producers_max is the limit,"
            " and streams.producer_expiry forgets producers that no longer write",
        )

    # -- captures (see `captures.py`) ------------------------------------------------------------------------

    def begin_capture(self) -> ProducerChanges:
        """What changed so far; it stays in memory until it is committed or rolled back."""
        captured, self._changed = self._changed, ProducerChanges()
        self._captured.insert(0, captured)
        return captured

    def commit(self, captured: ProducerChanges) -> None:
        """The catalog has it."""
        self._captured.remove(captured)

    def roll_back(self, captured: ProducerChanges) -> None:
        """It was not stored: all of it is still to be."""
        self._captured.remove(captured)
        changed = self._changed
        changed.full |= captured.full
        for incarnation, states in captured.states.items():
            later = changed.states.get(incarnation)
            if later is None:
                changed.states[incarnation] = dict(states)
                changed.count += len(states)
            else:
                changed.count += len(states.keys() - later.keys())
                changed.states[incarnation] = states | later
        for incarnation, count in captured.added.items():
            changed.added[incarnation] = changed.added.get(incarnation, 0) + count
