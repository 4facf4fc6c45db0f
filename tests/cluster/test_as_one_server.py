"""What a single server offers, every node of a cluster offers: tokens, metrics, readiness, documents, compaction."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.pipeline.planning import Limits, groups_of, plan_group, weigh
from millstream.pipeline.rewriting import Part, rewrite_part
from millstream.pipeline.view import load_views
from millstream.protocol.lib0 import frame_update
from millstream.tiers.cold import compacted_path
from millstream.tiers.objects import ObjectStoreSettings, open_objects
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
"""


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
        weights = await weigh(objects, view, {bucket})
        for weighed in groups_of(weights, limits):
            group = await plan_group(objects, view, weighed, limits)
            source = group.sources[0]
            path = compacted_path(bucket, source.first_at_ms, group.shard, source.first_position, os.urandom(8))
            (edges,) = group.ranges()
            part = Part(settings, path, bucket, group.shard, group.sources, *edges, group.kept_from)
            return compaction.proposal(group, [await rewrite_part(part)])
    raise AssertionError(f"there is nothing to compact in {bucket}")


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
