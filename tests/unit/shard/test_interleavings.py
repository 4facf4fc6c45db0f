"""Commands that meet in the middle: what one rests on must not be taken away by another in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.protocol.expiry import Expiry
from support.disks import HeldDisk
from support.fake_time import FakeClock, run, turns
from support.shards import create, key_of, started


def test_a_stop_in_the_middle_of_a_checkpoint_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, crash=False) as driver:
            await driver.create("logs/a", content_type="text/plain", body=b"acknowledged")
            checkpoint = asyncio.create_task(driver.checkpoint())
            while not driver.shard.namespace.captured:
                await asyncio.sleep(0)
            checkpoint.cancel()  # what stop() does to the periodic task
            await asyncio.gather(checkpoint, return_exceptions=True)
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("logs/a") == [b"acknowledged"]

    clock = FakeClock()
    run(main(), clock)


def test_a_fork_never_outlives_its_source_when_both_names_are_busy(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, disk=disk) as driver:
            await driver.create("source", content_type="text/plain", body=b"shared")
            await driver.create("target", content_type="text/plain")
            disk.hold()
            first = driver.ask(driver.shard.delete, key_of("target"))
            await turns()  # in flight
            fork = driver.ask(driver.shard.create, create("target", fork=("source",)))
            second = driver.ask(driver.shard.delete, key_of("source"))
            disk.let_go()
            assert await first is None
            assert await second is None
            # Refused, or whole: what it must not be is a fork without its source.
            if not isinstance(await fork, MillstreamError):
                assert await driver.messages("target") == [b"shared"]

    disk = HeldDisk()
    clock = FakeClock()
    run(main(), clock)


def test_an_expired_source_keeps_its_name_for_a_fork_that_is_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock, crash=False) as driver:
            await driver.create("s", content_type="text/plain", body=b"old", expiry=Expiry(ttl_seconds=5))
            fork = driver.ask(driver.shard.create, create("f", fork=("s",), expiry=Expiry(ttl_seconds=500)))
            clock.advance(6_000)
            again = driver.ask(driver.shard.create, create("s", content_type="text/plain", body=b"new"))
            outcomes = [await fork, await again]
        async with started(tmp_path, clock) as driver:
            if not isinstance(outcomes[0], MillstreamError):
                assert await driver.messages("f") == [b"old"]
            if not isinstance(outcomes[1], MillstreamError):
                assert await driver.messages("s") == [b"new"]

    clock = FakeClock()
    run(main(), clock)


def test_a_bucket_is_not_deleted_under_a_stream_that_is_being_created(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            shard = driver.shard
            await driver.outcome(shard.create_bucket, "logs")
            await driver.create("logs/k", content_type="text/plain")
            asked = [
                driver.ask(shard.delete, key_of("logs/k")),
                driver.ask(shard.create, create("logs/k", content_type="text/plain")),
                driver.ask(shard.delete_bucket, "logs"),
            ]
            await asyncio.gather(*asked)
            if shard.namespace.find(key_of("logs/k")) is not None:
                assert "logs" in shard.namespace.buckets

    clock = FakeClock()
    run(main(), clock)
