"""A record that no node can apply: every node stops there and says so, and goes on when it was set aside on each."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from millstream.shard.quarantine import REFUSED, Refused, read_all
from support import poisoned_node
from support.cluster import NodeProcess, running, wait_until
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(300)

TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/poisoned/s"


def says_that_it_stopped(node: NodeProcess) -> bool:
    answer = httpx.get(node.url + "/readyz/local", timeout=10)
    return "(Appended) cannot be applied" in " ".join(answer.json().get("problems", []))


def has_everything(node: NodeProcess) -> bool:
    return httpx.get(node.url + PATH, timeout=10, follow_redirects=True).content == b"before after"


def test_every_node_stops_at_the_record_and_goes_on_when_it_was_set_aside(cluster_s3: S3Server, tmp_path: Path) -> None:
    command = (sys.executable, str(Path(poisoned_node.__file__).resolve()), "serve")
    with running(tmp_path / "cluster", cluster_s3, command=command) as cluster:
        leader = cluster.leader()
        assert httpx.put(leader.url + PATH, content=b"before", headers=TEXT, timeout=30).status_code == 201
        answer = httpx.post(leader.url + PATH, content=b"poison", headers=TEXT, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "apply_failed")
        for node in cluster.nodes.values():
            wait_until(partial(says_that_it_stopped, node), f"node {node.number} says so", 60, node.stderr)
            assert node.is_running
            assert httpx.get(node.url + PATH, timeout=10).content == b"before"
        (refused,) = {one.position for node in cluster.nodes.values() for one in _refused(node)}
        for node in cluster.nodes.values():
            node.stop()
            set_aside = [sys.executable, "-m", "millstream.cli.main", "quarantine", str(refused)]
            subprocess.run([*set_aside, "--data-dir", str(node.data_dir)], check=True, timeout=60)
        cluster.start()
        leader = cluster.leader()
        assert httpx.post(leader.url + PATH, content=b" after", headers=TEXT, timeout=30).status_code == 204
        for node in cluster.nodes.values():
            wait_until(partial(has_everything, node), f"node {node.number} has everything")


def _refused(node: NodeProcess) -> list[Refused]:
    return read_all(node.data_dir / "quarantine", REFUSED)
