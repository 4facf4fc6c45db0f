"""Memory and flushes at the numbers that once broke them, in process."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from millstream.protocol.producers import ProducerClaim
from millstream.shard.restore import chain_of
from millstream.streams.limits import StreamLimits
from support.cycles import cycles
from support.fake_time import FakeClock, run
from support.shards import started

MIB = 1 << 20
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_200000_streams_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, segment_bytes=64 * MIB, keep_bytes=8 * MIB) as driver:
            await cycles(driver, 20_000)
            before, counted = resident_bytes(), driver.shard.budget.used
            await cycles(driver, 200_000)
            assert driver.shard.budget.used <= max(2 * counted, 16 * MIB)
            assert resident_bytes() - before < 40 * MIB

    clock = FakeClock()
    run(main(), clock)


def test_a_flush_beside_200000_producers_writes_the_one_that_changed(tmp_path: Path) -> None:
    async def main() -> None:
        limits = StreamLimits(producers_max=1_000_000)
        async with started(tmp_path, clock, segment_bytes=64 * MIB, limits=limits) as driver:
            await driver.create("b/s", content_type="text/plain")

            async def write(number: int, seq: int) -> None:
                await driver.append("b/s", b"x", producer=ProducerClaim(f"producer-{number}", 0, seq))

            for first in range(0, 200_000, 500):
                await asyncio.gather(*(write(number, 0) for number in range(first, first + 500)))
            await driver.checkpoint()
            before = resident_bytes()
            for number in range(20):
                await write(number, 1)
                await driver.checkpoint()
            sizes = [(tmp_path / "cold" / head.path).stat().st_size for head in await chain_of(driver.shard.cold)]
            assert max(sizes[1:]) * 1_000 < sizes[0]
            assert resident_bytes() - before < 20 * MIB
            assert len(driver.shard.namespace.producers) == 0

    clock = FakeClock()
    run(main(), clock)
