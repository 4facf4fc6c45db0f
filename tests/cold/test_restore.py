"""A new machine with an empty data directory, pointed at the same object store, serves every stream again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from millstream.tiers.manifests import encode_manifest, read_manifest
from support.cold import (
    ColdStore,
    FolderStore,
    delete_object,
    names,
    put_object,
    read_all,
    read_object,
    run_command,
    run_here,
    server_on,
    stats,
    token,
    verified,
    wait_until,
    wait_until_flushed,
)
from support.crashing_flush import LAUNCHER
from support.server import ServerProcess

FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1s")
QUIET = ("cold.flush_interval=1h",)
JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}
CLAIM = {"producer-id": "p", "producer-epoch": "3"}
STREAMS = ("json", "bytes", "closed", "snapped", "fork", "window", "dated", "produced")


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30)


def restore(data_dir: Path, store: ColdStore, code: int = 0) -> str:
    done = run_command("restore", data_dir=data_dir, store=store)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def populate(client: httpx.Client) -> None:
    """One of everything that a stream, a bucket or a subscription can be."""

    def ok(answer: httpx.Response) -> None:
        assert answer.is_success, (answer.request.method, answer.request.url, answer.text)

    ok(client.put("/restore"))
    ok(client.put("/empty-bucket"))
    ok(client.put("/restore/json", headers={"content-type": "application/json; charset=utf-8"}))
    ok(client.post("/restore/json", headers=JSON, content=b'[{"n": 1.00}, 12345678901234567890123, "\\u00e9"]'))
    ok(client.put("/restore/bytes", content=bytes(range(256)) * 20))
    ok(client.post("/restore/bytes", headers={"content-type": "application/octet-stream"}, content=b"\0more"))
    ok(client.put("/restore/closed", headers=TEXT))
    ok(client.post("/restore/closed", headers={**TEXT, "stream-closed": "true"}, content=b"last words"))
    ok(client.put("/restore/snapped", headers=TEXT, content=b"before"))
    ok(client.post("/restore/snapped", headers=TEXT, content=b"after"))
    ok(client.put(f"/restore/snapped/snapshot/{token(6)}", headers={"content-type": "image/png"}, content=b"picture"))
    fork = {"stream-forked-from": "/restore/bytes", "stream-fork-offset": token(0), "stream-fork-sub-offset": "3"}
    ok(client.put("/restore/fork", headers=fork))
    ok(client.post("/restore/fork", headers={"content-type": "application/octet-stream"}, content=b"own"))
    ok(client.put("/restore/window", headers={**TEXT, "stream-ttl": "86400"}, content=b"sliding"))
    ok(client.put("/restore/dated", headers={**TEXT, "stream-expires-at": "2099-01-02T03:04:05Z"}, content=b"dated"))
    ok(client.put("/restore/produced", headers=TEXT))
    for seq in range(3):
        headers = {**TEXT, **CLAIM, "producer-seq": str(seq), "stream-seq": f"seq-{seq}"}
        ok(client.post("/restore/produced", headers=headers, content=f"<{seq}>".encode()))
    ok(client.put("/v1/stream/some bucket é/with/slashes %25", headers=TEXT, content=b"awkward"))
    ok(client.put("/restore/deleted", headers=TEXT, content=b"never to be seen again"))
    subscription = {
        "type": "webhook",
        "streams": ["restore/json"],
        "webhook": {"url": "http://127.0.0.1:9/hook"},
        "lease_ttl_ms": 5000,
        "description": "survives",
    }
    ok(client.put("/v1/stream/__ds/subscriptions/keeper", json=subscription))


def state(client: httpx.Client) -> dict[str, Any]:
    """Everything a client can see, without what tells of time passing."""
    found: dict[str, Any] = {}
    for name in STREAMS:
        head = client.head(f"/restore/{name}")
        kept = ("content-type", "stream-next-offset", "stream-closed", "stream-ttl", "stream-expires-at", "etag")
        offsets = ("stream-snapshot-offset", "stream-earliest-offset")
        found[name] = (head.status_code, {field: head.headers.get(field) for field in (*kept, *offsets)})
        start = head.headers.get("stream-earliest-offset", "-1")
        found[f"{name} content"] = read_all(client, f"/restore/{name}", start)
    found["snapshot"] = client.get(f"/restore/snapped/snapshot/{token(6)}").content
    found["snapshot type"] = client.get(f"/restore/snapped/snapshot/{token(6)}").headers["content-type"]
    found["awkward"] = client.get("/v1/stream/some bucket é/with/slashes %25").content
    for bucket in ("restore", "empty-bucket"):
        found[bucket] = client.get(f"/{bucket}").json()
        found[f"{bucket} listing"] = client.get(f"/{bucket}/streams").json()
        feed = client.get(f"/{bucket}/streams/feed", params={"max_bytes": "1000000"})
        found[f"{bucket} feed"] = [json.loads(line) for line in feed.content.splitlines()]
    subscription = client.get("/v1/stream/__ds/subscriptions/keeper").json()
    found["subscription"] = {name: subscription[name] for name in subscription if name != "status"}
    found["keys"] = client.get("/v1/stream/__ds/jwks.json").json()
    found["deleted"] = client.get("/restore/deleted").status_code
    return found


@pytest.mark.parametrize(("store", "end"), [("fs", "killed"), ("s3", "stopped")], indirect=["store"])
def test_restore_from_the_store_alone_brings_everything_back(tmp_path: Path, store: ColdStore, end: str) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        populate(client)
        wait_until_flushed(client)
        assert client.delete("/restore/deleted").status_code == 204
        wait_until_flushed(client)
        before = state(client)
        assert before["deleted"] == 404
        wait_until_flushed(client)
        if end == "stopped":
            assert server.stop() == 0
        else:
            server.kill()
    shutil.rmtree(data_dir)
    said = restore(data_dir, store)
    assert "restored" in said
    assert str(data_dir) in said
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        after = state(client)
        for name, value in before.items():
            assert after[name] == value, name
        retried = client.post("/restore/produced", headers={**TEXT, **CLAIM, "producer-seq": "2"}, content=b"a repeat")
        assert retried.status_code == 204
        stale = {**TEXT, "producer-id": "p", "producer-epoch": "2", "producer-seq": "0"}
        assert client.post("/restore/produced", headers=stale, content=b"stale").status_code == 403
        repeated = {**TEXT, "stream-seq": "seq-2"}
        assert client.post("/restore/produced", headers=repeated, content=b"again").status_code == 409
        following = {**TEXT, **CLAIM, "producer-seq": "3", "stream-seq": "seq-3"}
        assert client.post("/restore/produced", headers=following, content=b"<3>").status_code == 200
        assert client.post("/restore/closed", headers=TEXT, content=b"more").status_code == 409
        assert read_all(client, "/restore/produced") == b"<0><1><2><3>"
        wait_until_flushed(client)
        assert read_all(client, "/restore/produced") == b"<0><1><2><3>"
        server.kill()
    # And once more, from what the new machine flushed.
    shutil.rmtree(data_dir)
    restore(data_dir, store)
    with server_on(data_dir, store, *QUIET) as server, client_of(server) as client:
        assert read_all(client, "/restore/produced") == b"<0><1><2><3>"
        assert state(client)["json content"] == before["json content"]


# -- what happened between the last flush and the loss ---------------------------------------------------------------


def lost(tmp_path: Path, store: FolderStore, before: Callable[[Any], None], after: Callable[[Any], None]) -> Path:
    """A machine that flushed `before`, then did `after`, and was lost without another flush."""
    data_dir = tmp_path / "data"
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        before(client)
        wait_until_flushed(client)
        assert server.stop() == 0
    with server_on(data_dir, store, *QUIET, "cold.reclaim_grace=1s") as server, client_of(server) as client:
        after(client)
        server.kill()
    shutil.rmtree(data_dir)
    return data_dir


def test_a_snapshot_that_was_replaced_after_the_last_flush_is_still_there(tmp_path: Path, folder: FolderStore) -> None:
    def before(client: httpx.Client) -> None:
        client.put("/restore")
        client.put("/restore/snapped", headers=TEXT, content=b"123456")
        assert client.put(f"/restore/snapped/snapshot/{token(6)}", content=b"first").status_code == 204

    def after(client: httpx.Client) -> None:
        client.post("/restore/snapped", headers=TEXT, content=b"789")
        assert client.put(f"/restore/snapped/snapshot/{token(9)}", content=b"second").status_code == 204
        client.get(f"/restore/snapped/snapshot/{token(9)}").read()

    data_dir = lost(tmp_path, folder, before, after)
    restore(data_dir, folder)
    with server_on(data_dir, folder, *QUIET) as server, client_of(server) as client:
        assert client.head("/restore/snapped").headers["stream-next-offset"] == token(6)
        assert client.get(f"/restore/snapped/snapshot/{token(6)}").content == b"first"
        assert b"first" in client.get("/restore/snapped/bootstrap").content


def test_a_stream_that_was_deleted_after_the_last_flush_comes_back_whole(tmp_path: Path, folder: FolderStore) -> None:
    def before(client: httpx.Client) -> None:
        client.put("/restore")
        client.put("/restore/snapped", headers=TEXT, content=b"123456")
        client.put(f"/restore/snapped/snapshot/{token(3)}", content=b"half")
        client.put(f"/restore/snapped/snapshot/{token(6)}", content=b"first")
        client.post("/restore/snapped", headers=TEXT, content=b"789")

    def after(client: httpx.Client) -> None:
        assert client.delete("/restore/snapped").status_code == 204

    data_dir = lost(tmp_path, folder, before, after)
    restore(data_dir, folder)
    with server_on(data_dir, folder, *QUIET) as server, client_of(server) as client:
        assert read_all(client, "/restore/snapped", token(6)) == b"789"
        assert client.get(f"/restore/snapped/snapshot/{token(6)}").content == b"first"


def test_segments_reclaimed_after_the_last_flush_do_not_stand_in_the_way(tmp_path: Path, folder: FolderStore) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        client.put("/restore")
        client.put("/restore/gone", headers=TEXT, content=b"gone")
        wait_until_flushed(client, released=True)
        (dead,) = names(folder, "segments")
        client.put("/restore/kept", headers=TEXT, content=b"kept")
        client.delete("/restore/gone")
        wait_until_flushed(client, released=True)
        wait_until(lambda: dead not in names(folder, "segments"), "the dead segment is reclaimed")
        server.kill()
    shutil.rmtree(data_dir)
    assert verified(data_dir, folder)["problems"] == []
    restore(data_dir, folder)
    with server_on(data_dir, folder, *QUIET) as server, client_of(server) as client:
        assert read_all(client, "/restore/kept") == b"kept"
        assert client.get("/restore/gone").status_code == 404


# -- many flushes ------------------------------------------------------------------------------------------------


def write_flushes(data_dir: Path, store: ColdStore, flushes: int, **constants: int) -> dict[str, bytes]:
    """As many flushes, with full manifests among them; returns what the streams then hold."""
    environment = {name: str(value) for name, value in constants.items()}
    server = ServerProcess(data_dir, settings=(*store.settings, *FLUSHING), command=LAUNCHER, environment=environment)
    expected: dict[str, bytes] = {}
    with server, client_of(server) as client:
        client.put("/restore")
        for number in range(flushes):
            for stream in range(3):
                path = f"/restore/s{stream}"
                client.put(path, headers=TEXT)
                body = f"<{number}.{stream}>".encode()
                assert client.post(path, headers=TEXT, content=body).status_code == 204
                expected[path] = expected.get(path, b"") + body
            if number == 1:
                client.put("/restore/deleted", headers=TEXT, content=b"only here")
                client.put("/restore/snapped", headers=TEXT, content=b"12345")
            if number == 3:
                client.delete("/restore/deleted")
                client.put(f"/restore/snapped/snapshot/{token(5)}", content=b"five")
            wait_until_flushed(client, released=True)
        if constants:  # a full manifest is written after its flush, and then those before it go
            wait_until(lambda: len(names(store, "manifests")) < flushes, "a full manifest removes those before it")
        server.kill()
    assert "Traceback" not in server.stderr()
    return expected


@pytest.mark.parametrize(
    ("flushes", "constants"),
    [
        (5, {}),
        pytest.param(6, {"MANIFESTS_PER_FULL": 6}, marks=pytest.mark.soak),
        (8, {"MANIFESTS_PER_FULL": 3}),
        (6, {"MANIFESTS_PER_FULL": 3, "FULL_PART_STREAMS": 2}),
    ],
    ids=["no full manifest", "a full one last", "several full ones", "full ones in parts"],
)
def test_restore_after_many_flushes_follows_the_manifests(
    tmp_path: Path, folder: FolderStore, flushes: int, constants: dict[str, int]
) -> None:
    data_dir = tmp_path / "data"
    expected = write_flushes(data_dir, folder, flushes, **constants)
    manifests = [read_manifest(read_object(folder, path), path)[0] for path in names(folder, "manifests")]
    assert any(manifest.first == 0 for manifest in manifests) is bool(constants)
    if constants:
        assert len(manifests) < flushes, "a full manifest removes those before it"
    shutil.rmtree(data_dir)
    restore(data_dir, folder)
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        assert {path: read_all(client, path) for path in expected} == expected
        assert client.get("/restore/deleted").status_code == 404
        assert client.get(f"/restore/snapped/snapshot/{token(5)}").content == b"five"
        assert client.get("/restore/snapped", params={"offset": "-1"}).status_code == 410
        # What dies now is reclaimed although this machine never saw it written.
        for path in (*expected, "/restore/snapped"):
            assert client.delete(path).status_code == 204
        wait_until_flushed(client, released=True)
        wait_until(lambda: not names(folder, "segments"), "every segment is reclaimed", 8)


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lost_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data directory of a killed server in `origin` and its cold tier in `cold`."""
    place = tmp_path_factory.mktemp("lost")
    store = FolderStore(place / "cold")
    with server_on(place / "origin", store, *FLUSHING) as server, client_of(server) as client:
        client.put("/restore")
        for number in range(3):
            client.put(f"/restore/s{number}", headers=TEXT, content=f"content {number}".encode())
            wait_until_flushed(client, released=True)
        server.kill()
    return place


