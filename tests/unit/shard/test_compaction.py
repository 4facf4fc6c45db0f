"""Compaction, the server's part: what it accepts changes nothing that can be read, and it accepts nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from millstream.errors import Conflict, InvalidRequest, MillstreamError
from millstream.log.file_log import FileLog
from millstream.pipeline import rewriting
from millstream.pipeline.planning import Group, Limits
from millstream.shard import history
from millstream.shard.compaction import Compacted, Proposal
from millstream.shard.restore import restore
from millstream.streams.records import SegmentRef
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.units import Milliseconds
from support import compaction
from support.fake_time import FakeClock
from support.shards import CACHE_BYTES, ShardDriver, key_of, started

SMALL = Limits(20_000, 2, 0.3)


def settings(directory: Path) -> ObjectStoreSettings:
    return ObjectStoreSettings("fs", directory / "cold", {})


async def tidy(driver: ShardDriver) -> None:
    reclaimer: Any = driver.shard._reclaimer
    reclaimer.is_tidying = False


def forget_what_was_read(driver: ShardDriver) -> None:
    driver.shard.feed._notes_read = ByteLimitedCache(CACHE_BYTES)
    driver.shard.cold._groups = ByteLimitedCache(CACHE_BYTES)


async def feed_of(driver: ShardDriver, bucket: str) -> list[Any]:
    """Everything the feed tells, page by page."""
    items: list[Any] = []
    after = driver.shard.feed.earliest
    while True:
        page = await driver.shard.feed.read_cold(bucket, after, "", 4_000)
        items += page.items
        after = page.position
        if page.up_to_date:
            assert [item.position for item in items] == sorted({item.position for item in items})
            return items


async def content_of(driver: ShardDriver, paths: list[str]) -> dict[str, list[bytes]]:
    found = {}
    for path in paths:
        stream = driver.shard.get(key_of(path))
        messages: list[bytes] = []
        offset = stream.earliest
        while offset < stream.tail:
            result = await driver.shard.reader.read_messages(stream, offset, 3_000)
            messages += map(bytes, result.messages)
            offset = result.next_offset
        found[path] = messages
    return found


async def filled(driver: ShardDriver, flushes: int = 6, streams: int = 5, seed: int = 7) -> list[str]:
    """Streams of two buckets over several flushes, with JSON arrays, large and small messages."""
    chance = random.Random(seed)
    paths = [f"{bucket}/s{number}" for bucket in ("comp-a", "comp-b") for number in range(streams)]
    for number, path in enumerate(paths):
        await driver.create(path, content_type="application/json" if number % 2 else "text/plain")
    for flush in range(flushes):
        for number, path in enumerate(paths):
            for _ in range(chance.randrange(4)):
                size = chance.choice([1, 40, 400, 2_000])
                if number % 2:
                    body = msgspec.json.encode([{"flush": flush, "pad": "x" * size}] * chance.randrange(1, 4))
                    await driver.append(path, body, content_type="application/json")
                else:
                    await driver.append(path, f"<{flush}:{path}>".encode() + b"y" * size)
        await driver.checkpoint()
    return paths


async def commit(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> Compacted:
    return await driver.shard.compaction.commit(Proposal([one.path for one in group.sources], segments))


async def compact_all(driver: ShardDriver, directory: Path, limits: Limits = compaction.LIMITS) -> int:
    await tidy(driver)
    groups = await compaction.plan(settings(directory), limits)
    for group in groups:
        await commit(driver, group, await compaction.write(settings(directory), group))
    return len(groups)


def test_after_compaction_streams_and_feed_read_as_before_and_nothing_is_left_to_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = FakeClock()
        async with started(tmp_path, clock) as driver:
            paths = await filled(driver)
            before = await content_of(driver, paths)
            feeds = {bucket: await feed_of(driver, bucket) for bucket in ("comp-a", "comp-b")}
            assert await compact_all(driver, tmp_path) == 2
            assert await compact_all(driver, tmp_path) == 0
            forget_what_was_read(driver)
            assert await content_of(driver, paths) == before
            assert {bucket: await feed_of(driver, bucket) for bucket in feeds} == feeds
            live = [row for _, row in driver.catalog.segments() if row.live_bytes]
            assert len(live) == 2
        async with started(tmp_path, clock) as driver:
            assert await content_of(driver, paths) == before
            assert {bucket: await feed_of(driver, bucket) for bucket in feeds} == feeds

    asyncio.run(scenario())


def test_compaction_in_several_parts_and_small_windows_keeps_the_feed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "WINDOW_BYTES", 5_000)

    async def scenario() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            paths = await filled(driver, flushes=12)
            before = await content_of(driver, paths)
            feeds = {bucket: await feed_of(driver, bucket) for bucket in ("comp-a", "comp-b")}
            groups = await compaction.plan(settings(tmp_path), SMALL)
            assert any(len(list(group.ranges())) > 1 for group in groups)
            assert await compact_all(driver, tmp_path, SMALL) == len(groups)
            forget_what_was_read(driver)
            assert await content_of(driver, paths) == before
            assert {bucket: await feed_of(driver, bucket) for bucket in feeds} == feeds

    asyncio.run(scenario())


def test_dead_messages_are_left_out_and_forks_keep_what_they_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            for name in ("gone", "trimmed", "source", "kept"):
                await driver.create(f"dead/{name}", content_type="text/plain")
            for number in range(4):
                for name in ("gone", "trimmed", "source", "kept"):
                    await driver.append(f"dead/{name}", f"<{name}-{number}>".encode())
                await driver.checkpoint()
            await driver.create("dead/fork", fork=("dead/source",))
            for name in ("trimmed", "source"):
                stream = driver.shard.get(key_of(f"dead/{name}"))
                message = len(f"<{name}-0>")
                await publish_snapshot(driver, f"dead/{name}", 2 * message)
                assert stream.earliest == 2 * message
            await driver.delete("dead/gone")
            await driver.checkpoint()
            assert await compact_all(driver, tmp_path) == 1
            [segment] = [row.segment for _, row in driver.catalog.segments() if row.live_bytes]
            table = parquet.read_table(tmp_path / "cold" / segment.path)
            payloads = table.column("payload").to_pylist()
            assert payloads == [
                *(b"<kept-%d>" % number for number in range(4)),
                *(b"<source-%d>" % number for number in range(4)),
                *(b"<trimmed-%d>" % number for number in (2, 3)),
            ]
            assert await driver.messages("dead/fork") == [b"<source-%d>" % number for number in range(4)]
            stream = driver.shard.get(key_of("dead/trimmed"))
            assert await driver.messages("dead/trimmed", stream.earliest) == [b"<trimmed-2>", b"<trimmed-3>"]

    asyncio.run(scenario())


async def publish_snapshot(driver: ShardDriver, path: str, offset: int) -> None:
    upload = driver.shard.blobs.begin(driver.shard.clock.random_bytes(8))
    upload.write(b"state")
    await driver.outcome(driver.shard.publish_snapshot, key_of(path), offset, "text/plain", upload)


def test_what_is_deleted_trimmed_and_appended_between_plan_and_commit_is_respected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            await tidy(driver)
            paths = await filled(driver)
            [first, *others] = await compaction.plan(settings(tmp_path))
            segments = await compaction.write(settings(tmp_path), first)
            await driver.delete("comp-a/s0")
            stream = driver.shard.get(key_of("comp-a/s2"))
            boundary = len((await driver.messages("comp-a/s2"))[0])
            await publish_snapshot(driver, "comp-a/s2", boundary)
            await driver.checkpoint()
            await driver.append("comp-a/s4", b"newer than the plan")
            left = [path for path in paths if path != "comp-a/s0"]
            before = await content_of(driver, left)
            await commit(driver, first, segments)
            assert await content_of(driver, left) == before
            assert before["comp-a/s4"][-1] == b"newer than the plan"
            assert stream.earliest == boundary
            with pytest.raises(MillstreamError):
                driver.shard.get(key_of("comp-a/s0"))
            row = next(row for _, row in driver.catalog.segments() if row.segment == segments[0])
            assert row.live_bytes < segments[0].payload_bytes, "what died since does not count"
            assert len(others) == 1

    asyncio.run(scenario())


def test_the_same_proposal_again_is_confirmed_and_a_rival_one_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            await tidy(driver)
            await filled(driver)
            group = (await compaction.plan(settings(tmp_path)))[0]
            ours, rival = [await compaction.write(settings(tmp_path), group) for _ in range(2)]
            assert not (await commit(driver, group, ours)).was_known
            assert (await commit(driver, group, ours)).was_known
            with pytest.raises(Conflict, match="not in force"):
                await commit(driver, group, rival)

    asyncio.run(scenario())


SPOILED_REFERENCES: dict[str, Callable[[SegmentRef], SegmentRef]] = {
    "another checksum": lambda segment: msgspec.structs.replace(segment, checksum=segment.checksum ^ 1),
    "another row count": lambda segment: msgspec.structs.replace(segment, rows=segment.rows + 1),
    "another bucket": lambda segment: msgspec.structs.replace(segment, bucket="comp-b"),
    "other positions": lambda segment: msgspec.structs.replace(segment, last_position=segment.last_position + 1),
    "other times": lambda segment: msgspec.structs.replace(segment, first_at_ms=segment.first_at_ms - 1),
    "another footer checksum": lambda segment: msgspec.structs.replace(segment, footer_checksum=1),
}


@pytest.mark.parametrize("spoil", SPOILED_REFERENCES.values(), ids=SPOILED_REFERENCES.keys())
def test_a_description_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, spoil: Callable[[SegmentRef], SegmentRef]
) -> None:
    async def spoiled(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> None:
        await commit(driver, group, [spoil(segments[0]), *segments[1:]])

    refused(tmp_path, spoiled)


def refused(tmp_path: Path, attempt: Callable[[ShardDriver, Group, list[SegmentRef]], Awaitable[None]]) -> str:
    """Run an attempt that must fail, and see that nothing has changed by it."""
    message = ""

    async def scenario() -> None:
        nonlocal message
        async with started(tmp_path, FakeClock()) as driver:
            await tidy(driver)
            paths = await filled(driver, flushes=3)
            before = await content_of(driver, paths)
            group = (await compaction.plan(settings(tmp_path)))[0]
            segments = await compaction.write(settings(tmp_path), group)
            with pytest.raises(MillstreamError) as error:
                await attempt(driver, group, segments)
            message = error.value.message
            assert driver.shard.measures.compactions["segments"] == 0
            assert await content_of(driver, paths) == before
            # And the right one is still accepted afterwards.
            await commit(driver, group, segments)
            assert await content_of(driver, paths) == before

    asyncio.run(scenario())
    return message


def test_a_segment_that_leaves_out_live_messages_is_refused(tmp_path: Path) -> None:
    async def attempt(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> None:
        fewer = group._replace(sources=group.sources[1:])
        short = await compaction.write(settings(tmp_path), fewer)
        await commit(driver, group, short)

    assert "do not stand for the old ones" in refused(tmp_path, attempt)


def test_a_segment_with_messages_of_other_segments_is_refused(tmp_path: Path) -> None:
    async def attempt(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> None:
        await commit(driver, group._replace(sources=group.sources[:-1]), segments)

    assert "do not stand for the old ones" in refused(tmp_path, attempt)


def test_no_new_segments_at_all_is_refused_while_messages_live(tmp_path: Path) -> None:
    async def attempt(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> None:
        await commit(driver, group, [])

    assert "live runs of messages are not in them" in refused(tmp_path, attempt)


@pytest.mark.parametrize("column", ["payload", "position", "appended_at", "stream", "content_type", "incarnation"])
def test_a_row_that_differs_in_any_column_is_refused(tmp_path: Path, column: str) -> None:
    async def attempt(driver: ShardDriver, group: Group, segments: list[SegmentRef]) -> None:
        batch_of: Any = rewriting._batch

        def spoiled(part: Any, taken: Any, group: Any) -> Any:
            batch = batch_of(part, taken, group)
            index = batch.schema.get_field_index(column)
            values = batch.column(index).to_pylist()
            if isinstance(values[2], bytes):
                values[2] = bytes([values[2][0] ^ 1]) + values[2][1:]
            elif isinstance(values[2], str):
                values[2] = values[2] + "x"
            elif isinstance(values[2], int):
                values[2] = values[2] + 1
            else:
                values[2] = values[2].replace(microsecond=999_000)
            return batch.set_column(
                index, batch.schema.field(index), arrow.array(values, batch.schema.field(index).type)
            )

        rewriting._batch = spoiled
        try:
            wrong = await compaction.write(settings(tmp_path), group)
        finally:
            rewriting._batch = batch_of
        await commit(driver, group, wrong)

    refused(tmp_path, attempt)


def test_names_outside_the_segments_folder_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            await tidy(driver)
            await filled(driver, flushes=2)
            group = (await compaction.plan(settings(tmp_path)))[0]
            segments = await compaction.write(settings(tmp_path), group)
            for path in ("../x-compacted.parquet", "manifests/0000/1-compacted.parquet", "segments/a.parquet"):
                with pytest.raises(InvalidRequest, match="no name for a compacted segment"):
                    await commit(driver, group, [msgspec.structs.replace(segments[0], path=path)])

    asyncio.run(scenario())


def test_abandoned_segments_are_swept_and_committed_ones_are_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = FakeClock()
        async with started(tmp_path, clock) as driver:
            await tidy(driver)
            paths = await filled(driver)
            before = await content_of(driver, paths)
            group, other = await compaction.plan(settings(tmp_path))
            await commit(driver, group, await compaction.write(settings(tmp_path), group))
            abandoned = await compaction.write(settings(tmp_path), other)
            future_ms = 1 << 50
            assert await driver.shard.compaction.sweep(Milliseconds(0)) == 0
            assert await driver.shard.compaction.sweep(Milliseconds(future_ms)) == len(abandoned)
            assert not any((tmp_path / "cold" / segment.path).exists() for segment in abandoned)
            forget_what_was_read(driver)
            assert await content_of(driver, paths) == before

    asyncio.run(scenario())


def test_restore_after_compaction_gives_the_same_streams_and_feed(tmp_path: Path) -> None:
    async def scenario() -> None:
        origin, clock = tmp_path / "origin", FakeClock()
        async with started(origin, clock) as driver:
            paths = await filled(driver)
            await compact_all(driver, origin)
            await driver.append("comp-a/s0", b"after the compaction")
            await driver.delete("comp-b/s0")
            await driver.checkpoint()
            left = [path for path in paths if path != "comp-b/s0"]
            before = await content_of(driver, left)
            feeds = {bucket: await feed_of(driver, bucket) for bucket in ("comp-a", "comp-b")}
            # A full manifest tells the same as the chain.
            parts = list(driver.catalog.dump(3))
            assert parts[-1].replacements and parts[-1].retired
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "cold").symlink_to(origin / "cold")
        catalog = Catalog(copy / "catalog")
        cold = ColdTier(open_objects(settings(copy)), catalog, CACHE_BYTES)
        await restore(cold, catalog, clock.now_ms(), lambda done, total: None)
        log = FileLog(copy / "log", clock)
        log.start(catalog.position, lambda *call: None)
        log.close()
        cold.close()
        catalog.close()
        async with started(copy, clock) as driver:
            assert await content_of(driver, left) == before
            assert {bucket: await feed_of(driver, bucket) for bucket in feeds} == feeds

    asyncio.run(scenario())
