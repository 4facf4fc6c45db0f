"""Limits of the HTTP server, from the configuration, which has the defaults; docs/behaviour.md explains each."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.config import Config


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_bytes_max: int
    body_bytes_max: int
    connections_max: int
    pipelined_requests_max: int
    header_timeout_seconds: float
    body_timeout_seconds: float
    idle_timeout_seconds: float
    send_timeout_seconds: float
    write_buffer_bytes_max: int
    unsent_bytes_max: int
    incoming_bytes_max: int
    body_bytes_per_second_min: int
    address_connections_max: int
    # Addresses whose connections are not counted: proxies, which have many clients, and this machine.
    trusted_proxies: frozenset[str]
    exempt_loopback: bool


@dataclass(frozen=True, slots=True)
class ReadLimits:
    chunk_bytes_max: int
    long_poll_seconds: float
    sse_lifetime_seconds: float
    sse_heartbeat_seconds: float
    live_readers_max: int
    live_readers_per_stream_max: int
    snapshot_bytes_max: int


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
        unsent_bytes_max=http.unsent_bytes_max,
        incoming_bytes_max=http.incoming_bytes_max,
        body_bytes_per_second_min=http.body_bytes_per_second_min,
        address_connections_max=config.limits.address_connections_max,
        trusted_proxies=trusted_proxies(config),
        exempt_loopback=config.limits.exempt_loopback,
    )


def trusted_proxies(config: Config) -> frozenset[str]:
    return frozenset(address.strip() for address in config.server.trusted_proxies.split(",") if address.strip())


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
