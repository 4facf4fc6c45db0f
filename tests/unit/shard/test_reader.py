"""Reads across the seams of forks, in pieces of any size."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import Gone, InvalidRequest, NotFound
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.cold import GROUPS_AHEAD
from millstream.units import Offset
from support.fake_time import FakeClock, run
from support.shards import ShardDriver, key_of, started


async def family(driver: ShardDriver) -> None:
    """A source, a fork of it, and a fork of the fork that leaves before the fork's own messages begin."""
    await driver.create("source", content_type="text/plain", body=b"aaa")
    for body in (b"bb", b"c", b"dddd"):
        await driver.append("source", body)
    await driver.create("fork", fork=("source", 6))
    await driver.append("fork", b"EE")
    await driver.append("fork", b"F")
    await driver.create("early", fork=("fork", 3))
    await driver.append("early", b"GGG")
    await driver.create("late", fork=("fork", 8))
    await driver.append("late", b"HH")
    await driver.append("source", b"later")


EXPECTED = {
    "source": [b"aaa", b"bb", b"c", b"dddd", b"later"],
    "fork": [b"aaa", b"bb", b"c", b"EE", b"F"],
    "early": [b"aaa", b"GGG"],
    "late": [b"aaa", b"bb", b"c", b"EE", b"HH"],
}


def test_forks_of_forks_read_without_a_seam_in_pieces_of_any_size(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await family(driver)
            for path, expected in EXPECTED.items():
                stream = driver.shard.get(key_of(path))
                for bytes_max in (1, 2, 3, 5, 1000):
                    found, offset, result = list[bytes | memoryview](), 0, None
                    while result is None or not result.up_to_date:
                        result = await driver.shard.reader.read_messages(stream, Offset(offset), bytes_max)
                        assert result.next_offset > offset
                        assert len(result.messages) == 1 or sum(map(len, result.messages)) <= bytes_max
                        found += result.messages
                        offset = result.next_offset
                    assert found == expected

    clock = FakeClock()
    run(main(), clock)


def test_an_offset_inside_a_message_reads_that_message_whole_and_one_beyond_the_tail_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await family(driver)
            stream = driver.shard.get(key_of("late"))
            assert await driver.messages("late", 4) == [b"bb", b"c", b"EE", b"HH"]
            beyond = await driver.shard.reader.read_cold(stream, Offset(10_000), 1000)
            assert (beyond.pieces, beyond.next_offset, beyond.up_to_date) == ([], stream.tail, True)

    clock = FakeClock()
    run(main(), clock)


def test_deleted_sources_serve_their_forks_until_the_last_one_goes(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await family(driver)
            await driver.delete("source")
            await driver.delete("fork")
            for path in ("source", "fork"):
                with pytest.raises(Gone):
                    driver.shard.get(key_of(path))
            for path in ("early", "late"):
                assert await driver.messages(path) == EXPECTED[path]
            await driver.delete("early")
            with pytest.raises(Gone):
                driver.shard.get(key_of("source"))
            await driver.delete("late")
            # Up the chain: the fork goes with its last fork, the source with the fork.
            for path in EXPECTED:
                with pytest.raises(NotFound):
                    driver.shard.get(key_of(path))
            assert len(driver.shard.hot) == 0
            await driver.create("source", content_type="text/plain", body=b"again")

    clock = FakeClock()
    run(main(), clock)


@pytest.mark.parametrize(
    ("offset", "sub_offset"),
    [(11, 0), (1, 0), (4, 0), (10, 1), (0, 4), (3, 3), (5, 2)],
    ids=["past-tail", "inside", "inside-later", "nothing-after", "past-append", "past-second", "past-third"],
)
def test_a_fork_at_a_place_that_is_none_is_refused_and_changes_nothing(
    tmp_path: Path, offset: int, sub_offset: int
) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain", body=b"aaa")
            for body in (b"bb", b"c", b"dddd"):
                await driver.append("s", body)
            with pytest.raises(InvalidRequest) as caught:
                await driver.create("f", fork=("s", offset, sub_offset))
            assert caught.value.code == "invalid_fork_offset"
            assert driver.shard.get(key_of("s")).forks == 0
            assert driver.shard.namespace.find(key_of("f")) is None

    clock = FakeClock()
    run(main(), clock)


def test_a_sub_offset_counts_messages_of_one_json_append(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("j", content_type="application/json", body=b"[1,22,333]")
            await driver.append("j", b"[4,5]", content_type="application/json")
            for offset, sub_offset, expected in (
                (0, 2, [b"1", b"22"]),
                (0, 3, [b"1", b"22", b"333"]),
                (1, 1, [b"1", b"22"]),
                (6, 1, [b"1", b"22", b"333", b"4"]),
            ):
                await driver.create("f", fork=("j", offset, sub_offset))
                assert await driver.messages("f") == expected
                await driver.delete("f")
            with pytest.raises(InvalidRequest):
                await driver.create("f", fork=("j", 0, 4))

    clock = FakeClock()
    run(main(), clock)


def test_what_comes_next_is_read_ahead_and_not_forgotten_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, size = 12, 1000

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain")
            for number in range(groups):
                await driver.append("s", b"%03d" % number + b"x" * (size - 3))
                await driver.checkpoint()
            stream, cold, asked = driver.shard.get(key_of("s")), driver.shard.cold, list[str]()
            read_columns = cold.read_columns

            def noting(segment: Any, *rest: Any) -> Any:
                asked.append(segment.path)
                return read_columns(segment, *rest)

            monkeypatch.setattr(cold, "read_columns", noting)
            group = await cold.row_group(cold.extent_at(stream.incarnation, Offset(0)).row.segment, 0)
            # Not enough for all: the second time over, some are still there, and would be the next to go.
            cold._groups = ByteLimitedCache(group.size * (groups - 2))
            for _ in range(2):
                asked.clear()
                for number in range(groups):
                    found = await driver.shard.reader.read_messages(stream, Offset(number * size), size)
                    assert [message[:3] for message in found.messages] == [b"%03d" % number]
                    await asyncio.gather(*cold._loading.values())
                    held = sum(
                        cold._is_expected(cold.extent_at(stream.incarnation, Offset(later * size)))
                        for later in range(number + 1, min(number + 1 + GROUPS_AHEAD, groups))
                    )
                    assert held >= min(1 if number == 0 else GROUPS_AHEAD, groups - 1 - number)
                assert len(asked) == len(set(asked)), "none is read twice"

    clock = FakeClock()
    run(main(), clock)
