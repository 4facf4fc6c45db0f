"""/metrics: well-formed for Prometheus, true to what happened, and all that the dashboard asks for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "millstream.json"
ADAPTERS = ("in-process",)
TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/metrics/s"


class Samples:
    """The samples of a scrape, parsed by Prometheus' own client."""

    def __init__(self, url: str) -> None:
        answer = httpx.get(f"{url}/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        self.names = {sample.name for family in self.families.values() for sample in family.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with a name and these labels."""
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    """For tests that do not mind each other."""
    return serve()


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_requests_appends_bytes_and_batches_are_counted_as_they_happened(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.put(PATH, headers=TEXT).status_code == 201
        for _ in range(7):
            assert client.post(PATH, content=b"12345", headers=TEXT).status_code == 204
        assert client.get(PATH).content == b"12345" * 7
        assert client.get("/v1/stream/metrics/none").status_code == 404
        assert client.get("/v1/stream/%zz").status_code == 400
    seen = Samples(server.url)
    requests = "millstream_requests_total"
    assert seen.value(requests, method="POST", route="stream", status="204") == 7
    assert seen.value(requests, method="PUT", route="stream", status="201") == 1
    assert seen.value(requests, method="GET", route="stream", status="404") == 1
    assert seen.value(requests, route="none", status="400") == 1
    assert seen.value("millstream_request_seconds_count", method="POST", route="stream") == 7
    assert 0 < seen.value("millstream_request_seconds_sum", method="POST", route="stream") < 60
    assert seen.value("millstream_appends_total") == 7
    assert seen.value("millstream_appended_messages_total") == 7
    assert seen.value("millstream_appended_bytes_total") == 35
    assert seen.value("millstream_sent_bytes_total") >= 35
    # Everything that is durable went through a batch, and every batch through a sync.
    assert seen.value("millstream_commit_batch_records_sum") >= 8
    syncs = seen.value("millstream_fsync_seconds_count")
    assert syncs == seen.value("millstream_commit_batch_records_count") == seen.value("millstream_commit_seconds_count")
    assert seen.value("millstream_fsync_seconds_sum") > 0
    assert seen.value("millstream_hot_bytes") >= 35


def test_histograms_are_cumulative_and_end_in_infinity(running: Server) -> None:
    httpx.put(running.url + PATH, headers=TEXT)
    seen = Samples(running.url)
    histograms = [family for family in seen.families.values() if family.type == "histogram"]
    assert len(histograms) >= 6
    for family in histograms:
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
        for labels, buckets in series.items():
            assert buckets == sorted(buckets)
            assert buckets[-1][0] == float("inf")
            assert buckets[-1][1] == seen.value(f"{family.name}_count", **dict(labels))


def test_live_readers_and_their_wakes_are_measured(server: ServerProcess) -> None:
    assert httpx.put(server.url + PATH, headers=TEXT).status_code == 201
    with RawConnection(server.url) as follower:
        follower.send(follower.request("GET", f"{PATH}?offset=now&live=sse"))
        assert follower.head()[0] == 200
        assert Samples(server.url).value("millstream_live_readers", kind="sse") == 1
        assert httpx.post(server.url + PATH, content=b"x", headers=TEXT).status_code == 204
        received = b""
        while b"data:x" not in received:
            received += follower.chunk() or b""
        seen = Samples(server.url)
        assert seen.value("millstream_wake_seconds_count") == 1
        assert seen.value("millstream_requests_total", route="sse", status="200") == 1
    eventually(lambda: Samples(server.url).value("millstream_live_readers") == 0)


def test_a_flush_moves_bytes_from_the_backlog_to_the_cold_tier(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("cold.flush_interval=300ms",)) as server:
        assert httpx.put(server.url + PATH, content=b"x" * 1000, headers=TEXT).status_code == 201
        eventually(lambda: Samples(server.url).value("millstream_cold_payload_bytes") == 1000)
        eventually(lambda: Samples(server.url).value("millstream_flush_seconds_count") >= 1)
        seen = Samples(server.url)
        assert seen.value("millstream_flush_backlog_bytes") == 0
        assert seen.value("millstream_cold_segments") == 1
        assert seen.value("millstream_cold_bytes") > 0


def test_refused_connections_and_slow_requests_are_counted(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("http.header_timeout=500ms",)) as server:
        with RawConnection(server.url) as slow:
            slow.send(b"GET / HTTP/1.1\r\n")
            assert slow.answer().status == 408
        assert Samples(server.url).value("millstream_requests_total", status="408") == 1


def test_a_method_nobody_knows_makes_no_series_of_its_own(running: Server) -> None:
    for method in ("BREW", "PROPFIND", "MKCOL"):
        with RawConnection(running.url) as connection:
            connection.exchange(method, PATH)
    methods = {sample.labels["method"] for sample in Samples(running.url).families["millstream_requests"].samples}
    assert methods <= {"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "any", "other"}


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_only_for_metrics_that_exist(running: Server) -> None:
    httpx.put(running.url + PATH, content=b"x", headers=TEXT)
    seen = Samples(running.url)
    known = seen.names | {sample for family in seen.families for sample in (family, f"{family}_total")}
    asked = {name for one in expressions() for name in re.findall(r"\b(?:millstream|process)_[a-z_]+", one)}
    assert len(asked) >= 20
    assert asked <= known, asked - known


def test_the_dashboard_shows_every_thing_that_is_measured(running: Server) -> None:
    """A metric that no panel asks for is one that nobody sees."""
    everything = " ".join(expressions())
    families = Samples(running.url).families
    unseen = {name for name in families if name.startswith("millstream_") and name not in everything}
    assert unseen == set()


def test_every_metric_is_documented(running: Server) -> None:
    documented = (ROOT / "docs" / "operations.md").read_text()
    for name, family in Samples(running.url).families.items():
        exposed = f"{name}_total" if family.type == "counter" else name
        assert f"`{exposed}`" in documented, exposed


@pytest.mark.parametrize("path", ["/readyz/local", "/readyz/cluster"])
def test_a_server_that_can_write_is_ready(running: Server, path: str) -> None:
    answer = httpx.get(running.url + path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert answer.headers["cache-control"] == "no-store"


def test_a_server_that_refuses_writers_is_not_ready_and_says_why(tmp_path: Path) -> None:
    """Memory is full because the cold tier's folder cannot be written."""
    settings = ("hot.bytes_max=200KiB", "cold.flush_interval=1h", f"cold.path={tmp_path / 'cold'}")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        assert httpx.put(server.url + PATH, headers=TEXT).status_code == 201
        (tmp_path / "cold").rename(tmp_path / "away")
        (tmp_path / "cold").write_text("in the way")
        answers = [httpx.post(server.url + PATH, content=bytes(150 << 10), headers=TEXT) for _ in range(4)]
        assert answers[-1].status_code == 503
        ready = httpx.get(server.url + "/readyz/local")
        assert ready.status_code == 503
        assert "refused" in ready.json()["problems"][0]
        assert httpx.get(server.url + "/healthz").status_code == 200
        seen = Samples(server.url)
        assert seen.value("millstream_backpressure") == 1
        assert seen.value("millstream_backpressure_refusals_total") == [one.status_code for one in answers].count(503)
