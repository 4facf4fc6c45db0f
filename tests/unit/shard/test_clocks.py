"""A wall clock that is set while a shard runs: nothing is lost by it, and nothing stops."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from millstream.clock import HOLD_SECONDS
from millstream.errors import NotFound
from millstream.protocol.expiry import Expiry
from support.fake_time import FakeClock, run, turns
from support.shards import ShardDriver, key_of, started

HOUR_MS = 3_600_000


async def pass_time(clock: FakeClock, seconds: int) -> None:
    """A second at a time: whatever is due once a second is done."""
    for _ in range(seconds):
        clock.advance(1000)
        await turns(8)


def names(driver: ShardDriver) -> list[str]:
    page = driver.shard.listing.page("b", "", "", 100, driver.shard.clock.now_ms())
    return [stream.key.stream for stream in page.streams]


@pytest.mark.parametrize(("expiry", "is_touched"), [("ttl", False), ("ttl", True), ("expires_at", False)])
def test_an_hour_ahead_for_three_seconds_ends_no_stream(tmp_path: Path, expiry: str, is_touched: bool) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            chosen = Expiry(ttl_seconds=600) if expiry == "ttl" else Expiry(expires_at_ms=clock.now_ms() + 600_000)
            await driver.create("b/s", content_type="text/plain", expiry=chosen, body=b"x")
            await pass_time(clock, 2)
            clock.set_wall(HOUR_MS)
            # Before any tick: neither a read, nor a list, nor whoever creates it again may take it for expired.
            assert driver.shard.get(key_of("b/s")).tail == 1
            assert names(driver) == ["s"]
            created = await driver.create("b/s", content_type="text/plain", expiry=chosen)
            assert not created.is_new
            await pass_time(clock, 3)
            if is_touched:
                driver.shard.deadlines.touch(driver.shard.get(key_of("b/s")))
                await driver.append("b/s", b"y")
            clock.set_wall(-HOUR_MS)
            await pass_time(clock, 3)
            assert driver.shard.get(key_of("b/s")).tail == 1 + is_touched
            assert driver.shard.expiry_clock.jumps == 2
            if not is_touched:
                await pass_time(clock, 600)
                with pytest.raises(NotFound):
                    driver.shard.get(key_of("b/s"))

    run(scenario(), clock)


def test_streams_expire_by_the_new_time_after_the_hold(tmp_path: Path) -> None:
    """A machine that slept, or a clock that was wrong before and is right now."""
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("b/s", content_type="text/plain", expiry=Expiry(ttl_seconds=1800))
            await driver.create("b/used", content_type="text/plain", expiry=Expiry(ttl_seconds=1800))
            clock.set_wall(HOUR_MS)
            await pass_time(clock, int(HOLD_SECONDS) - 5)
            assert driver.shard.get(key_of("b/s"))
            driver.shard.deadlines.touch(driver.shard.get(key_of("b/used")))
            await pass_time(clock, 10)
            with pytest.raises(NotFound):
                driver.shard.get(key_of("b/s"))
            assert driver.shard.get(key_of("b/used")), "it was read within the hold"

    run(scenario(), clock)


def test_a_read_while_the_clock_is_back_does_not_shorten_a_life(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("b/s", content_type="text/plain", expiry=Expiry(ttl_seconds=600))
            stream = driver.shard.get(key_of("b/s"))
            before = stream.last_access_ms
            clock.set_wall(-24 * HOUR_MS)
            driver.shard.deadlines.touch(stream)
            await pass_time(clock, 3)
            assert stream.last_access_ms == before
            clock.set_wall(24 * HOUR_MS)
            await pass_time(clock, 3)
            assert driver.shard.get(key_of("b/s"))

    run(scenario(), clock)


def test_flushing_by_age_goes_on_when_the_clock_is_set_back_a_day(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock, flush_seconds=10.0) as driver:
            await driver.create("b/s", content_type="text/plain", body=b"x")
            clock.set_wall(-24 * HOUR_MS)
            await pass_time(clock, 12)
            deadline = time.monotonic() + 60.0
            while not driver.shard.flusher.flush_count:  # its threads need real time
                assert time.monotonic() < deadline
                await asyncio.to_thread(time.sleep, 0.01)

    run(scenario(), clock)
