"""A store that lacks or has damaged what the catalog names: 5xx with its name, not ready, counted; never 404."""

from __future__ import annotations

from pathlib import Path

import httpx

from support.cold import FolderStore, names, run_here, server_on, token, verified, wait_until, wait_until_flushed

FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.cache_bytes=0B")
TEXT = {"content-type": "text/plain"}


def test_lost_segments_are_503_not_ready_and_counted_and_come_back(tmp_path: Path, folder: FolderStore) -> None:
    data_dir, away = tmp_path / "data", tmp_path / "away"
    segments = folder.folder / "segments"
    with server_on(data_dir, folder, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.put("/v1/stream/lost", headers=TEXT, content=b"lost and found")
        wait_until_flushed(client, released=True)
        segments.rename(away)
        answer = client.get("/v1/stream/lost", params={"offset": "-1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cold_object_missing")
        assert "segments/" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        ready = client.get("/readyz/local")
        assert ready.status_code == 503
        assert "missing or damaged" in ready.text
        assert "millstream_cold_damaged_objects 1" in client.get("/metrics").text
        assert "damaged" in server.stderr()
        server.kill()
    # A start compares the listing: nobody need read first.
    with server_on(data_dir, folder, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        wait_until(lambda: client.get("/readyz/local").status_code == 503, "the start finds that they are missing")
        away.rename(segments)
        assert client.get("/v1/stream/lost", params={"offset": "-1"}).content == b"lost and found"
        wait_until(lambda: client.get("/readyz/local").status_code == 200, "all is well again")


def test_a_damaged_snapshot_is_500_and_cold_verify_names_it(tmp_path: Path, folder: FolderStore) -> None:
    data_dir = tmp_path / "data"
    with server_on(data_dir, folder, *FLUSHING) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.put("/snaps")
        client.put("/snaps/s", headers=TEXT, content=b"0123456789")
        url = f"/snaps/s/snapshot/{token(10)}"
        assert client.put(url, content=b"state" * 1000).status_code == 204
        wait_until_flushed(client, released=True)
        assert client.get(url).content == b"state" * 1000
        (path,) = names(folder, "snapshots")
        file = folder.folder / path
        whole = file.read_bytes()
        file.write_bytes(whole[:2000] + b"X" + whole[2001:])
        for damaged in (client.get(url), client.get("/snaps/s/bootstrap")):
            assert (damaged.status_code, damaged.json()["error"]["code"]) == (500, "object_damaged")
            assert path in damaged.json()["error"]["message"]
        assert client.get("/readyz/local").status_code == 503
        assert [one["path"] for one in verified(data_dir, folder)["problems"]] == [path]
        file.write_bytes(whole)
        assert client.get(url).content == whole
        assert client.get("/readyz/local").status_code == 200
        assert run_here("cold", "verify", data_dir=data_dir, store=folder)[0] == 0
