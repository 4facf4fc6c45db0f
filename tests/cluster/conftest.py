"""Clusters that tests share: starting one takes seconds, so those that leave it whole use the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster, running
from support.s3 import S3Server


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
    settings = "flush_interval = '1s'\n[read]\nlong_poll_timeout = '500ms'\n"
    with running(
        tmp_path_factory.mktemp("cluster"), cluster_s3, shards=2, settings=settings, proxied=True, forwarding=(3,)
    ) as started:
        yield started
