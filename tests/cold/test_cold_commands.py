"""`millstream cold ls|verify|stats` as an operator runs them, and what the configuration of a store refuses."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest

from millstream.tiers.objects import ObjectStoreSettings
from support import compaction
from support.cold import (
    SECONDS,
    ColdStore,
    FolderStore,
    S3Prefix,
    delete_object,
    names,
    put_object,
    read_object,
    run_command,
    run_here,
    run_json,
    server_on,
    verified,
    wait_until_flushed,
)
from support.commands import millstream
from support.s3 import S3Server, shared_s3_server

SETTINGS = ("cold.flush_interval=100ms", "hot.keep_bytes=0B")
TEXT = {"content-type": "text/plain"}
MESSAGES = {"first-bucket": [b"one", b"two" * 100], "other-bucket": [b"three"]}


def fill(data_dir: Path, store: ColdStore) -> None:
    with server_on(data_dir, store, *SETTINGS) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        for bucket, messages in MESSAGES.items():
            client.put(f"/{bucket}")
            client.put(f"/{bucket}/stream", headers=TEXT)
            for message in messages:
                assert client.post(f"/{bucket}/stream", headers=TEXT, content=message).status_code == 204
                wait_until_flushed(client, released=True)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def filled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filled")
    fill(place / "data", FolderStore(place / "cold"))
    return place / "cold"


@pytest.fixture(scope="module")
def filled_s3(tmp_path_factory: pytest.TempPathFactory) -> S3Prefix:
    server: S3Server = shared_s3_server()
    store = S3Prefix(server)
    fill(tmp_path_factory.mktemp("filled") / "data", store)
    return store


@pytest.fixture(params=["fs", "s3"])
def filled(request: pytest.FixtureRequest) -> ColdStore:
    """A store to look at."""
    if request.param == "s3":
        found: S3Prefix = request.getfixturevalue("filled_s3")
        return found
    return FolderStore(request.getfixturevalue("filled_folder"))


@pytest.fixture
def damaged(filled_folder: Path, tmp_path: Path) -> FolderStore:
    """A copy of it, to damage."""
    shutil.copytree(filled_folder, tmp_path / "cold")
    return FolderStore(tmp_path / "cold")


# -- ls and stats --------------------------------------------------------------------------------------------------


def test_ls_lists_every_segment_with_what_is_in_it(tmp_path: Path, filled: ColdStore) -> None:
    rows = run_json("cold", "ls", data_dir=tmp_path, store=filled)
    sizes = filled.listing()
    assert {row["path"] for row in rows} == names(filled, "segments")
    assert all(row["size"] == sizes[row["path"]] for row in rows)
    assert [(row["bucket"], row["messages"], row["payload_bytes"]) for row in rows] == [
        ("first-bucket", 1, 3),
        ("first-bucket", 1, 300),
        ("other-bucket", 1, 5),
    ]
    positions = [(row["first_position"], row["last_position"]) for row in rows]
    assert positions == sorted(positions)


def test_ls_prints_a_table_that_lines_up(tmp_path: Path, filled: ColdStore) -> None:
    done = run_command("cold", "ls", data_dir=tmp_path, store=filled)
    assert (done.returncode, done.stderr) == (0, "")
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["messages", "payload", "size", "positions", "path"]
    assert len(lines) == 3
    column = heading.index("path")
    assert {line[column:] for line in lines} == names(filled, "segments")
    assert lines[1].split()[:3] == ["1", "300", "B"]


def test_ls_names_the_files_as_other_programs_do(tmp_path: Path, filled: ColdStore) -> None:
    done = run_command("cold", "ls", "--paths", data_dir=tmp_path, store=filled)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == run_json("cold", "ls", "--paths", data_dir=tmp_path, store=filled)
    if isinstance(filled, FolderStore):
        assert {Path(line) for line in lines} == set(filled.folder.glob("segments/**/*.parquet"))
    else:
        assert all(line.startswith("s3://") for line in lines)
        assert {line[line.index("segments/") :] for line in lines} == names(filled, "segments")


def test_the_documented_duckdb_query_agrees_with_the_server_after_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent = FolderStore(tmp_path / "cold"), 6
    with server_on(tmp_path / "data", store, *SETTINGS) as server:
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            client.put("/counted")
            client.put("/counted/stream", headers={"content-type": "application/json"})
            for number in range(sent):
                client.post("/counted/stream", json={"n": number}).raise_for_status()
                wait_until_flushed(client, released=True)
            client.post("/cluster/compactions", json=asyncio.run(compacted(store))).raise_for_status()
            wait_until_flushed(client)
            assert len(client.get("/counted/stream").json()) == sent
        assert server.stop() == 0
    monkeypatch.chdir(tmp_path)
    (list_files,), (query,) = documented("sh"), documented("sql")
    assert list_files.strip() == "millstream cold ls --paths > segments.txt"
    done = run_command("cold", "ls", "--paths", data_dir=tmp_path / "data", store=store)
    (tmp_path / "segments.txt").write_text(done.stdout)
    files = len(list(store.folder.glob("segments/**/*.parquet")))
    assert files > len(done.stdout.splitlines()) == 1, "what was replaced is still there"
    everything = duckdb.sql(f"select count(*) from read_parquet('{store.folder}/segments/**/*.parquet')").fetchall()
    assert everything == [(2 * sent,)]
    duckdb.sql(query.partition(";")[0])
    assert duckdb.sql(query.partition(";")[2]).fetchall() == [("stream", sent, sent * len('{"n":0}'))]


def documented(language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "formats" / "segment.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


async def compacted(store: FolderStore) -> dict[str, Any]:
    settings = ObjectStoreSettings("fs", store.folder, {})
    (group,) = await compaction.plan(settings)
    return compaction.proposal(group, await compaction.write(settings, group))


def test_stats_adds_up_by_bucket(tmp_path: Path, filled: ColdStore) -> None:
    totals = run_json("cold", "stats", data_dir=tmp_path, store=filled)
    sizes = filled.listing()
    expected = {
        bucket: {
            "segments": len(messages),
            "messages": len(messages),
            "payload_bytes": sum(map(len, messages)),
            "size": sum(size for path, size in sizes.items() if f"bucket={bucket}/" in path),
        }
        for bucket, messages in MESSAGES.items()
    }
    assert totals == expected


def test_stats_prints_a_table(tmp_path: Path, filled: ColdStore) -> None:
    done = run_command("cold", "stats", data_dir=tmp_path, store=filled)
    assert (done.returncode, done.stderr) == (0, "")
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["bucket", "segments", "messages", "payload", "stored", "compression"]
    assert [line.split()[:3] for line in lines] == [["first-bucket", "2", "2"], ["other-bucket", "1", "1"]]


def test_an_empty_store_is_listed_as_empty(tmp_path: Path, folder: FolderStore) -> None:
    folder.folder.mkdir()
    assert run_json("cold", "ls", data_dir=tmp_path, store=folder) == []
    assert run_json("cold", "stats", data_dir=tmp_path, store=folder) == {}
    assert verified(tmp_path, folder) == {"checked": 0, "problems": [], "notes": []}
    assert run_here("cold", "ls", data_dir=tmp_path, store=folder)[:2] == (
        0,
        "messages  payload  size  positions  path\n",
    )


def test_the_commands_leave_the_data_directory_and_the_store_alone(tmp_path: Path, filled: ColdStore) -> None:
    before = filled.listing()
    for action in ("ls", "stats", "verify"):
        assert run_here("cold", action, data_dir=tmp_path / "untouched", store=filled)[0] == 0
    assert not (tmp_path / "untouched").exists()
    assert filled.listing() == before


# -- verify --------------------------------------------------------------------------------------------------------


def test_verify_of_a_whole_store_finds_nothing(tmp_path: Path, filled: ColdStore) -> None:
    assert verified(tmp_path, filled) == {"checked": 3, "problems": [], "notes": []}
    done = run_command("cold", "verify", data_dir=tmp_path, store=filled)
    assert (done.returncode, done.stdout) == (0, "checked 3 segments, 0 problems\n")


@pytest.mark.parametrize("where", [4, 0.5, -1, -9])
def test_verify_finds_a_flipped_byte(tmp_path: Path, damaged: FolderStore, where: float) -> None:
    path = sorted(names(damaged, "segments"))[1]
    file = damaged.folder / path
    data = bytearray(file.read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 4
    file.write_bytes(data)
    report = verified(tmp_path, damaged)
    assert [problem["path"] for problem in report["problems"]] == [path]
    assert report["checked"] == 3
    done = run_command("cold", "verify", data_dir=tmp_path, store=damaged)
    assert done.returncode == 1
    assert path in done.stderr
    assert done.stdout == "checked 3 segments, 1 problem\n"


def test_verify_finds_a_segment_that_is_missing(tmp_path: Path, damaged: FolderStore) -> None:
    path = sorted(names(damaged, "segments"))[0]
    delete_object(damaged, path)
    (problem,) = verified(tmp_path, damaged)["problems"]
    assert problem["path"] == path
    assert "not in the store" in problem["problem"]


def test_verify_finds_a_truncated_segment(tmp_path: Path, damaged: FolderStore) -> None:
    path = sorted(names(damaged, "segments"))[0]
    (damaged.folder / path).write_bytes(read_object(damaged, path)[:-20])
    (problem,) = verified(tmp_path, damaged)["problems"]
    assert problem["path"] == path


def test_verify_finds_an_object_that_nothing_names(tmp_path: Path, damaged: FolderStore) -> None:
    known = sorted(names(damaged, "segments"))[0]
    orphan = known.replace(".parquet", "00.parquet")
    put_object(damaged, orphan, read_object(damaged, known))
    (problem,) = verified(tmp_path, damaged)["problems"]
    assert problem["path"] == orphan
    assert "no manifest names" in problem["problem"]
    # One that a flush may have put there just now is nothing to worry about.
    report = run_json("cold", "verify", data_dir=tmp_path, store=damaged)
    assert report["problems"] == []
    assert [note["path"] for note in report["notes"]] == [orphan]


@pytest.mark.parametrize("kind", ["notes", "snapshots"])
def test_verify_finds_notes_and_snapshots_that_are_missing(tmp_path: Path, folder: FolderStore, kind: str) -> None:
    with (
        server_on(tmp_path / "data", folder, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/snapped")
        client.put("/snapped/stream", headers=TEXT, content=b"x")
        assert client.put(f"/snapped/stream/snapshot/0000000000000000_{1:016d}", content=b"state").status_code == 204
        wait_until_flushed(client, released=True)
        assert server.stop() == 0
    path = sorted(names(folder, kind))[0]
    delete_object(folder, path)
    assert [problem["path"] for problem in verified(tmp_path, folder)["problems"]] == [path]


def test_a_manifest_that_cannot_be_read_is_reported_by_its_name(tmp_path: Path, damaged: FolderStore) -> None:
    path = sorted(names(damaged, "manifests"))[0]
    (damaged.folder / path).write_bytes(b"\xc1 no msgpack")
    code, output, errors = run_here("cold", "ls", data_dir=tmp_path, store=damaged)
    assert (code, output) == (1, "")
    assert path in errors


def test_a_store_that_is_down_is_reported_in_one_line(tmp_path: Path, filled_s3: S3Prefix) -> None:
    settings = (*filled_s3.settings, "cold.s3_endpoint=http://127.0.0.1:9")
    done = run_command("cold", "ls", data_dir=tmp_path, settings=settings, store=filled_s3)
    assert done.returncode == 5
    assert done.stderr.startswith("millstream: the object store failed: ")
    assert "Traceback" not in done.stderr


# -- configuration -------------------------------------------------------------------------------------------------


SERVE = ("serve", "--listen", "127.0.0.1:0")
NO_BUCKET = ("cold.backend=s3", "cold.path=p")


@pytest.mark.parametrize(
    ("command", "settings", "said"),
    [
        (SERVE, ("cold.backend=floppy",), "cold.backend = 'floppy' is not one of fs, s3, gcs, azure, memory"),
        (SERVE, NO_BUCKET, "cold.s3_bucket is not set"),
        (("restore",), NO_BUCKET, "cold.s3_bucket is not set"),
        (("cold", "ls"), NO_BUCKET, "cold.s3_bucket is not set"),
        (SERVE, ("cold.backend=s3", "cold.s3_bucket=b", "cold.s3_secret_access_key=$NO_SUCH_NAME"), "'NO_SUCH_NAME'"),
        (SERVE, ("cold.backend=gcs", "cold.path=p"), "cold.gcs_bucket is not set"),
        (SERVE, ("cold.backend=azure", "cold.path=p"), "cold.azure_container is not set"),
        (SERVE, ("cold.flush_interval=soon",), "cold.flush_interval = 'soon' is not a duration"),
        (SERVE, ("cold.flush_bytes=many",), "cold.flush_bytes = 'many' is not a size"),
        (SERVE, ("cold.bucket=b",), "there is no setting 'cold.bucket'"),
    ],
)
def test_a_store_that_is_configured_wrong_is_refused_in_one_line(
    tmp_path: Path, command: tuple[str, ...], settings: tuple[str, ...], said: str
) -> None:
    done = run_command(*command, data_dir=tmp_path / "data", settings=settings)
    assert done.returncode == 1
    assert done.stderr.startswith("millstream: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_credentials_come_from_the_variables_that_the_settings_name(tmp_path: Path, filled_s3: S3Prefix) -> None:
    file = tmp_path / "millstream.toml"
    lines = [setting.partition("=") for setting in filled_s3.settings]
    entries = "\n".join(f"{key.removeprefix('cold.')} = {json.dumps(value)}" for key, _, value in lines)
    file.write_text(f"version = 1\n[cold]\n{entries}\n")
    store = FolderStore(tmp_path)
    store.settings = ()
    store.environment = filled_s3.environment
    done = run_command("cold", "stats", "--json", "--config", str(file), data_dir=tmp_path, store=store)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == set(MESSAGES)
    assert asyncio.run(filled_s3.objects().head(sorted(names(filled_s3, "segments"))[0])).size > 0


def test_a_cold_tier_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    done = millstream("cold", "ls", "--data-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 3
    assert "there is no cold tier in" in done.stderr.decode() and "--data-dir" in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []
