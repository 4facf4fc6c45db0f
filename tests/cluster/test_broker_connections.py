"""How nodes reach their brokers: TLS between the brokers of nodes, and brokers that exist already."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.authority import Authority
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.cluster_load import Load
from support.nats_cluster import PASSWORD, USER, NatsCluster
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(180)

TEXT = {"content-type": "text/plain"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def tls_settings(authority: Authority, name: str) -> str:
    certificate, key = authority.certificate(name)
    return f'tls_certificate = "{certificate}"\ntls_key = "{key}"\ntls_authority = "{authority.path}"\n'


def is_let_in(node: NodeProcess, certificate: tuple[Path, Path] | None, authority: Authority) -> bool:
    """Whether a node's broker greets another one that shows this certificate."""
    address = json.loads(node.file.read_text().partition("[cluster]")[2].partition("listen = ")[2].splitlines()[0])
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority.path))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    with socket.create_connection((host, int(port)), 10.0) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host) as secured:
                return secured.recv(5) == b"INFO "
        except (ssl.SSLError, ConnectionError):
            return False


def test_brokers_speak_tls_and_let_nobody_in_whom_their_authority_does_not_know(
    cluster_s3: S3Server, tmp_path: Path, authority: Authority
) -> None:
    with running(tmp_path, cluster_s3, cluster_settings=tls_settings(authority, "node")) as cluster:
        load = Load(cluster, "tls", seed=1).start()
        time.sleep(1.0)
        load.stop()
        load.check()
        node = cluster.nodes[1]
        assert is_let_in(node, authority.certificate("another"), authority)
        assert not is_let_in(node, None, authority)
        stranger = Authority(tmp_path, "stranger")
        assert not is_let_in(node, stranger.certificate("intruder"), authority)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[NatsCluster]:
    existing = NatsCluster(tmp_path_factory.mktemp("nats"), authority)
    try:
        yield existing.start()
    finally:
        existing.stop()


def existing(brokers: NatsCluster, authority: Authority, **changed: str) -> str:
    settings = {
        "nats_url": ",".join(brokers.urls),
        "nats_user": USER,
        "nats_password": PASSWORD,
        "tls_authority": str(authority.path),
        **changed,
    }
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nats_password": "wrong"}, ("cluster.nats_user", "Authorization")),
        ({"tls_authority": ""}, ("certificate", "cluster.tls_authority")),
    ],
)
def test_a_broker_that_turns_us_away_is_an_error_at_the_start(
    brokers: NatsCluster,
    authority: Authority,
    cluster_s3: S3Server,
    tmp_path: Path,
    changed: dict[str, str],
    words: tuple[str, ...],
) -> None:
    cluster = Cluster(tmp_path, cluster_s3, nodes=1, cluster_settings=existing(brokers, authority, **changed))
    node = cluster.nodes[1]
    answer = subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "serve", "--config", str(node.file)],
        capture_output=True,
        text=True,
        timeout=60,
        env=node.environment,
    )
    assert answer.returncode == 1, answer.stderr
    for word in words:
        assert word in answer.stderr


def has_moved(cluster: Cluster, target: int) -> bool:
    leader = cluster.leader()
    if leader.number != target:
        httpx.post(f"{leader.url}/cluster/transfer-leader", json={"node": target}, timeout=20.0)
    return cluster.leader().number == target


def test_brokers_that_exist_are_used_and_one_of_them_may_die(
    brokers: NatsCluster, authority: Authority, cluster_s3: S3Server, tmp_path: Path
) -> None:
    with running(tmp_path, cluster_s3, cluster_settings=existing(brokers, authority)) as cluster:
        assert not list(tmp_path.glob("node*/broker")), "no broker of its own"
        load = Load(cluster, "existing", seed=2).start()
        try:
            time.sleep(1.0)
            brokers.kill(0)
            load.wait_for_writes(time.monotonic() + 0.5, 60.0)
            target = cluster.followers()[0].number
            # The leases' own stream may still be without a leader, and a transfer is then told to come again.
            wait_until(lambda: has_moved(cluster, target), "another node leads", 60.0)
            load.wait_for_writes(time.monotonic())
        finally:
            load.stop()
        load.check()
