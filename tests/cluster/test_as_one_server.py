"""What a single server offers, every node of a cluster offers: tokens, metrics, readiness, documents, compaction."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.cluster.placement import shard_of
from millstream.pipeline.planning import Limits, groups_of, plan_group, weigh
from millstream.pipeline.rewriting import Part, rewrite_part
from millstream.pipeline.view import load_views
from millstream.protocol.lib0 import frame_update
from millstream.tiers.cold import compacted_path
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segment_reader import SegmentReader
from support import compaction
from support.access import bearer, make_token
from support.cluster import Cluster, NodeProcess, running, wait_until
from support.s3 import S3Server

pytestmark = pytest.mark.timeout(180)

TEXT = {"content-type": "text/plain"}
SETTINGS = """flush_interval = '1s'
[auth]
enabled = true
tokens_file = '{tokens}'
reload_interval = '200ms'
[limits]
exempt_loopback = false
address_bytes_per_second = '64KiB'
burst = '16s'
"""
BURST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens.json"


@pytest.fixture(scope="module")
def admin(tokens: Path) -> dict[str, str]:
    return bearer(make_token(tokens, "admin:*"))


@pytest.fixture(scope="module")
def guarded(
    cluster_s3: S3Server, tokens: Path, admin: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Three nodes with tokens and two shards; node 3 passes writes on."""
    settings = SETTINGS.format(tokens=tokens)
    with running(tmp_path_factory.mktemp("guarded"), cluster_s3, shards=2, settings=settings, forwarding=(3,)) as one:
        yield one


def test_every_node_asks_for_tokens_and_operations_need_the_admin(
    guarded: Cluster, tokens: Path, admin: dict[str, str]
) -> None:
    reader = bearer(make_token(tokens, "read:guarded"))
    for node in guarded.nodes.values():
        wait_until(
            lambda node=node: httpx.get(f"{node.url}/guarded/none", headers=reader).status_code != 401,
            "the new token is known",
        )
        for path in ("/cluster/status", "/cluster/hot-cold-stats", "/cluster/cold", "/metrics"):
            assert httpx.get(node.url + path).status_code == 401, path
            assert httpx.get(node.url + path, headers=reader).status_code == 403, path
            assert httpx.get(node.url + path, headers=admin).status_code == 200, path
        for path in ("transfer-leader", "trigger-snapshot", "purge-log", "members", "compactions"):
            assert httpx.post(f"{node.url}/cluster/{path}", json={}).status_code == 401, path
            assert httpx.post(f"{node.url}/cluster/{path}", json={}, headers=reader).status_code == 403, path
        for path in ("/healthz", "/readyz/local", "/readyz/cluster"):
            assert httpx.get(node.url + path).status_code == 200, path
        assert httpx.put(f"{node.url}/guarded", headers=reader).status_code == 403


def test_a_request_that_is_passed_on_takes_its_token_along(guarded: Cluster, admin: dict[str, str]) -> None:
    passing = guarded.nodes[3]
    assert httpx.put(f"{passing.url}/passed", headers=admin).status_code in (200, 201)
    made = httpx.put(f"{passing.url}/passed/s", headers=admin | TEXT, content=b"through node 3")
    assert made.status_code == 201
    assert httpx.put(f"{passing.url}/passed/t", headers=TEXT).status_code == 401
    for node in guarded.nodes.values():
        answer = httpx.get(f"{node.url}/passed/s", headers=admin, follow_redirects=False)
        if answer.status_code == 307:  # it does not have it yet
            answer = httpx.get(answer.headers["location"], headers=admin)
        assert answer.content == b"through node 3"
        assert answer.headers["cache-control"].startswith("private")


def _leaders(cluster: Cluster, admin: dict[str, str]) -> dict[int, NodeProcess]:
    """Who leads which shard, once it says so itself."""
    found: dict[int, NodeProcess] = {}

    def are_found() -> bool:
        for node in cluster.nodes.values():
            for shard in httpx.get(f"{node.url}/cluster/status", headers=admin, timeout=10).json()["shards"]:
                if shard["role"] == "leading":
                    found[shard["shard"]] = node
        return len(found) == cluster.shards

    wait_until(are_found, "every shard has a leader")
    return found


def from_address(address: str, **options: Any) -> httpx.Client:
    """A client as if on another machine: all of 127.0.0.0/8 is this one."""
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60, **options)