@pytest.fixture
def small(tmp_path: Path, lost_machine: Path) -> FolderStore:
    """A copy of it, to damage at will."""
    shutil.copytree(lost_machine, tmp_path, dirs_exist_ok=True)
    return FolderStore(tmp_path / "cold")


def test_restore_into_a_directory_that_holds_a_catalog_is_refused(tmp_path: Path, small: FolderStore) -> None:
    said = restore(tmp_path / "origin", small, code=1)
    assert "not empty" in said
    assert "hint:" in said
    with server_on(tmp_path / "origin", small, *QUIET) as server, client_of(server) as client:
        assert read_all(client, "/restore/s2") == b"content 2"


def test_restore_into_a_directory_whose_log_was_never_flushed_is_refused(tmp_path: Path, small: FolderStore) -> None:
    other = FolderStore(tmp_path / "other")
    with server_on(tmp_path / "busy", other, *QUIET) as server, client_of(server) as client:
        client.put("/v1/stream/acknowledged", headers=TEXT, content=b"only in the log")
        server.kill()
    said = restore(tmp_path / "busy", small, code=1)
    assert "not empty" in said
    with server_on(tmp_path / "busy", other, *QUIET) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/acknowledged") == b"only in the log"


def test_restore_into_a_directory_in_use_is_refused(tmp_path: Path, small: FolderStore) -> None:
    with server_on(tmp_path / "busy", FolderStore(tmp_path / "other"), *QUIET):
        assert "in use by another process" in restore(tmp_path / "busy", small, code=1)


