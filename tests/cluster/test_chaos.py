"""What a cluster survives. Under load, in each case: every acknowledged append exactly once and in order, repeats
recognised, nothing shown that later vanished, the leader's answers linearizable, and writes back within ten seconds.
NATS needs four to nine of them where a broker that led is gone, and more where an election fails or the machine
is busy; then writes must be back soon after it has elected, which its own log tells.

The tests share one cluster and leave it whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support import network
from support.cluster import Cluster
from support.cluster_load import Load
from support.s3 import S3Server

# They measure how long writers wait, which other tests beside them would lengthen.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(180)]

BACK_SECONDS = 10.0
AFTER_ELECTION_SECONDS = 3.0
# Less than brokers take to find out that nobody leads: where nodes stop in order, they must not have to.
ORDERLY_SECONDS = 3.0
GIVE_UP_SECONDS = 60.0
WARM_SECONDS = 0.7


@contextmanager
def under_load(
    cluster: Cluster, name: str, capsys: pytest.CaptureFixture[str], *, all_brokers_end: bool = False
) -> Iterator[Load]:
    seed = random.randrange(2**31)
    load = Load(cluster, f"{name}-{seed:x}", seed=seed).start()
    try:
        time.sleep(WARM_SECONDS)
        disturbed_at = time.monotonic()
        yield load
        load.wait_for_writes(time.monotonic())
        time.sleep(WARM_SECONDS)
    finally:
        for node in cluster.nodes.values():
            if not node.is_running:
                node.start(wait=False)  # whatever became of this test, the next one finds a whole cluster
        load.stop()
    for node in cluster.nodes.values():
        node.wait_until_ready()
    load.check()
    pause = load.longest_pause(disturbed_at)
    # Where all were down, from when they are up again: a machine takes as long as it takes to start a process.
    begin = cluster.brokers_said("Server is ready", *pause)[-1] if all_brokers_end else pause.start
    elections = cluster.brokers_said("new stream leader for", *pause)
    ours = pause.end - (elections[-1] if elections else begin)
    report = f"{pause.seconds:.1f} s without writes, {pause.end - begin:.1f} s counted, {ours:.1f} s of them not NATS's"
    with capsys.disabled():
        print(f"\n  {name}: {load.counts}; {report} (seed {seed})", end="")
    assert pause.end - begin < BACK_SECONDS or ours < AFTER_ELECTION_SECONDS, report


def test_the_leader_is_killed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "kill-leader", capsys) as load:
        leader = cluster.leader()
        leader.kill()
        load.wait_for_writes(time.monotonic())
        leader.start()


def test_a_follower_is_killed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "kill-follower", capsys) as load:
        follower = cluster.followers()[0]
        follower.kill()
        load.wait_for_writes(time.monotonic())
        follower.start()


def test_a_broker_that_leads_is_killed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "kill-broker", capsys) as load:
        cluster.broker_leader().kill_broker()
        load.wait_for_writes(time.monotonic() + 0.5, GIVE_UP_SECONDS)


@pytest.mark.soak
def test_a_machine_is_lost_and_comes_back(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "kill-all-of-one", capsys) as load:
        leader = cluster.leader()
        leader.kill_all()
        load.wait_for_writes(time.monotonic() + 0.5, GIVE_UP_SECONDS)
        leader.start()


def test_the_leader_is_stopped_for_longer_than_its_lease_and_goes_on(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with under_load(cluster, "pause-leader", capsys) as load:
        leader = cluster.leader()
        leader.pause()
        paused_at = time.monotonic()
        try:
            load.wait_for_writes(paused_at + 0.1)
            time.sleep(1.0)
        finally:
            leader.resume()


@pytest.mark.skipif(network.is_available(), reason="the next one does the same with namespaces")
def test_a_node_is_cut_off(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off_the_leader(cluster, "cut-off", capsys)


def test_a_node_loses_its_network(cluster_apart: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cut_off_the_leader(cluster_apart, "network-lost", capsys)


def cut_off_the_leader(cluster: Cluster, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.wait_until_balanced()  # or leadership may move by itself at this very moment
    with under_load(cluster, name, capsys) as load:
        leader = cluster.leader()
        cluster.cut_off(leader.number)
        try:
            load.wait_for_writes(time.monotonic() + 0.5, GIVE_UP_SECONDS)
            time.sleep(1.0)
        finally:
            cluster.mend()


def test_the_object_store_stops(cluster: Cluster, cluster_s3: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "stop-s3", capsys) as load:
        cluster_s3.stop()
        try:
            time.sleep(3.0)
            load.wait_for_writes(time.monotonic())
        finally:
            cluster_s3.start()


def test_all_nodes_are_restarted_at_once(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with under_load(cluster, "restart-all", capsys, all_brokers_end=True) as load:
        for node in cluster.nodes.values():
            node.kill_all()
        started_at = time.monotonic()
        for node in cluster.nodes.values():
            node.start(wait=False)
        load.wait_for_writes(started_at, GIVE_UP_SECONDS)


def test_the_nodes_are_restarted_one_by_one(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    pauses = []
    with under_load(cluster, "rolling", capsys) as load:
        for node in [*cluster.nodes.values()] * 2:
            stopped_at = time.monotonic()
            assert node.stop() == 0
            load.wait_for_writes(time.monotonic())
            node.start()
            pauses.append(load.longest_pause(stopped_at).seconds)
    # But for one, when the machine itself may have stood still.
    assert sorted(pauses)[-2] < ORDERLY_SECONDS, pauses


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thirty_failures_in_a_random_order(
    cluster: Cluster, cluster_s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios = [
        lambda: test_the_leader_is_killed(cluster, capsys),
        lambda: test_a_follower_is_killed(cluster, capsys),
        lambda: test_a_broker_that_leads_is_killed(cluster, capsys),
        lambda: test_a_machine_is_lost_and_comes_back(cluster, capsys),
        lambda: test_the_leader_is_stopped_for_longer_than_its_lease_and_goes_on(cluster, capsys),
        lambda: cut_off_the_leader(cluster, "cut-off", capsys),
        lambda: test_the_object_store_stops(cluster, cluster_s3, capsys),
    ]
    seed = random.randrange(2**31)
    chance = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(30):
        chance.choice(scenarios)()
