"""A manifest that is lost while the server runs: noticed, and made good from the catalog before anything is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import Corrupt
from millstream.shard.restore import chain_of, restore
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.units import Milliseconds
from support.fake_time import FakeClock, run
from support.shards import CACHE_BYTES, ShardDriver, started

FLUSHES = 5


def manifests(directory: Path) -> list[Path]:
    return sorted((directory / "cold" / "manifests").rglob("*.*"))


async def written(driver: ShardDriver) -> None:
    for number in range(FLUSHES):
        await driver.create(f"watch/{number}", content_type="text/plain", body=b"%d" % number)
        await driver.append("watch/0", b"+")
        await driver.checkpoint()


async def restored_streams(driver: ShardDriver, place: Path) -> int:
    catalog = Catalog(place)
    cold = ColdTier(driver.shard.cold.objects, catalog, CACHE_BYTES)
    try:
        return (await restore(cold, catalog, Milliseconds(0), lambda done, total: None)).streams
    finally:
        cold.close()
        catalog.close()


@pytest.mark.parametrize("which", range(FLUSHES))
@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_a_lost_manifest_is_noticed_and_a_full_one_stands_for_it(tmp_path: Path, which: int, kind: str) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver)
            shard = driver.shard
            assert await shard.manifest_watch.compare()
            file = manifests(tmp_path)[which]
            if kind == "missing":
                file.unlink()
            else:
                shard.manifest_watch._heads.clear()  # as after a restart: what was read once is not read again
                file.write_bytes(file.read_bytes()[:-3])
            is_last = which == FLUSHES - 1
            if not is_last:
                with pytest.raises(Corrupt):
                    await chain_of(shard.cold)
            assert not await shard.manifest_watch.compare()
            assert shard.cold.objects.damage.found_total == 1
            assert not shard.damaged()
            assert await restored_streams(driver, tmp_path / "restored") == FLUSHES
            # And the history goes on from there.
            await driver.create("watch/later", content_type="text/plain", body=b"later")
            await driver.checkpoint()
            assert await shard.manifest_watch.compare()
            assert await restored_streams(driver, tmp_path / "again") == FLUSHES + 1

    clock = FakeClock()
    run(main(), clock)


def test_while_no_full_manifest_can_be_written_the_damage_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver)
            shard = driver.shard
            manifests(tmp_path)[2].unlink()

            async def refuse() -> None:
                raise Corrupt("no room")

            with monkeypatch.context() as patch:
                patch.setattr(shard.flusher, "write_full_manifest", refuse)
                with pytest.raises(Corrupt):
                    await shard.manifest_watch.compare()
            (reason,) = shard.damaged().values()
            assert "a manifest is missing or damaged" in reason
            assert not await shard.manifest_watch.compare()
            assert not shard.damaged()

    clock = FakeClock()
    run(main(), clock)


def test_rounds_read_each_manifest_once_and_rest_while_nothing_is_flushed(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver)
            watch = driver.shard.manifest_watch
            assert await watch.compare()
            reads: list[str] = []
            get = watch._objects.get

            async def counted(path: str) -> bytes:
                reads.append(path)
                return await get(path)

            watch._objects.get = counted  # type: ignore[method-assign]
            await driver.append("watch/0", b"more")
            await driver.checkpoint()
            reads.clear()
            assert await watch.compare()
            assert len(reads) == 1
            assert not watch._is_due()

    clock = FakeClock()
    run(main(), clock)
