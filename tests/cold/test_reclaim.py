"""Space comes back: segments that are wholly dead, superseded snapshots and what crashes left, on fs and S3."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from support.cold import (
    SECONDS,
    ColdStore,
    FolderStore,
    S3Prefix,
    names,
    put_object,
    read_all,
    server_on,
    stats,
    token,
    verified,
    wait_until,
    wait_until_flushed,
)
from support.s3 import S3Server

SETTINGS = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1s")
TEXT = {"content-type": "text/plain"}


def create(client: httpx.Client, path: str, body: bytes, **headers: str) -> None:
    fields = {**TEXT, **{name.replace("_", "-"): value for name, value in headers.items()}}
    answer = client.put(path, headers=fields, content=body)
    assert answer.status_code == 201, answer.text


def flushed(client: httpx.Client, store: ColdStore, before: set[str]) -> set[str]:
    """The segments that are new since `before`."""
    wait_until_flushed(client, released=True)
    return names(store, "segments") - before


def wait_until_gone(store: ColdStore, paths: set[str], folder: str = "segments") -> None:
    wait_until(lambda: not paths & names(store, folder), f"{paths} are reclaimed", 12)


def test_segments_go_when_their_last_message_does_and_stay_until_then(tmp_path: Path, store: ColdStore) -> None:
    """Deleted, expired and trimmed streams, each in a segment of its own and together with one that lives on."""
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        for bucket in ("alone", "shared"):
            client.put(f"/{bucket}")
        first = set[str]()
        create(client, "/alone/deleted", b"deleted")
        create(client, "/alone/expired", b"expired", stream_ttl="2")
        create(client, "/alone/trimmed", b"before")
        create(client, "/shared/kept", b"kept ")
        create(client, "/shared/deleted", b"deleted")
        # A flush may come between any two of them; all that matters is who shares a segment with whom.
        dying = flushed(client, store, first)
        shared = {path for path in dying if "bucket=shared" in path}
        alone = dying - shared
        assert alone and shared
        client.post("/alone/trimmed", headers=TEXT, content=b"after")
        later = flushed(client, store, dying)
        client.delete("/alone/deleted")
        client.delete("/shared/deleted")
        assert client.put(f"/alone/trimmed/snapshot/{token(6)}", content=b"state").status_code == 204
        wait_until(lambda: client.head("/alone/expired").status_code == 404, "the stream expires", 10)
        wait_until_gone(store, alone)
        assert later <= names(store, "segments")
        kept = {path for path in shared if path in names(store, "segments")}
        assert kept, "a segment with a living message was deleted"
        assert read_all(client, "/shared/kept") == b"kept "
        assert read_all(client, "/alone/trimmed", token(6)) == b"after"
        assert client.get(f"/alone/trimmed/snapshot/{token(6)}").content == b"state"
        assert client.delete("/shared/kept").status_code == 204
        wait_until_gone(store, kept)
        assert names(store, "segments") == later
        assert stats(client)["segment_count"] == len(later)
        assert verified(tmp_path / "data", store)["problems"] == []


def test_a_dead_segment_stays_for_the_grace_period(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1h")
    with (
        server_on(tmp_path / "data", folder, *settings) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        create(client, "/v1/stream/dead", b"dead")
        dead = flushed(client, folder, set())
        client.delete("/v1/stream/dead")
        wait_until_flushed(client, released=True)
        assert server.stop() == 0
    assert dead <= names(folder, "segments")
    # Its time is up under another setting: the mark survives the restart.
    with server_on(tmp_path / "data", folder, *SETTINGS):
        wait_until_gone(folder, dead)


def test_a_source_that_was_deleted_keeps_its_segments_while_forks_read_them(
    tmp_path: Path, folder: FolderStore
) -> None:
    with (
        server_on(tmp_path / "data", folder, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/forks")
        create(client, "/forks/source", b"of the source")
        segments = flushed(client, folder, set())
        create(client, "/forks/fork", b"", stream_forked_from="/forks/source")
        client.delete("/forks/source")
        create(client, "/forks/other", b"other")
        others = flushed(client, folder, segments)
        client.delete("/forks/other")
        wait_until_gone(folder, others)  # a whole round of reclaiming has passed
        assert segments <= names(folder, "segments")
        assert read_all(client, "/forks/fork") == b"of the source"
        client.delete("/forks/fork")
        wait_until_gone(folder, segments)


def test_superseded_and_orphaned_snapshots_go_and_the_latest_stays(tmp_path: Path, store: ColdStore) -> None:
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/snaps")
        for name in ("kept", "deleted"):
            create(client, f"/snaps/{name}", b"0123456789")
            for offset in (0, 10):
                body = f"{name} at {offset}".encode()
                assert client.put(f"/snaps/{name}/snapshot/{token(offset)}", content=body).status_code == 204
        wait_until(lambda: len(names(store, "snapshots")) == 2, "superseded snapshots are deleted", 12)
        client.delete("/snaps/deleted")
        wait_until(lambda: len(names(store, "snapshots")) == 1, "a deleted stream's snapshot is deleted", 12)
        assert client.get(f"/snaps/kept/snapshot/{token(10)}").content == b"kept at 10"
        server.kill()
    put_object(store, "snapshots/snaps_lost-0000000000000010-00ff", b"nothing refers to this")
    put_object(store, "segments/bucket=snaps/date=2026-01-01/0000-00000000000000000001-00ff.parquet", b"nor to this")
    put_object(store, "notes/0000/00000000000000000001-00ff.msgpack", b"nor to this")
    time.sleep(1.1 if isinstance(store, S3Prefix) else 0.01)  # S3 tells time in whole seconds
    with (
        server_on(tmp_path / "data", store, *SETTINGS, "cold.leftover_age=0s") as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        # Their age is by the store's own clock: something later must be there.
        create(client, "/snaps/later", b"later")
        wait_until(lambda: not [path for path in store.listing() if "00ff" in path], "orphans are removed", 12)
        assert client.get(f"/snaps/kept/snapshot/{token(10)}").content == b"kept at 10"


def test_what_this_process_writes_is_no_orphan_however_old_the_store_says_it_is(
    tmp_path: Path, s3_server: S3Server
) -> None:
    """S3 gives times in whole seconds: an object from just after the start may look older than the start."""
    store = S3Prefix(s3_server)
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/fresh")
        create(client, "/fresh/s", b"written right after the start")
        wait_until_flushed(client, released=True)
        written = names(store, "segments")
        assert written
        time.sleep(1.5)  # a round of the reclaimer, which is all there is to wait for
        assert names(store, "segments") == written
        assert client.get("/fresh/s").content == b"written right after the start"


def test_cold_space_in_use_does_not_grow_while_streams_come_and_go(tmp_path: Path, folder: FolderStore) -> None:
    with (
        server_on(tmp_path / "data", folder, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/churn")
        for number in range(6):
            create(client, f"/churn/s{number}", b"x" * 300_000)
            wait_until_flushed(client, released=True)
            client.delete(f"/churn/s{number}")
        wait_until(lambda: not names(folder, "segments"), "everything is reclaimed", 12)
        wait_until(lambda: stats(client)["cold_bytes"] == 0, "and counted so")


def test_objects_of_others_in_the_store_are_left_alone_and_end_nothing(tmp_path: Path) -> None:
    """Somebody's notes among the manifests: space is reclaimed all the same, and one line of the log names them."""
    store = FolderStore(tmp_path / "store")
    foreign = ["manifests/0000/README.txt", "manifests/0000/99-x.msgpack", "notes/0000/x", "segments/_delta_log/0.json"]
    for path in foreign:
        put_object(store, path, b"mine")
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/alone")
        create(client, "/alone/deleted", b"deleted")
        dying = flushed(client, store, set(foreign))
        assert dying
        client.delete("/alone/deleted")
        wait_until_gone(store, dying)
        assert httpx.get(f"{server.url}/readyz/local").status_code == 200
        lines = [line for line in server.stderr().splitlines() if "not ours" in line]
        assert len([line for line in lines if "2 objects under manifests/0000/" in line]) == 1, server.stderr()
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "\nmillstream_background_task_failures_total{" not in metrics
    stored = {path for folder in ("manifests", "notes", "segments") for path in names(store, folder)}
    assert set(foreign) <= stored
