"""Damaged and missing objects of every kind: named, and never served; what is served is exactly what was written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import Corrupt, MillstreamError, ObjectMissing
from millstream.shard.scrub import ScrubLimits
from millstream.streams.records import SnapshotRef
from millstream.tiers import blobs as blobs_module
from millstream.tiers.cache import ByteLimitedCache
from support.fake_time import FakeClock, run
from support.shards import CACHE_BYTES, ShardDriver, key_of, started

FLIPS = 60


def forget_what_was_read(driver: ShardDriver) -> None:
    cold: Any = driver.shard.cold
    cold._groups = ByteLimitedCache(CACHE_BYTES)
    cold._footers = ByteLimitedCache(CACHE_BYTES)
    feed: Any = driver.shard.feed
    feed._notes_read = ByteLimitedCache(CACHE_BYTES)
    feed._history._windows.clear()


def flips(file: Path, seed: int, count: int = FLIPS) -> Iterator[int]:
    """The file with one bit flipped, at many places one after the other; whole again at the end."""
    whole = file.read_bytes()
    chance = random.Random(seed)
    try:
        for at in sorted(chance.sample(range(len(whole)), min(count, len(whole)))):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            yield at
    finally:
        file.write_bytes(whole)


async def filled(driver: ShardDriver) -> dict[str, list[bytes]]:
    chance = random.Random(5)
    content: dict[str, list[bytes]] = {}
    for name in ("a", "b", "c"):
        await driver.create(f"damage/{name}", content_type="text/plain")
        content[name] = [chance.randbytes(chance.randrange(1, 400)) for _ in range(40)]
    for turn in range(40):
        for name, messages in content.items():
            await driver.append(f"damage/{name}", messages[turn])
    await driver.checkpoint()
    return content


def the_file(directory: Path, folder: str) -> Path:
    (file,) = [path for path in (directory / "cold" / folder).rglob("*") if path.is_file()]
    return file


def test_a_flipped_bit_in_a_segment_is_never_served_and_always_found(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            content = await filled(driver)
            scrubber: Any = driver.shard.scrubber
            scrubber._limits = ScrubLimits(1 << 40, 0.0)
            file = the_file(tmp_path, "segments")
            path = str(file.relative_to(tmp_path / "cold"))
            refused, told = 0, set[bool]()
            for _ in flips(file, 1):
                forget_what_was_read(driver)
                for name, messages in content.items():
                    try:
                        assert await driver.messages(f"damage/{name}") == messages
                    except Corrupt as error:
                        assert path in error.message
                        refused += 1
                driver.shard.cold.objects.damage.objects.clear()
                await scrubber.scrub()
                said = driver.shard.damaged()[path]
                assert "120 messages of bucket" in said
                assert "damage/a, damage/b, damage/c" in said or "its index cannot be read either" in said
                told |= {said.endswith("damage/c)")}
            assert refused
            assert told == {True, False}
            await scrubber.scrub()
            assert driver.shard.damaged() == {}

    run(main(), clock)


def test_a_segment_that_is_gone_or_cut_short_is_missing_and_not_not_found(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            content = await filled(driver)
            file = the_file(tmp_path, "segments")
            whole = file.read_bytes()
            assert await driver.shard.scrubber.compare_listing() == 0
            file.unlink()
            forget_what_was_read(driver)
            with pytest.raises(ObjectMissing, match="segments/"):
                await driver.messages("damage/a")
            with pytest.raises(ObjectMissing):
                await driver.shard.feed.read_cold("damage", driver.shard.feed.earliest, "", 4_000)
            assert await driver.shard.scrubber.compare_listing() == 1
            file.write_bytes(whole[:-10])
            assert await driver.shard.scrubber.compare_listing() == 1
            with pytest.raises(MillstreamError):
                await driver.messages("damage/a")
            file.write_bytes(whole)
            assert await driver.messages("damage/a") == content["a"]
            assert driver.shard.damaged() == {}

    run(main(), clock)


def test_notes_and_snapshots_that_are_gone_are_found_by_the_listing(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver)
            upload = driver.shard.blobs.begin(b"up")
            upload.write(b"state")
            await driver.outcome(driver.shard.publish_snapshot, key_of("damage/a"), 0, "text/plain", upload)
            await driver.checkpoint()
            compare = driver.shard.scrubber.compare_listing
            assert await compare() == 0
            notes = min(path for path in (tmp_path / "cold" / "notes").rglob("*.msgpack"))
            for file in (notes, the_file(tmp_path, "snapshots")):
                file.rename(tmp_path / "away")
                assert await compare() == 1
                assert list(driver.shard.damaged()) == [str(file.relative_to(tmp_path / "cold"))]
                (tmp_path / "away").rename(file)
                driver.shard.cold.objects.damage.objects.clear()
            assert await compare() == 0

    run(main(), clock)


def test_a_flipped_bit_in_notes_is_never_told_of_by_the_feed(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver)
            for _ in flips(the_file(tmp_path, "notes"), 2, 40):
                forget_what_was_read(driver)
                with pytest.raises(Corrupt, match="notes/"):
                    await driver.shard.feed.read_cold("damage", driver.shard.feed.earliest, "", 4_000)
            forget_what_was_read(driver)
            page = await driver.shard.feed.read_cold("damage", driver.shard.feed.earliest, "", 1 << 20)
            assert [item.stream for item in page.items if item.event == "created"] == ["a", "b", "c"]

    run(main(), clock)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_flipped_bit_in_a_snapshot_is_refused_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(blobs_module, "WHOLE_BYTES", 10)
    clock = FakeClock()

    async def whole(driver: ShardDriver, snapshot: SnapshotRef) -> bytes:
        return b"".join([piece async for piece in await driver.shard.blobs.open(snapshot)])

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver)
            body = random.Random(9).randbytes(3_000_000)
            upload = driver.shard.blobs.begin(b"up")
            upload.write(body)
            await driver.outcome(
                driver.shard.publish_snapshot, key_of("damage/a"), 0, "application/octet-stream", upload
            )
            snapshot = driver.shard.get(key_of("damage/a")).snapshot
            assert snapshot is not None
            file = tmp_path / "cold" / "snapshots" / snapshot.blob
            for _ in flips(file, 3, 12):
                with pytest.raises(Corrupt, match="snapshots/"):
                    await driver.shard.blobs.open(snapshot)
            assert await whole(driver, snapshot) == body
            # Damaged after it was compared once: a large one breaks off before its end.
            for _ in flips(file, 4, 3):
                with pytest.raises(Corrupt, match="snapshots/"):
                    await whole(driver, snapshot)
            file.rename(file.with_suffix(".away"))
            with pytest.raises(ObjectMissing):
                await whole(driver, snapshot)

    run(main(), clock)


def test_a_scrub_goes_on_where_it_was_left(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await filled(driver)
            await driver.append("damage/a", b"more")
            await driver.checkpoint()
            scrubber: Any = driver.shard.scrubber
            scrubber._limits = ScrubLimits(1 << 40, 3600.0)
            assert scrubber._is_due()
            assert await scrubber.scrub() == 3  # notes of the first flush, and two segments
            assert not scrubber._is_due()
            clock.advance(3_601_000)
            assert scrubber._is_due()
            first = min(path for path in (tmp_path / "cold" / "segments").rglob("*.parquet"))
            scrubber._save(type(scrubber._progress())(str(first.relative_to(tmp_path / "cold")), clock.now_ms()))
            assert scrubber._is_due()
            assert await scrubber.scrub() == 1

    run(main(), clock)
