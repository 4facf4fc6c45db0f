"""Producers of a stream, however many: kept as rows of their own, looked up one by one, written when they change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.errors import Conflict, ProducerFenced, SequenceGap
from millstream.protocol.producers import ProducerClaim
from millstream.shard.flush import full_manifests
from millstream.shard.restore import chain_of, load_manifest, restore
from millstream.streams.limits import StreamLimits
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.manifests import Manifest
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.units import Milliseconds
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, append, started

STREAM = "b/s"


async def write(driver: ShardDriver, number: int, seq: int = 0, epoch: int = 0) -> bool:
    """Append as one of many producers; whether it was new."""
    outcome = await driver.append(STREAM, b"%d.%d" % (number, seq), producer=ProducerClaim(f"p{number}", epoch, seq))
    return bool(outcome.is_new_data)


async def write_all(driver: ShardDriver, numbers: range, seq: int = 0) -> None:
    for first in range(numbers.start, numbers.stop, 500):
        await asyncio.gather(*(write(driver, number, seq) for number in range(first, min(first + 500, numbers.stop))))


async def manifests(driver: ShardDriver) -> list[Manifest]:
    cold = driver.shard.cold
    return [await load_manifest(cold, head.path) for head in await chain_of(cold)]


def told(manifest: Manifest) -> int:
    return sum(len(states) for _, states in manifest.producers)


def test_a_flush_writes_the_producers_that_changed_and_memory_holds_no_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            machine = driver.shard.machine
            await driver.create(STREAM, content_type="text/plain")
            await write_all(driver, range(5_000))
            assert len(machine.namespace.producers) == 5_000
            await driver.checkpoint()
            assert len(machine.namespace.producers) == 0
            assert await write(driver, 17, seq=1)
            assert len(machine.namespace.producers) == 1
            await driver.checkpoint()
            assert [told(one) for one in await manifests(driver)] == [5_000, 1]
            assert not await write(driver, 17, seq=1)
            assert not await write(driver, 4_999)
            with pytest.raises(SequenceGap):
                await write(driver, 4_999, seq=2)
            assert len(machine.namespace.producers) == 0, "whoever only asks keeps nothing in memory"
            stream = driver.shard.get(driver.shard.listing.page("b", "", "", 1, Milliseconds(0)).streams[0].key)
            assert machine.namespace.producers.count(stream.incarnation) == 5_000

    clock = FakeClock()
    run(main(), clock)


def test_producers_survive_crashes_failed_flushes_full_manifests_and_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_manifests, "MANIFESTS_PER_FULL", 3)
    monkeypatch.setattr(full_manifests, "FULL_PART_STREAMS", 7)

    async def check(driver: ShardDriver) -> None:
        assert [await write(driver, number) for number in range(30)] == [False] * 30
        with pytest.raises(ProducerFenced):
            await write(driver, 40, epoch=0)
        assert not await write(driver, 40, epoch=3)
        with pytest.raises(SequenceGap):
            await write(driver, 0, seq=5)
        stream = driver.shard.listing.page("b", "", "", 1, Milliseconds(0)).streams[0]
        assert driver.shard.namespace.producers.count(stream.incarnation) == 31

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(STREAM, content_type="text/plain")
            await write_all(driver, range(10))
            await driver.checkpoint()
            await write_all(driver, range(10, 20))
            await write(driver, 40, epoch=2)
            with monkeypatch.context() as failing:
                failing.setattr(Catalog, "write", fail)
                with pytest.raises(OSError, match="disk"):
                    await driver.checkpoint()
            await write_all(driver, range(20, 30))
            await write(driver, 40, epoch=3)
            await check(driver)
        async with started(tmp_path, clock) as driver:  # from the log
            await check(driver)
            await driver.checkpoint()
            await check(driver)
        async with started(tmp_path, clock) as driver:  # from the catalog
            await check(driver)
            for number in range(3):
                await driver.create(f"b/t{number}", content_type="text/plain")
                await driver.checkpoint()
            kept = await manifests(driver)
            assert [one.first for one in kept][:2] == [0, 0] and sum(map(told, kept)) == 31, "a full one, in parts"
        restored = Catalog(tmp_path / "restored")
        cold = ColdTier(open_objects(ObjectStoreSettings("fs", tmp_path / "cold", {})), restored, 1 << 20)
        await restore(cold, restored, Milliseconds(0), lambda done, count: None)
        states = {producer_id: state[:2] for _, producer_id, state in restored.producers()}
        assert states == {f"p{number}": (0, 0) for number in range(30)} | {"p40": (3, 0)}
        cold.close()
        restored.close()

    def fail(self: Catalog, checkpoint: object) -> None:
        raise OSError("the disk is full")

    clock = FakeClock()
    run(main(), clock)


def test_producers_go_with_their_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(STREAM, content_type="text/plain")
            await write_all(driver, range(20))
            await driver.checkpoint()
            await write_all(driver, range(20, 30))
            await driver.delete(STREAM)
            await driver.checkpoint()
            assert list(driver.catalog.producers()) == [] and len(driver.shard.namespace.producers) == 0
            await driver.create(STREAM, content_type="text/plain")
            assert await write(driver, 1)

    clock = FakeClock()
    run(main(), clock)


def test_a_stream_has_so_many_producers_and_those_that_expired_make_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, limits=limits) as driver:
            await driver.create(STREAM, content_type="text/plain")
            answers = [driver.ask(driver.shard.append, one(number)) for number in range(12)]
            refused = [answer for answer in [await each for each in answers] if isinstance(answer, Conflict)]
            assert [error.code for error in refused] == ["too_many_producers"] * 2
            assert await write(driver, 3, seq=1), "those that are known go on"
            clock.advance(61_000)
            assert await write(driver, 3), "one that expired begins anew"
            with pytest.raises(Conflict):
                await write(driver, 20)
            await driver.checkpoint()
            assert await write(driver, 20)
            await driver.checkpoint()
            assert sorted(name for _, name, _ in driver.catalog.producers()) == ["p20", "p3"]

    def one(number: int) -> object:
        return append(STREAM, b"x", producer=ProducerClaim(f"p{number}", 0, 0))

    limits = StreamLimits(producers_max=10, producer_expiry_ms=Milliseconds(60_000))
    clock = FakeClock()
    run(main(), clock)
