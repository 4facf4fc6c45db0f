"""All nodes and brokers are lost and the object store is left: the cluster is begun again from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from millstream.cluster.placement import shard_of
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.cluster_load import Load, read_all
from support.s3 import S3Server
from support.server import ServerProcess

pytestmark = pytest.mark.timeout(480)

TEXT = {"content-type": "text/plain"}
SHARDS = 3
NEVER = "flush_interval = '1h'\n"


def command(name: str, node: NodeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", name, "--config", str(node.file), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=node.environment,
    )


def flush(cluster: Cluster, shards: int) -> None:
    """Flush some of the shards, at whoever leads them."""
    for shard in range(shards):
        leader = cluster.leader(shard)
        before = cluster.status(leader.number)["shards"][shard]["applied_position"]
        answer = httpx.post(f"{leader.url}/cluster/trigger-snapshot", json={"shard": shard})
        assert answer.status_code == 202, answer.text
        wait_until(
            lambda leader=leader, shard=shard, before=before: (
                cluster.status(leader.number)["shards"][shard]["flushed_position"] > before
            ),
            f"shard {shard} is flushed",
        )


def append(cluster: Cluster, path: str, content: str, sequence: int) -> int:
    claim = {"producer-id": "p", "producer-epoch": "0", "producer-seq": str(sequence)}
    url = f"{cluster.nodes[1].url}{path}"
    return httpx.post(url, content=content, headers=TEXT | claim, follow_redirects=True, timeout=20.0).status_code


def test_a_cluster_that_lost_every_node_is_restored_from_the_object_store(cluster_s3: S3Server, tmp_path: Path) -> None:
    # The last shard is never flushed: nothing of it is left.
    buckets = {shard_of(name, SHARDS): name for name in (f"bucket-{number}" for number in range(50))}
    paths = [f"/v1/stream/{buckets[shard]}/s" for shard in range(SHARDS)]
    with running(tmp_path / "lost", cluster_s3, shards=SHARDS, settings=NEVER) as lost:
        for path in paths:
            url = f"{lost.nodes[1].url}{path}"
            assert httpx.put(url, headers=TEXT, follow_redirects=True, timeout=20.0).status_code == 201
            assert append(lost, path, "first,", 0) == 200
        flush(lost, SHARDS - 1)
        assert append(lost, paths[0], "never flushed", 1) == 200
    shutil.rmtree(tmp_path / "lost")

    again = Cluster(tmp_path / "again", cluster_s3, shards=SHARDS, settings=NEVER, prefix=lost.prefix)
    first = again.nodes[1]
    try:
        # Nobody knows whether there is a cluster before a majority of the brokers is up.
        again.nodes[2].start(wait=False)
        again.nodes[3].start(wait=False)
        refused = command("serve", first)
        assert refused.returncode == 1 and "millstream restore" in refused.stderr, refused.stderr
        assert [path.name for path in first.data_dir.iterdir()] == ["lock"]  # restore wants it empty
    finally:
        again.stop()
    for node in again.nodes.values():
        shutil.rmtree(node.data_dir, ignore_errors=True)  # one that came late has none
    elsewhere = command("restore", again.nodes[2])
    assert elsewhere.returncode != 0 and "node 1 begins the cluster" in elsewhere.stderr
    wrong = command("restore", first, "--set", "cluster.shards=7")
    assert wrong.returncode != 0 and "cluster.shards" in wrong.stderr, wrong.stderr
    restored = command("restore", first, "--json")
    assert restored.returncode == 0, restored.stderr
    found = json.loads(restored.stdout)["shards"]
    assert [one and one["streams"] for one in found] == [1, 1, None]

    try:
        again.start()
        for path in paths[:-1]:
            assert read_all(again, path) == b"first,"
            # A repeat is recognised, and what was lost is written again.
            assert append(again, path, "first,", 0) == 204
            assert append(again, path, "second,", 1) == 200
        assert httpx.get(f"{again.leader(SHARDS - 1).url}{paths[-1]}").status_code == 404
        load = Load(again, "after", seed=6, streams=SHARDS).start()
        wait_until(lambda: len(load.acknowledged_since(0.0)) > 100, "it takes writes")
        flush(again, SHARDS)
        # A node that knows nothing, and one that has only its log, come to the same as the others.
        follower, leader = again.followers()[0], again.leader()
        follower.stop()
        shutil.rmtree(follower.data_dir / "shards")
        follower.start()
        leader.kill()
        leader.start()
        load.stop()
        load.check()
        for path in paths[:-1]:
            for node in again.nodes.values():
                wait_until(
                    lambda node=node, path=path: (
                        httpx.get(f"{node.url}{path}?offset=-1", follow_redirects=True).content == b"first,second,"
                    ),
                    f"node {node.number} has it",
                )
    finally:
        again.stop()


def data_objects(s3: S3Server, prefix: str) -> dict[str, int]:
    """All but who owns it, which a change of leader changes."""
    return {path: size for path, size in s3.listing(prefix).items() if not path.startswith("owner/")}


def test_a_drill_beside_a_running_cluster_reads_every_shard_and_touches_nothing(
    cluster_s3: S3Server, tmp_path: Path
) -> None:
    buckets = {shard_of(name, SHARDS): name for name in (f"bucket-{number}" for number in range(50))}
    paths = [f"/v1/stream/{buckets[shard]}/s" for shard in range(SHARDS)]
    with running(tmp_path / "cluster", cluster_s3, shards=SHARDS, settings=NEVER) as cluster:
        for path in paths:
            url = f"{cluster.nodes[1].url}{path}"
            assert httpx.put(url, headers=TEXT, follow_redirects=True, timeout=20.0).status_code == 201
            assert append(cluster, path, f"content of {path}", 0) == 200
        flush(cluster, SHARDS - 1)  # the last shard is not in the store yet
        before = data_objects(cluster_s3, cluster.prefix)
        node, drill = cluster.nodes[2], tmp_path / "drill"
        done = command("restore", node, "--read-only", "--data-dir", str(drill), "--json")
        assert done.returncode == 0, done.stderr
        assert [one and one["streams"] for one in json.loads(done.stdout)["shards"]] == [1, 1, None]
        serve = (sys.executable, "-m", "millstream.cli.main", "serve", "--config", str(node.file))
        with ServerProcess(drill, command=serve, environment=node.environment) as server:
            read = [httpx.get(server.url + path, timeout=20.0) for path in paths]
            assert [one.status_code for one in read] == [200, 200, 404]
            assert [one.text for one in read[:-1]] == [f"content of {path}" for path in paths[:-1]]
            for shard in range(SHARDS - 1):
                listed = httpx.get(f"{server.url}/{buckets[shard]}/streams", timeout=20.0)
                assert [one["stream_id"] for one in listed.json()["streams"]] == ["s"]
                assert httpx.get(f"{server.url}/{buckets[shard]}/streams/feed", timeout=20.0).status_code == 200
            for answer in (
                httpx.post(server.url + paths[0], headers=TEXT, content=b"no"),
                httpx.put(server.url + "/v1/stream/new/s", headers=TEXT),
                httpx.delete(server.url + paths[1]),
                httpx.put(f"{server.url}/{buckets[0]}/s/snapshot/0000000000000000_0000000000000001", content=b"no"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "read_only"), answer.text
            for probe in ("/healthz", "/readyz/local", "/readyz/cluster", "/metrics"):
                assert httpx.get(server.url + probe).status_code == 200
            assert append(cluster, paths[0], ", and more", 1) == 200
            assert server.stop() == 0
        assert data_objects(cluster_s3, cluster.prefix) == before
        assert read_all(cluster, paths[0]).endswith(b", and more")


def test_a_store_of_several_shards_is_not_restored_to_a_single_server(cluster_s3: S3Server, tmp_path: Path) -> None:
    bucket = next(name for name in (f"bucket-{number}" for number in range(50)) if shard_of(name, 2) == 1)
    with running(tmp_path, cluster_s3, shards=2, settings=NEVER) as cluster:
        url = f"{cluster.leader(1).url}/v1/stream/{bucket}/s"
        assert httpx.put(url, headers=TEXT, content=b"x").status_code == 201
        flush(cluster, 2)
        node = cluster.nodes[1]
        options = ("--set", "cluster.name=", "--data-dir", str(tmp_path / "single"))
        refused = command("restore", node, *options)
    assert refused.returncode != 0 and "a cluster of several shards" in refused.stderr, refused.stderr
