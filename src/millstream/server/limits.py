"""The limits of the HTTP side, with their defaults. Each has a config key and a line in docs/behaviour.md."""

from __future__ import annotations

from dataclasses import dataclass

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
