"""Which batches of a replicated log count: the same for every reader, wherever it starts, whoever wrote in between."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.log.chain import Chain, StoredBatch
from millstream.log.interface import LogBatch
from millstream.log.jetstream_log import LOOK_BACK
from millstream.units import Position


def stored(sequence: int, writer: str, fence: int, first: int, following: int) -> StoredBatch:
    return StoredBatch(
        sequence, writer, fence, LogBatch(Position(first), Position(following), f"{writer}{first}".encode())
    )


def counted(log: list[StoredBatch], chain: Chain | None = None) -> list[int]:
    chain = chain or Chain()
    return [one.sequence for one in log if chain.accepts(one)]


def test_what_an_overtaken_writer_left_behind_does_not_count() -> None:
    log = [
        stored(1, "a", 1, 1, 2),
        stored(2, "a", 1, 2, 5),
        stored(3, "b", 3, 5, 6),  # its predecessor's next batch was refused for this one,
        stored(4, "a", 1, 6, 8),  # but the one behind that was not, and even its position fits
        stored(5, "b", 3, 6, 7),
    ]
    assert counted(log) == [1, 2, 3, 5]


def test_a_batch_behind_one_that_is_missing_does_not_count_until_it_comes_again() -> None:
    log = [
        stored(1, "a", 1, 1, 2),
        stored(2, "a", 1, 4, 6),
        stored(3, "a", 1, 2, 4),
        stored(4, "a", 1, 4, 6),
        stored(5, "a", 1, 4, 6),
    ]
    assert counted(log) == [1, 3, 4]


class Writer:
    """Publishes in order on predicted sequences; what it sent arrives later, or never."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fence = 0
        self.underway: list[tuple[int, StoredBatch]] = []  # expected last sequence, what would be stored

    def take_over(self, log: list[StoredBatch], chance: random.Random) -> None:
        """Read to the end and put a fence there; it gets in, for nobody else's message is in between here."""
        chain = Chain()
        for one in log:
            chain.accepts(one)
        self.fence = len(log) + 1
        position = chain.position or 1
        log.append(stored(self.fence, self.name, self.fence, position, position + 1))
        self._publish(len(log), position + 1, chance)

    def _publish(self, last: int, position: int, chance: random.Random) -> None:
        self.underway = []
        for number in range(chance.randrange(0, 5)):
            span = chance.randrange(1, 3)
            batch = stored(last + number + 1, self.name, self.fence, position, position + span)
            self.underway.append((last + number, batch))
            position += span

    def resend(self, log: list[StoredBatch], chance: random.Random) -> None:
        """After a gap: go on from what counts, on new sequences, if the fence still holds."""
        chain = Chain()
        for one in log:
            chain.accepts(one)
        if chain.fence == self.fence and chain.position is not None:
            self._publish(len(log), chain.position, chance)


def simulated(seed: int) -> list[StoredBatch]:
    """A log that three writers have fought over. The broker stores what expects the last sequence, nothing else."""
    chance = random.Random(seed)
    writers = [Writer(name) for name in "abc"]
    log: list[StoredBatch] = []
    chance.choice(writers).take_over(log, chance)
    for _ in range(120):
        writer = chance.choice(writers)
        action = chance.random()
        if action < 0.05:
            writer.take_over(log, chance)
        elif action < 0.2:
            writer.resend(log, chance)
        elif writer.underway:
            lost = chance.random() < 0.2
            expected, batch = writer.underway.pop(0)
            if not lost and expected == len(log):
                log.append(batch)
    return log


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_what_counts_is_gapless_and_never_of_an_earlier_fence(seed: int) -> None:
    log = simulated(seed)
    chain = Chain()
    position, fence = 1, 0
    for one in log:
        if chain.accepts(one):
            assert one.batch.first == position, "positions go on without a gap"
            assert one.fence >= fence, "an overtaken writer adds nothing"
            position, fence = one.batch.next, one.fence


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**16))
def test_a_reader_that_starts_later_agrees_with_one_that_has_read_everything(seed: int, choice: int) -> None:
    log = simulated(seed)
    everything = [log[sequence - 1] for sequence in counted(log)]
    start = everything[choice % len(everything)].batch.first
    begin = next(index for index, one in enumerate(log) if one.batch.next > start)
    chain = Chain(start, log[max(0, begin - LOOK_BACK) : begin])
    behind = chain.begin_after(log[max(0, begin - LOOK_BACK) : begin + LOOK_BACK])
    begin = behind if behind is not None else begin
    later = [log[sequence - 1] for sequence in counted(log[begin:], chain)]
    assert [one.batch for one in later] == [one.batch for one in everything if one.batch.first >= start]
