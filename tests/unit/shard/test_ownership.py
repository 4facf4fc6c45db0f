"""Who owns the object store: each start and change of leader takes the next epoch, and who was overtaken stops."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import Corrupt, NotLeader, ReadOnly, Unavailable
from millstream.shard.ownership import StoreRefused, take_over
from millstream.shard.restore import find_manifests, live_segments
from millstream.streams.records import AnyRecord, LeaderStarted, StoreClaimed
from millstream.tiers.objects import Objects, ObjectStoreSettings, open_objects
from millstream.tiers.owners import Owner, become_owner, decode_owner, encode_owner, epochs, newest_owner
from millstream.units import Milliseconds
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, open_shard, started

OWNER = Owner("store", 7, 0, "claim", "somebody", Milliseconds(1_700_000_000_000))


def copied(source: Path, target: Path) -> Path:
    """A copy of a data directory, on the same object store."""
    target.mkdir()
    for name in ("log", "catalog"):
        shutil.copytree(source / name, target / name)
    (target / "cold").symlink_to(source / "cold")
    return target


async def written(driver: ShardDriver, name: str) -> None:
    await driver.create(f"owned/{name}", content_type="text/plain")
    await driver.append(f"owned/{name}", name.encode())
    await driver.checkpoint()


def objects_of(driver: ShardDriver) -> Objects:
    return driver.shard.cold.objects


def test_every_start_takes_the_next_epoch_of_the_same_store(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        stores = set()
        for number in range(1, 13):
            async with started(tmp_path, clock) as driver:
                owner = await newest_owner(objects_of(driver), 0)
                assert owner is not None
                stores.add(owner.store)
                assert owner.epoch == driver.shard.ownership.epoch == number
                kept = await epochs(objects_of(driver), 0)
                assert kept[-1] == number
                assert len(kept) <= 8
        assert len(stores) == 1

    run(main(), clock)


def test_a_change_of_leader_takes_the_epoch_over(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            before = driver.shard.ownership.epoch
            await driver.shard.committer.drain()
            driver.shard.follow(NotLeader("another node leads"))
            assert driver.shard.ownership.epoch == 0
            driver.log.close()
            await driver.shard.lead()
            assert driver.shard.ownership.epoch == before + 1
            await written(driver, "two")
            found = await find_manifests(driver.shard.cold)
            assert [head.epoch for head in found.chain.heads] == [before, before + 1]

    run(main(), clock)


def test_who_was_overtaken_flushes_and_accepts_nothing_more(tmp_path: Path) -> None:
    clock = FakeClock()
    old, new = tmp_path / "old", tmp_path / "new"

    async def main() -> None:
        async with started(old, clock) as first:
            await written(first, "one")
            async with started(copied(old, new), clock) as second:
                await first.create("owned/late", content_type="text/plain")
                stored = {entry.path async for entry in objects_of(first).list("")}
                with pytest.raises(Unavailable) as refused:
                    await first.checkpoint()
                assert refused.value.code == "store_taken_over"
                assert {entry.path async for entry in objects_of(first).list("")} == stored
                with pytest.raises(Unavailable):
                    await first.append("owned/one", b"no")
                assert await first.messages("owned/one") == [b"one"]
                await written(second, "two")
                assert await second.messages("owned/two") == [b"two"]

    run(main(), clock)


def test_a_manifest_that_comes_too_late_is_not_sealed_and_loses_against_the_new_owners(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            objects: Any = objects_of(driver)
            put = objects.put

            async def taken_over_just_before(path: str, data: Any) -> None:
                if path.startswith("manifests/"):
                    objects.put = put
                    await take_over(objects, 0, clock, breaks_history=False)
                await put(path, data)

            objects.put = taken_over_just_before
            with pytest.raises(Unavailable) as refused:
                await written(driver, "late")
            assert refused.value.code == "store_taken_over"
            assert driver.catalog.position == driver.shard.machine.flushed, "it was not sealed"
            found = await find_manifests(driver.shard.cold)
            assert len(found.chain.heads) == 2  # nobody has written since: what it says is true

    run(main(), clock)


def test_of_two_that_claim_one_epoch_exactly_one_gets_it(tmp_path: Path) -> None:
    clock = FakeClock()
    first, second = tmp_path / "first", tmp_path / "second"

    async def main() -> None:
        async with started(first, clock) as driver:
            await written(driver, "one")
        copied(first, second)

        async def attempt(directory: Path) -> str:
            try:
                async with started(directory, clock) as driver:
                    await asyncio.sleep(0)
                    return "owner" if driver.shard.ownership.epoch else "none"
            except StoreRefused:
                return "refused"

        outcomes = await asyncio.gather(attempt(first), attempt(second))
        assert sorted(outcomes) == ["owner", "refused"]

    run(main(), clock)


def test_a_claim_whose_put_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
        put = Objects.put

        async def down(self: Objects, path: str, data: Any) -> None:
            if path.startswith("owner/"):
                raise Unavailable("the object store failed", code="object_store_unavailable")
            await put(self, path, data)

        monkeypatch.setattr(Objects, "put", down)
        async with started(tmp_path, clock) as driver:
            assert driver.shard.ownership.epoch == 0
            await driver.append("owned/one", b"accepted meanwhile")
            with pytest.raises(Unavailable):
                await driver.checkpoint()
            monkeypatch.setattr(Objects, "put", put)
            await driver.checkpoint()
            assert driver.shard.ownership.epoch == 3  # the log has gone on since the claim before: one more
            claim = driver.shard.machine.store_claim
            assert claim is not None and claim.epoch == 3
            assert driver.catalog.position == driver.shard.committer.applied_position - 1, "all but the seal is flushed"
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("owned/one") == [b"one", b"accepted meanwhile"]

    run(main(), clock)


class HeldObjects:
    """Holds the calls to one method of an object store until they are let go."""

    def __init__(self, objects: Any, method: str) -> None:
        self.reached, self._go_on = asyncio.Event(), asyncio.Event()
        self._objects, self._method, self._real = objects, method, getattr(objects, method)

    async def put(self, path: str, data: Any) -> None:
        if path.startswith("owner/"):
            self.reached.set()
            await self._go_on.wait()
        await self._real(path, data)

    async def list(self, prefix: str) -> AsyncIterator[Any]:
        if prefix.startswith("owner/"):
            self.reached.set()
            await self._go_on.wait()
        async for entry in self._real(prefix):
            yield entry

    def __enter__(self) -> HeldObjects:
        setattr(self._objects, self._method, getattr(self, self._method))
        return self

    def let_go(self) -> None:
        self._go_on.set()
        setattr(self._objects, self._method, self._real)

    def __exit__(self, *error: object) -> None:
        self.let_go()


async def resigned(driver: ShardDriver) -> None:
    await driver.shard.committer.drain()
    driver.shard.follow(NotLeader("another node leads"))
    driver.log.close()


def test_a_change_of_leader_does_not_keep_writers_waiting_for_the_store(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            before = driver.shard.ownership.epoch
            await resigned(driver)
            with HeldObjects(objects_of(driver), "put") as held:
                await driver.shard.lead(claims_later=True)
                await held.reached.wait()
                await driver.append("owned/one", b"accepted meanwhile")
                assert driver.shard.ownership.epoch == 0
            await driver.checkpoint()
            assert driver.shard.ownership.epoch == before + 1
            assert await driver.messages("owned/one") == [b"one", b"accepted meanwhile"]

    run(main(), clock)


def test_a_flush_that_is_due_while_a_node_begins_to_lead_does_not_claim_the_store_behind_its_back(
    tmp_path: Path,
) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            shard = driver.shard
            commit, announced = shard.committer.commit, asyncio.Event()

            async def with_a_flush_behind_the_fence(record: AnyRecord) -> None:
                if isinstance(record, StoreClaimed):
                    announced.set()
                await commit(record)
                if isinstance(record, LeaderStarted):
                    flush = asyncio.ensure_future(shard.flusher.flush())
                    claim = asyncio.ensure_future(announced.wait())
                    await asyncio.wait([flush, claim], return_when=asyncio.FIRST_COMPLETED)
                    waiting.extend([flush, claim])

            waiting: list[asyncio.Future[Any]] = []
            await driver.append("owned/one", b"more")
            await resigned(driver)
            shard.committer.commit = with_a_flush_behind_the_fence  # type: ignore[method-assign, assignment]
            await shard.lead(LeaderStarted(1, 1, clock.now_ms()), claims_later=True)
            await asyncio.gather(*waiting, return_exceptions=True)
            await driver.checkpoint()
            newest, claim = await newest_owner(objects_of(driver), 0), shard.machine.store_claim
            assert newest is not None
            assert claim is not None
            assert claim.claim == newest.claim, "the next leader would be refused"

    run(main(), clock)


@pytest.mark.parametrize("method", ["put", "list"])
def test_an_answer_of_the_store_that_comes_after_the_shard_was_handed_over_counts_for_nothing(
    tmp_path: Path, method: str
) -> None:
    """Neither does a node own what it has given away, nor is it refused what another node has claimed since."""
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            ownership, before = driver.shard.ownership, driver.shard.ownership.epoch
            with HeldObjects(objects_of(driver), method) as held:
                if method == "put":
                    await resigned(driver)
                    await driver.shard.lead(claims_later=True)
                    (late,) = driver.shard.background._running
                else:
                    late = asyncio.ensure_future(ownership.check())
                await held.reached.wait()
                await resigned(driver)
                held.let_go()
                await asyncio.gather(late, return_exceptions=True)
            assert ownership.owner is None
            assert ownership.refusal is None
            await driver.shard.lead()
            assert ownership.epoch > before
            await written(driver, "two")

    run(main(), clock)


def test_a_refusal_is_over_when_the_log_has_a_later_claim(tmp_path: Path) -> None:
    """A leader that was paused finds another node's claim before it hears of it in the log they share."""
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            claim = await take_over(objects_of(driver), 0, clock, breaks_history=False)
            with pytest.raises(Unavailable):
                await driver.shard.ownership.check()
            assert driver.shard.ownership.refusal is not None
            driver.shard.machine.apply(claim, driver.shard.committer.applied_position)
            assert driver.shard.ownership.refusal is None

    run(main(), clock)


