"""A crash at any step of a flush leaves the old state or the new one: content exact, no repeats, no orphans."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.tiers.manifests import read_manifest
from support.cold import (
    FolderStore,
    names,
    read_all,
    read_object,
    run_command,
    run_json,
    server_on,
    token,
    verified,
    wait_until,
    wait_until_flushed,
)
from support.crashing_flush import LAUNCHER, POINTS
from support.server import ServerProcess

FLUSHING = (
    "cold.flush_interval=100ms",
    "hot.keep_bytes=0B",
    "log.segment_bytes=64KiB",
    "cold.reclaim_grace=1s",
    "cold.leftover_age=0s",
)
QUIET = ("cold.flush_interval=1h",)
JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}
FIRST, SECOND = "/crash-one/json", "/crash-two/text"
# The points at which the objects of a flush, or some of them, are in the store and nothing refers to them.
# After one step is before the next: half of the points say all.
DISTINCT = (
    "before the segment put",
    "before the notes put",
    "before the manifest put",
    "before the seal",
    "after the seal",
    "after the catalog write",
    "after the trim",
)
UNSEALED = ("after the segment put", "after the notes put", "after the manifest put", "before the seal")


def some_soak(point: str, is_distinct: bool, *more: object) -> Any:
    """A parameter for every run, or only for `make soak`."""
    return pytest.param(point, *more, marks=() if is_distinct else pytest.mark.soak)


def crashing(
    data_dir: Path, store: FolderStore, point: str, after: int = 0, *more: str, process: bool = False
) -> ServerProcess:
    environment = {"CRASH_POINT": point, "CRASH_FILE": str(armed(data_dir)), "CRASH_AFTER": str(after)}
    if process:
        environment["PROCESS_ROWS"] = "0"
    settings = (*store.settings, *FLUSHING, *more)
    return ServerProcess(data_dir, settings=settings, command=LAUNCHER, environment=environment)


def armed(data_dir: Path) -> Path:
    return data_dir.parent / "armed"


def produce(client: httpx.Client, path: str, seq: int) -> int:
    is_json = path == FIRST
    claim = {"producer-id": "p", "producer-epoch": "0", "producer-seq": str(seq)}
    return client.post(path, content=message(path, seq), headers={**(JSON if is_json else TEXT), **claim}).status_code


def message(path: str, seq: int) -> bytes:
    return json.dumps({"n": seq, "pad": "x" * 300}).encode() if path == FIRST else b"<%06d>" % seq + b"y" * 300


def content(path: str, count: int) -> bytes:
    messages = [message(path, seq) for seq in range(count)]
    return b"[" + b",".join(messages) + b"]" if path == FIRST else b"".join(messages)


def set_scene(client: httpx.Client) -> None:
    """Two buckets, so that a flush has two segments; history that is cold already; a snapshot; a closed stream."""
    for bucket in ("crash-one", "crash-two"):
        assert client.put(f"/{bucket}").status_code == 201
    assert client.put(FIRST, headers=JSON).status_code == 201
    assert client.put(SECOND, headers=TEXT).status_code == 201
    assert (
        client.put("/crash-one/closed", headers={**TEXT, "stream-closed": "true"}, content=b"whole").status_code == 201
    )
    assert client.put("/crash-two/snapped", headers=TEXT, content=b"0123456789").status_code == 201
    assert client.put(f"/crash-two/snapped/snapshot/{token(10)}", content=b"ten").status_code == 204


def produce_until_crash(client: httpx.Client, server: ServerProcess) -> dict[str, int]:
    """How many appends to each stream were acknowledged before the server died."""
    counts = {FIRST: 0, SECOND: 0}
    for _ in range(20_000):
        for path in counts:
            try:
                if path == FIRST and counts[path] == 20:
                    armed(server.data_dir).touch()
                    # An event, so that the next flush has every kind of object, also if the others are long cold.
                    client.put("/crash-one/late", headers=TEXT)
                assert produce(client, path, counts[path]) == 200
            except httpx.TransportError:
                assert server.wait_for_exit() == 137
                return counts
            counts[path] += 1
    raise AssertionError("the server never reached its crash")


def events(client: httpx.Client, bucket: str) -> list[tuple[Any, ...]]:
    answer = client.get(f"/{bucket}/streams/feed", params={"max_bytes": "100000000"})
    assert answer.status_code == 200, answer.text
    items = [json.loads(line) for line in answer.content.splitlines()]
    return [(item["event"], item["stream"], item["next_offset"]) for item in items]


@pytest.mark.parametrize(
    ("point", "after", "process"),
    [
        ("before the segment put", 1, False),
        *(some_soak(point, point in DISTINCT, 0, False) for point in POINTS),
        # By a process of its own, which has something to say or to write just then.
        ("after the segment put", 0, True),
        ("before the catalog write", 0, True),
        ("after the catalog write", 0, True),
    ],
)
def test_crash_in_a_flush_keeps_every_message_once_and_its_orphans_go(
    tmp_path: Path, point: str, after: int, process: bool
) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    with (
        crashing(data_dir, store, point, after, process=process) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        set_scene(client)
        counts = produce_until_crash(client, server)
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for path, acknowledged in counts.items():
            found = client.get(path, params={"offset": "-1"}).content
            stored = acknowledged if found == content(path, acknowledged) else acknowledged + 1
            assert found == content(path, stored)
            assert produce(client, path, acknowledged - 1) == 204
            assert produce(client, path, acknowledged) == (204 if stored > acknowledged else 200)
            counts[path] = acknowledged + 1
        wait_until_flushed(client, released=True)
        for path in counts:
            assert produce(client, path, counts[path]) == 200
            assert read_all(client, path) == content(path, counts[path] + 1)
        assert client.get("/crash-one/closed").content == b"whole"
        assert client.get("/crash-one/closed").headers["stream-closed"] == "true"
        assert client.get(f"/crash-two/snapped/snapshot/{token(10)}").content == b"ten"
        assert client.get("/crash-two/snapped", params={"offset": "-1"}).status_code == 410
        # The life of both buckets, from the very beginning, is whole too.
        for bucket, path in (("crash-one", FIRST), ("crash-two", SECOND)):
            ends, end = [], 0
            for seq in range(counts[path] + 1):
                end += len(message(path, seq))
                ends.append(("message", path.rpartition("/")[2], token(end)))
            mine = [event for event in events(client, bucket) if event[1] == path.rpartition("/")[2]]
            assert mine == [("created", path.rpartition("/")[2], token(0)), *ends]
        wait_until_flushed(client, released=True)
        wait_until(lambda: not verified(data_dir, store)["problems"], "nothing is left over", 10)
        listed = {row["path"] for row in run_json("cold", "ls", data_dir=data_dir, store=store)}
        assert names(store, "segments") == listed
        assert server.stop() == 0
        assert "Traceback" not in server.stderr()


def children(pid: int) -> set[int]:
    """The processes that a process has started, whichever of its threads it was."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(path.parent.name))
    return found


