"""Compaction as spark-submit runs it: a standalone cluster of two workers, the cold tier on S3."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pyspark
import pytest

from millstream import pipeline
from millstream.spark.options import Connection
from support.cold import S3Prefix, names, server_on, verified, wait_until
from support.pipeline import FLUSHING, FolderStore, Scene, fill
from support.s3 import shared_s3_server
from support.spark_cluster import SparkCluster, environment

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
PROGRAM = Path(pipeline.__file__).parent / "__main__.py"


@pytest.mark.soak  # a minute; `test_source_on_a_cluster.py` has the same cluster in every run
def test_spark_submit_compacts_a_cold_tier_on_s3_on_a_standalone_cluster(tmp_path: Path) -> None:
    store = S3Prefix(shared_s3_server())
    with (
        server_on(tmp_path / "data", store, *FLUSHING[:2], "cold.reclaim_grace=1s") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        scene = Scene(server, client, FolderStore(tmp_path), Connection(server.url, None, 30.0))
        paths = fill(scene, "cluster-a", flushes=3) + fill(scene, "cluster-b", flushes=3)
        before = {path: scene.read(path) for path in paths}
        feeds = {bucket: scene.feed(bucket) for bucket in ("cluster-a", "cluster-b")}
        old = names(store, "segments")
        (tmp_path / "spark").mkdir()
        with SparkCluster(tmp_path / "spark") as cluster:
            command = [str(SUBMIT), "--master", cluster.url, str(PROGRAM), "compact", "--url", server.url, "--json"]
            # The driver alone has the credentials; tasks get them from it.
            variables = {**environment(), **credentials(store)}
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables)
        assert done.returncode == 0, done.stderr[-4000:]
        summary = json.loads(done.stdout[done.stdout.index("{") :])
        assert summary["segments_before"] == len(old) and summary["segments_after"] == 2
        assert {path: scene.read(path) for path in paths} == before
        assert {bucket: scene.feed(bucket) for bucket in feeds} == feeds
        wait_until(lambda: not old & names(store, "segments"), "replaced segments are deleted", 20)
        assert {path: scene.read(path) for path in paths} == before
    assert verified(tmp_path / "data", store)["problems"] == []


def credentials(store: S3Prefix) -> dict[str, str]:
    options = store.server.options
    return {
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        "PATH": os.environ["PATH"],
    }
