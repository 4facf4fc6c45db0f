"""Uploads: several at a time, bounded, and none left under way."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import Unavailable
from millstream.shard import uploads as module
from millstream.shard.uploads import Uploads


class Store:
    def __init__(self) -> None:
        self.under_way: dict[str, int] = {}
        self.most = self.most_bytes = 0
        self.stored: list[str] = []
        self.failing: set[str] = set()

    async def put(self, path: str, data: bytes | memoryview) -> None:
        self.under_way[path] = len(data)
        self.most = max(self.most, len(self.under_way))
        self.most_bytes = max(self.most_bytes, sum(self.under_way.values()))
        try:
            await asyncio.sleep(0.001)
            if path in self.failing:
                raise Unavailable("the store is down", code="object_store_unavailable")
            self.stored.append(path)
        finally:
            del self.under_way[path]


async def put_all(store: Store, count: int, size: int) -> None:
    async with Uploads(store.put) as uploads:
        for number in range(count):
            await uploads.put(str(number), b"x" * size)


def test_everything_is_stored_several_at_a_time_when_it_is_left() -> None:
    store = Store()
    asyncio.run(put_all(store, 100, 10))
    assert sorted(store.stored, key=int) == [str(number) for number in range(100)]
    assert store.most == module.UPLOADS_AT_ONCE


def test_no_more_bytes_are_under_way_than_allowed_but_for_a_single_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 100)
    store = Store()
    asyncio.run(put_all(store, 20, 30))
    assert (store.most, store.most_bytes, len(store.stored)) == (3, 90, 20)
    large = Store()
    asyncio.run(put_all(large, 3, 1000))
    assert (large.most, len(large.stored)) == (1, 3)


@pytest.mark.parametrize("failing", ["3", "39"])
def test_the_first_failure_is_raised_and_nothing_goes_on_behind_it(failing: str) -> None:
    store = Store()
    store.failing = {failing}

    async def main() -> None:
        with pytest.raises(Unavailable):
            await put_all(store, 40, 1)
        assert store.under_way == {}
        stored = list(store.stored)
        await asyncio.sleep(0.01)
        assert store.stored == stored

    asyncio.run(main())
