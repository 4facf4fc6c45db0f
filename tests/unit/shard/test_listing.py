"""Listing: pages of catalog and memory together are the streams there are, once each and in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import MillstreamError, NotFound
from millstream.protocol.expiry import Expiry
from millstream.shard.flush import capture
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, create, key_of, started

BUCKET = "logs"
names = st.text(st.sampled_from("ab-é𝄞\ufffd"), min_size=1, max_size=3)


def listed(driver: ShardDriver, prefix: str = "", after: str = "", limit: int = 1000) -> list[str]:
    shard = driver.shard
    page = shard.listing.page(BUCKET, prefix, after, limit, shard.clock.now_ms())
    return [stream.key.stream for stream in page.streams]


def walked(driver: ShardDriver, limit: int, prefix: str = "") -> list[str]:
    """Every page after another."""
    shard, found, after = driver.shard, [], ""
    for _ in range(1000):
        page = shard.listing.page(BUCKET, prefix, after, limit, shard.clock.now_ms())
        found += [stream.key.stream for stream in page.streams]
        assert len(page.streams) <= limit
        if not page.has_more:
            return found
        assert len(page.streams) == limit
        after = page.streams[-1].key.stream
    raise AssertionError("the pages do not end")


steps = st.lists(
    st.tuples(st.just("create"), names)
    | st.tuples(st.just("delete"), names)
    | st.tuples(st.just("append"), names)
    | st.tuples(st.just("flush"), st.just(""))
    | st.tuples(st.just("restart"), st.just("")),
    max_size=25,
)


@settings(max_examples=40)
@given(steps, st.integers(1, 4), names | st.just(""))
def test_pages_are_the_streams_there_are_whatever_is_in_the_catalog(
    script: list[tuple[str, str]], limit: int, prefix: str
) -> None:
    clock = FakeClock()
    expected: set[str] = set()

    async def play(directory: Path, script: list[tuple[str, str]]) -> list[tuple[str, str]]:
        async with started(directory, clock) as driver:
            for index, (action, name) in enumerate(script):
                if action == "restart":
                    return script[index + 1 :]
                if action == "flush":
                    await driver.checkpoint()
                elif action == "create":
                    await driver.create(f"{BUCKET}/{name}", content_type="text/plain")
                    expected.add(name)
                else:
                    try:
                        await (
                            driver.delete(f"{BUCKET}/{name}")
                            if action == "delete"
                            else driver.append(f"{BUCKET}/{name}", b"x")
                        )
                    except NotFound:
                        assert name not in expected
                    if action == "delete":
                        expected.discard(name)
                in_order = sorted(expected, key=str.encode)
                assert listed(driver) == in_order
            in_order = sorted(expected, key=str.encode)
            assert walked(driver, limit) == in_order
            assert walked(driver, limit, prefix) == [name for name in in_order if name.startswith(prefix)]
            for after in in_order:
                assert listed(driver, prefix, after) == [n for n in in_order if n.startswith(prefix) and n > after]
        return []

    with TemporaryDirectory() as folder:
        while script:
            script = run(play(Path(folder), script), clock)


def test_streams_that_change_while_a_flush_is_written_are_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two slices of the flush, the listing is what it would be without one."""
    monkeypatch.setattr(capture, "SLICE_STREAMS", 1)

    async def main() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            for number in range(8):
                await driver.create(f"{BUCKET}/{number}")
            await driver.checkpoint()
            for number in range(0, 8, 2):
                await driver.append(f"{BUCKET}/{number}", b"x", content_type="application/octet-stream")
            flush = asyncio.ensure_future(driver.checkpoint())
            pending: list[asyncio.Future[Any]] = [
                driver.ask(driver.shard.delete, key_of(f"{BUCKET}/0")),
                driver.ask(driver.shard.delete, key_of(f"{BUCKET}/1")),
                driver.ask(driver.shard.create, create(f"{BUCKET}/9")),
            ]
            kept = {"2", "3", "4", "5", "6", "7"}
            while not flush.done() or not all(future.done() for future in pending):
                found = listed(driver)
                assert found == sorted(set(found))
                assert kept <= set(found) <= kept | {"0", "1", "9"}
                assert walked(driver, 2) == found
                await asyncio.sleep(0)
            assert listed(driver) == sorted(kept | {"9"})
            await driver.create(f"{BUCKET}/0")
            assert listed(driver) == sorted(kept | {"0", "9"})

    run(asyncio.wait_for(main(), 30))


