"""compact on Spark: fewer segments, the same streams and feeds, and safe to repeat, to kill and to race."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from millstream.pipeline.compact import CompactOptions, compact
from support.cold import names, run_command, server_on, stats, verified, wait_until
from support.pipeline import FLUSHING, NO_COLD, Scene, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def options(scene: Scene, **more: object) -> CompactOptions:
    return CompactOptions(scene.connection, NO_COLD, **more)


def test_compaction_merges_segments_and_readers_notice_nothing(
    spark: SparkSession, scene: Scene, tmp_path: Path
) -> None:
    paths = fill(scene, "compact-a") + fill(scene, "compact-b")
    before = {path: scene.read(path) for path in paths}
    feeds = {bucket: scene.feed(bucket) for bucket in ("compact-a", "compact-b")}
    old = names(scene.store, "segments")
    summary = compact(spark, options(scene))
    assert summary.segments_before == len(old) and summary.segments_after == 2 and summary.refused == 0
    assert {path: scene.read(path) for path in paths} == before
    assert {bucket: scene.feed(bucket) for bucket in feeds} == feeds
    assert verified(tmp_path / "data", scene.store)["problems"] == []
    rows = spark.read.format("millstream").options(**scene.source).option("bucket", "compact-a").load()
    assert rows.count() == sum(item["event"] == "message" for item in feeds["compact-a"])
    assert compact(spark, options(scene)).groups == 0, "nothing is left to do"
    # A machine that is lost comes back from the store. To it, objects that were replaced before are leftovers.
    scene.server.kill()
    restored = tmp_path / "restored"
    assert run_command("restore", data_dir=restored, store=scene.store).returncode == 0
    quick = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.leftover_age=200ms")
    with server_on(restored, scene.store, *quick) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        again = scene._replace(server=server, client=client)
        assert {path: again.read(path) for path in paths} == before
        assert {bucket: again.feed(bucket) for bucket in feeds} == feeds
        wait_until(lambda: not old & names(scene.store, "segments"), "replaced segments are deleted", 60)
        assert verified(restored, scene.store)["problems"] == []
        assert stats(client)["segment_count"] == 2


def test_replaced_segments_go_after_the_grace_period(spark: SparkSession, scene: Scene, tmp_path: Path) -> None:
    paths = fill(scene, "grace")
    before = {path: scene.read(path) for path in paths}
    old = names(scene.store, "segments")
    compact(spark, options(scene))
    assert old < names(scene.store, "segments"), "whoever is reading them reads on"
    assert scene.server.stop() == 0
    quick = (*FLUSHING[:2], "cold.reclaim_grace=0s")
    with (
        server_on(tmp_path / "data", scene.store, *quick) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        again = scene._replace(server=server, client=client)
        wait_until(lambda: not old & names(scene.store, "segments"), "replaced segments are deleted", 15)
        assert {path: again.read(path) for path in paths} == before
        assert verified(tmp_path / "data", scene.store)["problems"] == []


def test_writes_and_deletions_go_on_while_segments_are_merged(spark: SparkSession, scene: Scene) -> None:
    """The job runs as a user starts it, beside a writer."""
    paths = fill(scene, "busy", flushes=3)
    command = [sys.executable, "-m", "millstream.pipeline", "compact", "--url", scene.connection.url, "--json"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    expected = {path: scene.read(path) for path in paths}
    count = 0
    while job.poll() is None:
        scene.client.post(paths[1], headers={"content-type": "text/plain"}, content=b"<%d>" % count)
        count += 1
        if count == 20:
            assert scene.client.delete(paths[3]).status_code == 204
    expected[paths[1]] += b"".join(b"<%d>" % number for number in range(count))
    del expected[paths[3]]
    output, _ = job.communicate()
    assert job.returncode == 0 and json.loads(output)["groups"] >= 1
    scene.flushed()
    assert {path: scene.read(path) for path in expected} == expected
    assert scene.client.get(paths[3]).status_code == 404
    compact(spark, options(scene))
    assert {path: scene.read(path) for path in expected} == expected


def test_a_bucket_that_is_named_is_compacted_and_others_are_left_alone(spark: SparkSession, scene: Scene) -> None:
    fill(scene, "wanted", flushes=2)
    fill(scene, "unwanted", flushes=2)
    others = {path for path in names(scene.store, "segments") if "bucket=unwanted" in path}
    summary = compact(spark, options(scene, buckets=("wanted",)))
    assert summary.segments_after == 1
    assert others <= names(scene.store, "segments")
    assert not [path for path in names(scene.store, "segments") if "unwanted" in path and "compacted" in path]
