"""A follower's catalog: moved by the leader's flushes to the same rows, without flushing anything itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millstream.errors import NotLeader
from millstream.log.file_log import FileLog
from millstream.protocol.producers import ProducerClaim
from millstream.shard.compaction import Proposal
from millstream.shard.flush.limits import FlushLimits
from millstream.shard.settings import ShardSettings
from millstream.shard.shard import Shard
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.units import Milliseconds, Offset
from support import compaction
from support.fake_time import FakeClock, run, turns
from support.shards import NO_FLUSHES_SECONDS, ShardDriver, key_of


class Pair:
    """A leader with a log of its own, and a follower that is given what that log holds. One object store for both."""

    def __init__(self, directory: Path, clock: FakeClock) -> None:
        self._directory = directory
        self.leader = self._open("leader", clock)
        self.follower = self._open("follower", clock)
        self._applied = 1

    def _open(self, name: str, clock: FakeClock) -> ShardDriver:
        directory = self._directory / name
        log = FileLog(directory / "log", clock)
        catalog = Catalog(directory / "catalog")
        objects = open_objects(ObjectStoreSettings("fs", self._directory / "cold", {}))
        shard = Shard(
            log,
            catalog,
            ColdTier(objects, catalog, 1 << 20),
            Blobs(objects, directory / "uploads"),
            clock,
            ShardSettings(hot_bytes_max=1 << 30, flush=FlushLimits(NO_FLUSHES_SECONDS, 1 << 40, 0, 1 << 40, 10_000)),
        )
        return ShardDriver(shard, log, catalog)

    async def replicate(self) -> None:
        """Give the follower everything that is new; a reader of its own sees the log as it is on disk."""
        reader = FileLog(self._directory / "leader" / "log", FakeClock())
        for batch in list(_batches(reader)):
            if batch.first >= self._applied:
                self.follower.shard.apply_committed(batch)
                self._applied = batch.next

    async def until_followed(self) -> None:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if self.follower.catalog.position == self.leader.catalog.position and not self._pending():
                return
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)
        raise AssertionError(
            f"the follower stands at {self.follower.catalog.position}, the leader at {self.leader.catalog.position}"
            f" with {self.follower.shard.machine.sealed} to follow"
        )

    def _pending(self) -> bool:
        return bool(self.follower.shard.machine.sealed)


def _batches(log: FileLog):
    """The log's frames, without settling its end as a restart would."""
    from millstream.log.frames import SEGMENT_HEADER_BYTES, decode_frame, decode_segment_header

    for path in log.segments():
        data = memoryview(path.read_bytes())
        header = decode_segment_header(data)
        assert header is not None
        at = SEGMENT_HEADER_BYTES
        while (found := decode_frame(data, at, header.salt)) is not None:
            batch, at = found
            yield batch


@asynccontextmanager
async def pair(directory: Path, clock: FakeClock) -> AsyncIterator[Pair]:
    both = Pair(directory, clock)
    await both.leader.shard.start()
    both.follower.shard.committer.refuse(NotLeader("it follows"))
    both.follower.shard.run()
    both.follower.shard.follow(NotLeader("it follows"))
    await turns(2)
    try:
        yield both
    finally:
        await both.follower.shard.catalog_follower.stop()
        await both.follower.crash()
        await both.leader.crash()


def rows(driver: ShardDriver) -> dict[bytes, bytes]:
    return dict(driver.catalog.scan(b""))


def test_producers_come_with_the_manifests_and_stay_known_when_the_follower_takes_over(tmp_path: Path) -> None:
    clock = FakeClock()

    async def write(driver: ShardDriver, number: int) -> None:
        await driver.append("b/s", b"x", producer=ProducerClaim(f"p{number}", 0, 0))

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/s", content_type="text/plain")
            for number in range(9):
                await write(both.leader, number)
                if number in (2, 5):
                    await both.leader.checkpoint()
                await both.replicate()
            await both.until_followed()
            machine = both.follower.shard.machine
            stream = both.follower.shard.get(key_of("b/s"))
            for _ in range(2):
                known = [machine.namespace.producer(stream, f"p{number}", Milliseconds(0)) for number in range(10)]
                assert [state[:2] if state is not None else None for state in known] == [(0, 0)] * 9 + [None]
                assert machine.namespace.producers.count(stream.incarnation) == 9
                await both.follower.shard.catalog_follower.stop()
            assert len(machine.namespace.producers) <= 6, "what the manifests brought is not held in memory any more"

    run(main(), clock)