def test_expired_and_soft_deleted_streams_are_not_listed_saved_or_not(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/source", body=b"x")
            await driver.create(f"{BUCKET}/fork", fork=(f"{BUCKET}/source",))
            await driver.create(f"{BUCKET}/brief", expiry=Expiry(60, None, None))
            await driver.delete(f"{BUCKET}/source")
            for _ in range(2):
                assert listed(driver) == ["brief", "fork"]
                await driver.checkpoint()
            clock.ms += 60_000
            assert listed(driver) == ["fork"]

    run(main(), clock)


def test_listing_keeps_nothing_in_memory(tmp_path: Path) -> None:
    """A walk over millions of streams must not load them."""
    clock = FakeClock()

    async def fill() -> None:
        async with started(tmp_path, clock, crash=False) as driver:
            for number in range(50):
                await driver.create(f"{BUCKET}/{number:02d}")

    async def walk() -> None:
        async with started(tmp_path, clock) as driver:
            before = len(list(driver.shard.namespace.resident()))
            assert walked(driver, 7) == [f"{number:02d}" for number in range(50)]
            assert len(list(driver.shard.namespace.resident())) == before

    run(fill(), clock)
    run(walk(), clock)


def test_page_reads_only_as_many_rows_as_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the millionth stream as fast as the first: nothing before `after` is looked at."""
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            for number in range(200):
                await driver.create(f"{BUCKET}/{number:03d}")
            await driver.checkpoint()
            scan, rows = driver.catalog.scan, []

            def counted(prefix: bytes, after: bytes = b"") -> Any:
                for row in scan(prefix, after):
                    rows.append(row)
                    yield row

            monkeypatch.setattr(driver.catalog, "scan", counted)
            assert listed(driver, "", "149", 10) == [f"{number:03d}" for number in range(150, 160)]
            assert len(rows) <= 12

    run(main(), clock)


# -- buckets in a hurry ------------------------------------------------------------------------------------------


def test_bucket_delete_behind_a_recreation_in_flight_leaves_no_stream_without_a_bucket(tmp_path: Path) -> None:
    """Delete a stream, create it again and delete its bucket, all before any of it is durable."""

    async def main() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            shard = driver.shard
            await driver.outcome(shard.create_bucket, "race")
            await driver.create("race/s")
            pending = [
                driver.ask(shard.delete, key_of("race/s")),
                driver.ask(shard.create, create("race/s", bucket_required=True)),
                driver.ask(shard.delete_bucket, "race"),
            ]
            deleted, created, gone = await asyncio.gather(*pending)
            assert not isinstance(deleted, MillstreamError)
            is_created = not isinstance(created, MillstreamError)
            is_gone = not isinstance(gone, MillstreamError)
            assert is_created != is_gone, "one of them comes first"
            assert ("race" in shard.namespace.buckets) == is_created
            if is_created:
                assert shard.namespace.buckets["race"].streams == 1
                await driver.delete("race/s")
                await driver.outcome(shard.delete_bucket, "race")

    run(asyncio.wait_for(main(), 30))


def test_creation_behind_a_bucket_delete_is_404(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, FakeClock()) as driver:
            shard = driver.shard
            await driver.outcome(shard.create_bucket, "race")
            gone = driver.ask(shard.delete_bucket, "race")
            created = driver.ask(shard.create, create("race/s", bucket_required=True))
            assert not isinstance(await gone, MillstreamError)
            assert isinstance(await created, NotFound)
            assert shard.namespace.find(key_of("race/s")) is None

    run(asyncio.wait_for(main(), 30))
