"""Checkpoints (the catalog's part of a flush) while streams change: one moment each, and a failed one loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import NotFound
from millstream.shard.flush import apply, flusher, seal
from millstream.shard.flush import capture as module
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint
from millstream.tiers.manifests import decode_manifest_streams
from millstream.tiers.stream_rows import encode_stream
from support.fake_time import FakeClock, run, turns
from support.shards import ShardDriver, key_of, started


async def streams(driver: ShardDriver, count: int) -> None:
    for number in range(count):
        await driver.create(f"logs/{number}", content_type="text/plain", body=b"x")


def saved_tails(catalog: Catalog, count: int) -> list[int | None]:
    found = (catalog.load_key(key_of(f"logs/{number}")) for number in range(count))
    return [stream.tail if stream is not None else None for stream in found]


def test_a_stream_that_changes_during_a_checkpoint_is_saved_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One stream at a time, so that commits land between the slices.
    monkeypatch.setattr(module, "SLICE_STREAMS", 1)
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await streams(driver, 6)
            position = driver.shard.committer.applied_position
            checkpoint = asyncio.create_task(driver.checkpoint())
            while not driver.shard.namespace.unencoded:  # the store is asked first whose it is
                await asyncio.sleep(0)
            # Applied here and now, in the middle of the checkpoint, as a batch that becomes durable is.
            applied = asyncio.gather(
                *(driver.append(f"logs/{number}", b"yy") for number in range(6)), driver.create("logs/new", body=b"n")
            )
            assert await checkpoint == position
            await applied
            assert saved_tails(driver.catalog, 6) == [1] * 6
            assert driver.catalog.load_key(key_of("logs/new")) is None
            assert driver.catalog.position == position
            await driver.checkpoint()
            assert saved_tails(driver.catalog, 6) == [3] * 6
        async with started(tmp_path, clock) as driver:
            assert [await driver.messages(f"logs/{number}") for number in range(6)] == [[b"x", b"yy"]] * 6
            assert await driver.messages("logs/new") == [b"n"]

    run(main(), clock)


def test_every_kind_of_change_during_a_checkpoint_leaves_the_captured_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_STREAMS", 1)
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await streams(driver, 8)
            machine = driver.shard.machine
            held = asyncio.Event()
            written: list[Checkpoint] = []
            write = driver.catalog.write

            def note(checkpoint: Checkpoint) -> None:
                written.append(checkpoint)
                write(checkpoint)

            monkeypatch.setattr(driver.catalog, "write", note)
            original = asyncio.sleep

            async def slowly(seconds: float) -> None:
                await original(0)
                if not held.is_set() and machine.namespace.unencoded:
                    held.set()
                    # While most are still to be encoded: commit a change of each kind.
                    await driver.append("logs/0", b"yy", close=True)
                    await driver.delete("logs/1")
                    await driver.delete("logs/2")
                    await driver.create("logs/2", content_type="application/json")
                    await driver.create("logs/fork", fork=("logs/3",))

            monkeypatch.setattr(asyncio, "sleep", slowly)
            await driver.checkpoint()
            monkeypatch.setattr(asyncio, "sleep", original)
            assert held.is_set()
            assert len(written) == 1
            # Each of the eight exactly once, as they were when it began.
            assert len(decode_manifest_streams(written[0].streams)) == 8
            assert saved_tails(driver.catalog, 8) == [1] * 8
            saved = driver.catalog.load_key(key_of("logs/0"))
            assert saved is not None
            assert not saved.closed
            source = driver.catalog.load_key(key_of("logs/3"))
            assert source is not None
            assert source.forks == 0
            # What was deleted meanwhile is in the catalog still, and must not come back from there.
            with pytest.raises(NotFound):
                driver.shard.get(key_of("logs/1"))
            assert await driver.messages("logs/2") == []
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("logs/0") == [b"x", b"yy"]
            assert driver.shard.get(key_of("logs/0")).closed
            with pytest.raises(NotFound):
                driver.shard.get(key_of("logs/1"))
            assert driver.shard.get(key_of("logs/2")).is_json
            assert await driver.messages("logs/fork") == [b"x"]
            assert driver.shard.get(key_of("logs/3")).forks == 1

    run(main(), clock)


def test_a_checkpoint_that_cannot_be_written_is_written_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await streams(driver, 4)
            await driver.checkpoint()
            await driver.append("logs/0", b"yy")
            await driver.delete("logs/1")

            def fail(checkpoint: Any) -> None:
                raise OSError("no space left")

            with monkeypatch.context() as patch:
                patch.setattr(driver.catalog, "write", fail)
                with pytest.raises(OSError):
                    await driver.checkpoint()
            with pytest.raises(NotFound):
                driver.shard.get(key_of("logs/1"))
            assert saved_tails(driver.catalog, 4) == [1, 1, 1, 1]
            await driver.append("logs/2", b"zzz")
            await driver.checkpoint()
            assert saved_tails(driver.catalog, 4) == [3, None, 4, 1]
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("logs/0") == [b"x", b"yy"]

    run(main(), clock)


def test_streams_that_only_grew_are_saved_without_being_encoded(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, keep_bytes=1 << 30) as driver:
            machine = driver.shard.machine
            await streams(driver, 6)
            await driver.checkpoint()
            for number in range(6):
                await driver.append(f"logs/{number}", b"y")
            clock.advance(100)
            await driver.append("logs/0", b"zz")
            assert not machine.namespace.changed
            await driver.append("logs/1", b"zz", seq="1")
            clock.advance(-50)  # back, but not before the last append
            await driver.append("logs/2", b"zz")
            clock.advance(-100)  # before it: messages alone would not tell when it was last accessed
            await driver.append("logs/3", b"zz")
            await driver.delete("logs/4")
            assert sorted(stream.key.stream for stream in machine.namespace.changed.values()) == ["1", "3"]
            await driver.checkpoint()
            assert saved_tails(driver.catalog, 6) == [4, 4, 4, 4, None, 2]
            for number in (0, 1, 2, 3, 5):
                saved, stream = (
                    driver.catalog.load_key(key_of(f"logs/{number}")),
                    driver.shard.get(key_of(f"logs/{number}")),
                )
                assert saved is not None
                assert encode_stream(saved) == encode_stream(stream)

    run(main(), clock)


def test_a_stream_that_grew_stays_in_memory_until_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            machine = driver.shard.machine
            await streams(driver, 4)
            await driver.checkpoint()
            driver.shard.flusher.memory._limits = driver.shard.flusher.memory._limits._replace(resident_streams_max=1)
            await driver.append("logs/0", b"yy")
            machine.namespace.evict(list(machine.namespace.resident()), (), 4)
            assert [stream.key.stream for stream in machine.namespace.resident()] == ["0"]
            await driver.append("logs/1", b"yy")
            await driver.checkpoint()
            assert machine.namespace.resident_count() == 1
            assert saved_tails(driver.catalog, 4) == [3, 3, 1, 1]
            assert await driver.messages("logs/0") == [b"x", b"yy"]

    run(main(), clock)


def test_a_checkpoint_without_changes_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await streams(driver, 1)
            position = await driver.checkpoint()

            def fail(checkpoint: Any) -> None:
                raise AssertionError("written for nothing")

            monkeypatch.setattr(driver.catalog, "write", fail)
            assert await driver.checkpoint() == position

    run(main(), clock)


def test_flushes_are_taken_at_their_interval(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, flush_seconds=10.0) as driver:
            await streams(driver, 1)
            before = driver.catalog.position
            clock.advance(9_000)
            await turns()
            assert driver.catalog.position == before
            clock.advance(1_000)
            await turns()
            # The write itself runs on a thread; whoever asks next waits for it.
            await driver.checkpoint()
            assert driver.catalog.position > before
            assert saved_tails(driver.catalog, 1) == [1]

    run(main(), clock)


def test_many_changed_streams_are_flushed_however_little_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "FLUSH_STREAMS", 4)
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, flush_seconds=1000.0) as driver:
            before = driver.catalog.position
            for count, is_flushed in ((3, False), (4, True)):
                await streams(driver, count)
                clock.advance(1_000)
                await turns()
                async with driver.shard.flusher.lock:
                    assert (driver.catalog.position > before) == is_flushed

    run(main(), clock)


def test_a_flush_of_more_segments_than_a_record_names_is_indexed_from_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays small however many segments there are, and a crash before the catalog has them loses nothing."""
    monkeypatch.setattr(seal, "SEALED_SEGMENTS_MAX", 2)
    clock = FakeClock()
    names = [f"bucket{number}/s" for number in range(5)]

    async def no_apply(*arguments: Any) -> None:
        raise NotFound("the catalog could not be written")

    async def main() -> None:
        async with started(tmp_path, clock, crash=True) as driver:
            for name in names:
                await driver.create(name, content_type="text/plain", body=name.encode())
            with monkeypatch.context() as crash:
                crash.setattr(apply.CatalogUpdate, "apply", no_apply)
                with pytest.raises(NotFound):
                    await driver.shard.flusher.flush()
        async with started(tmp_path, clock) as driver:
            assert [one.segments for one in driver.shard.machine.sealed] == [[]]
            await driver.append(names[0], b"more")
            await driver.checkpoint()
            stored = [row.segment.bucket for _, row in driver.catalog.segments()]
            assert sorted(stored) == sorted([*(name.partition("/")[0] for name in names), "bucket0"])
            for name in names[1:]:
                assert await driver.messages(name) == [name.encode()]
            assert await driver.messages(names[0]) == [names[0].encode(), b"more"]

    run(main(), clock)


def test_written_paths_are_those_of_the_flush_under_way_and_none_after_it_whether_it_fails_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    seen: list[set[str]] = []

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            flushing = driver.shard.flusher
            apply_step, seal_step = apply.CatalogUpdate.apply, seal.SealedFlushes.seal

            async def look(update: apply.CatalogUpdate, *arguments: Any) -> None:
                seen.append(set(flushing.unlisted.written_paths))
                await apply_step(update, *arguments)

            async def refuse(*arguments: Any) -> None:
                seen.append(set(flushing.unlisted.written_paths))
                raise NotFound("the log does not take it")

            monkeypatch.setattr(apply.CatalogUpdate, "apply", look)
            for number in range(6):
                await driver.create(f"logs/{number}", content_type="text/plain", body=b"x")
                monkeypatch.setattr(seal.SealedFlushes, "seal", refuse if number % 2 else seal_step)
                if number % 2:
                    with pytest.raises(NotFound):
                        await flushing.flush()
                else:
                    await flushing.flush()
                assert flushing.unlisted.paths == set()
            assert {len(paths) for paths in seen} == {3}, "a segment, the notes and the manifest"
            assert not set.intersection(*seen)

    run(main(), clock)
