"""One owner at a time: a copy of the data, a restore or a drill beside a server that runs deletes nothing of its."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest

from support.cold import (
    ColdStore,
    FolderStore,
    names,
    read_all,
    read_object,
    run_command,
    server_on,
    verified,
    wait_until,
    wait_until_flushed,
)
from support.crashing_flush import LAUNCHER
from support.server import ServerProcess

# Whatever may be taken for a leftover would be deleted almost at once.
FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1s", "cold.leftover_age=0s")
TEXT = {"content-type": "text/plain"}


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30)


def write(client: httpx.Client, words: str, *, create: bool = False) -> None:
    for word in words.split():
        answer = client.put(f"/v1/stream/{word}", headers=TEXT) if create else None
        assert answer is None or answer.status_code == 201, answer.text
        answer = client.post(f"/v1/stream/{word}", headers=TEXT, content=f"{word} ".encode())
        assert answer.is_success, answer.text
        wait_until_flushed(client)


def contents(store: ColdStore) -> dict[str, bytes]:
    """Every object that holds data."""
    paths = [path for path in store.listing() if not path.startswith("owner/")]
    return {path: read_object(store, path) for path in paths}


def refused(data_dir: Path, store: ColdStore, *settings: str) -> str:
    """What a start says that is refused."""
    done = run_command("serve", "--listen", "127.0.0.1:0", data_dir=data_dir, store=store, settings=settings)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_a_start_on_an_older_copy_of_the_data_is_refused_and_deletes_nothing(tmp_path: Path, store: ColdStore) -> None:
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two", create=True)
        server.kill()
    shutil.copytree(data_dir, copy)
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        write(client, "three four", create=True)
        before = contents(store)
        said = refused(copy, store, *FLUSHING)
        assert "has owned the object store since" in said
        assert "millstream restore" in said
        write(client, "one")
        assert before.items() <= contents(store).items()
        server.kill()
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        for word in ("one one", "two", "three", "four"):
            assert read_all(client, f"/v1/stream/{word.split()[0]}") == f"{word} ".encode()
    assert verified(data_dir, store)["problems"] == []


def test_a_copy_from_under_the_running_server_is_refused_by_what_was_flushed_since(
    tmp_path: Path, folder: FolderStore
) -> None:
    """No start lies between them, so both know the same epoch: positions tell."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one", create=True)
        shutil.copytree(data_dir, copy)
        write(client, "two", create=True)
        before = contents(folder)
        said = refused(copy, folder, *FLUSHING)
        assert "the object store goes on to position" in said
        assert "older copy" in said
        write(client, "one")
        assert before.items() <= contents(folder).items()


