"""The configuration a node writes for its broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cluster.broker import BrokerPlan, render_configuration
from millstream.cluster.placement import shard_of
from millstream.config import Config, load
from millstream.errors import ConfigurationError
from millstream.server.node.cluster_checks import check_cluster

PLAN = BrokerPlan("prod", "prod-1", ("10.0.0.1", 6437), (("10.0.0.2", 6437), ("10.0.0.3", 6437)), 's"e/c', 8 << 20)


def test_every_write_is_synced_and_clients_reach_it_on_loopback_only() -> None:
    text = render_configuration(PLAN, Path("/data/broker"), 5000)
    assert "sync_interval: always" in text
    assert 'listen: "127.0.0.1:5000"' in text
    assert 'listen: "10.0.0.1:6437"' in text
    assert f"max_payload: {9 << 20}" in text


def test_the_secret_is_quoted_wherever_it_stands() -> None:
    text = render_configuration(PLAN, Path("/data/broker"), 5000)
    assert 'password: "s\\"e/c"' in text
    assert "nats-route://millstream:s%22e%2Fc@10.0.0.2:6437" in text


def test_tls_between_brokers_verifies_both_sides() -> None:
    plan = PLAN._replace(certificate="/c.pem", key="/k.pem", authority="/a.pem")
    text = render_configuration(plan, Path("/data/broker"), 5000)
    assert 'cert_file: "/c.pem"' in text and "verify: true" in text


def test_other_brokers_are_told_another_address_only_if_one_is_set() -> None:
    assert " advertise:" not in render_configuration(PLAN, Path("/data/broker"), 5000)
    text = render_configuration(PLAN._replace(advertise=("broker.example", 7000)), Path("/data/broker"), 5000)
    assert '  advertise: "broker.example:7000"' in text
    assert configured("cluster.advertise=broker.example:7000").cluster.advertise == ("broker.example", 7000)
    assert configured().cluster.advertise is None


def test_buckets_keep_their_shards() -> None:
    """Part of the stored format: these may never change."""
    assert [shard_of(name, 1024) for name in ("load", "_default", "chat", "größe")] == [29, 418, 682, 393]
    assert len({shard_of(f"bucket-{number}", 8) for number in range(200)}) == 8


def configured(*settings: str) -> Config:
    return load(None, {}, ["cluster.name=c", "cluster.secret=s", "cluster.routes=a:1,b:2", *settings])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (("cold.backend=fs",), "cold.backend"),
        (("cold.backend=memory",), "cold.backend"),
        (("cold.backend=s3", "cluster.secret="), "cluster.secret"),
        (("cold.backend=s3", "cluster.replicas=5"), "cluster.replicas"),
        (("cold.backend=s3", "server.read_only=true"), "server.read_only"),
        (("cold.backend=s3", "cluster.tls_key=/k"), "tls_certificate"),
        (("cold.backend=s3", "server.listen=0.0.0.0:80"), "server.listen"),
        (("cold.backend=s3", "cluster.routes=a:4437,b:4437"), "cluster.routes"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        check_cluster(configured(*settings))


def test_what_can_work_is_accepted() -> None:
    check_cluster(configured("cold.backend=s3"))
