"""The feed: any walk through it, by whatever pages and prefixes, is the same list of items."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import NotFound, OffsetTrimmed
from millstream.protocol.expiry import Expiry
from millstream.shard import feed as module
from millstream.shard import history
from millstream.shard.feed import FeedItem, FeedPage
from millstream.shard.history import History, Window
from millstream.units import Position
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, key_of, started

BUCKET = "logs"
JSON = "application/json"


async def page(driver: ShardDriver, after: int, prefix: str = "", bytes_max: int = 1 << 30) -> FeedPage:
    """One page from wherever it is, as the server asks for it."""
    feed = driver.shard.feed
    if feed.is_hot(Position(after)):
        return feed.read(BUCKET, Position(after), prefix, bytes_max)
    return await feed.read_cold(BUCKET, Position(after), prefix, bytes_max)


async def everything(driver: ShardDriver, prefix: str = "", bytes_max: int = 1 << 30) -> list[FeedItem]:
    found: list[FeedItem] = []
    after = driver.shard.feed.earliest
    for _ in range(10_000):
        one = await page(driver, after, prefix, bytes_max)
        found += one.items
        assert one.position >= after, "a page never goes back"
        after = one.position
        if one.up_to_date:
            return found
    raise AssertionError("the feed does not end")


def brief(items: list[FeedItem]) -> list[tuple[str, str, bytes | None]]:
    return [(item.event, item.stream, item.payload) for item in items]


streams = st.sampled_from(["a1", "a2", "b1"])
steps = st.lists(
    st.tuples(st.just("append"), streams, st.integers(1, 3))
    | st.tuples(st.just("close"), streams, st.integers(0, 2))
    | st.tuples(st.just("delete"), streams, st.just(0))
    | st.tuples(st.just("flush"), st.just(""), st.just(0)),
    max_size=25,
)


@settings(max_examples=30)
@given(steps, st.integers(1, 400), st.data())
def test_walk_by_pages_of_any_size_is_the_feed_and_every_item_can_be_resumed_behind(
    script: list[tuple[str, str, int]], bytes_max: int, data: st.DataObject
) -> None:
    clock = FakeClock()

    async def main(directory: Path) -> None:
        async with started(directory, clock) as driver:
            number = 0
            for action, name, count in script:
                path = f"{BUCKET}/{name}"
                number += 1
                body = b"[" + b",".join(b"%d%d" % (number, index) for index in range(count)) + b"]" if count else b""
                if action == "flush":
                    await driver.checkpoint()
                elif action == "delete":
                    try:
                        await driver.delete(path)
                    except NotFound:
                        continue
                else:
                    state = driver.shard.namespace.find(key_of(path))
                    if state is None:
                        await driver.create(path, content_type=JSON, body=body, closed=action == "close")
                    elif not state.closed:
                        await driver.append(path, body, content_type=JSON, close=action == "close")
            whole = await everything(driver)
            positions = [item.position for item in whole]
            assert positions == sorted(positions)
            assert await everything(driver, bytes_max=bytes_max) == whole
            assert await everything(driver, bytes_max=1) == whole
            for prefix in ("a", "b1", "x"):
                matching = [item for item in whole if item.stream.startswith(prefix)]
                assert await everything(driver, prefix, bytes_max) == matching
            if whole:
                index = data.draw(st.integers(0, len(whole) - 1))
                rest = await page(driver, whole[index].position)
                assert rest.items == whole[index + 1 :]

    with TemporaryDirectory() as folder:
        run(main(Path(folder)), clock)


def test_a_large_flush_is_read_in_windows_and_each_of_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "WINDOW_BYTES", 2_000)
    clock = FakeClock()
    gathered: list[Window] = []
    gather = History._gather

    async def counted(self: History, bucket: str, first: int) -> Window:
        gathered.append(await gather(self, bucket, Position(first)))
        return gathered[-1]

    monkeypatch.setattr(History, "_gather", counted)

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            for name in ("a", "b", "c"):
                await driver.create(f"{BUCKET}/{name}", content_type="text/plain")
            for number in range(180):
                text = f"{number:0100d}".encode()
                await driver.append(f"{BUCKET}/{'abc'[number % 3]}", text, content_type="text/plain")
            hot = await everything(driver)
            await driver.checkpoint()
            assert not driver.shard.feed.is_hot(driver.shard.feed.earliest)
            for bytes_max in (1, 300, 1 << 30):
                gathered.clear()
                assert await everything(driver, bytes_max=bytes_max) == hot
                assert len({window.first for window in gathered}) == len(gathered) <= 20
            assert await everything(driver, "b", 300) == [item for item in hot if item.stream == "b"]

    run(main(), clock)


def test_feed_is_the_same_before_and_after_a_flush_and_a_crash(tmp_path: Path) -> None:
    clock = FakeClock()
    seen: list[FeedItem] = []

    async def fill() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/a", content_type=JSON, body=b"[1,2]")
            await driver.create(f"{BUCKET}/gone", content_type="text/plain")
            await driver.append(f"{BUCKET}/a", b"[3]", content_type=JSON)
            await driver.delete(f"{BUCKET}/gone")
            await driver.append(f"{BUCKET}/a", b"[4,5]", content_type=JSON, close=True)
            seen.extend(await everything(driver))
            await driver.checkpoint()
            assert await everything(driver) == seen
            await driver.create(f"{BUCKET}/b", content_type="text/plain", body=b"hot again")
            seen.extend((await everything(driver))[len(seen) :])

    async def again() -> None:
        async with started(tmp_path, clock) as driver:
            assert await everything(driver) == seen
            await driver.checkpoint()
            assert await everything(driver) == seen

    run(fill(), clock)
    assert brief(seen) == [
        ("created", "a", None),
        ("message", "a", b"1"),
        ("message", "a", b"2"),
        ("created", "gone", None),
        ("message", "a", b"3"),
        ("deleted", "gone", None),
        ("message", "a", b"4"),
        ("message", "a", b"5"),
        ("closed", "a", None),
        ("created", "b", None),
        ("message", "b", b"hot again"),
    ]
    run(again(), clock)


def test_expiry_is_an_event_of_its_own(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/brief", expiry=Expiry(60, None, None))
            clock.ms += 60_000
            await driver.create(f"{BUCKET}/brief")
            assert [item.event for item in await everything(driver)] == ["created", "expired", "created"]

    run(main(), clock)


def test_page_that_finds_nothing_in_a_long_journal_still_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rare a prefix is, one call looks at a bounded piece, and its token covers what it looked at."""
    monkeypatch.setattr(module, "ENTRIES_SCANNED_MAX", 5)
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/rare", content_type="text/plain")
            await driver.create(f"{BUCKET}/common", content_type="text/plain")
            for _ in range(30):
                await driver.append(f"{BUCKET}/common", b"x")
            await driver.append(f"{BUCKET}/rare", b"found")
            first = await page(driver, driver.shard.feed.earliest, "rare")
            assert (brief(first.items), first.up_to_date) == ([("created", "rare", None)], False)
            assert brief(await everything(driver, "rare")) == [("created", "rare", None), ("message", "rare", b"found")]
            assert len(await everything(driver)) == 33

    run(main(), clock)


def test_token_older_than_what_is_kept_is_refused(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/a", content_type="text/plain", body=b"x")
            driver.shard.journals.start_at(driver.shard.committer.applied_position)
            with pytest.raises(OffsetTrimmed):
                await page(driver, 0)

    run(main(), clock)


def test_buckets_do_not_see_each_other(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create(f"{BUCKET}/mine", content_type="text/plain", body=b"mine")
            await driver.create("other/theirs", content_type="text/plain", body=b"theirs")
            for _ in range(2):
                assert brief(await everything(driver)) == [("created", "mine", None), ("message", "mine", b"mine")]
                await driver.checkpoint()

    run(main(), clock)


def test_deleted_stream_takes_its_messages_out_of_the_feed_hot_or_cold(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            for name in ("hot", "cold"):
                await driver.create(f"{BUCKET}/{name}", content_type="text/plain", body=b"secret")
                if name == "cold":
                    await driver.checkpoint()
                assert b"secret" in [item.payload for item in await everything(driver)]
                await driver.delete(f"{BUCKET}/{name}")
                assert b"secret" not in [item.payload for item in await everything(driver)], name
                assert ("deleted", name, None) in brief(await everything(driver))

    run(main(), clock)
