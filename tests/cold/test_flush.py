"""Flushing: by age, by bytes, by pressure; what it frees; and that any engine reads what it wrote as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import duckdb
import httpx
import pandas
import pytest

from support.cold import SECONDS, FolderStore, names, read_all, server_on, stats, token, wait_until, wait_until_flushed

TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}
COLUMNS = [
    "bucket",
    "stream",
    "offset_start",
    "offset_end",
    "shard",
    "position",
    "appended_at",
    "content_type",
    "payload",
]


def client_of(server: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=SECONDS)


def append(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, headers=TEXT, content=body)
    assert answer.status_code == 204, answer.text


# -- when ----------------------------------------------------------------------------------------------------------


def test_messages_that_are_old_enough_are_flushed_and_leave_memory_and_log(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=300ms", "hot.keep_bytes=0B", "log.segment_bytes=64KiB")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        client.put("/v1/stream/aged", headers=TEXT)
        expected = b""
        for number in range(40):
            body = b"%04d" % number * 2000
            append(client, "/v1/stream/aged", body)
            expected += body
        logs = tmp_path / "data" / "log"
        assert stats(client)["flush_backlog_bytes"] > 0 or stats(client)["flush_count"] > 0
        wait_until_flushed(client, released=True)
        now = stats(client)
        assert now["hot_bytes"] == now["flush_backlog_bytes"] == 0
        assert now["cold_payload_bytes"] == len(expected)
        assert now["cold_bytes"] == sum(size for path, size in folder.listing().items() if path.startswith("segments/"))
        assert now["segment_count"] == len(names(folder, "segments"))
        assert (now["backpressure"], now["backpressure_reason"], now["flush_failure"]) == (False, None, None)
        wait_until(lambda: len(list(logs.glob("*.log"))) == 1, "the log files before the flush are gone")
        assert read_all(client, "/v1/stream/aged") == expected
        assert stats(client)["row_group_cache_bytes"] > 0
        # Nothing new: no more flushes, no more objects.
        listed, flushes = folder.listing(), stats(client)["flush_count"]
        wait_until_flushed(client)
        assert server.stop() == 0
        assert folder.listing() == listed
        assert flushes == now["flush_count"]


def test_enough_bytes_are_flushed_before_they_are_old(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=1h", "cold.flush_bytes=256KiB", "hot.keep_bytes=0B")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        client.put("/v1/stream/large", headers=TEXT)
        append(client, "/v1/stream/large", b"x" * 200_000)
        assert stats(client)["flush_backlog_bytes"] == 200_000
        assert stats(client)["flush_count"] == 0
        append(client, "/v1/stream/large", b"y" * 100_000)
        wait_until(lambda: stats(client)["flush_count"] == 1, "a flush by bytes", 10)
        assert stats(client)["hot_bytes"] == 0
        assert read_all(client, "/v1/stream/large") == b"x" * 200_000 + b"y" * 100_000


@pytest.mark.parametrize("kept", ["0B", "128MiB"])
def test_memory_that_runs_out_is_flushed_whatever_the_other_limits_say(
    tmp_path: Path, folder: FolderStore, kept: str
) -> None:
    settings = ("cold.flush_interval=1h", "cold.flush_bytes=64MiB", "hot.bytes_max=1MiB", f"hot.keep_bytes={kept}")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        client.put("/v1/stream/pressed", headers=TEXT)
        expected = b""
        for number in range(30):
            body = b"%03d" % number * 33_000
            wait_until(
                lambda body=body: client.post("/v1/stream/pressed", headers=TEXT, content=body).status_code == 204,
                f"room for append {number}",
                8,
            )
            expected += body
        assert read_all(client, "/v1/stream/pressed") == expected


def test_what_was_flushed_stays_in_memory_as_long_as_there_is_room(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=1MiB")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        client.put("/v1/stream/kept", headers=TEXT)
        append(client, "/v1/stream/kept", b"x" * 500_000)
        wait_until_flushed(client)
        assert stats(client)["hot_bytes"] > 500_000
        for _ in range(4):
            append(client, "/v1/stream/kept", b"y" * 500_000)
            wait_until_flushed(client)
        wait_until(lambda: stats(client)["hot_bytes"] <= 1 << 20, "memory goes back to its limit")
        assert read_all(client, "/v1/stream/kept") == b"x" * 500_000 + b"y" * 2_000_000


def test_a_server_that_restarts_does_not_count_its_last_segments_twice(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1s")
    data_dir = tmp_path / "data"
    for round_ in range(3):
        with server_on(data_dir, folder, *settings) as server, client_of(server) as client:
            client.put("/v1/stream/counted", headers=TEXT)
            append(client, "/v1/stream/counted", b"%d" % round_)
            wait_until_flushed(client, released=True)
            assert stats(client)["segment_count"] == len(names(folder, "segments")) == round_ + 1
            assert stats(client)["cold_payload_bytes"] == round_ + 1
            if round_ < 2:
                assert server.stop() == 0
                continue
            client.delete("/v1/stream/counted")
            wait_until(lambda: stats(client)["segment_count"] == 0, "all segments are dead and gone", 10)
            # The catalog forgets a segment before its object is deleted.
            wait_until(lambda: names(folder, "segments") == set(), "their objects are deleted")


def test_a_stop_flushes_what_is_left(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=1h", "server.stop_timeout=60s")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        client.put("/v1/stream/last", headers=TEXT, content=b"words")
        assert names(folder, "segments") == set()
        assert server.stop() == 0
    assert len(names(folder, "segments")) == 1


# -- what other engines see ----------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A server's cold folder, and what was appended to it."""

    segments: Path
    rows: list[tuple[str, str, int, int, str, bytes]]  # bucket, stream, offsets, content type, payload