def test_what_was_accepted_while_the_store_was_down_stays_in_the_log_if_another_has_owned_it_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    old, new = tmp_path / "old", tmp_path / "new"

    async def main() -> None:
        async with started(old, clock) as driver:
            await written(driver, "one")
        copied(old, new)
        real = Objects.list

        async def down(self: Objects, prefix: str) -> AsyncIterator[Any]:
            raise Unavailable("the object store failed", code="object_store_unavailable")
            yield

        monkeypatch.setattr(Objects, "list", down)
        async with started(old, clock) as driver:
            await driver.append("owned/one", b"only in the log")
            monkeypatch.setattr(Objects, "list", real)
            async with started(new, clock) as other:
                await written(other, "two")
                before = {entry.path async for entry in objects_of(other).list("")}
                with pytest.raises(Unavailable) as refused:
                    await driver.checkpoint()
                assert refused.value.code == "store_taken_over"
                assert "has owned the object store since" in refused.value.message
                assert driver.shard.ownership.refusal is refused.value
                with pytest.raises(Unavailable) as refused:
                    await driver.append("owned/one", b"no")
                assert refused.value.code == "store_taken_over"
                assert {entry.path async for entry in objects_of(other).list("")} == before
        with pytest.raises(StoreRefused):
            async with started(old, clock):
                pass
        driver = open_shard(old, clock)
        driver.shard.read_only(ReadOnly("for reading only"))
        assert await driver.messages("owned/one") == [b"one", b"only in the log"]
        await driver.crash()

    run(main(), clock)


