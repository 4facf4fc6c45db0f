"""`[pipeline] compact_every`: the server compacts by itself."""

from __future__ import annotations

from pathlib import Path

import httpx

from millstream.spark.options import Connection
from support.cold import FolderStore, names, server_on, wait_until
from support.pipeline import FLUSHING, Scene, fill


def test_a_server_compacts_on_its_schedule_and_takes_the_job_with_it_when_it_stops(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "cold")
    settings = (*FLUSHING, "pipeline.compact_every=2s")
    with (
        server_on(tmp_path / "data", store, *settings) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        scene = Scene(server, client, store, Connection(server.url, None, 30.0))
        paths = fill(scene, "scheduled", flushes=3)
        before = {path: scene.read(path) for path in paths}
        wait_until(lambda: any("compacted" in path for path in names(store, "segments")), "a compaction", 120)
        assert {path: scene.read(path) for path in paths} == before
        assert server.stop() == 0
        assert "compaction failed" not in server.stderr()
