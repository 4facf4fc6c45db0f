"""Small buckets share segments: few objects, and each bucket still reads as if it had its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.errors import InvalidRequest
from millstream.pipeline.rewriting import rewrite_part
from millstream.shard.compaction import Proposal
from millstream.shard.restore import restore
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.inspection import Inspection
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segments import SHARED
from millstream.units import Milliseconds, Position
from support.compaction import parts_of, plan, write
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, started

LARGE = b"L" * (1 << 20)


def content(number: int) -> list[bytes]:
    return [b"first of %d" % number, b"second of %d" % number]


async def fill(driver: ShardDriver, buckets: range) -> None:
    """Every bucket has streams of the same names; one bucket has a lot."""
    for first in range(buckets.start, buckets.stop, 500):
        some = range(first, min(first + 500, buckets.stop))
        for stream in ("a", "b"):
            await asyncio.gather(
                *(
                    driver.create(f"bucket{number}/{stream}", content_type="text/plain", body=content(number)[0])
                    for number in some
                )
            )
            await asyncio.gather(*(driver.append(f"bucket{number}/{stream}", content(number)[1]) for number in some))
    await driver.create("bucket-large/a", content_type="text/plain", body=LARGE)


async def check(driver: ShardDriver, numbers: list[int]) -> None:
    for number in numbers:
        for stream in ("a", "b"):
            assert await driver.messages(f"bucket{number}/{stream}") == content(number)
        page = await driver.shard.feed.read_cold(f"bucket{number}", Position(0), "", 1 << 20)
        assert sorted(item.payload for item in page.items if item.payload) == sorted(content(number) * 2)
        _, segments = driver.shard.cold_segments(f"bucket{number}", Position(-1))
        assert [one.bucket for one in segments] == [SHARED]
    assert await driver.messages("bucket-large/a") == [LARGE]
    _, segments = driver.shard.cold_segments("bucket-large", Position(-1))
    assert [one.bucket for one in segments] == ["bucket-large"]
    assert driver.shard.cold_segments("nowhere", Position(-1))[1] == []


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_many_small_buckets_are_a_handful_of_objects_and_read_as_their_own(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        picked = [0, 1, count // 2, count - 1]
        async with started(tmp_path, clock, segment_bytes=64 << 20) as driver:
            await fill(driver, range(count))
            await driver.checkpoint()
            stored = sorted(path.parts[-3] for path in (tmp_path / "cold").rglob("*.parquet"))
            assert stored == ["bucket=bucket-large", "shared"]
            await check(driver, picked)
            for _, row in driver.catalog.segments():
                inspection = await Inspection.begin(driver.shard.cold.objects, row.segment)
                await inspection.read(driver.shard.cold.objects)
                if row.segment.bucket == SHARED:
                    footer = inspection.footer
                    assert len(footer.info.shared_by) == count
                    assert [one.stream for one in footer.of("bucket1").extents] == ["a", "b"]
        async with started(tmp_path, clock) as driver:
            await check(driver, picked)
        restored = Catalog(tmp_path / "restored")
        cold = ColdTier(open_objects(ObjectStoreSettings("fs", tmp_path / "cold", {})), restored, 1 << 20)
        await restore(cold, restored, Milliseconds(0), lambda done, total: None)
        for number in picked:
            assert len(restored.segments_of(f"bucket{number}", Position(-1))[1]) == 1
        cold.close()
        restored.close()

    clock = FakeClock()
    run(main(), clock)


def test_a_few_small_buckets_have_segments_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await fill(driver, range(10))
            await driver.checkpoint()
            assert len(list((tmp_path / "cold").rglob("*.parquet"))) == 11

    clock = FakeClock()
    run(main(), clock)


def test_a_shared_segment_that_dies_is_forgotten_by_all_its_buckets(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await fill(driver, range(30))
            await driver.checkpoint()
            for number in range(30):
                await driver.delete(f"bucket{number}/a")
            await driver.checkpoint()
            assert driver.catalog.dead_segments(clock.now_ms()) == []
            await check_half(driver)
            for number in range(30):
                await driver.delete(f"bucket{number}/b")
            await driver.checkpoint()
            (dead,) = driver.catalog.dead_segments(clock.now_ms())
            segment = driver.catalog.segment(dead)
            assert segment is not None and driver.catalog.holds(dead, segment, "bucket3")
            driver.catalog.forget_segment(dead)
            assert not driver.catalog.holds(dead, segment, "bucket3")
            assert driver.catalog.segments_of("bucket3", Position(-1))[1] == []

    async def check_half(driver: ShardDriver) -> None:
        page = await driver.shard.feed.read_cold("bucket3", Position(0), "", 1 << 20)
        assert [item.payload for item in page.items if item.payload] == content(3)

    clock = FakeClock()
    run(main(), clock)


def test_compaction_merges_shared_segments_and_gives_a_bucket_with_enough_its_own(tmp_path: Path) -> None:
    settings = ObjectStoreSettings("fs", tmp_path / "cold", {})
    growing = b"g" * 400_000

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            for number in range(30):
                await driver.create(f"bucket{number}/a", content_type="text/plain")
                await driver.create(f"bucket{number}/b", content_type="text/plain")
            for turn in range(3):
                for number in range(30):
                    await driver.append(f"bucket{number}/a", content(number)[0])
                    await driver.append(f"bucket{number}/b", b"turn %d" % turn)
                await driver.append("bucket7/a", growing)
                await driver.checkpoint()
            await driver.delete("bucket5/a")
            await driver.checkpoint()
            before = {number: await everything(driver, number) for number in range(30)}
            (group,) = await plan(settings)
            assert [share.bucket for share in group.shares()] == ["bucket7", SHARED]
            segments = await write(settings, group)
            done = await driver.shard.compaction.commit(Proposal([one.path for one in group.sources], segments))
            assert (done.replaced, done.segments) == (3, 2)
            assert {number: await everything(driver, number) for number in range(30)} == before
            assert [one.bucket for one in driver.shard.cold_segments("bucket7", Position(-1))[1]] == ["bucket7"]
            assert [one.bucket for one in driver.shard.cold_segments("bucket8", Position(-1))[1]] == [SHARED]
            for segment in segments:
                await (await Inspection.begin(driver.shard.cold.objects, segment)).read(driver.shard.cold.objects)
        async with started(tmp_path, clock) as driver:
            assert {number: await everything(driver, number) for number in range(30)} == before

    async def everything(driver: ShardDriver, number: int) -> list[object]:
        streams = ["b"] if number == 5 else ["a", "b"]
        read: list[object] = [await driver.messages(f"bucket{number}/{stream}") for stream in streams]
        page = await driver.shard.feed.read_cold(f"bucket{number}", Position(0), "", 1 << 30)
        return [*read, [(item.position, item.stream, item.payload) for item in page.items]]

    clock = FakeClock()
    run(main(), clock)


def test_a_compaction_that_moves_messages_to_another_bucket_is_refused(tmp_path: Path) -> None:
    settings = ObjectStoreSettings("fs", tmp_path / "cold", {})

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await fill(driver, range(30))
            await driver.checkpoint()
            await driver.append("bucket1/a", b"more")
            for number in range(30):
                await driver.append(f"bucket{number}/b", b"more")
            await driver.checkpoint()
            (group,) = await plan(settings)
            parts = [part._replace(bucket="bucket3") for part in parts_of(settings, group)]
            parts = [part._replace(path=part.path.replace("shared", "bucket=bucket3")) for part in parts]
            segments = [await rewrite_part(part) for part in parts]
            with pytest.raises(InvalidRequest):
                await driver.shard.compaction.commit(Proposal([one.path for one in group.sources], segments))

    clock = FakeClock()
    run(main(), clock)