def test_a_flush_whose_manifest_may_be_in_the_store_deletes_nothing_of_it(tmp_path: Path) -> None:
    """Its answer was lost, and somebody has restored from it since: what it names is theirs by now."""
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
            objects: Any = objects_of(driver)
            put = objects.put

            async def answer_is_lost(path: str, data: Any) -> None:
                await put(path, data)
                if path.startswith("manifests/"):
                    objects.put = put
                    raise Unavailable("the answer was lost", code="object_store_unavailable")

            objects.put = answer_is_lost
            with pytest.raises(Unavailable):
                await written(driver, "two")
            found = await find_manifests(driver.shard.cold)
            assert len(found.chain.heads) == 2
            stored = {entry.path async for entry in objects.list("segments/")}
            assert {one.path for one in await live_segments(driver.shard.cold, found.chain.heads)} <= stored
            # The next one stands in for it.
            await driver.checkpoint()
            found = await find_manifests(driver.shard.cold)
            assert await driver.messages("owned/two") == [b"two"]
            assert found.chain.through == driver.catalog.position

    run(main(), clock)


def test_a_flipped_bit_in_an_owner_is_always_refused() -> None:
    whole = encode_owner(OWNER)
    assert decode_owner(whole, "p") == OWNER
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        try:
            assert decode_owner(bytes(damaged), "the-path") == OWNER
        except Corrupt as error:
            assert "the-path" in error.message