def test_the_catalog_moves_with_each_flush_and_memory_is_let_go(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/s", content_type="text/plain")
            for number in range(10):
                await both.leader.append("b/s", b"%d" % number)
            await both.replicate()
            assert await both.follower.messages("b/s") == [b"%d" % number for number in range(10)]
            await both.leader.checkpoint()
            await both.leader.append("b/s", b"later")
            await both.replicate()
            await both.until_followed()
            assert rows(both.follower) == rows(both.leader)
            # What the flush holds is read from the store now, what came later from memory.
            tail = both.follower.shard.hot.tail(both.follower.shard.get(key_of("b/s")))
            assert tail is not None
            assert tail.start == 10
            assert await both.follower.messages("b/s") == [*(b"%d" % number for number in range(10)), b"later"]

    run(main(), clock)


def test_streams_that_changed_and_went_between_flushes_end_up_alike(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            for round_number in range(4):
                for number in range(5):
                    await both.leader.create(f"b/{round_number}.{number}", body=b"x", content_type="text/plain")
                if round_number:
                    await both.leader.delete(f"b/{round_number - 1}.0")
                    await both.leader.create(f"b/{round_number - 1}.0", content_type="text/plain")
                    await both.leader.append(f"b/{round_number - 1}.1", b"again")
                await both.replicate()
                await both.leader.checkpoint()
                await both.leader.append(f"b/{round_number}.2", b"after the flush")
                await both.replicate()
                await both.until_followed()
                assert rows(both.follower) == rows(both.leader)
            for round_number in range(4):
                for number in range(5):
                    path = f"b/{round_number}.{number}"
                    assert await both.follower.messages(path) == await both.leader.messages(path), path

    run(main(), clock)


def test_a_follower_that_takes_over_flushes_everything_the_catalog_lacks(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/old", content_type="text/plain")
            await both.leader.append("b/old", b"one")
            await both.leader.checkpoint()
            await both.leader.append("b/old", b"two")
            await both.leader.create("b/new", body=b"three", content_type="text/plain")
            await both.replicate()
            await both.until_followed()
            expected = {path: await both.leader.messages(path) for path in ("b/old", "b/new")}
            await both.follower.shard.lead()
            await both.follower.append("b/new", b"four")
            position = await both.follower.checkpoint()
            assert both.follower.catalog.position == position
            assert {name.decode() for name in rows(both.follower)} == {"b\0old", "b\0new"}
            assert len(both.follower.shard.hot) == 0, "all of it is cold"
            assert await both.follower.messages("b/old") == expected["b/old"]
            assert await both.follower.messages("b/new") == [*expected["b/new"], b"four"]

    run(main(), clock)


def test_a_follower_refuses_writes(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/s", content_type="text/plain")
            await both.replicate()
            with pytest.raises(NotLeader):
                await both.follower.append("b/s", b"x")
            with pytest.raises(NotLeader):
                await both.follower.create("b/t")

    run(main(), clock)


def segments(driver: ShardDriver) -> dict[str, int]:
    """What is alive in each segment."""
    return {row.segment.path: row.live_bytes for _, row in driver.catalog.segments()}


def test_compactions_and_trims_reach_the_follower_and_the_next_leader_does_not_repeat_them(tmp_path: Path) -> None:
    clock = FakeClock()
    store = ObjectStoreSettings("fs", tmp_path / "cold", {})

    async def compact(driver: ShardDriver) -> None:
        (group,) = await compaction.plan(store)
        new = await compaction.write(store, group)
        await driver.shard.compaction.commit(Proposal([one.path for one in group.sources], new))

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/s", content_type="text/plain")
            for number in range(6):
                await both.leader.append("b/s", b"message %d" % number)
                await both.leader.checkpoint()
            await both.replicate()
            await both.until_followed()
            await compact(both.leader)
            await both.replicate()
            await both.until_followed()
            assert segments(both.follower) == segments(both.leader)
            assert sum(1 for live in segments(both.follower).values() if live) == 1
            assert both.follower.shard.machine.replaced == []
            assert await both.follower.messages("b/s") == [b"message %d" % number for number in range(6)]
            stream = both.leader.shard.get(key_of("b/s"))
            both.leader.shard.trim(stream, Offset(len(b"message 0") * 2))
            await both.leader.append("b/s", b"last")
            await both.leader.checkpoint()
            await both.replicate()
            await both.until_followed()
            assert rows(both.follower) == rows(both.leader)
            assert segments(both.follower) == segments(both.leader)
            before = segments(both.follower)
            await both.follower.shard.lead()
            await both.follower.append("b/s", b"by the next leader")
            await both.follower.checkpoint()
            assert {path: live for path, live in segments(both.follower).items() if path in before} == before
            assert len(segments(both.follower)) == len(before) + 1

    run(main(), clock)


def test_a_follower_whose_manifest_was_tidied_up_asks_to_be_restored(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with pair(tmp_path, clock) as both:
            await both.leader.create("b/s", body=b"x", content_type="text/plain")
            await both.leader.checkpoint()
            for manifest in (tmp_path / "cold" / "manifests").rglob("*.msgpack"):
                manifest.unlink()
            await both.replicate()
            deadline = time.monotonic() + 20.0
            while not both.follower.shard.catalog_follower.is_behind and time.monotonic() < deadline:
                await asyncio.sleep(0)
                await asyncio.to_thread(lambda: None)
            assert both.follower.shard.catalog_follower.is_behind

    run(main(), clock)
