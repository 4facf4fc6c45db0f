"""Long chains of forks of forks: made, read, freed and replayed, far beyond the depth of the interpreter's stack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millstream.errors import Conflict, NotFound
from millstream.streams.limits import StreamLimits
from millstream.units import Offset
from support.disks import QuickDisk
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, key_of, started

DEEP = sys.getrecursionlimit() + 200
UNLIMITED = StreamLimits(fork_depth_max=1_000_000)


def link(number: int) -> str:
    return f"chain/{number:05d}"


async def make_chain(driver: ShardDriver, depth: int) -> None:
    """A stream and so many forks of forks, each with a message of its own."""
    await driver.create(link(0), content_type="text/plain", body=b"0")
    for number in range(1, depth + 1):
        await driver.create(link(number), fork=(link(number - 1),), body=b"%d" % (number % 10))


async def delete_sources(driver: ShardDriver, depth: int) -> None:
    for number in range(depth):
        await driver.delete(link(number))


async def is_empty(driver: ShardDriver) -> bool:
    machine = driver.shard.machine
    return (
        machine.namespace.resident_count() == 0
        and "chain" not in machine.namespace.buckets
        and not machine.namespace.changed
    )


@pytest.mark.parametrize("is_flushed", [False, True], ids=["hot", "cold"])
def test_a_chain_deeper_than_the_stack_is_read_freed_and_replayed(tmp_path: Path, is_flushed: bool) -> None:
    clock = FakeClock()
    expected = b"".join(b"%d" % (number % 10) for number in range(DEEP + 1))

    async def make() -> None:
        async with started(tmp_path, clock, disk=QuickDisk(), limits=UNLIMITED) as driver:
            await make_chain(driver, DEEP)
            await delete_sources(driver, DEEP)
            if is_flushed:
                await driver.checkpoint()

    async def free() -> None:
        # The limit is a later one: chains that are deeper already stay what they are.
        async with started(tmp_path, clock, disk=QuickDisk()) as driver:
            assert b"".join(await driver.messages(link(DEEP))) == expected
            stream = driver.shard.get(key_of(link(DEEP)))
            pieces = [
                await driver.shard.reader.fetch(one) for one in driver.shard.reader.cut(stream, Offset(0), stream.tail)
            ]
            assert b"".join(b"".join(map(bytes, piece)) for piece in pieces) == expected
            await driver.delete(link(DEEP))
            assert await is_empty(driver)

    async def replay() -> None:
        async with started(tmp_path, clock, disk=QuickDisk(), crash=False) as driver:
            assert await is_empty(driver)
            with pytest.raises(NotFound):
                await driver.messages(link(DEEP))
            await driver.create("chain/next", content_type="text/plain", body=b"on we go")

    run(make(), clock)
    run(free(), clock)
    run(replay(), clock)


def test_a_fork_beyond_the_depth_limit_is_a_conflict(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock, disk=QuickDisk(), limits=StreamLimits(fork_depth_max=3)) as driver:
            await make_chain(driver, 3)
            with pytest.raises(Conflict) as refusal:
                await driver.create(link(4), fork=(link(3),))
            assert refusal.value.code == "fork_too_deep"
            # A sibling is as deep as the deepest, and allowed; and the answer to a repeated PUT is what it was.
            await driver.create("chain/sibling", fork=(link(2),))
            assert (await driver.create(link(3), fork=(link(2),))).is_new is False

    run(scenario(), clock)
