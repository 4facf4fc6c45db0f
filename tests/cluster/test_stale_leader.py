"""A leader that was stopped for longer than its lease, and what it answers when it goes on.

The same is done to a build that ignores its lease: the checker must find it out, or it would be worth nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import httpx
import pytest

from millstream.cluster.placement import shard_of
from millstream.pipeline.view import load_views
from millstream.tiers.objects import open_objects
from support import broken_node
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.cluster_load import read_all
from support.linearizability import Operation, find_violation
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
WATCH_SECONDS = 3.0
FOLLOW_SECONDS = 30.0
PATH = "/v1/stream/stale/s"
TEXT = {"content-type": "text/plain"}


def history_around_a_pause(
    cluster: Cluster, follow_seconds: float
) -> tuple[list[Operation], list[str], list[httpx.Response]]:
    """Write, stop the leader, write at its successor, let it go on, and read at it: all as a history."""
    history: list[Operation] = []
    shard = shard_of("stale", cluster.shards)
    leader = cluster.leader(shard)

    def leads(node: NodeProcess) -> bool:
        return bool(cluster.status(node.number)["shards"][shard]["role"] == "leading")

    def append(url: str, value: str) -> bool:
        called = time.monotonic()
        try:
            answer = httpx.post(f"{url}{PATH}", content=value, headers=TEXT, follow_redirects=True, timeout=20.0)
        except httpx.TransportError:
            return False
        if answer.status_code == 204:
            history.append(Operation("append", value, 0, called, time.monotonic()))
        return answer.status_code == 204

    assert httpx.put(f"{leader.url}{PATH}", headers=TEXT).status_code in (200, 201)
    assert append(leader.url, "a")
    leader.pause()
    others = [node for node in cluster.nodes.values() if node is not leader]
    try:
        # Nothing is sent to the one that is stopped: it would find out when it tried to write it.
        wait_until(lambda: any(leads(node) for node in others), "another node leads")
        assert any(append(node.url, "b") for node in others if leads(node))
    finally:
        leader.resume()
    answers = []
    resumed_at = time.monotonic()
    while time.monotonic() < resumed_at + WATCH_SECONDS or (
        answers[-1].content != b"ab" and time.monotonic() < resumed_at + follow_seconds
    ):
        called = time.monotonic()
        answer = httpx.get(f"{leader.url}{PATH}?offset=-1", timeout=20.0)
        answers.append(answer)
        if answer.headers.get("millstream-role") == "leader":
            history.append(Operation("read", "", len(answer.content), called, time.monotonic()))
    return history, ["a", "b"], answers


def test_a_leader_that_was_stopped_shows_nothing_stale_as_fresh(cluster: Cluster) -> None:
    history, final, answers = history_around_a_pause(cluster, FOLLOW_SECONDS)
    assert find_violation(history, final) is None
    for answer in answers:
        assert answer.status_code == 200
        assert answer.content == b"ab" or "stream-up-to-date" not in answer.headers
    assert answers[-1].content == b"ab", "it follows again"


def test_a_build_that_ignores_its_lease_is_found_out(cluster_s3: S3Server, tmp_path: Path) -> None:
    command = (sys.executable, str(Path(broken_node.__file__).resolve()), "serve")
    # It must not come to write anything itself meanwhile: the log would tell it.
    settings = "flush_interval = '1h'\n"
    with running(tmp_path, cluster_s3, command=command, settings=settings) as cluster:
        history, final, _ = history_around_a_pause(cluster, WATCH_SECONDS)
        violation = find_violation(history, final)
        assert violation is not None and "read" in violation


def test_a_leader_that_was_stopped_in_a_flush_leaves_the_store_to_its_successor(
    cluster: Cluster, cluster_s3: S3Server
) -> None:
    shard = shard_of("stale", cluster.shards)
    path = "/v1/stream/stale/flushing"
    old = cluster.leader(shard)
    others = [node for node in cluster.nodes.values() if node is not old]
    assert httpx.put(f"{old.url}{path}", headers=TEXT, content=b"a" * MIB).status_code == 201

    def leads(node: NodeProcess) -> bool:
        return bool(cluster.status(node.number)["shards"][shard]["role"] == "leading")

    def flushed(node: NodeProcess) -> int:
        return int(cluster.status(node.number)["shards"][shard]["flushed_position"])

    with cluster_s3.paused():  # a flush is due every second, and now it waits for the store in the middle
        assert httpx.post(f"{old.url}{path}", content=b"b" * MIB, headers=TEXT, timeout=20).status_code == 204
        time.sleep(2.0)
        old.pause()
    try:
        wait_until(lambda: any(leads(node) for node in others), "another node leads")
        new = next(node for node in others if leads(node))
        before = flushed(new)
        assert httpx.post(f"{new.url}{path}", content=b"c" * MIB, headers=TEXT, timeout=20).status_code == 204
        wait_until(lambda: flushed(new) > before, "the new leader flushes", 60, new.stderr)
    finally:
        old.resume()
    wait_until(lambda: old.is_ready("cluster"), "it follows, and has nothing to complain of", 60, old.stderr)
    expected = b"".join(letter * MIB for letter in (b"a", b"b", b"c"))
    assert read_all(cluster, path) == expected
    if not leads(old):
        body = {"shard": shard, "node": old.number}
        leader = cluster.leader(shard)
        assert httpx.post(f"{leader.url}/cluster/transfer-leader", json=body, timeout=30).status_code == 200
    before = flushed(old)
    assert httpx.post(f"{old.url}{path}", content=b"d", headers=TEXT, timeout=20).status_code == 204
    wait_until(lambda: flushed(old) > before, "it flushes again when it leads again", 60, old.stderr)
    assert read_all(cluster, path) == expected + b"d"
    asyncio.run(load_views(open_objects(cluster.store)))  # raises if a manifest is missing