def test_restore_from_an_empty_store_says_that_there_is_nothing(tmp_path: Path, folder: FolderStore) -> None:
    assert "nothing to restore" in restore(tmp_path / "data", folder, code=3)


def test_restore_without_a_segment_names_it_and_succeeds_once_it_is_back(tmp_path: Path, small: FolderStore) -> None:
    missing = sorted(names(small, "segments"))[-1]
    data = read_object(small, missing)
    delete_object(small, missing)
    said = restore(tmp_path / "restored", small, code=1)
    assert missing in said
    put_object(small, missing, data)
    restore(tmp_path / "restored", small)
    with server_on(tmp_path / "restored", small, *QUIET) as server, client_of(server) as client:
        assert [read_all(client, f"/restore/s{number}") for number in range(3)] == [
            b"content 0",
            b"content 1",
            b"content 2",
        ]


def test_a_restore_that_failed_leaves_nothing_that_would_be_served(tmp_path: Path, small: FolderStore) -> None:
    delete_object(small, sorted(names(small, "segments"))[-1])
    restore(tmp_path / "restored", small, code=1)
    server = server_on(tmp_path / "restored", small, *QUIET)
    try:
        server.start()
    except AssertionError as refusal:
        assert "Traceback" not in str(refusal)
        return
    try:
        with client_of(server) as client:
            found = [client.get(f"/restore/s{number}").status_code for number in range(3)]
        assert found == [404, 404, 404], "a part of the history is served as if it were all of it"
    finally:
        server.kill()


