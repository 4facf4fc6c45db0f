"""Giving up history without a snapshot, and what forks make of snapshots that did not trim."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import OffsetTrimmed
from millstream.units import Milliseconds, Offset
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, key_of, started

HOUR_MS = 3_600_000


async def filled(driver: ShardDriver, count: int, clock: FakeClock) -> None:
    """Messages of ten bytes, one an hour."""
    await driver.create("notes/docs/a", content_type="application/octet-stream")
    for number in range(count):
        await driver.append("notes/docs/a", b"message %02d" % number, content_type="application/octet-stream")
        clock.advance(HOUR_MS)


async def publish(driver: ShardDriver, offset: int, body: bytes = b"state") -> None:
    upload = driver.shard.blobs.begin(driver.shard.clock.random_bytes(16))
    upload.write(body)
    await driver.outcome(
        driver.shard.publish_snapshot, key_of("notes/docs/a"), offset, "application/octet-stream", upload, trims=False
    )


@pytest.mark.parametrize("is_cold", [False, True])
def test_what_is_trimmed_stays_trimmed_and_the_rest_stays(tmp_path: Path, is_cold: bool) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver, 6, clock)
            if is_cold:
                await driver.checkpoint()
            stream = driver.shard.get(key_of("notes/docs/a"))
            await driver.outcome(driver.shard.trim, stream, 20)
        for _ in range(2):  # once from the log, once from the catalog
            async with started(tmp_path, clock) as driver:
                stream = driver.shard.get(key_of("notes/docs/a"))
                with pytest.raises(OffsetTrimmed):
                    driver.shard.check_retained(stream, Offset(19))
                assert await driver.messages("notes/docs/a", 20) == [b"message %02d" % number for number in range(2, 6)]
                await driver.checkpoint()

    run(scenario(), clock)


def test_trimming_never_goes_back(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver, 3, clock)
            stream = driver.shard.get(key_of("notes/docs/a"))
            await driver.outcome(driver.shard.trim, stream, 20)
            await driver.outcome(driver.shard.trim, stream, 10)
            assert stream.earliest == 20

    run(scenario(), clock)


def test_the_boundary_by_age_lies_before_what_is_young(tmp_path: Path) -> None:
    clock = FakeClock()

    def hours_ago(count: int) -> int:
        return clock.now_ms() - count * HOUR_MS

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver, 4, clock)
            stream, boundary = driver.shard.get(key_of("notes/docs/a")), driver.shard.reader.oldest_since
            assert [boundary(stream, Milliseconds(hours_ago(age)), Offset(40)) for age in (5, 4, 3, 1, 0)] == [
                0,
                0,
                10,
                30,
                40,
            ]
            assert boundary(stream, Milliseconds(hours_ago(0)), Offset(20)) == 20
            await driver.checkpoint()
        async with started(tmp_path, clock) as driver:
            stream, boundary = driver.shard.get(key_of("notes/docs/a")), driver.shard.reader.oldest_since
            for number in range(4, 6):
                await driver.append("notes/docs/a", b"message %02d" % number, content_type="application/octet-stream")
                clock.advance(HOUR_MS)
            # Of the cold ones the segment's last time counts, so they go together.
            assert boundary(stream, Milliseconds(hours_ago(4)), Offset(60)) == 0
            assert boundary(stream, Milliseconds(hours_ago(2)), Offset(60)) == 40
            assert boundary(stream, Milliseconds(hours_ago(1)), Offset(60)) == 50

    run(scenario(), clock)


def test_a_fork_before_a_snapshot_that_did_not_trim_has_the_history_and_not_the_snapshot(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver, 4, clock)
            await publish(driver, 20)
            await driver.create("notes/early", fork=("notes/docs/a", 10))
            await driver.create("notes/late", fork=("notes/docs/a", 30))
            early, late = driver.shard.get(key_of("notes/early")), driver.shard.get(key_of("notes/late"))
            assert early.snapshot is None
            assert late.snapshot is not None and late.snapshot.offset == 20
            assert await driver.messages("notes/early") == [b"message 00"]
            source = driver.shard.get(key_of("notes/docs/a"))
            await driver.outcome(driver.shard.trim, source, 10)
            with pytest.raises(OffsetTrimmed) as refusal:
                await driver.create("notes/too-early", fork=("notes/docs/a", 10))
            assert refusal.value.earliest == 20

    run(scenario(), clock)
