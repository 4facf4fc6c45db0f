"""Looking after a cluster: status, transfer, snapshots, trimming, adding and removing nodes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from millstream.client import Client
from millstream.cluster.placement import shard_of
from millstream.pipeline.audit import AuditOptions, audit
from millstream.pipeline.usage import UsageOptions, usage
from millstream.spark.options import ColdRoot, Connection
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.cluster_load import Load, read_all
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(180)

TEXT = {"content-type": "text/plain"}


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> None:
    """What went before may have left a node leading too much, which it would hand over in the midst of a test."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_until_balanced()


def command(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "cluster", *arguments, "--url", url],
        capture_output=True,
        text=True,
        timeout=120,
    )


def buckets_of(shards: int, name: str = "bucket") -> list[str]:
    """A bucket of each shard, by its number."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < shards:
        found.setdefault(shard_of(f"{name}-{number}", shards), f"{name}-{number}")
        number += 1
    return [found[shard] for shard in range(shards)]


def test_status_tells_who_leads_and_how_far_each_shard_has_come(cluster: Cluster) -> None:
    for number in cluster.nodes:
        status = cluster.status(number)
        assert status["node_id"] == number and status["cluster"] == "tests"
        assert [member["node_id"] for member in status["members"]] == [1, 2, 3]
        assert {member["state"] for member in status["members"]} == {"active"}
        for shard in status["shards"]:
            assert shard["leader_id"] in (1, 2, 3) and shard["generation"] >= 1
            assert shard["applied_position"] <= shard["last_position"]
    cluster.nodes[1].wait_until_ready()
    answer = command("status", url=cluster.nodes[1].url)
    assert answer.returncode in (0, 1) and "ready" in answer.stdout and "node 1" in answer.stdout
    assert json.loads(command("status", "--json", url=cluster.nodes[2].url).stdout)["node_id"] == 2


def test_shards_spread_over_the_nodes(cluster: Cluster) -> None:
    wait_until(lambda: cluster.leader(0) is not cluster.leader(1), "the shards are led by different nodes")


def test_leadership_moves_where_it_is_told_and_writes_go_on(cluster: Cluster) -> None:
    for _ in range(2):
        target = cluster.followers(0)[0]
        answer = command("transfer", "--shard", "0", "--to", str(target.number), url=cluster.nodes[1].url)
        assert answer.returncode == 0, answer.stderr
        assert cluster.leader(0) is target
    refused = httpx.post(f"{cluster.leader(0).url}/cluster/transfer-leader", json={"node": 77})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "invalid_successor"
    elsewhere = httpx.post(f"{cluster.followers(0)[0].url}/cluster/transfer-leader", json={"shard": 0})
    assert elsewhere.status_code == 503 and elsewhere.json()["error"]["code"] == "not_leader"


def test_a_node_number_that_nobody_has_gets_the_right_words(cluster: Cluster) -> None:
    url = cluster.nodes[1].url
    for action in ("drain", "remove", "add"):
        refused = command(action, "9", url=url)
        assert refused.returncode == 3 and "there is no node 9 in this cluster" in refused.stderr, refused
        assert "its nodes are 1, 2, 3" in refused.stderr
    assert command("drain", "two", url=url).returncode == 2
    refused = command("transfer", "--to", "9", url=url)
    assert refused.returncode == 1 and "node 9 cannot take over" in refused.stderr, refused


def test_a_node_is_not_removed_without_a_place_for_its_replicas_and_goes_on_leading(cluster: Cluster) -> None:
    refused = command("remove", "2", url=cluster.nodes[1].url)
    assert refused.returncode == 1 and "add another node first" in refused.stderr, refused
    wait_until(lambda: {one["state"] for one in cluster.status()["members"]} == {"active"}, "it may lead again")
    cluster.wait_until_balanced()


def test_drain_ends_when_others_lead_what_the_node_led(cluster: Cluster) -> None:
    node = cluster.leader(0)
    other = next(one for one in cluster.nodes.values() if one is not node)
    drained = command("drain", str(node.number), url=other.url)
    assert drained.returncode == 0, drained
    assert all(shard["leader_id"] not in (None, node.number) for shard in cluster.status(other.number)["shards"])
    added = command("add", str(node.number), "--json", url=other.url)
    assert json.loads(added.stdout) == {"node": node.number, "state": "active", "up": True}
    cluster.wait_until_balanced()


def test_a_dead_node_is_shown_as_down(cluster: Cluster) -> None:
    dead = cluster.followers(0)[0]
    other = next(one for one in cluster.nodes.values() if one is not dead)
    dead.kill()
    try:

        def is_down() -> bool:
            return {one["node_id"]: one["up"] for one in cluster.status(other.number)["members"]}[dead.number] is False

        wait_until(is_down, "the node is missed")
        shown = command("status", url=other.url).stdout
        assert f"but node {dead.number} is down" in shown.splitlines()[0]
        (row,) = [line.split() for line in shown.splitlines() if dead.url in line]
        assert row[2:4] == ["down", "no"]
        refused = command("drain", str(dead.number), url=other.url)
        assert refused.returncode == 1 and f"node {dead.number} is down" in refused.stderr, refused
    finally:
        dead.start()


def test_writes_at_a_follower_are_redirected_and_reads_are_answered(cluster: Cluster) -> None:
    bucket = buckets_of(2)[0]
    leader = cluster.leader(0)
    follower = next(node for node in cluster.followers(0) if node.number != 3)  # the third passes writes on
    path = f"/v1/stream/{bucket}/redirected"
    answer = httpx.put(f"{follower.url}{path}", headers=TEXT)
    assert answer.status_code == 307 and answer.headers["location"] == f"{leader.url}{path}"
    assert httpx.put(f"{leader.url}{path}", headers=TEXT).status_code == 201
    for number in range(3):
        posted = httpx.post(f"{follower.url}{path}", content=f"{number}", headers=TEXT, follow_redirects=True)
        assert posted.status_code == 204
    # A reader that is ahead of the follower is sent to the leader, never set back.
    beyond = httpx.get(f"{follower.url}{path}?offset=0000000000000000_0000000000000099")
    assert beyond.status_code == 307
    assert httpx.get(f"{follower.url}/v1/stream/{bucket}/unknown").status_code == 307
    assert httpx.get(f"{leader.url}/v1/stream/{bucket}/unknown").status_code == 404

    def has_all() -> bool:
        answer = httpx.get(f"{follower.url}{path}?offset=-1")
        assert answer.headers["millstream-role"] == "follower"
        # It says so once it has asked how far the log goes, and has it all.
        return answer.content == b"012" and answer.headers.get("stream-up-to-date") == "true"

    wait_until(has_all, "the follower has it, and knows it")
    assert httpx.get(f"{leader.url}{path}?offset=-1").headers["millstream-role"] == "leader"


def test_live_reads_at_a_follower_hear_of_appends_at_the_leader(cluster: Cluster) -> None:
    bucket = buckets_of(2)[1]
    leader, follower = cluster.leader(1), cluster.followers(1)[0]
    path = f"/v1/stream/{bucket}/live"
    assert httpx.put(f"{leader.url}{path}", headers=TEXT).status_code == 201
    wait_until(lambda: httpx.head(f"{follower.url}{path}").status_code == 200, "the follower knows the stream")
    with httpx.stream("GET", f"{follower.url}{path}?offset=-1&live=sse", timeout=20.0) as events:
        lines = events.iter_lines()
        next(lines)
        assert httpx.post(f"{leader.url}{path}", content="hello", headers=TEXT).status_code == 204
        assert any("hello" in line for line in lines)


def test_what_would_cross_shards_is_refused(cluster: Cluster) -> None:
    first, second = buckets_of(2)
    assert httpx.put(f"{cluster.leader(0).url}/v1/stream/{first}/source", headers=TEXT).status_code == 201
    fork = {**TEXT, "stream-forked-from": f"/v1/stream/{first}/source"}
    across = httpx.put(f"{cluster.leader(1).url}/v1/stream/{second}/fork", headers=fork)
    assert across.status_code == 409 and across.json()["error"]["code"] == "fork_across_shards"
    within = httpx.put(f"{cluster.leader(0).url}/v1/stream/{first}/fork", headers=fork)
    assert within.status_code == 201
    for body in ({"pattern": "*/x"}, {"pattern": f"{first}/*", "streams": [f"{second}/s"]}):
        wanted: dict[str, Any] = {"type": "webhook", "webhook": {"url": "http://127.0.0.1:1/"}, **body}
        answer = httpx.put(
            f"{cluster.leader(0).url}/v1/stream/__ds/subscriptions/across", json=wanted, follow_redirects=True
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "SUBSCRIPTION_ACROSS_SHARDS"


def test_every_node_gives_the_webhook_keys_of_every_shard(cluster: Cluster) -> None:
    found = [httpx.get(f"{url}/v1/stream/__ds/jwks.json").json()["keys"] for url in cluster.urls]
    assert len({key["kid"] for key in found[0]}) == 2
    assert found[0] == found[1] == found[2]


def test_a_subscription_goes_on_at_the_next_leader(cluster: Cluster) -> None:
    bucket = buckets_of(2)[0]
    client = httpx.Client(follow_redirects=True, timeout=10.0)
    base = cluster.leader(0).url
    for name in ("wakes", "work"):
        kind = "application/json" if name == "wakes" else "text/plain"
        assert client.put(f"{base}/v1/stream/{bucket}/{name}", headers={"content-type": kind}).status_code == 201
    url = f"{base}/v1/stream/__ds/subscriptions/pull"
    wanted = {"type": "pull-wake", "pattern": f"{bucket}/work", "wake_stream": f"{bucket}/wakes"}
    assert client.put(url, json=wanted).status_code == 201
    target = cluster.followers(0)[0]
    moved = client.post(f"{base}/cluster/transfer-leader", json={"shard": 0, "node": target.number})
    assert moved.status_code == 200, moved.text
    assert client.post(f"{base}/v1/stream/{bucket}/work", content="x", headers=TEXT).status_code == 204
    wait_until(
        lambda: b'"wake"' in client.get(f"{target.url}/v1/stream/{bucket}/wakes?offset=-1").content, "the wake is told"
    )
    claimed = client.post(f"{url}/claim", json={"worker": "w"})
    assert claimed.status_code == 200 and claimed.json()["generation"] == 1
    client.close()


def test_a_snapshot_is_triggered_and_the_log_trimmed_to_it(cluster: Cluster) -> None:
    leader = cluster.leader(0)
    bucket = buckets_of(2)[0]
    assert httpx.put(f"{leader.url}/v1/stream/{bucket}/flushed", headers=TEXT, content=b"x").status_code == 201
    before = cluster.status(leader.number)["shards"][0]["applied_position"]
    answer = httpx.post(f"{leader.url}/cluster/trigger-snapshot", json={"shard": 0})
    assert answer.status_code == 202 and answer.json() == {"queued": [0]}
    for number in cluster.nodes:
        wait_until(
            lambda number=number: cluster.status(number)["shards"][0]["flushed_position"] > before, "it is flushed"
        )
    purged = httpx.post(f"{leader.url}/cluster/purge-log", json={"shard": 0})
    assert purged.status_code == 200 and purged.json()["purged_through"]["0"] > before
    assert httpx.post(f"{leader.url}/cluster/purge-log", json={"shard": 9}).status_code == 400
    assert httpx.get(f"{leader.url}/cluster/purge-log").status_code == 405


def test_a_fourth_node_is_added_and_an_old_one_removed_while_writes_go_on(cluster_s3: S3Server, tmp_path: Path) -> None:
    with running(tmp_path, cluster_s3, settings="flush_interval = '1s'\n") as cluster:
        load = Load(cluster, "grow", seed=4).start()
        try:
            time.sleep(2.5)
            # Nothing of the beginning is left in the log: the new node needs the object store for it.
            assert httpx.post(f"{cluster.leader().url}/cluster/purge-log").status_code == 200
            fourth = cluster.add().start()
            assert "restored" in fourth.stderr()
            added = command("add", "4", url=cluster.nodes[1].url)
            assert added.returncode == 0, added.stderr
            drained = command("drain", "1", url=cluster.nodes[2].url)
            assert drained.returncode == 0, drained.stderr
            assert cluster.leader() is not cluster.nodes[1]
            removed = command("remove", "1", url=cluster.nodes[2].url)
            assert removed.returncode == 0, removed.stderr
            gone = cluster.nodes.pop(1)
            assert gone.process is not None and gone.process.wait(40) == 0
            since = time.monotonic()
            load.wait_for_writes(since)
            # What is left must stand the loss of another.
            cluster.leader().kill()
            load.wait_for_writes(time.monotonic())
        finally:
            load.stop()
        load.check()
        assert sorted(member["node_id"] for member in cluster.status()["members"] if member["ready"])[-1] == 4


@pytest.mark.soak
def test_a_node_that_was_away_for_long_is_restored_and_follows_again(cluster_s3: S3Server, tmp_path: Path) -> None:
    settings = "flush_interval = '500ms'\n"
    with running(tmp_path, cluster_s3, settings=settings) as cluster:
        load = Load(cluster, "away", seed=5).start()
        try:
            time.sleep(1.0)
            away = cluster.followers()[0]
            away.kill()
            time.sleep(3.0)
            assert httpx.post(f"{cluster.leader().url}/cluster/purge-log").status_code == 200
            away.start()
            assert "restored" in away.stderr()
            time.sleep(1.0)
        finally:
            load.stop()
        load.check()


def test_writes_are_passed_on_to_the_leader_where_that_is_wanted(cluster: Cluster) -> None:
    third = cluster.nodes[3]
    shard = 0 if cluster.leader(0) is not third else 1
    if cluster.leader(shard) is third:  # it leads both for the moment
        body = {"shard": shard, "node": 1}
        assert httpx.post(f"{third.url}/cluster/transfer-leader", json=body, timeout=20.0).status_code == 200
    leader = cluster.leader(shard)
    path = f"/v1/stream/{buckets_of(2)[shard]}/forwarded"
    created = httpx.put(f"{third.url}{path}", headers=TEXT)
    assert created.status_code == 201 and created.headers["location"] == f"{third.url}{path}"
    claim = {"producer-id": "p", "producer-epoch": "0", "producer-seq": "0"}
    assert httpx.post(f"{third.url}{path}", content="a", headers=TEXT | claim).status_code == 200
    assert httpx.post(f"{third.url}{path}", content="a", headers=TEXT | claim).status_code == 204
    mismatch = httpx.post(f"{third.url}{path}", content="b", headers={"content-type": "image/png"})
    assert mismatch.status_code == 409 and mismatch.json()["error"]["code"] == "content_type_mismatch"
    assert httpx.get(f"{leader.url}{path}?offset=-1").content == b"a"
    assert read_all(cluster, path) == b"a"


def started_with(file: Path, text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    file.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def test_a_data_directory_of_another_node_or_cluster_is_refused(
    cluster: Cluster, cluster_s3: S3Server, tmp_path: Path
) -> None:
    node: NodeProcess = cluster.nodes[3]
    assert node.stop() == 0
    try:
        text = node.file.read_text()
        for changed, word in (
            (text.replace("node_id = 3", "node_id = 7"), "node 3 of cluster 'tests'"),
            (text.replace('name = "tests"', 'name = "other"'), "node 3 of cluster 'tests'"),
            (text.replace('backend = "s3"', 'backend = "fs"'), "cold.backend is 'fs'"),
        ):
            answer = started_with(tmp_path / "wrong.toml", changed, node.environment)
            assert answer.returncode == 1 and word in answer.stderr, answer.stderr
        answer = started_with(tmp_path / "wrong.toml", text.replace("shards = 2", "shards = 5"), node.environment)
        assert answer.returncode == 1 and "cluster.shards is 5" in answer.stderr, answer.stderr
    finally:
        node.start()


class Tried:
    """`make cluster`, as somebody uses it who types at it."""

    def __init__(self, *arguments: str) -> None:
        script = Path(__file__).parents[2] / "scripts" / "try_cluster.py"
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def until(self, mark: str) -> list[str]:
        """The lines it prints up to one with the mark."""
        assert self.process.stdout is not None
        shown: list[str] = []
        while not shown or mark not in shown[-1]:
            shown.append(self.process.stdout.readline())
            assert shown[-1], shown
        return shown

    def close(self) -> int:
        self.process.terminate()
        try:
            self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.mark.soak
def test_make_cluster_goes_on_without_a_node_and_starts_it_again(tmp_path: Path) -> None:
    directory = tmp_path / "tried"
    tried = Tried("--directory", str(directory))
    try:
        lines = tried.until("quit")
        urls = [word for line in lines for word in line.split() if word.startswith("http://")][:3]
        assert len(set(urls)) == 3, lines
        status = httpx.get(f"{urls[1]}/cluster/status").json()
        assert [member["node_id"] for member in status["members"]] == [1, 2, 3] and len(status["shards"]) == 3
        assert httpx.put(f"{urls[2]}/v1/stream/a/b", headers=TEXT, follow_redirects=True).status_code == 201
        # Somebody ends a node by hand.
        (pid,) = [
            int(line.partition("process ")[2].partition(",")[0]) for line in lines if line.startswith("  node 2 ")
        ]
        os.kill(pid, signal.SIGKILL)
        assert "node 2 has ended by SIGKILL; the others go on" in tried.until("has ended")[-1]
        with Client(urls[0], timeout=60) as client:
            client.stream("a/b").append(b"without node 2", content_type="text/plain")
        tried.type("start 2")
        tried.until("node 2 is ready again")
        tried.type("kill 3")
        tried.until("node 3 is gone")
        tried.type("start 3")
        tried.until("node 3 is ready again")
        # One that cannot start shows why.
        tried.type("stop 3")
        tried.until("node 3 has stopped")
        (directory / "node3.toml").write_text("version = 1\n[server]\nlisten = 7\n")
        tried.type("start 3")
        assert "node 3 has ended with exit code 1" in tried.until("server.listen = 7 is not HOST:PORT")[0]
        assert httpx.get(f"{urls[1]}/v1/stream/a/b?offset=-1").content == b"without node 2"
    finally:
        assert tried.close() == 0
    assert (directory / "node1").is_dir()


@pytest.mark.soak
def test_audit_and_usage_cover_the_shards_of_a_cluster(cluster: Cluster, spark: SparkSession, tmp_path: Path) -> None:
    buckets = buckets_of(2, "tended")
    with httpx.Client(base_url=cluster.nodes[1].url, timeout=30, follow_redirects=True) as client:
        for bucket in buckets:
            assert client.put(f"/{bucket}").status_code == 201
            for number in range(3):
                answer = client.put(f"/{bucket}/s{number}", headers=TEXT, content=f"{bucket} {number}")
                assert answer.status_code == 201
        wait_until(lambda: all(_is_cold(client, bucket) for bucket in buckets), "everything is flushed")
    connection = Connection(",".join(cluster.urls), None, 30.0)
    cold = ColdRoot(cluster.store, {})
    rows = usage(spark, UsageOptions(connection, cold, tuple(buckets)))
    expected = {bucket: sum(len(f"{bucket} {number}") for number in range(3)) for bucket in buckets}
    assert {row.bucket: row.payload_bytes for row in rows} == expected
    assert [(row.streams, row.messages) for row in rows] == [(3, 3), (3, 3)]
    report = audit(spark, AuditOptions(connection, cold))
    assert [one for one in report.problems if any(bucket in one.where for bucket in buckets)] == []
    assert set(report.through) == {0, 1} and min(report.through.values()) > 0
    # In a copy of the store some of each shard is missing, and that is found.
    asyncio.run(_copy_without(cluster, tmp_path, [f"segments/bucket={bucket}/" for bucket in buckets]))
    copy = ColdRoot(ObjectStoreSettings("fs", tmp_path, {}), {})
    found = {(one.kind, one.where) for one in audit(spark, AuditOptions(connection, copy)).problems}
    assert found >= {("stream", f"{bucket}/s{number}") for bucket in buckets for number in range(3)}


def _is_cold(client: httpx.Client, bucket: str) -> bool:
    [shard] = client.get(f"/{bucket}/streams/cold").json()["shards"]
    return sum(segment["rows"] for segment in shard["segments"]) == 3


async def _copy_without(cluster: Cluster, folder: Path, left_out: list[str]) -> None:
    objects = open_objects(cluster.store)
    async for entry in objects.list(""):
        if not entry.path.startswith(tuple(left_out)):
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / entry.path).write_bytes(await objects.get(entry.path))
