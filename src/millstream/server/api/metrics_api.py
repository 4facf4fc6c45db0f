"""`GET /metrics`: all counts, for Prometheus. docs/operations.md lists every name."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from millstream import __version__
from millstream.clock import SystemClock
from millstream.errors import NotLeader
from millstream.server.api.live import Follower, LiveReaders
from millstream.server.http.exposition import CONTENT_TYPE, Family, counter, gauge, merged, render
from millstream.server.http.messages import Answer, Request, Response
from millstream.server.http.metrics import Metrics
from millstream.shard.shard import Shard
from millstream.tasks import Supervisor

_STARTED_SECONDS = SystemClock().now_ms() / 1000


class MetricsApi:
    def __init__(
        self, metrics: Metrics, readers: Sequence[LiveReaders], shards: Sequence[Shard], supervisor: Supervisor
    ) -> None:
        self._metrics = metrics
        self._readers = readers
        self._shards = shards
        self._supervisor = supervisor

    def expose(self, request: Request) -> Answer:
        families = [*self._http(), *self._writing(), *self._tiers(), *self._live(), *self._background(), *_process()]
        fields = b"content-type: %b\r\ncache-control: no-store\r\n" % CONTENT_TYPE.encode()
        return Response(200, fields, render(families))

    def _http(self) -> Iterator[Family]:
        metrics = self._metrics
        routes = list(metrics.routes.values())
        yield Family(
            "millstream_requests_total",
            "counter",
            "Requests answered, by method, route and status.",
            [
                ({"method": route.method, "route": route.route, "status": str(status)}, count)
                for route in routes
                for status, count in sorted(route.statuses.items())
            ],
        )
        yield Family(
            "millstream_request_seconds",
            "histogram",
            "Time from a request's last byte to the start of its answer.",
            [({"method": route.method, "route": route.route}, route.seconds) for route in routes if route.statuses],
        )
        yield counter("millstream_sent_bytes_total", "Bytes of answers' bodies.", metrics.sent_bytes)
        yield gauge("millstream_connections", "Open connections.", metrics.connections)
        text = "Bytes for clients that do not read them at present."
        yield gauge("millstream_unsent_bytes", text, metrics.unsent_bytes)
        text = "Connections cut off because all together had too much unread."
        yield counter("millstream_slow_readers_dropped_total", text, metrics.slow_readers_dropped)
        yield Family(
            "millstream_authentication_failures_total",
            "counter",
            "Requests refused with 401, by reason.",
            [({"reason": reason}, count) for reason, count in sorted(metrics.authentication_failures.items())],
        )
        yield counter("millstream_forbidden_total", "Requests refused with 403 for want of a scope.", metrics.forbidden)
        yield Family(
            "millstream_rate_limited_total",
            "counter",
            "Requests refused with 429, by limit.",
            [({"limit": limit}, count) for limit, count in sorted(metrics.rate_limited.items())],
        )

    def _writing(self) -> Iterator[Family]:
        shards = self._shards
        measures = [shard.measures for shard in shards]
        yield counter("millstream_appends_total", "Appends made durable.", sum(shard.appends for shard in measures))
        messages = sum(shard.hot.published_messages for shard in shards)
        yield counter("millstream_appended_messages_total", "Messages made durable.", messages)
        size = sum(shard.hot.published_bytes for shard in shards)
        yield counter("millstream_appended_bytes_total", "Payload bytes made durable.", size)
        for name, text, histograms in (
            ("commit_batch_records", "Records in a group commit.", [shard.batch_records for shard in measures]),
            ("commit_batch_bytes", "Bytes in a group commit.", [shard.batch_bytes for shard in measures]),
            (
                "commit_seconds",
                "Time from a batch's dispatch until it is known durable.",
                [shard.commit_seconds for shard in measures],
            ),
            (
                "fsync_seconds",
                "Time the disk took to write and sync a batch.",
                [shard.sync_seconds for shard in measures],
            ),
        ):
            yield Family(f"millstream_{name}", "histogram", text, [({}, merged(histograms))])
        failures = [shard.committer.failure for shard in shards]
        failed = sum(failure is not None and not isinstance(failure, NotLeader) for failure in failures)
        yield gauge("millstream_log_stopped", "Logs that accept nothing more until a restart.", failed)
        refused = sum(shard.backpressure_reason() is not None for shard in shards)
        yield gauge("millstream_backpressure", "Shards that refuse writers for want of memory.", refused)
        refusals = sum(shard.backpressure_refusals for shard in measures)
        yield counter("millstream_backpressure_refusals_total", "Writes refused for want of memory.", refusals)

    def _tiers(self) -> Iterator[Family]:
        shards = self._shards
        measures = [shard.measures for shard in shards]
        totals = [shard.cold_totals() for shard in shards]
        for name, text, value in (
            ("hot_bytes", "Memory taken by messages.", sum(shard.hot.bytes for shard in shards)),
            ("budget_bytes", "Memory that counts against the limit.", sum(shard.budget.used for shard in shards)),
            ("hot_bytes_max", "Memory that may be taken.", sum(shard.hot_bytes_max for shard in shards)),
            ("cold_bytes", "Bytes of segments in the object store.", sum(shard.stored_bytes for shard in totals)),
            ("cold_payload_bytes", "Payload bytes in the cold tier.", sum(shard.payload_bytes for shard in totals)),
            ("cold_segments", "Segments in the object store.", sum(shard.segments for shard in totals)),
            ("cold_cache_bytes", "Row groups and footers in memory.", sum(shard.cold.cached_bytes for shard in shards)),
            (
                "flush_backlog_bytes",
                "Payload bytes that are not in the cold tier yet.",
                sum(shard.hot.backlog_bytes for shard in shards),
            ),
            (
                "resident_streams",
                "Streams whose state is in memory.",
                sum(shard.namespace.resident_count() for shard in shards),
            ),
            (
                "store_lost",
                "Shards whose part of the object store is not this server's.",
                sum(shard.ownership.refusal is not None for shard in shards),
            ),
            (
                "cold_damaged_objects",
                "Objects in the store that are known to be missing or damaged.",
                sum(len(shard.damaged()) for shard in shards),
            ),
            ("flush_failing", "Shards whose last flush failed.", sum(s.flusher.failure is not None for s in shards)),
        ):
            yield gauge(f"millstream_{name}", text, value)
        flushes = merged([shard.flush_seconds for shard in measures])
        yield Family("millstream_flush_seconds", "histogram", "Time a flush took.", [({}, flushes)])
        failures = sum(shard.flush_failures for shard in measures)
        yield counter("millstream_flush_failures_total", "Flushes that failed and are tried again.", failures)
        found = sum(shard.cold.objects.damage.found_total for shard in shards)
        yield counter("millstream_cold_damage_found_total", "Times that damage was come upon.", found)
        scrubbed = sum(shard.scrubbed_bytes for shard in measures)
        yield counter("millstream_scrubbed_bytes_total", "Bytes of the store read and compared.", scrubbed)
        scrubs = sum(shard.scrubs for shard in measures)
        yield counter("millstream_scrubs_total", "Rounds in which all of the store was compared.", scrubs)
        reclaimed = sum(shard.segments_reclaimed for shard in measures)
        yield counter("millstream_segments_reclaimed_total", "Dead segments deleted.", reclaimed)
        kinds = sorted({kind for shard in measures for kind in shard.compactions})
        yield Family(
            "millstream_compactions_total",
            "counter",
            "Compactions, by what was compacted.",
            [({"kind": kind}, sum(shard.compactions.get(kind, 0) for shard in measures)) for kind in kinds],
        )

    def _live(self) -> Iterator[Family]:
        live = [reader for readers in self._readers for reader in readers.live]
        followers = sum(isinstance(reader, Follower) for reader in live)
        waiting = len(live) - followers
        yield Family(
            "millstream_live_readers",
            "gauge",
            "Live reads under way, by kind.",
            [({"kind": "sse"}, followers), ({"kind": "long-poll"}, waiting)],
        )
        wakes = merged([shard.measures.wake_seconds for shard in self._shards])
        text = "Time from a batch's being durable until a live reader was given what is new."
        yield Family("millstream_wake_seconds", "histogram", text, [({}, wakes)])

    def _background(self) -> Iterator[Family]:
        yield Family(
            "millstream_background_task_failures_total",
            "counter",
            "Failures of background tasks, which are started again.",
            [({"task": name}, count) for name, count in sorted(self._supervisor.failures.items())],
        )
        problems = len(self._supervisor.problems)
        clocks = {id(shard.expiry_clock): shard.expiry_clock for shard in self._shards}.values()
        jumps = sum(clock.jumps for clock in clocks)
        yield counter("millstream_clock_jumps_total", "Times the wall clock was set while the server ran.", jumps)
        text = "Whether nothing expires, because the wall clock has jumped ahead."
        yield gauge("millstream_expiry_held", text, int(any(clock.is_held for clock in clocks)))
        yield gauge("millstream_background_tasks_failing", "Vital background tasks that do not run.", problems)


def _process() -> Iterator[Family]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    yield Family("millstream_build_info", "gauge", "The version that runs.", [({"version": __version__}, 1)])
    yield counter("process_cpu_seconds_total", "Processor time.", usage.ru_utime + usage.ru_stime)
    yield gauge("process_resident_memory_bytes", "Resident memory.", pages * os.sysconf("SC_PAGE_SIZE"))
    open_files = sum(1 for _ in Path("/proc/self/fd").iterdir())
    yield gauge("process_open_fds", "Open file descriptors.", open_files)
    yield gauge("process_max_fds", "File descriptors allowed.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield gauge("process_start_time_seconds", "When the process started.", _STARTED_SECONDS)
