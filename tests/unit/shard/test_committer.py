"""Group commit: who is told what, and when; and what a batch that cannot be stored takes with it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import (
    Conflict,
    NotFound,
    OutcomeUnknown,
    PayloadTooLarge,
    SequenceGap,
    StreamClosed,
    Unavailable,
)
from millstream.log.interface import BATCH_BYTES_MAX, Done, LogBatch
from millstream.pending import Pending
from millstream.protocol.producers import ProducerClaim
from millstream.shard.committer import BATCH_RECORDS_MAX, Batch, Committer
from millstream.streams.records import Appended, decode_batch
from millstream.units import Incarnation, Milliseconds, Offset, Position
from support.disks import FailingDisk
from support.fake_time import FakeClock, run, turns
from support.shards import append, create, key_of, started


class HeldLog:
    """A log that answers when the test says so. Not a mock of ours: the contract allows any delay."""

    notices: list[str]
    failure = None
    batch_bytes_max = BATCH_BYTES_MAX
    record_bytes_max = 2 * BATCH_BYTES_MAX
    exists = True

    def __init__(self, window: int = 1) -> None:
        self.window = window
        self.notices = []
        self.waiting: list[tuple[LogBatch, Done]] = []
        self.stored: list[LogBatch] = []

    def read(self) -> Any:
        return iter(())

    def start(self, first_position: int, deliver: Any) -> None:
        self.first = first_position

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None:
        self.waiting.append((batch, done))

    def answer(self, error: Any = None) -> None:
        batch, done = self.waiting.pop(0)
        if error is None:
            self.stored.append(batch)
        done(error)

    def trim(self, position: int) -> None: ...

    def close(self) -> None: ...


class Bed:
    def __init__(self, window: int = 1, first: int = 1) -> None:
        self.log = HeldLog(window)
        self.applied: list[int] = []
        self.undone: list[int] = []
        self.answers: list[Any] = []
        self.committer = Committer(self.log, Position(first), self._note(self.applied), self._note(self.undone))
        self.committer.start(asyncio.get_running_loop())

    @staticmethod
    def _note(into: list[int]) -> Any:
        def note(batch: Batch) -> None:
            into.extend(position for record, position, _ in batch.entries if record is not None)

        return note

    def submit(self, name: str, messages: int = 1, size: int = 1) -> int:
        record = Appended(Incarnation(1), Offset(0), Milliseconds(0), [b"x" * size] * messages)
        return self.committer.submit(record, self.answered(name))

    def answered(self, name: str) -> Pending[str]:
        """One whose outcome is noted as an answer."""
        pending = Pending(name)
        pending.when_settled(self.answers.append)
        return pending

    def after_durable(self, name: str) -> None:
        self.committer.after_durable(name).when_settled(self.answers.append)


def test_a_record_is_answered_only_after_it_is_stored_and_applied() -> None:
    async def main() -> None:
        bed = Bed()
        assert bed.log.first == 1
        position = bed.submit("a")
        await turns()
        assert (bed.applied, bed.answers) == ([], [])
        assert not bed.committer.is_idle
        bed.log.answer()
        assert (bed.applied, bed.answers) == ([position], ["a"])
        assert bed.committer.is_idle
        assert bed.committer.pending_bytes == 0

    run(main())


def test_a_record_takes_a_position_and_one_for_each_message() -> None:
    async def main() -> None:
        bed = Bed(first=10)
        assert [bed.submit("a", 0), bed.submit("b", 3), bed.submit("c", 1)] == [10, 11, 15]
        await turns()
        (batch, _), *_ = bed.log.waiting
        assert (batch.first, batch.next) == (10, 17)
        assert len(decode_batch(batch.payload)) == 3

    run(main())


class QuickLog(HeldLog):
    """A log that has answered when `append` returns, as the contract allows where it may block."""

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None:
        super().append(batch, done)
        self.answer()


def test_a_log_that_answers_at_once_leaves_what_its_answer_brings_to_the_next_turn_of_the_loop() -> None:
    async def main() -> None:
        bed = Bed()
        bed.log = bed.committer._log = QuickLog()
        turns_begun = 0
        answered_in: list[int] = []

        def answer(left: int) -> None:
            answered_in.append(turns_begun)
            if left:
                submit(left - 1)

        def submit(left: int) -> None:
            pending = Pending(left)
            pending.when_settled(answer)  # type: ignore[arg-type]
            bed.committer.submit(Appended(Incarnation(1), Offset(0), Milliseconds(0), [b"x"]), pending)

        submit(5)
        for _ in range(20):
            turns_begun += 1
            await asyncio.sleep(0)
        assert len(answered_in) == 6
        assert answered_in == sorted(set(answered_in)), "the loop had no turn between two of them"
        assert [batch.first for batch in bed.log.stored] == bed.applied == [1, 3, 5, 7, 9, 11]
        assert bed.committer.is_idle

    run(main())


def test_what_arrives_while_a_batch_is_in_flight_goes_out_as_one_batch_behind_it() -> None:
    async def main() -> None:
        bed = Bed()
        bed.submit("a")
        await turns()
        for name in "bcd":
            bed.submit(name)
        await turns()
        assert len(bed.log.waiting) == 1
        bed.log.answer()
        await turns()
        assert bed.answers == ["a"]
        assert len(bed.log.waiting) == 1
        bed.log.answer()
        assert bed.answers == ["a", "b", "c", "d"]
        assert [batch.next for batch in bed.log.stored] == [3, 9]

    run(main())


def test_beside_others_a_batch_goes_out_when_it_is_about_as_large_as_they_are() -> None:
    async def scenario() -> None:
        bed = Bed(window=4)
        for number in range(8):
            bed.submit(f"a{number}")
        await turns()
        assert [len(decode_batch(batch.payload)) for batch, _ in bed.log.waiting] == [8]
        for number in range(5):
            bed.submit(f"b{number}")
        await turns()
        assert len(bed.log.waiting) == 1, "five wait for company"
        bed.submit("b5")
        await turns()
        assert [len(decode_batch(batch.payload)) for batch, _ in bed.log.waiting] == [8, 6]
        bed.submit("c0")
        bed.log.answer()
        await turns()
        assert len(bed.log.waiting) == 1
        bed.log.answer()
        await turns()
        assert [len(decode_batch(batch.payload)) for batch, _ in bed.log.waiting] == [1], "nothing to wait for"
        bed.submit("d0")
        await turns()
        assert len(bed.log.waiting) == 2, "few writers are pipelined as well"

    run(scenario())


def test_a_batch_is_closed_before_it_grows_beyond_its_limit() -> None:
    async def main() -> None:
        bed = Bed()
        for name in "abc":
            bed.submit(name, size=BATCH_BYTES_MAX // 2)
        await turns()
        while bed.log.waiting:
            bed.log.answer()
            await turns()
        assert bed.answers == ["a", "b", "c"]
        assert len(bed.log.stored) >= 2
        assert all(len(batch.payload) < BATCH_BYTES_MAX + 1024 for batch in bed.log.stored)
        assert [one.first for one in bed.log.stored[1:]] == [one.next for one in bed.log.stored[:-1]]

    run(main())


def test_a_refusal_waits_for_the_records_in_flight_before_it() -> None:
    async def main() -> None:
        bed = Bed()
        bed.after_durable("at once")
        assert bed.answers == ["at once"]
        bed.submit("a")
        bed.after_durable("refused on a")
        await turns()
        bed.after_durable("also on a")
        await turns()
        assert bed.answers == ["at once"]
        bed.log.answer()
        await turns()
        assert bed.answers == ["at once", "a", "refused on a", "also on a"]
        assert bed.log.waiting == []

    run(main())


def test_a_failed_batch_takes_everything_checked_on_top_of_it_with_it() -> None:
    async def main() -> None:
        bed = Bed()
        first = bed.submit("a")
        await turns()
        bed.submit("b")
        bed.after_durable("refused on b")
        error = Unavailable("full")
        bed.log.answer(error)
        await turns()
        assert bed.answers == [error, error, error]
        assert (bed.applied, len(bed.undone)) == ([], 2)
        assert bed.committer.is_idle
        assert bed.committer.pending_bytes == 0
        # Nothing was stored, so the positions are free again.
        assert bed.submit("c") == first
        await turns()
        bed.log.answer()
        assert bed.answers[-1] == "c"

    run(main())


def test_after_an_unknown_outcome_nothing_more_is_accepted() -> None:
    async def main() -> None:
        bed = Bed()
        bed.submit("a")
        await turns()
        error = OutcomeUnknown("stopped")
        bed.log.answer(error)
        assert bed.answers == [error]
        with pytest.raises(OutcomeUnknown):
            bed.submit("b")
        bed.after_durable("reads go on")
        assert bed.answers[-1] == "reads go on"
        await bed.committer.drain()

    run(main())


def test_an_answer_that_fails_does_not_keep_the_others_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bed = Bed()

        def broken(outcome: object) -> None:
            raise RuntimeError("the connection is gone")

        bed.committer.commit(Appended(Incarnation(1), Offset(0), Milliseconds(0), [b"x"])).when_settled(broken)
        bed.submit("b")
        await turns()
        bed.log.answer()
        assert bed.answers == ["b"]

    run(main())
    assert "an answer could not be given" in caplog.text


def test_what_an_answer_submits_goes_out_too() -> None:
    async def main() -> None:
        bed = Bed()

        def follow_up(outcome: object) -> None:
            bed.submit("follow-up")

        bed.committer.commit(Appended(Incarnation(1), Offset(0), Milliseconds(0), [b"x"])).when_settled(follow_up)
        await turns()
        bed.log.answer()
        await turns()
        bed.log.answer()
        assert bed.answers == ["follow-up"]

    run(main())


# -- the same through a whole shard ----------------------------------------------------------------------------


def test_a_pipeline_of_appends_is_checked_against_those_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain")
            answers: list[Any] = []
            for number, seq in enumerate((0, 1, 1, 3, 2)):
                claim = ProducerClaim("p", 0, seq)
                driver.shard.append(append("s", b"%d" % number, producer=claim)).when_settled(answers.append)
            driver.shard.append(append("s", b"end", close=True)).when_settled(answers.append)
            driver.shard.append(append("s", b"late")).when_settled(answers.append)
            # Even what could be refused at once rests on appends a crash could still take back.
            assert answers == []
            await driver.shard.committer.drain()
            new = [getattr(answer, "is_new_data", type(answer)) for answer in answers]
            assert new == [True, True, False, SequenceGap, True, True, StreamClosed]
            assert answers[2].tail == 2
            assert answers[-1].tail == 6
            assert await driver.messages("s") == [b"0", b"1", b"4", b"end"]

    clock = FakeClock()
    run(main(), clock)


def test_readers_see_nothing_before_it_is_durable(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain")
            pending = driver.ask(driver.shard.append, append("s", b"x", close=True))
            stream = driver.shard.get(key_of("s"))
            assert (stream.tail, stream.closed, await driver.messages("s")) == (0, False, [])
            await pending
            assert (stream.tail, stream.closed, await driver.messages("s")) == (1, True, [b"x"])

    clock = FakeClock()
    run(main(), clock)


def test_a_full_disk_undoes_what_was_planned_and_the_same_appends_succeed_later(tmp_path: Path) -> None:
    disk = FailingDisk()

    async def main() -> None:
        # Small segments: every batch needs room of its own.
        async with started(tmp_path, clock, disk=disk, segment_bytes=64) as driver:
            await driver.create("s", content_type="text/plain")
            disk.failing = {"allocate", "sync"}
            claim = ProducerClaim("p", 0, 0)
            commands = [
                append("s", b"a", producer=claim, seq="1"),
                append("s", b"a", producer=claim, seq="1"),
                append("s", b"b", close=True),
            ]
            answers = await asyncio.gather(*(driver.ask(driver.shard.append, command) for command in commands))
            assert [type(answer) for answer in answers] == [Unavailable] * 3
            stream = driver.shard.get(key_of("s"))
            assert (stream.tail, stream.closed, stream.ahead) == (0, False, None)
            disk.failing = set()
            outcomes = [await driver.outcome(driver.shard.append, command) for command in commands]
            assert [outcome.is_new_data for outcome in outcomes] == [True, False, True]
            assert await driver.messages("s") == [b"a", b"b"]

    clock = FakeClock()
    run(main(), clock)


def test_a_create_or_delete_that_cannot_be_stored_leaves_the_name_as_it_was_and_free(tmp_path: Path) -> None:
    disk = FailingDisk()

    async def main() -> None:
        async with started(tmp_path, clock, disk=disk, segment_bytes=64) as driver:
            await driver.create("kept", content_type="text/plain", body=b"x")
            disk.failing = {"allocate", "sync"}
            with pytest.raises(Unavailable):
                await driver.create("new", content_type="text/plain")
            with pytest.raises(Unavailable):
                await driver.delete("kept")
            assert not driver.shard.names
            assert await driver.messages("kept") == [b"x"]
            with pytest.raises(NotFound):
                driver.shard.get(key_of("new"))
            disk.failing = set()
            await driver.create("new", content_type="text/plain")
            await driver.delete("kept")

    clock = FakeClock()
    run(main(), clock)


def test_a_disk_that_fails_to_sync_stops_writes_and_leaves_reads(tmp_path: Path) -> None:
    disk = FailingDisk()

    async def main() -> None:
        async with started(tmp_path, clock, disk=disk, crash=False) as driver:
            await driver.create("s", content_type="text/plain", body=b"x")
            disk.failing, disk.error = {"write_durably"}, errno.EIO
            with pytest.raises(OutcomeUnknown):
                await driver.append("s", b"y")
            disk.failing = set()
            for attempt in (driver.append("s", b"z"), driver.create("t"), driver.delete("s")):
                with pytest.raises(OutcomeUnknown):
                    await attempt
            assert await driver.messages("s") == [b"x"]
            assert not driver.shard.names
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("s") == [b"x"]
            await driver.append("s", b"y")

    clock = FakeClock()
    run(main(), clock)


def test_commands_on_a_name_wait_for_its_creation_and_keep_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            shard = driver.shard
            asked = [
                driver.ask(shard.create, create("s", content_type="text/plain", body=b"1")),
                driver.ask(shard.append, append("s", b"2")),
                driver.ask(shard.delete, key_of("s")),
                driver.ask(shard.append, append("s", b"3")),
                driver.ask(shard.create, create("s", content_type="text/plain", body=b"4")),
                driver.ask(shard.append, append("s", b"5")),
                driver.ask(shard.create, create("s", content_type="text/html")),
            ]
            kinds = [type(answer).__name__ for answer in await asyncio.gather(*asked)]
            assert kinds == ["Created", "AppendOutcome", "NoneType", "NotFound", "Created", "AppendOutcome", "Conflict"]
            # Delete followed at once by create must not show old bytes.
            assert await driver.messages("s") == [b"4", b"5"]

    clock = FakeClock()
    run(main(), clock)


def test_memory_that_is_used_up_refuses_writes_and_leaves_the_rest_working(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, hot_bytes_max=8192) as driver:
            await driver.create("s", content_type="text/plain", body=b"x" * 1000)
            with pytest.raises(Unavailable) as caught:
                await driver.append("s", b"y" * 8000)
            assert "memory" in caught.value.message
            assert await driver.messages("s") == [b"x" * 1000]
            await driver.append("s", b"z")
            await driver.delete("s")
            await driver.create("t", content_type="text/plain", body=b"y" * 3000)
            with pytest.raises(Conflict):
                await driver.create("t", content_type="text/html")

    clock = FakeClock()
    run(main(), clock)


def test_a_record_larger_than_the_log_takes_is_refused_and_holds_nothing_up() -> None:
    async def main() -> None:
        bed = Bed()
        with pytest.raises(PayloadTooLarge) as refusal:
            bed.submit("too large", size=bed.log.record_bytes_max)
        assert refusal.value.code == "record_too_large"
        assert bed.committer.is_idle and bed.committer.pending_bytes == 0
        bed.submit("small")
        # Its bytes fit, what stands around each of its messages does not: records are judged as they are encoded.
        with pytest.raises(PayloadTooLarge):
            bed.submit("many", messages=bed.log.record_bytes_max // 3 + 1)
        bed.submit("as large as allowed", size=bed.log.record_bytes_max - 100)
        await turns()
        while bed.log.waiting:
            bed.log.answer()
            await turns()
        assert bed.answers == ["small", "as large as allowed"]
        assert all(len(batch.payload) <= bed.log.record_bytes_max + 5 for batch in bed.log.stored)

    run(main())


def test_messages_in_flight_count_with_what_they_cost_beside_their_bytes() -> None:
    async def main() -> None:
        bed = Bed()
        bed.submit("a", messages=1000)
        assert bed.committer.pending_bytes > 1000 * 100
        await turns()
        bed.log.answer()
        assert bed.committer.pending_bytes == 0

    run(main())


def test_a_batch_that_the_log_does_not_store_shows_for_how_long() -> None:
    async def main() -> None:
        bed = Bed()
        assert bed.committer.stuck_seconds == 0
        bed.submit("a")
        await turns()
        first = bed.committer.stuck_seconds
        assert 0 < first < bed.committer.stuck_seconds
        bed.log.answer()
        assert bed.committer.stuck_seconds == 0

    run(main())


def test_very_many_records_are_applied_some_at_a_time() -> None:
    async def main() -> None:
        bed = Bed()
        for number in range(3 * BATCH_RECORDS_MAX):
            bed.submit(str(number), size=0)
        await turns()
        while bed.log.waiting:
            before = len(bed.applied)
            bed.log.answer()
            assert len(bed.applied) - before <= BATCH_RECORDS_MAX
            await turns()
        assert len(bed.answers) == 3 * BATCH_RECORDS_MAX

    run(main())
