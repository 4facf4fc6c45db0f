"""Memory: what requests make a shard keep is counted, released when it is over, and refused when there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.shard.budget import RESERVE_SHARE
from millstream.tiers.objects import Objects
from support.cycles import cycles
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, create, started

MIB = 1 << 20


def kept(driver: ShardDriver) -> dict[str, int]:
    """Everything in a shard that grows with requests, as counts."""
    shard = driver.shard
    machine, flusher, hot = shard.machine, shard.flusher, shard.hot
    return {
        "streams": machine.namespace.resident_count(),
        "names": len(machine.namespace._by_key),
        "dirty": len(machine.namespace.changed) + len(machine.namespace.captured) + len(machine.namespace.unencoded),
        "removed": len(machine.namespace.removed) + len(machine.namespace.captured_removals),
        "freed": len(machine.namespace.freed_blobs) + len(machine.purged) + len(machine.sealed) + len(machine.replaced),
        "hot": hot.bytes + len(hot.unflushed) + len(hot._waiting),
        "journals": shard.journals.bytes,
        "kept": sum(len(incarnations) for _, incarnations in flusher.memory._kept),
        "written": len(flusher.unlisted.paths) + len(shard.blobs.made),
        "deadlines": len(shard.deadlines),
        "held": len(shard.names._held) + len(shard.listeners._listeners) + len(shard.listeners._changed),
    }


def test_streams_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await cycles(driver, 1_000)
            before = kept(driver)
            await cycles(driver, 5_000)
            after = kept(driver)
            assert after["deadlines"] <= 2 * 1024 and before["deadlines"] <= 2 * 1024
            assert {**after, "deadlines": 0} == {**before, "deadlines": 0}
            assert after["streams"] == after["hot"] == after["journals"] == after["written"] == 0

    clock = FakeClock()
    run(main(), clock)


def test_what_is_kept_for_readers_is_no_more_than_is_to_be_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, keep_bytes=MIB) as driver:
            for _ in range(6):
                await cycles(driver, 1_000)
                assert driver.shard.journals.bytes + driver.shard.hot.bytes <= MIB
            assert driver.shard.budget.used <= 2 * MIB

    clock = FakeClock()
    run(main(), clock)


class BrokenStore:
    """A store that takes nothing, as long as it is broken."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.is_broken = True

    async def put(self, path: str, data: Any) -> None:
        if self.is_broken:
            raise Unavailable("the store is down", code="object_store_unavailable")
        await self._objects.put(path, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


async def until_refused(one: Callable[[int], Any], count: int) -> int:
    for number in range(count):
        try:
            await one(number)
        except Unavailable as error:
            assert error.code == "backpressure"
            assert "memory" in error.message
            return number
    raise AssertionError(f"{count} were accepted")


@pytest.mark.parametrize("what", ["empty streams", "streams that come and go", "messages that are trimmed", "buckets"])
def test_with_the_store_down_memory_is_bounded_whatever_is_asked_for(tmp_path: Path, what: str) -> None:
    hot_bytes_max = MIB

    async def main() -> None:
        async with started(tmp_path, clock, hot_bytes_max=hot_bytes_max) as driver:
            store = driver.shard.cold.objects = BrokenStore(driver.shard.cold.objects)  # type: ignore[assignment]
            await driver.create("s", content_type="text/plain")

            async def empty_stream(number: int) -> None:
                await driver.create(f"b/{number}", content_type="text/plain")

            async def come_and_go(number: int) -> None:
                await driver.create(f"b/{number}", content_type="text/plain", body=b"x" * 1000)
                await driver.delete(f"b/{number}")

            async def trimmed(number: int) -> None:
                await driver.append("s", b"x" * 1000)
                stream = driver.shard.namespace.find(create("s").key)
                assert stream is not None
                await driver.outcome(driver.shard.trim, stream, stream.tail)

            async def bucket(number: int) -> None:
                await driver.outcome(driver.shard.create_bucket, f"bucket-{number}")

            asked = {
                "empty streams": empty_stream,
                "streams that come and go": come_and_go,
                "messages that are trimmed": trimmed,
                "buckets": bucket,
            }[what]
            count = await until_refused(asked, 10_000)
            assert count > 100
            assert driver.shard.budget.used <= hot_bytes_max * (1 + 1 / RESERVE_SHARE)
            with pytest.raises(Unavailable):
                await driver.checkpoint()
            store.is_broken = False
            await driver.checkpoint()
            if what != "buckets":
                await asked(count + 1)  # the budget heals with the store

    clock = FakeClock()
    run(main(), clock)


def test_streams_that_are_only_read_leave_memory_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, resident_streams_max=100) as driver:
            for number in range(1_000):
                await driver.create(f"b/{number}", content_type="text/plain")
            await driver.checkpoint()
            assert driver.shard.namespace.resident_count() <= 100
            for number in range(1_000):
                assert driver.shard.get(create(f"b/{number}").key).tail == 0
            assert driver.shard.namespace.resident_count() > 900
            clock.advance(1_000)
            for _ in range(50):
                await asyncio.sleep(0)
            assert driver.shard.namespace.resident_count() <= 100

    clock = FakeClock()
    run(main(), clock)


def test_buckets_that_came_with_their_first_stream_go_with_their_last(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.outcome(driver.shard.create_bucket, "kept")
            await driver.create("kept/s", content_type="text/plain")
            for number in range(100):
                await driver.create(f"~{number}/s", content_type="text/plain", body=b"x")
            await driver.create("fork/s", fork=("~7/s", None, 0))
            await driver.checkpoint()
        async with started(tmp_path, clock) as driver:
            assert len(driver.shard.namespace.buckets) == 102
            await driver.delete("kept/s")
            for number in range(100):
                await driver.delete(f"~{number}/s")
            assert sorted(driver.shard.namespace.buckets) == ["fork", "kept", "~7"], "its fork keeps the source's name"
            await driver.checkpoint()
            await driver.delete("fork/s")
            assert list(driver.shard.namespace.buckets) == ["kept"]
        async with started(tmp_path, clock) as driver:
            assert list(driver.shard.namespace.buckets) == ["kept"]

    clock = FakeClock()
    run(main(), clock)