def test_a_flushing_process_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    with (
        crashing(data_dir, store, "none", process=True) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        set_scene(client)
        assert server.process is not None
        counts = {FIRST: 0, SECOND: 0}
        seen: dict[int, float] = {}
        # While it starts, and in the middle of its work or just after some of it.
        ages = [0.0, 0.5, 0.6, 0.75, 1.0]
        deadline = time.monotonic() + 60
        while ages and time.monotonic() < deadline:
            for path in counts:
                assert produce(client, path, counts[path]) == 200
                counts[path] += 1
            for child in children(server.process.pid):
                if time.monotonic() - seen.setdefault(child, time.monotonic()) >= ages[0]:
                    seen[child] = float("inf")
                    os.kill(child, signal.SIGKILL)
                    ages.pop(0)
                    break
        assert not ages
        wait_until_flushed(client, released=True)
        for path, count in counts.items():
            assert read_all(client, path) == content(path, count)
        wait_until(lambda: not verified(data_dir, store)["problems"], "nothing is left over", 20)
        server.kill()
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for path, count in counts.items():
            assert read_all(client, path) == content(path, count)


def test_a_flushing_process_that_gets_no_processor_is_replaced_by_one_that_competes(tmp_path: Path) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    with (
        crashing(data_dir, store, "none", process=True) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        set_scene(client)
        wait_until_flushed(client, released=True)
        assert server.process is not None
        (starved,) = children(server.process.pid)
        os.kill(starved, signal.SIGSTOP)
        assert produce(client, FIRST, 0) == 200
        wait_until_flushed(client, released=True)  # after the ten seconds of patience
        (successor,) = children(server.process.pid)
        assert successor != starved
        assert os.sched_getscheduler(successor) == os.SCHED_OTHER
        assert read_all(client, FIRST) == content(FIRST, 1)


@pytest.mark.parametrize("point", ["before the seal", "after the seal"])
def test_crash_beside_the_seal_of_the_first_flush_keeps_the_feed_from_its_beginning(tmp_path: Path, point: str) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    armed(data_dir).touch()
    # All of it must be there before the first flush, however slow the machine is.
    asked = "cold.flush_interval=1h"
    with crashing(data_dir, store, point, 0, asked) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        client.put("/crash-one")
        client.put(FIRST, headers=JSON, content=b"[1,2]")
        with suppress(httpx.TransportError):  # it may end before it answers
            client.post("/cluster/trigger-snapshot", json={"shard": 0})
        assert server.wait_for_exit() == 137
    expected = [("created", "json", token(0)), ("message", "json", token(1)), ("message", "json", token(2))]
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert events(client, "crash-one") == expected
        client.post(FIRST, headers=JSON, content=b"[3]")
        wait_until_flushed(client, released=True)
        assert events(client, "crash-one") == [*expected, ("message", "json", token(3))]


def idle_crash(data_dir: Path, store: FolderStore, point: str) -> None:
    """A flush that reached the store, a second one that crashed, and nobody who wrote meanwhile."""
    with crashing(data_dir, store, point) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        client.put("/crash-one")
        client.put(FIRST, headers=JSON, content=b"[1]")
        wait_until_flushed(client, released=True)
        armed(data_dir).touch()
        # One record that has a message and an event, so that the flush has every kind of object.
        assert client.post(FIRST, headers={**JSON, "stream-closed": "true"}, content=b"[2]").status_code == 204
        assert server.wait_for_exit() == 137


def test_after_a_crash_before_the_seal_no_two_manifests_tell_of_the_same_positions(tmp_path: Path) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    idle_crash(data_dir, store, "before the seal")
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        wait_until_flushed(client, released=True)
        assert client.get(FIRST).content == b"[1,2]"

        def is_told_once() -> bool:
            manifests = [read_manifest(read_object(store, path), path)[0] for path in names(store, "manifests")]
            ranges = [(manifest.first, manifest.through) for manifest in manifests]
            return len(ranges) == len(set(ranges))

        wait_until(is_told_once, "the manifest that was never sealed is gone", 6)


@pytest.mark.parametrize(
    "point", [some_soak(one, one in ("after the segment put", "before the seal")) for one in UNSEALED]
)
def test_a_machine_lost_after_a_crash_in_a_flush_is_restored_to_the_flush_before(tmp_path: Path, point: str) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    idle_crash(data_dir, store, point)
    # It comes back, and is lost before its next flush. A manifest that was not sealed tells the truth all the same.
    with server_on(data_dir, store, *QUIET) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.get(FIRST).content == b"[1,2]"
        server.kill()
    expected = b"[1,2]" if point in ("after the manifest put", "before the seal") else b"[1]"
    restored = tmp_path / "restored"
    done = run_command("restore", data_dir=restored, store=store)
    assert done.returncode == 0, done.stderr
    with server_on(restored, store, *QUIET) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.get(FIRST).content == expected


def test_a_half_written_file_of_a_crash_is_removed(tmp_path: Path) -> None:
    data_dir, store = tmp_path / "data", FolderStore(tmp_path / "cold")
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        client.put("/crash-one")
        client.put(FIRST, headers=JSON, content=b"[1]")
        wait_until_flushed(client)
        server.kill()
    (segment,) = names(store, "segments")
    # obstore writes beside the target and renames: a crash in between leaves this, which no listing shows.
    staged = store.folder / f"{segment.removesuffix('.parquet')}ff.parquet#1"
    staged.write_bytes(b"half")
    with server_on(data_dir, store, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.get(FIRST).content == b"[1]"
        client.post(FIRST, headers=JSON, content=b"[2]")  # its age is by the store's own clock
        wait_until(lambda: not staged.exists(), "the half-written file is removed", 5)
