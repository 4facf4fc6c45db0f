"""Clusters that tests share: starting one takes seconds, so those that leave it whole use the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import network
from support.cluster import Cluster, running
from support.s3 import S3Server

SETTINGS = "flush_interval = '1s'\n[read]\nlong_poll_timeout = '500ms'\n"


@pytest.fixture(scope="session")
def cluster_s3() -> Iterator[S3Server]:
    """A store of the cluster tests' own: some of them stop it."""
    directory = Path(tempfile.mkdtemp(prefix="millstream-cluster-s3-"))
    with S3Server(directory) as server:
        yield server
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(cluster_s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, their brokers joined by proxies that a test can cut, flushing often; node 3 passes writes on."""
    with running(
        tmp_path_factory.mktemp("cluster"), cluster_s3, shards=2, settings=SETTINGS, proxied=True, forwarding=(3,)
    ) as started:
        yield started


@pytest.fixture
def cluster_apart(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes, each in a network namespace of its own."""
    if not network.is_available():
        pytest.skip("this machine lets us have no network namespaces; test_a_node_is_cut_off has proxies instead")
    with (
        network.Network(3) as between,
        S3Server(tmp_path / "s3", between.host) as s3,
        running(tmp_path / "cluster", s3, shards=2, settings=SETTINGS, network=between, forwarding=(3,)) as started,
    ):
        yield started