def test_what_is_passed_on_counts_as_its_clients_and_not_as_the_passing_nodes(
    guarded: Cluster, admin: dict[str, str]
) -> None:
    passing = guarded.nodes[3]
    buckets = {shard_of(name, 2): name for name in (f"many-{number}" for number in range(20))}
    # The shards are spread over the nodes soon after the start; until then one node may lead them all.
    wait_until(lambda: any(one is not passing for one in _leaders(guarded, admin).values()), "another node leads one")
    leader, bucket = next((one, buckets[n]) for n, one in _leaders(guarded, admin).items() if one is not passing)
    with from_address("127.0.3.1", headers=admin) as first:
        assert first.put(f"{passing.url}/{bucket}").status_code in (200, 201)
        assert first.put(f"{passing.url}/{bucket}/s", headers=TEXT).status_code == 201
    piece = bytes(BURST_BYTES // 2)
    url = f"{passing.url}/{bucket}/s"
    for number in range(10, 16):  # together more than one address may send
        with from_address(f"127.0.3.{number}", headers=admin | TEXT) as client:
            assert client.post(url, content=piece).status_code == 204
    with from_address("127.0.3.2", headers=admin | TEXT) as greedy:
        seen = [greedy.post(url, content=piece).status_code for _ in range(5)]
        assert seen[0] == 204 and 429 in seen
        # What it has used up it has used up at the leader too, whomever it pretends to be.
        for name in ("millstream-forwarded", "x-forwarded-for"):
            assert greedy.get(f"{leader.url}/{bucket}", headers={name: "3 198.51.100.7"}).status_code == 429


def test_a_token_in_the_url_is_good_at_every_node_and_event_streams_go_on_there(
    guarded: Cluster, admin: dict[str, str]
) -> None:
    with httpx.Client(headers=admin, timeout=30) as client:
        assert client.put(f"{guarded.nodes[3].url}/urls").status_code in (200, 201)
        assert client.put(f"{guarded.nodes[3].url}/urls/s", headers=TEXT, content=b"one").status_code == 201
        assert client.post(f"{guarded.nodes[3].url}/urls/s", headers=TEXT, content=b"two").status_code == 204
        for maker in guarded.nodes.values():
            made = client.post(f"{maker.url}/v1/tokens", json={"stream": "/urls/s"})
            assert made.status_code == 201, made.text
            token = made.json()["token"]
            for node in guarded.nodes.values():
                _follow_with(node, token)


def _follow_with(node: NodeProcess, token: str) -> None:
    """Read as an EventSource does that has the first message and a URL, and nothing else."""
    url = f"{node.url}/urls/s?offset=-1&live=sse&token={token}"
    place = {"last-event-id": f"{0:016d}_{3:016d}"}
    with httpx.stream("GET", url, headers=place, follow_redirects=True, timeout=30) as followed:
        assert followed.status_code == 200, followed.headers
        assert followed.headers["cache-control"] == "private, no-store"
        lines = followed.iter_lines()
        assert [next(lines) for _ in range(3)] == [f"id: {0:016d}_{6:016d}", "event: data", "data:two"]
    assert httpx.get(url.replace("/urls/s?", "/urls/t?")).status_code == 403
    assert httpx.get(url.replace("token=msu_", "token=msu_x")).status_code == 401
    # A place that a follower has not heard of yet is asked for at the leader, with the token.
    with httpx.stream("GET", url, headers={"last-event-id": f"{0:016d}_{9:016d}"}, timeout=30) as ahead:
        assert ahead.status_code in (200, 307, 503)
        assert ahead.status_code != 200 or ahead.headers["millstream-role"] == "leader"
        assert ahead.status_code != 307 or f"token={token}" in ahead.headers["location"]


def test_metrics_count_the_requests_and_appends_of_all_shards(guarded: Cluster, admin: dict[str, str]) -> None:
    for node in guarded.nodes.values():
        text = httpx.get(f"{node.url}/metrics", headers=admin).text
        assert 'millstream_requests_total{method="GET",route="cluster readiness",status="200"}' in text
        assert "\nmillstream_log_stopped 0\n" in text
        assert "millstream_authentication_failures_total" in text


def test_a_document_is_written_and_read_at_any_node(guarded: Cluster, admin: dict[str, str]) -> None:
    update = frame_update(b"\0\0")
    for number, node in guarded.nodes.items():
        url = f"{node.url}/v1/yjs/notes/docs/from-{number}"
        # httpx drops the token where a redirect leads to another address, so it is followed by hand.
        answer = httpx.post(url, headers=admin, content=update)
        if answer.status_code == 307:
            answer = httpx.post(answer.headers["location"], headers=admin, content=update)
        assert answer.status_code in (200, 204), answer.text
        for other in guarded.nodes.values():
            found = httpx.get(f"{other.url}/v1/yjs/notes/docs/from-{number}?offset=-1", headers=admin)
            if found.status_code == 307:
                found = httpx.get(found.headers["location"], headers=admin)
            assert found.status_code == 200 and found.content == update
    refused = httpx.get(f"{guarded.nodes[1].url}/v1/yjs/notes/docs/from-1?offset=-1")
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "UNAUTHORIZED"


async def _compacted(settings: ObjectStoreSettings, bucket: str) -> dict[str, object]:
    """A proposal for a bucket of whichever shard, planned and written as the job does it."""
    objects = open_objects(settings)
    for view in await load_views(objects):
        limits = Limits(128 << 20, 2, 0.3)
        reader = SegmentReader(objects)
        weights = weigh(reader, view, {bucket})
        for weighed in groups_of(weights, limits):
            group = plan_group(reader, view, weighed, limits)
            source = group.sources[0]
            path = compacted_path(bucket, source.first_at_ms, group.shard, source.first_position, os.urandom(8))
            (edges,) = group.ranges()
            part = Part(settings, path, bucket, group.shard, group.sources, *edges, group.kept_from)
            return compaction.proposal(group, [await rewrite_part(part)])
    raise AssertionError(f"there is nothing to compact in {bucket}")


def test_what_needed_a_token_is_private_at_every_node(guarded: Cluster, admin: dict[str, str]) -> None:
    passing = guarded.nodes[3]
    with httpx.Client(headers=admin, timeout=30) as client:
        assert client.put(f"{passing.url}/cached").status_code == 201
        assert client.put(f"{passing.url}/cached/s", headers=TEXT, content=b"1").status_code == 201
        for node in guarded.nodes.values():
            for target in (
                "/cached/s",
                "/cached/s?offset=-1&live=sse",
                "/cached/streams",
                "/cached/streams/feed?live=sse",
                "/v1/yjs/cached/docs/plan",
                "/cached/none",
                "/cluster/status",
            ):
                with client.stream("GET", node.url + target) as answer:
                    described = f"node {node.number}, {target}: {answer.status_code} {answer.headers}"
                    assert answer.headers["cache-control"].startswith("private"), described
                    assert answer.headers["vary"].split(", ").count("authorization") == 1, described


@pytest.mark.parametrize("bucket", ["compact-4", "compact-0"])
def test_a_compaction_goes_to_the_leader_and_every_node_reads_as_before(
    guarded: Cluster, admin: dict[str, str], bucket: str
) -> None:
    passing = guarded.nodes[3]
    assert httpx.put(f"{passing.url}/{bucket}", headers=admin).status_code in (200, 201)
    expected = b""
    assert httpx.put(f"{passing.url}/{bucket}/s", headers=admin | TEXT).status_code == 201
    for number in range(4):
        piece = b"piece %d of %b;" % (number, bucket.encode())
        assert httpx.post(f"{passing.url}/{bucket}/s", headers=admin | TEXT, content=piece).status_code in (200, 204)
        expected += piece
        wait_until(
            lambda count=number + 1: len(cold_segments(passing, bucket, admin)) == count, "what was written is cold"
        )
    proposal = asyncio.run(_compacted(guarded.store, bucket))

    def propose() -> httpx.Response:
        return httpx.post(f"{passing.url}/cluster/compactions", headers=admin, json=proposal, timeout=30)

    wait_until(lambda: propose().status_code != 503, "the leader has tidied up after its start")
    answer = propose()
    assert answer.status_code == 200, answer.text
    assert answer.json()["replaced"] == 4 and answer.json()["messages"] == 4
    for node in guarded.nodes.values():
        wait_until(lambda node=node: len(cold_segments(node, bucket, admin)) == 1, f"node {node.number} has followed")
        assert httpx.get(f"{node.url}/{bucket}/s?offset=-1", headers=admin).content == expected


def cold_segments(node: NodeProcess, bucket: str, admin: dict[str, str]) -> list[str]:
    answer = httpx.get(f"{node.url}/{bucket}/streams/cold", headers=admin)
    if answer.status_code != 200:
        return []
    return [segment["path"] for shard in answer.json()["shards"] for segment in shard["segments"]]
