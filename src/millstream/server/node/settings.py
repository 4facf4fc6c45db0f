"""Converts the configuration into the settings types of a node's components."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from millstream.access.authenticator import Authenticator, auth_settings
from millstream.access.exposure import is_loopback_host
from millstream.clock import Clock
from millstream.config import Config
from millstream.protocol.webhook_targets import NO_PRIVATE_TARGETS, THIS_MACHINE
from millstream.server.api.gate import Gate
from millstream.server.api.handlers import ApiSettings
from millstream.server.api.yjs_api import YjsSettings
from millstream.server.http.limits import read_limits, trusted_proxies
from millstream.server.http.metrics import Metrics
from millstream.shard.budget import STREAM_BYTES
from millstream.shard.flush.limits import FlushLimits
from millstream.shard.scrub import ScrubLimits
from millstream.shard.settings import ShardSettings
from millstream.shard.subscription_quotas import SubscriptionSettings
from millstream.streams.limits import StreamLimits
from millstream.streams.subscriptions import Subscription
from millstream.tiers.objects import ObjectStoreSettings
from millstream.units import Milliseconds
from millstream.yjs.compaction import CompactionLimits


def open_gate(
    config: Config,
    metrics: Metrics,
    clock: Clock,
    subscriptions: Mapping[str, Subscription],
    token_key: Callable[[], bytes | None],
    *,
    is_mounted: bool = False,
) -> Gate | None:
    """The gate for a configuration; None if requests need no token and have no limits."""
    authenticator = Authenticator(auth_settings(config), clock) if config.auth.enabled else None
    if authenticator is None and not _limits_addresses(config, is_mounted=is_mounted):
        return None
    return Gate(
        authenticator,
        config.limits,
        metrics,
        clock,
        subscriptions,
        token_key,
        open_metrics=config.auth.open_metrics,
        trusted_proxies=trusted_proxies(config),
    )


def _limits_addresses(config: Config, *, is_mounted: bool) -> bool:
    """Whether clients can connect whose addresses are limited. By default loopback without a proxy is not."""
    limits = config.limits
    if not (limits.address_requests_per_second or limits.address_bytes_per_second or limits.address_live_max):
        return False
    is_reached_from_here_only = (
        is_loopback_host(config.server.listen[0]) and not trusted_proxies(config) and not is_mounted
    )
    return not (limits.exempt_loopback and is_reached_from_here_only)


def shard_settings(config: Config, shards: int = 1) -> ShardSettings:
    """The settings of one shard; all `shards` share the memory."""
    cold = config.cold
    return ShardSettings(
        hot_bytes_max=config.hot.bytes_max // shards,
        flush=flush_limits(config, shards),
        reclaim_grace=cold.reclaim_grace,
        leftover_age=cold.leftover_age,
        may_take_over=cold.take_over,
        scrub=ScrubLimits(cold.scrub_bytes_per_second, cold.scrub_interval),
        streams=stream_limits(config),
        stuck_after=config.log.stuck_after,
    )


def flush_limits(config: Config, shards: int = 1) -> FlushLimits:
    """When to flush; several shards share the memory."""
    cold, hot_bytes_max = config.cold, config.hot.bytes_max // shards
    return FlushLimits(
        cold.flush_interval,
        cold.flush_bytes,
        # Whatever is configured, a flush must be able to free half of the memory.
        min(config.hot.keep_bytes // shards, hot_bytes_max // 2),
        hot_bytes_max // 2,
        # The same for streams: those that are only read must leave room for those that change.
        max(1, min(config.hot.resident_streams_max // shards, hot_bytes_max // 4 // STREAM_BYTES)),
    )


def stream_limits(config: Config) -> StreamLimits:
    streams, expiry = config.streams, config.streams.producer_expiry
    return StreamLimits(
        streams.fork_depth_max,
        streams.append_messages_max,
        streams.producers_max,
        None if expiry is None else Milliseconds(expiry * 1000),
    )


def object_store_settings(config: Config) -> ObjectStoreSettings:
    """The object store of the cold tier; by default a folder in the data directory."""
    cold = config.cold
    path = cold.path
    if cold.backend == "fs" and path == Path():
        path = config.server.data_dir / "cold"
    prefix = f"{cold.backend}_"
    options = {
        name.removeprefix(prefix): value
        for name, value in ((setting.name, getattr(cold, setting.name)) for setting in fields(cold))
        if name.startswith(prefix)
    }
    return ObjectStoreSettings(cold.backend, path, options)


def api_settings(config: Config) -> ApiSettings:
    return ApiSettings(
        read_limits(config), object_store_settings(config), yjs_settings(config), subscription_settings(config)
    )


def yjs_settings(config: Config) -> YjsSettings:
    yjs = config.yjs
    return YjsSettings(
        implicit_create=yjs.implicit_create,
        awareness_ttl_seconds=math.ceil(yjs.awareness_ttl),
        long_poll_seconds=yjs.long_poll_timeout,
        compaction=CompactionLimits(
            yjs.compaction_threshold, yjs.retention, config.read.snapshot_bytes_max, yjs.merging_bytes_max
        ),
    )


def subscription_settings(config: Config) -> SubscriptionSettings:
    section = config.subscriptions
    private_targets = section.private_targets
    if private_targets is None:
        is_local = not config.auth.enabled and is_loopback_host(config.server.listen[0])
        private_targets = THIS_MACHINE if is_local else NO_PRIVATE_TARGETS
    limits = {
        setting.name: getattr(section, setting.name) for setting in fields(section) if setting.name != "private_targets"
    }
    return SubscriptionSettings(private_targets, **limits)