NAMES = (
    ("plain-bucket", "plain"),
    ("plain-bucket", "other"),
    ("with space", "a stream/with slashes/and spaces"),
    ("100%", "per%cent %41"),
    ("bücket-日本", "ünï/コード"),
    ('quo"te=*?', "a=b&c?d#e"),
    ("_default", "no bucket"),
    ("2026-01-02", "a bucket like a date"),
    ("007", "a bucket like a number"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    place = tmp_path_factory.mktemp("engines")
    store = FolderStore(place / "cold")
    rows: list[tuple[str, str, int, int, str, bytes]] = []
    tails: dict[tuple[str, str], int] = {}
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=0B")
    with server_on(place / "data", store, *settings) as server, client_of(server) as client:
        for round_ in range(3):
            for number, (bucket, stream) in enumerate(NAMES):
                path = f"/v1/stream/{quote(stream if bucket == '_default' else f'{bucket}/{stream}')}"
                headers = JSON if number % 2 else TEXT
                client.put(path, headers=headers)
                texts = [json.dumps({"round": round_, "n": one, "é": "日本"}) for one in range(1 + number % 3)]
                elements = [text.encode() for text in texts]
                body = b"[" + b",".join(elements) + b"]" if headers is JSON else b"\n".join(elements)
                assert client.post(path, headers=headers, content=body).status_code == 204
                for message in elements if headers is JSON else [body]:
                    start = tails.get((bucket, stream), 0)
                    tails[bucket, stream] = start + len(message)
                    rows.append((bucket, stream, start, start + len(message), headers["content-type"], message))
            wait_until_flushed(client, released=True)
        yield Written(store.folder / "segments", rows)


def test_the_layout_is_by_bucket_and_date_under_names_a_person_can_read(written: Written) -> None:
    form = re.compile(r"bucket=([^/]+)/date=\d{4}-\d\d-\d\d/\d{4}-\d{20}-[0-9a-f]{16}\.parquet")
    buckets = set()
    for path in written.segments.rglob("*.parquet"):
        match = form.fullmatch(str(path.relative_to(written.segments)))
        assert match is not None, path
        buckets.add(match[1])
    assert buckets == {quote(bucket, safe="") for bucket, _ in NAMES}
    assert not [path for path in written.segments.rglob("*") if path.is_file() and path.suffix != ".parquet"]


def table_of(written: Written) -> str:
    """The folder as DuckDB names it. Without the last option a bucket called 007 would be the number 7."""
    options = "hive_partitioning = true, hive_types_autocast = false"
    return f"read_parquet('{written.segments}/**/*.parquet', {options})"


def test_duckdb_reads_the_whole_folder_as_one_table_of_exactly_what_was_appended(written: Written) -> None:
    with duckdb.connect() as connection:
        source = (
            f"read_parquet('{written.segments}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
        )
        described = connection.execute(f"describe select * from {source}").fetchall()
        assert [column[0] for column in described][: len(COLUMNS)] == COLUMNS
        assert "date" in [column[0] for column in described]
        found = connection.execute(
            f"select bucket, stream, offset_start, offset_end, content_type, payload from {source} order by position"
        ).fetchall()
        assert found == written.rows
        (positions,) = connection.execute(f"select list(position order by position) from {source}").fetchone() or ()
        assert len(positions) == len(set(positions))
        shards, wrong, times = connection.execute(
            f"select list(distinct shard), count(*) filter (offset_end - offset_start != octet_length(payload)),"
            f" count(distinct date) from {source} where appended_at > now() - interval 1 hour"
        ).fetchone() or (None, None, None)
        assert (shards, wrong) == ([0], 0)
        assert times in (1, 2)


def test_duckdb_prunes_by_bucket_and_reads_one_stream_in_order(written: Written) -> None:
    with duckdb.connect() as connection:
        source = (
            f"read_parquet('{written.segments}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
        )
        for bucket, stream in NAMES:
            found = connection.execute(
                f"select payload from {source} where bucket = ? and stream = ? order by offset_start", [bucket, stream]
            ).fetchall()
            assert [payload for (payload,) in found] == [row[5] for row in written.rows if row[:2] == (bucket, stream)]


def test_duckdb_with_its_defaults_reads_the_folder(written: Written) -> None:
    with duckdb.connect() as connection:
        (count,) = connection.execute(f"select count(*) from '{written.segments}/**/*.parquet'").fetchone() or (0,)
        assert count == len(written.rows)


def test_pandas_reads_the_folder_as_it_is(written: Written) -> None:
    frame = pandas.read_parquet(written.segments).sort_values("position")
    assert set(COLUMNS) <= set(frame.columns)
    columns = ["bucket", "stream", "offset_start", "offset_end", "content_type", "payload"]
    assert [tuple(row) for row in frame[columns].itertuples(index=False)] == written.rows


def test_pandas_reads_every_file_as_it_is(written: Written) -> None:
    files = sorted(written.segments.rglob("*.parquet"))
    frame = pandas.concat([pandas.read_parquet(file, partitioning=None) for file in files]).sort_values("position")
    columns = ["bucket", "stream", "offset_start", "offset_end", "content_type", "payload"]
    assert [tuple(row) for row in frame[columns].itertuples(index=False)] == written.rows
    assert str(frame["appended_at"].dtype).endswith("UTC]")


def test_the_server_reads_streams_with_awkward_names_from_cold(tmp_path: Path, folder: FolderStore) -> None:
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1s")
    with server_on(tmp_path / "data", folder, *settings) as server, client_of(server) as client:
        paths = [f"/v1/stream/{quote(f'{bucket}/{stream}')}" for bucket, stream in NAMES]
        for path in paths:
            assert client.put(path, headers=TEXT, content=f"content of {path}".encode()).status_code == 201
        wait_until_flushed(client, released=True)
        for path in paths:
            assert read_all(client, path) == f"content of {path}".encode()
            assert client.get(path, params={"offset": token(7)}).content == f"content of {path}".encode()
        for path in paths:
            assert client.delete(path).status_code == 204
        wait_until(lambda: not names(folder, "segments"), "segments with awkward names are reclaimed", 10)
