"""A crash at any step of a compaction's commit leaves the old state or the new one, and nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.tiers.objects import ObjectStoreSettings
from support import compaction
from support.cold import FolderStore, names, read_all, server_on, verified, wait_until, wait_until_flushed
from support.crashing_flush import COMPACTION_POINTS, LAUNCHER
from support.server import ServerProcess

FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=0s", "cold.leftover_age=0s")
TEXT = {"content-type": "text/plain"}


def feed(client: httpx.Client) -> list[str]:
    answer = client.get("/crash/streams/feed", params={"max_bytes": "100000000"})
    assert answer.status_code == 200, answer.text
    return answer.text.splitlines()


# After one step is before the next, and the flush that follows is any flush: three points say all.
DISTINCT = ("before the replacement", "after the replacement", "after the catalog write")


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in DISTINCT else pytest.mark.soak) for point in COMPACTION_POINTS],
)
def test_crash_while_a_compaction_is_committed(tmp_path: Path, point: str) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    armed = tmp_path / "armed"
    environment = {"CRASH_POINT": point, "CRASH_FILE": str(armed)}
    server = ServerProcess(data_dir, settings=(*store.settings, *FLUSHING), command=LAUNCHER, environment=environment)
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.put("/crash").status_code == 201
        expected: dict[str, bytes] = {}
        for number in range(4):
            for name in ("a", "b"):
                path = f"/crash/{name}"
                client.put(path, headers=TEXT)
                body = f"<{number}.{name}>".encode() * 30
                assert client.post(path, headers=TEXT, content=body).status_code == 204
                expected[path] = expected.get(path, b"") + body
            wait_until_flushed(client, released=True)
        events = feed(client)
        body = asyncio.run(_proposal(store))
        old = set(body["replace"])
        armed.touch()
        with pytest.raises(httpx.TransportError):
            for _ in range(100):  # the server may still be tidying up after its start
                answer = client.post("/cluster/compactions", json=body)
                assert answer.status_code == 503, answer.text
        assert server.wait_for_exit() == 137
    with server_on(data_dir, store, *FLUSHING) as again, httpx.Client(base_url=again.url, timeout=20) as client:
        assert {path: read_all(client, path) for path in expected} == expected
        assert feed(client) == events
        client.post("/crash/a", headers=TEXT, content=b"more")
        expected["/crash/a"] += b"more"
        wait_until_flushed(client, released=True)
        new = {segment["path"] for segment in body["segments"]}

        def is_settled() -> bool:
            left = names(store, "segments")
            return bool(old <= left) != bool(old & left == set() and new <= left)

        wait_until(is_settled, "the old segments or the new ones are left", 15)
        wait_until(lambda: not (new & names(store, "segments") and old & names(store, "segments")), "and not both", 15)
        assert (new <= names(store, "segments")) is (point != "before the replacement")
        assert {path: read_all(client, path) for path in expected} == expected
        assert verified(data_dir, store)["problems"] == []


async def _proposal(store: FolderStore) -> dict[str, Any]:
    settings = ObjectStoreSettings("fs", store.folder, {})
    [group] = await compaction.plan(settings)
    return compaction.proposal(group, await compaction.write(settings, group))