def test_a_corrupt_manifest_is_reported_by_its_name(tmp_path: Path, small: FolderStore) -> None:
    path = sorted(names(small, "manifests"))[-1]
    (small.folder / path).write_bytes(read_object(small, path)[:-7])
    assert path in restore(tmp_path / "restored", small, code=1)


@pytest.mark.parametrize("command", [("restore",), ("restore", "--accept-loss"), ("cold", "ls"), ("cold", "verify")])
def test_a_store_of_another_version_is_refused_as_such_and_left_as_it_is(
    tmp_path: Path, small: FolderStore, command: tuple[str, ...]
) -> None:
    path = sorted(names(small, "manifests"))[-1]
    manifest = read_manifest(read_object(small, path), path)[0]
    (small.folder / path).write_bytes(encode_manifest(msgspec.structs.replace(manifest, format=99)))
    before = small.listing()
    code, _, errors = run_here(*command, data_dir=tmp_path / "restored", store=small)
    assert code == 1
    assert f"{path} was written by another version of millstream: it has format 99" in errors
    assert "missing or damaged" not in errors
    assert small.listing() == before


@pytest.mark.parametrize("kind", ["gone", "damaged"])
def test_notes_that_are_lost_are_named_and_the_rest_is_restored_only_if_told_to(
    tmp_path: Path, small: FolderStore, kind: str
) -> None:
    lost = sorted(names(small, "notes"))[1]
    whole = read_object(small, lost)
    delete_object(small, lost)
    if kind == "damaged":
        put_object(small, lost, whole[:-1] + bytes([whole[-1] ^ 8]))
    before = small.listing()
    said = restore(tmp_path / "restored", small, code=1)
    assert lost in said and "--accept-loss" in said
    assert small.listing() == before, "a restore that is refused takes nothing over"
    done = run_command("restore", "--accept-loss", "--json", data_dir=tmp_path / "restored", store=small)
    assert done.returncode == 0, done.stderr
    assert lost in done.stderr
    assert list(json.loads(done.stdout)["lost"]) == [lost]
    with server_on(tmp_path / "restored", small, *QUIET) as server, client_of(server) as client:
        # All messages are there, the feed goes on behind what is lost, and the server is well.
        assert [read_all(client, f"/restore/s{number}") for number in range(3)] == [
            b"content 0",
            b"content 1",
            b"content 2",
        ]
        feed = [json.loads(line) for line in client.get("/restore/streams/feed").content.splitlines()]
        assert [item["stream"] for item in feed if item.get("event") == "created"] == ["s0", "s2"], feed
        assert client.get("/readyz/local").status_code == 200
    assert {path: size for path, size in small.listing().items() if path in before} == before


