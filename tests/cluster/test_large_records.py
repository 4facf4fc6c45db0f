"""What the log cannot store is refused before it is accepted, what it does not store holds neither up nor on, and what
is accepted can be applied at every node."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from threading import Thread

import httpx
import pytest

from support.cluster import Cluster, NodeProcess, running, wait_until
from support.raw_http import RawConnection
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
JSON = {"content-type": "application/json"}
PATH = "/v1/stream/large/s"
STOP_SECONDS = 4
FORKS = 1_200
SETTINGS = f"flush_interval = '1s'\n[log]\nstuck_after = '1s'\n[streams]\nfork_depth_max = {FORKS}\n"


@pytest.fixture(scope="module")
def small_cluster(cluster_s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environment = {"MILLSTREAM_SERVER_STOP_TIMEOUT": f"{STOP_SECONDS}s"}
    directory = tmp_path_factory.mktemp("large")
    with running(directory, cluster_s3, settings=SETTINGS, environment=environment) as started:
        yield started


def array_of(message: bytes, count: int) -> bytes:
    return b"[" + b",".join([message] * count) + b"]"


def post(node: NodeProcess, body: bytes, seconds: float = 60.0) -> httpx.Response:
    return httpx.post(node.url + PATH, content=body, headers=JSON, timeout=seconds)


def test_the_largest_bodies_are_stored_or_refused_and_hold_nothing_up(small_cluster: Cluster) -> None:
    leader = small_cluster.leader()
    assert httpx.put(leader.url + PATH, headers=JSON, timeout=30).status_code in (200, 201)
    refused = post(leader, array_of(b"1", 4 * MIB - 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_messages")
    # As many messages as one request may have, and as many bytes: the record is larger than the body, and fits.
    message = b'"' + b"x" * 61 + b'"'
    body = array_of(message, 131_071)
    assert 8 * MIB - 64 <= len(body) <= 8 * MIB
    assert post(leader, body).status_code == 204
    assert post(leader, array_of(b'"' + b"x" * (8 * MIB - 4) + b'"', 1)).status_code == 204
    assert post(leader, b"[1]", 10.0).status_code == 204
    for probe in ("/readyz/local", "/readyz/cluster"):
        assert httpx.get(leader.url + probe, timeout=10).status_code == 200


def test_a_long_chain_of_forks_is_deleted_at_every_node_and_after_a_restart(small_cluster: Cluster) -> None:
    leader = small_cluster.leader()

    def ask(method: str, names: range, fields: Callable[[int], list[tuple[str, str]]] = lambda name: []) -> set[int]:
        with RawConnection(leader.url, seconds=120) as connection:
            requests = [connection.request(method, f"/v1/stream/forks/{name}", fields(name), b"") for name in names]
            sender = Thread(target=connection.send, args=(b"".join(requests),), daemon=True)
            sender.start()
            return {connection.answer().status for _ in names}

    def fork_of_the_one_before(name: int) -> list[tuple[str, str]]:
        return [("stream-forked-from", f"/v1/stream/forks/{name - 1}")]

    assert httpx.put(f"{leader.url}/v1/stream/forks/0", headers=JSON, content=b"[1]", timeout=30).status_code == 201
    assert ask("PUT", range(1, FORKS + 1), fork_of_the_one_before) == {201}
    assert ask("PUT", range(FORKS + 1, FORKS + 2), fork_of_the_one_before).isdisjoint({201, 500, 503})
    assert ask("DELETE", range(FORKS)) == {204}
    for node in small_cluster.nodes.values():
        read = partial(httpx.get, f"{node.url}/v1/stream/forks/{FORKS}", follow_redirects=True, timeout=30)
        wait_until(lambda read=read: read().content == b"[1]", f"node {node.number} reads through the chain", 60)
    assert ask("DELETE", range(FORKS, FORKS + 1)) == {204}
    follower = small_cluster.followers()[0]
    follower.stop()
    follower.start()
    for node in small_cluster.nodes.values():
        for probe in ("/readyz/local", "/readyz/cluster"):
            wait_until(lambda url=node.url + probe: httpx.get(url, timeout=10).status_code == 200, f"{probe} is good")
        gone = httpx.get(f"{node.url}/v1/stream/forks/{FORKS}", follow_redirects=True, timeout=30)
        assert gone.status_code in (404, 410)
    assert httpx.put(small_cluster.leader().url + PATH, headers=JSON, timeout=30).status_code in (200, 201)
    assert post(small_cluster.leader(), b"[1]", 30.0).status_code == 204


def _brokers_of(nodes: list[NodeProcess]) -> list[int]:
    return [json.loads((node.data_dir / "broker" / "broker.json").read_text())["pid"] for node in nodes]


def test_a_commit_that_is_stuck_shows_and_does_not_keep_the_node(small_cluster: Cluster) -> None:
    leader = small_cluster.leader()
    assert httpx.put(leader.url + PATH, headers=JSON, timeout=30).status_code in (200, 201)
    others = _brokers_of(small_cluster.followers())
    for broker in others:
        os.kill(broker, signal.SIGSTOP)
    try:
        writer = Thread(target=_try_to_post, args=(leader,), daemon=True)
        writer.start()

        def problems() -> list[str]:
            answers = [httpx.get(leader.url + path, timeout=10) for path in ("/readyz/local", "/readyz/cluster")]
            said = [" ".join(one.json().get("problems", [])) for one in answers if one.status_code == 503]
            return said if len(said) == 2 and all("for the log to store them" in one for one in said) else []

        wait_until(problems, "both probes say that writes wait", 30)
        started = time.monotonic()
        leader.stop(timeout=STOP_SECONDS + 20)
        assert time.monotonic() - started < STOP_SECONDS + 8  # a busy machine has its time too
    finally:
        for broker in others:
            os.kill(broker, signal.SIGCONT)
    leader.start()
    wait_until(lambda: post(small_cluster.leader(), b"[2]").status_code == 204, "writing goes on", 60)


def _try_to_post(node: NodeProcess) -> None:
    with suppress(httpx.HTTPError):
        post(node, b"[1]", 30.0)