def test_an_override_starts_on_an_older_copy_and_still_deletes_nothing(tmp_path: Path, folder: FolderStore) -> None:
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one", create=True)
        server.kill()
    shutil.copytree(data_dir, copy)
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "two three", create=True)
        server.kill()
    before = contents(folder)
    with server_on(copy, folder, *FLUSHING, "cold.take_over=true") as server, client_of(server) as client:
        assert client.get("/v1/stream/two").status_code == 404
        write(client, "four", create=True)
        time.sleep(1.0)  # rounds of the reclaimer
        write(client, "five", create=True)
        server.kill()
    assert before.items() <= contents(folder).items()
    assert "has owned the object store since" in refused(data_dir, folder, *FLUSHING)
    # The one who took over goes on without being told again.
    with server_on(copy, folder, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/five") == b"five "


def test_a_fresh_data_directory_on_a_used_store_is_refused(tmp_path: Path, folder: FolderStore) -> None:
    with server_on(tmp_path / "data", folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one", create=True)
        assert server.stop() == 0
    before = contents(folder)
    assert "this data directory does not know of that" in refused(tmp_path / "other", folder, *FLUSHING)
    assert contents(folder) == before
    # It is as empty as it was, so that what the refusal asks for can be done.
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]
    assert run_command("restore", data_dir=tmp_path / "other", store=folder).returncode == 0
    with server_on(tmp_path / "other", folder, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one "


def test_a_store_that_is_lost_or_mistyped_is_refused(tmp_path: Path, folder: FolderStore) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one", create=True)
        assert server.stop() == 0
    said = refused(data_dir, FolderStore(tmp_path / "mistyped"), *FLUSHING)
    assert "the store is lost, or cold.path (or the bucket) names another place" in said
    other = FolderStore(tmp_path / "other-cold")
    with server_on(tmp_path / "other", other, *FLUSHING) as server, client_of(server) as client:
        write(client, "one", create=True)
        assert server.stop() == 0
    assert "this data directory belongs to" in refused(data_dir, other, *FLUSHING)


def test_a_restore_beside_a_running_server_takes_the_store_over_and_nothing_is_lost(
    tmp_path: Path, store: ColdStore
) -> None:
    data_dir, new = tmp_path / "data", tmp_path / "new"
    with server_on(data_dir, store, *FLUSHING) as old, client_of(old) as client:
        write(client, "one two", create=True)
        done = run_command("restore", data_dir=new, store=store)
        assert done.returncode == 0, done.stderr
        before = contents(store)
        with server_on(new, store, *FLUSHING) as server, client_of(server) as new_client:
            # The old one notices when it wants to flush, and then accepts nothing more.
            client.post("/v1/stream/one", headers=TEXT, content=b"too late")
            wait_until(lambda: client.get("/readyz/local").status_code == 503, "the old server is not ready")
            assert "has taken over the object store" in client.get("/readyz/local").text
            late = client.post("/v1/stream/one", headers=TEXT, content=b"too late")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "store_taken_over")
            assert "millstream_store_lost 1" in client.get("/metrics").text
            assert read_all(client, "/v1/stream/two") == b"two "
            write(new_client, "three", create=True)
            write(new_client, "one")
            assert old.stop() == 0
            write(new_client, "two")
            assert before.items() <= contents(store).items()
            assert read_all(new_client, "/v1/stream/one") == b"one one "
            assert "store_lost 0" in new_client.get("/metrics").text
            server.kill()
    assert "has owned the object store since" in refused(data_dir, store, *FLUSHING)
    with server_on(new, store, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/three") == b"three "
        assert read_all(client, "/v1/stream/two") == b"two two "
    assert verified(new, store)["problems"] == []


def test_a_read_only_drill_beside_a_running_server_touches_nothing(tmp_path: Path, store: ColdStore) -> None:
    data_dir, drill = tmp_path / "data", tmp_path / "drill"
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two", create=True)
        before = {path: read_object(store, path) for path in store.listing()}
        done = run_command("restore", "--read-only", data_dir=drill, store=store)
        assert done.returncode == 0, done.stderr
        assert "for reading only" in done.stdout
        with server_on(drill, store, *FLUSHING) as beside, client_of(beside) as reader:
            assert reader.get("/readyz/local").status_code == 200
            assert read_all(reader, "/v1/stream/one") == b"one "
            for answer in (
                reader.post("/v1/stream/one", headers=TEXT, content=b"no"),
                reader.put("/v1/stream/new", headers=TEXT),
                reader.delete("/v1/stream/one"),
                reader.put("/_default/one/snapshot/0000000000000000_0000000000000004", content=b"no"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "read_only"), answer.text
            time.sleep(1.0)  # several times as long as everything takes that is due over time
            assert {path: read_object(store, path) for path in store.listing()} == before
            assert beside.stop() == 0
        write(client, "one")
        assert client.get("/readyz/local").status_code == 200
        assert {path: read_object(store, path) for path in before} == before
    with server_on(data_dir, store, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one one "


def test_a_manifest_in_the_middle_that_is_missing_is_named_and_nothing_is_restored_unasked(
    tmp_path: Path, folder: FolderStore
) -> None:
    data_dir, new = tmp_path / "data", tmp_path / "new"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two three four", create=True)
        server.kill()
    manifests = sorted(names(folder, "manifests"))
    whole = contents(folder)
    (folder.folder / manifests[len(manifests) // 2]).unlink()
    done = run_command("restore", data_dir=new, store=folder)
    assert done.returncode != 0
    assert "a manifest is missing or damaged" in done.stderr
    assert "--accept-loss" in done.stderr
    done = run_command("restore", "--accept-loss", data_dir=new, store=folder)
    assert done.returncode == 0, done.stderr
    with server_on(new, folder, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one "
        assert client.get("/v1/stream/four").status_code == 404
        write(client, "five", create=True)
        time.sleep(1.0)
        write(client, "six", create=True)
        server.kill()
    # What lies behind the hole is still there, and with the manifest put back it would be whole.
    lost = {path for path in whole if path not in contents(folder)}
    assert lost == {manifests[len(manifests) // 2]}


def test_a_manifest_that_is_lost_is_made_good_by_the_next_start_and_nothing_is_lost(
    tmp_path: Path, folder: FolderStore
) -> None:
    data_dir, new = tmp_path / "data", tmp_path / "new"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two three four", create=True)
        server.kill()
    manifests = sorted(names(folder, "manifests"))
    (folder.folder / manifests[len(manifests) // 2]).unlink()
    assert run_command("restore", "--read-only", data_dir=tmp_path / "drill", store=folder).returncode != 0
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        wait_until(lambda: verified(data_dir, folder)["problems"] == [], "a full manifest is written")
        assert client.get("/readyz/local").status_code == 200
        assert "a manifest is missing or damaged" in server.stderr()
        server.kill()
    assert run_command("restore", data_dir=new, store=folder).returncode == 0
    with server_on(new, folder, *FLUSHING) as server, client_of(server) as client:
        for word in ("one", "two", "three", "four"):
            assert read_all(client, f"/v1/stream/{word}") == f"{word} ".encode()


@pytest.mark.parametrize("kind", ["first", "last"])
def test_a_damaged_manifest_is_refused_wherever_it_is(tmp_path: Path, folder: FolderStore, kind: str) -> None:
    data_dir, new = tmp_path / "data", tmp_path / "new"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two three", create=True)
        server.kill()
    manifests = sorted(names(folder, "manifests"))
    file = folder.folder / manifests[0 if kind == "first" else -1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    done = run_command("restore", data_dir=new, store=folder)
    assert done.returncode != 0
    assert "a manifest is missing or damaged" in done.stderr
    assert str(file.relative_to(folder.folder)) in done.stderr


@pytest.mark.parametrize("point", ["before the segment put", "before the manifest put", "before the seal"])
def test_a_server_that_was_paused_in_a_flush_and_wakes_after_a_take_over_hurts_nothing(
    tmp_path: Path, folder: FolderStore, point: str
) -> None:
    data_dir, new, again = tmp_path / "data", tmp_path / "new", tmp_path / "again"
    armed = tmp_path / "armed"
    environment = {"CRASH_POINT": point, "CRASH_FILE": str(armed), "CRASH_SIGNAL": str(int(signal.SIGSTOP))}
    paused = ServerProcess(data_dir, settings=(*folder.settings, *FLUSHING), command=LAUNCHER, environment=environment)
    with paused as old, client_of(old) as client:
        write(client, "one two", create=True)
        armed.touch()
        assert client.post("/v1/stream/one", headers=TEXT, content=b"late ").is_success
        assert old.process is not None
        wait_until(lambda: is_stopped(old), "it is paused in the flush of that")
        done = run_command("restore", data_dir=new, store=folder)
        assert done.returncode == 0, done.stderr
        # Only a flush whose manifest was there counts.
        expected = {"one": b"one late " if point == "before the seal" else b"one ", "two": b"two ", "three": b"three "}
        with server_on(new, folder, *FLUSHING) as server, client_of(server) as new_client:
            write(new_client, "three", create=True)
            armed.unlink()
            os.kill(old.process.pid, signal.SIGCONT)
            # In one of the cases its own flush ends well; it notices with the next.
            client.post("/v1/stream/two", headers=TEXT, content=b"too late")
            wait_until(lambda: client.get("/readyz/local").status_code == 503, "the old server is not ready")
            assert client.post("/v1/stream/two", headers=TEXT, content=b"too late").status_code == 503
            # What it put too late counts for nothing, and stays as long as its manifest might be all that is left.
            assert all("no manifest names" in one["problem"] for one in verified(new, folder)["problems"])
            write(new_client, "three")
            expected["three"] *= 2
            server.kill()
        assert old.stop() == 0
    with server_on(new, folder, *FLUSHING) as server, client_of(server) as client:
        assert {name: read_all(client, f"/v1/stream/{name}") for name in expected} == expected
        server.kill()
    assert run_command("restore", data_dir=again, store=folder).returncode == 0
    with server_on(again, folder, *FLUSHING) as server, client_of(server) as client:
        assert {name: read_all(client, f"/v1/stream/{name}") for name in expected} == expected
    # What only the old one has can still be read there.
    with server_on(data_dir, folder, *FLUSHING, "server.read_only=true") as server, client_of(server) as client:
        assert client.get("/v1/stream/one", params={"offset": "-1"}).content == b"one late "


def is_stopped(server: ServerProcess) -> bool:
    assert server.process is not None
    return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# -- a damaged owner -----------------------------------------------------------------------------------------------


def damage_newest_owner(store: FolderStore) -> str:
    path = max(names(store, "owner"))
    data = bytearray((store.folder / path).read_bytes())
    data[len(data) // 2] ^= 1
    (store.folder / path).write_bytes(data)
    return path


def test_a_damaged_owner_refuses_a_start_and_the_override_goes_on_and_deletes_nothing(
    tmp_path: Path, folder: FolderStore
) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        write(client, "one two", create=True)
        server.kill()
    before = contents(folder)
    path = damage_newest_owner(folder)
    said = refused(data_dir, folder, *FLUSHING)
    assert path in said and "cold.take_over=true" in said
    done = run_command("doctor", data_dir=data_dir, store=folder)
    assert path in done.stdout + done.stderr
    assert any(path in one["problem"] for one in verified(data_dir, folder)["problems"])
    with server_on(data_dir, folder, *FLUSHING, "cold.take_over=true") as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one "
        write(client, "three", create=True)
        time.sleep(1.0)  # rounds of the reclaimer
        write(client, "one")
        server.kill()
    assert before.items() <= contents(folder).items()
    # The override is for one start.
    with server_on(data_dir, folder, *FLUSHING) as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one one "
        server.kill()
    assert verified(data_dir, folder)["problems"] == []
    assert run_command("restore", data_dir=tmp_path / "again", store=folder).returncode == 0


def test_a_restore_takes_over_from_a_damaged_owner_and_the_server_that_was_it_stops(
    tmp_path: Path, folder: FolderStore
) -> None:
    data_dir, new = tmp_path / "data", tmp_path / "new"
    with server_on(data_dir, folder, *FLUSHING) as old, client_of(old) as client:
        write(client, "one two", create=True)
        before = contents(folder)
        damage_newest_owner(folder)
        write(client, "one")  # it knows who it is
        done = run_command("restore", data_dir=new, store=folder)
        assert done.returncode == 0, done.stderr
        damage_newest_owner(folder)  # that of the restore: the old server must stop all the same
        client.post("/v1/stream/one", headers=TEXT, content=b"too late")
        wait_until(lambda: client.get("/readyz/local").status_code == 503, "the old server is not ready")
        late = client.post("/v1/stream/one", headers=TEXT, content=b"too late")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "store_taken_over")
        old.kill()
    assert "is damaged" in refused(new, folder, *FLUSHING)
    with server_on(new, folder, *FLUSHING, "cold.take_over=true") as server, client_of(server) as client:
        assert read_all(client, "/v1/stream/one") == b"one one "
        write(client, "two")
        time.sleep(1.0)
        write(client, "three", create=True)
    assert before.items() <= contents(folder).items()