def test_a_snapshot_that_is_lost_is_named_and_its_stream_restored_if_told_to(
    tmp_path: Path, folder: FolderStore
) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        client.put("/restore")
        client.put("/restore/s", headers=TEXT, content=b"before")
        client.post("/restore/s", headers=TEXT, content=b"after")
        assert client.put(f"/restore/s/snapshot/{token(6)}", content=b"picture").status_code == 204
        wait_until_flushed(client, released=True)
        server.kill()
    (lost,) = names(folder, "snapshots")
    delete_object(folder, lost)
    assert lost in restore(tmp_path / "new", folder, code=1)
    done = run_command("restore", "--accept-loss", data_dir=tmp_path / "new", store=folder)
    assert done.returncode == 0 and lost in done.stderr
    with server_on(tmp_path / "new", folder, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/restore/s", token(6)) == b"after"
        assert client.get(f"/restore/s/snapshot/{token(6)}").status_code == 503
        assert client.put(f"/restore/s/snapshot/{token(11)}", content=b"new").status_code == 204
        wait_until_flushed(client)
        wait_until(lambda: client.get("/readyz/local").status_code == 200, "it is well with a new snapshot")


def test_a_bucket_made_right_after_a_restore_is_flushed_by_itself(tmp_path: Path, small: FolderStore) -> None:
    restore(tmp_path / "restored", small)
    with server_on(tmp_path / "restored", small, *FLUSHING) as server, client_of(server) as client:
        assert client.put("/afterwards").status_code == 201
        wait_until(lambda: stats(client)["flush_count"] > 0, "the new bucket is flushed", 5)
        server.kill()
    restore(tmp_path / "again", small)
    with server_on(tmp_path / "again", small, *QUIET) as server, client_of(server) as client:
        assert client.get("/afterwards").status_code == 200
