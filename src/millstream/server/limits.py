"""The limits of the HTTP side, with their defaults. Each has a config key and a line in docs/behaviour.md."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.config import Config

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_bytes_max: int = 32 * KIB
    body_bytes_max: int = 8 * MIB
    connections_max: int = 20_000
    pipelined_requests_max: int = 64
    header_timeout_seconds: float = 10.0
    body_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 75.0
    send_timeout_seconds: float = 30.0
    write_buffer_bytes_max: int = 256 * KIB


@dataclass(frozen=True, slots=True)
class ReadLimits:
    chunk_bytes_max: int = 1 * MIB
    long_poll_seconds: float = 30.0
    sse_lifetime_seconds: float = 60.0
    sse_heartbeat_seconds: float = 15.0
    live_readers_max: int = 10_000
    live_readers_per_stream_max: int = 10_000
    snapshot_bytes_max: int = 128 * MIB


def http_limits(config: Config) -> HttpLimits:
    http = config.http
    return HttpLimits(
        header_bytes_max=http.header_bytes_max,
        body_bytes_max=http.body_bytes_max,
        connections_max=http.connections_max,
        pipelined_requests_max=http.pipelined_requests_max,
        header_timeout_seconds=http.header_timeout,
        body_timeout_seconds=http.body_timeout,
        idle_timeout_seconds=http.idle_timeout,
        send_timeout_seconds=http.send_timeout,
        write_buffer_bytes_max=http.write_buffer_bytes_max,
    )


def read_limits(config: Config) -> ReadLimits:
    read = config.read
    return ReadLimits(
        chunk_bytes_max=read.chunk_bytes_max,
        long_poll_seconds=read.long_poll_timeout,
        sse_lifetime_seconds=read.sse_lifetime,
        sse_heartbeat_seconds=read.sse_heartbeat,
        live_readers_max=read.live_readers_max,
        live_readers_per_stream_max=read.live_readers_per_stream_max,
        snapshot_bytes_max=read.snapshot_bytes_max,
    )
