"""A node ends within `server.stop_timeout`, and two seconds, whatever its brokers do."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

from millstream.cluster.placement import shard_of
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(240)

TEXT = {"content-type": "text/plain"}
SHARDS = 4
STOP_SECONDS = 4
# A stop is ended by force two seconds late, and a busy machine has its time too.
LATE_SECONDS = 2 + 4
ENVIRONMENT = {"MILLSTREAM_SERVER_STOP_TIMEOUT": f"{STOP_SECONDS}s"}


def ends_in_time(node: NodeProcess, is_done: Callable[[], bool]) -> None:
    assert node.process is not None
    started = time.monotonic()
    node.process.send_signal(signal.SIGTERM)
    wait_until(is_done, "the node ends", STOP_SECONDS + 20)
    assert time.monotonic() - started < STOP_SECONDS + LATE_SECONDS


def broker_of(node: NodeProcess) -> int:
    return int(json.loads((node.data_dir / "broker" / "broker.json").read_text())["pid"])


def test_a_node_whose_brokers_all_hang_ends_in_time(cluster_s3: S3Server, tmp_path: Path) -> None:
    """Several shards with writes that wait: each of them would wait by itself."""
    with running(tmp_path, cluster_s3, shards=SHARDS, environment=ENVIRONMENT) as cluster:
        node = cluster.nodes[1]
        buckets = {shard_of(name, SHARDS): name for name in (f"bucket-{number}" for number in range(60))}
        for bucket in buckets.values():
            url = f"{node.url}/v1/stream/{bucket}/s"
            assert httpx.put(url, headers=TEXT, follow_redirects=True, timeout=20).status_code == 201
        brokers = [broker_of(one) for one in cluster.nodes.values()]
        for broker in brokers:
            os.kill(broker, signal.SIGSTOP)
        try:
            for bucket in buckets.values():
                Thread(target=try_to_append, args=(f"{node.url}/v1/stream/{bucket}/s",), daemon=True).start()
            time.sleep(1.0)
            ends_in_time(node, lambda: node.process is not None and node.process.poll() is not None)
        finally:
            for broker in brokers:
                with suppress(ProcessLookupError):
                    os.kill(broker, signal.SIGCONT)


def try_to_append(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(url, headers=TEXT, content=b"waits", timeout=20)


def test_a_node_that_waits_for_the_other_brokers_at_its_start_ends_in_time(
    cluster_s3: S3Server, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, cluster_s3, environment=ENVIRONMENT)
    node = cluster.nodes[1]
    try:
        node.start(wait=False)
        wait_until((node.data_dir / "broker" / "broker.json").exists, "its own broker runs", 30)
        time.sleep(2.0)
        ends_in_time(node, lambda: node.process is not None and node.process.poll() is not None)
    finally:
        cluster.stop()