def test_an_attempt_whose_answer_was_lost_is_recognised(tmp_path: Path) -> None:
    async def main() -> None:
        objects = open_objects(ObjectStoreSettings("fs", tmp_path, {}))
        assert await become_owner(objects, 3, OWNER) == OWNER
        assert await become_owner(objects, 3, OWNER) == OWNER
        other = Owner("store", 7, 0, "another claim", "somebody else", Milliseconds(0))
        assert await become_owner(objects, 3, other) == OWNER
        assert await newest_owner(objects, 3) == OWNER
        assert await newest_owner(objects, 4) is None

    asyncio.run(main())


@pytest.mark.parametrize("crashes", [False, True])
def test_an_older_copy_that_went_on_without_the_store_is_refused_when_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: bool
) -> None:
    """By then its own log reaches further than the store does: what counts is where it was when it began."""
    clock = FakeClock()
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def down(self: Objects, path: str) -> bytes:
        raise Unavailable("the object store failed", code="object_store_unavailable")

    async def main() -> None:
        async with started(data, clock) as driver:
            await written(driver, "one")
            copied(data, copy)
            await written(driver, "two")
            stored = {entry.path async for entry in objects_of(driver).list("")}
        with monkeypatch.context() as outage:
            outage.setattr(Objects, "get", down)
            driver = open_shard(copy, clock)
            await driver.shard.start()
            for number in range(50):
                await driver.append("owned/one", b"unasked %d" % number)
        if crashes:
            await driver.crash()
            with pytest.raises(StoreRefused):
                async with started(copy, clock):
                    pass
        else:
            with pytest.raises(Unavailable, match="older copy"):
                await driver.checkpoint()
            with pytest.raises(Unavailable, match="older copy"):
                await driver.append("owned/one", b"no")
            await driver.crash()
        async with started(data, clock) as driver:
            assert stored <= {entry.path async for entry in objects_of(driver).list("")}
            assert await driver.messages("owned/two") == [b"two"]

    run(main(), clock)


def test_an_older_copy_that_claims_the_store_during_a_flush_is_refused_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's manifest comes between the copy's first look and its claim: the claim is void for good."""
    clock = FakeClock()
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def main() -> None:
        async with started(data, clock) as driver:
            await written(driver, "one")
            copied(data, copy)

            async def flush_and_become_owner(*arguments: Any) -> Owner:
                await written(driver, "two")
                return await become_owner(*arguments)

            with monkeypatch.context() as race:
                race.setattr("millstream.shard.ownership.become_owner", flush_and_become_owner)
                with pytest.raises(StoreRefused, match="older copy"):
                    async with started(copy, clock):
                        pass
            for _ in range(2):
                with pytest.raises(StoreRefused):
                    async with started(copy, clock):
                        pass
            assert await driver.messages("owned/two") == [b"two"]

    run(main(), clock)


def test_a_log_that_went_on_without_the_store_goes_on_with_it_through_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    async def down(self: Objects, path: str) -> bytes:
        raise Unavailable("the object store failed", code="object_store_unavailable")

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await written(driver, "one")
        for number in range(2):
            with monkeypatch.context() as outage:
                outage.setattr(Objects, "get", down)
                driver = open_shard(tmp_path, clock)
                await driver.shard.start()
                await driver.append("owned/one", b"unasked %d" % number)
            if number:
                await driver.shard.ownership.claim()
            await driver.crash()
        async with started(tmp_path, clock) as driver:
            assert driver.shard.machine.store_unasked_at is None
            assert await driver.messages("owned/one") == [b"one", b"unasked 0", b"unasked 1"]
            await driver.checkpoint()
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("owned/one") == [b"one", b"unasked 0", b"unasked 1"]

    run(main(), clock)
