"""Subscriptions: durable cursors over many streams, and the wakes that hand their work out.

This module keeps their state and says what follows from it; issuing wakes, timing leases and calling webhooks is
the shard's and the server's part. A subscription is pending when some linked stream's tail lies beyond the offset
acknowledged for it, and at most one wake is out at a time, fenced by `generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from millstream.errors import Conflict, InvalidRequest
from millstream.protocol.globs import matches
from millstream.protocol.offsets import BEGINNING_TOKEN, format_offset, parse_offset
from millstream.streams.records import (
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
)

LEASE_TTL_MS_DEFAULT: Final = 30_000
LEASE_TTL_MS_RANGE: Final = (1_000, 600_000)
STREAMS_MAX: Final = 10_000
TEXT_BYTES_MAX: Final = 1024
NOTHING_ACKED: Final = -1

TailOf = Callable[[str], int]


class Link:
    """One stream of a subscription: how it came to be linked, and up to where it is done."""

    __slots__ = ("acked", "types")

    def __init__(self, types: Iterable[str], acked: int) -> None:
        self.types = set(types)
        self.acked = acked

    @property
    def type(self) -> str:
        return "explicit" if "explicit" in self.types else "glob"


class Subscription:
    __slots__ = (
        "base_url",
        "config",
        "created_at_ms",
        "generation",
        "id",
        "links",
        "next_attempt_ms",
        "retry_count",
        "wake",
    )

    def __init__(self, subscription_id: str, created_at_ms: int, base_url: str, config: SubscriptionConfig) -> None:
        self.id = subscription_id
        self.created_at_ms = created_at_ms
        self.base_url = base_url
        self.config = config
        self.links: dict[str, Link] = {}
        self.generation = 0
        self.wake: Wake | None = None
        self.retry_count = 0
        self.next_attempt_ms: int | None = None

    @property
    def is_webhook(self) -> bool:
        return self.config.type == "webhook"

    def pending_streams(self, tail_of: TailOf) -> list[str]:
        return [path for path, link in self.links.items() if tail_of(path) > max(link.acked, 0)]

    def covers(self, path: str) -> bool:
        """Whether appends to this path are this subscription's business; its own wake stream never is."""
        if path == self.config.wake_stream:
            return False
        return path in self.links or (self.config.pattern is not None and matches(self.config.pattern, path))

    def checked_acks(self, acks: object, tail_of: TailOf) -> dict[str, int]:
        """The offsets a worker acknowledges, or INVALID_OFFSET: they must move forward and not past the tail."""
        if acks is None:
            return {}
        if not isinstance(acks, list):
            raise InvalidRequest("acks must be an array", code="INVALID_REQUEST")
        checked: dict[str, int] = {}
        for ack in acks:
            path = ack.get("stream", ack.get("path")) if isinstance(ack, dict) else None
            token = ack.get("offset") if isinstance(ack, dict) else None
            if not isinstance(path, str) or not isinstance(token, str):
                raise InvalidRequest("each ack needs a stream and an offset", code="INVALID_REQUEST")
            path = path.strip("/")
            link = self.links.get(path)
            try:
                offset = parse_offset(token)
            except InvalidRequest:
                raise _invalid_offset(f"{token[:64]!r} is not an offset") from None
            if link is None:
                raise _invalid_offset(f"{path!r} is not a stream of this subscription")
            if offset < max(link.acked, checked.get(path, 0)):
                raise _invalid_offset(f"the offset for {path!r} lies before the one acknowledged already")
            if offset > tail_of(path):
                raise _invalid_offset(f"the offset for {path!r} lies beyond the stream's tail")
            checked[path] = offset
        return checked


def _invalid_offset(message: str) -> Conflict:
    return Conflict(message, code="INVALID_OFFSET")


def acked_token(acked: int) -> str:
    return BEGINNING_TOKEN if acked == NOTHING_ACKED else format_offset(acked)


class Subscriptions:
    """All subscriptions of a shard; changed only by records."""

    def __init__(self) -> None:
        self.by_id: dict[str, Subscription] = {}

    def covering(self, path: str) -> list[Subscription]:
        return [subscription for subscription in self.by_id.values() if subscription.covers(path)]

    def created(self, record: SubscriptionCreated) -> None:
        subscription = Subscription(record.id, record.at_ms, record.base_url, record.config)
        subscription.links = {path: Link(types, acked) for path, (types, acked) in record.links.items()}
        self.by_id[record.id] = subscription

    def deleted(self, record: SubscriptionDeleted) -> None:
        self.by_id.pop(record.id, None)

    def changed(self, record: SubscriptionChanged) -> None:
        subscription = self.by_id.get(record.id)
        if subscription is None:
            return
        subscription.generation = record.generation
        subscription.wake = record.wake
        subscription.retry_count = record.retry_count
        subscription.next_attempt_ms = record.next_attempt_ms
        for path in record.unlinked:
            link = subscription.links.get(path)
            if link is not None:
                link.types.discard("explicit")
                if not link.types:
                    del subscription.links[path]
        for path, (types, acked) in record.linked.items():
            if path in subscription.links:
                subscription.links[path].types.update(types)
            else:
                subscription.links[path] = Link(types, acked)
        for path, acked in record.acked.items():
            if path in subscription.links:
                subscription.links[path].acked = acked

    def stream_purged(self, path: str) -> None:
        """A stream is gone: glob links go with it, explicit ones wait for its successor from the start."""
        for subscription in self.by_id.values():
            link = subscription.links.get(path)
            if link is not None:
                link.types.discard("glob")
                link.acked = NOTHING_ACKED
                if not link.types:
                    del subscription.links[path]


def parse_config(body: object) -> SubscriptionConfig:
    """The normalised configuration in a PUT body, or INVALID_REQUEST naming the field."""
    if not isinstance(body, dict):
        raise _invalid("the body must be a JSON object")
    kind = body.get("type")
    if kind not in ("webhook", "pull-wake"):
        raise _invalid('type must be "webhook" or "pull-wake"')
    pattern = _text(body, "pattern")
    streams = checked_paths(body.get("streams") or [])
    if pattern is None and not streams:
        raise _invalid("one of pattern and streams is required")
    lease_ttl_ms = body.get("lease_ttl_ms", LEASE_TTL_MS_DEFAULT)
    low, high = LEASE_TTL_MS_RANGE
    if not isinstance(lease_ttl_ms, int) or isinstance(lease_ttl_ms, bool) or not low <= lease_ttl_ms <= high:
        raise _invalid(f"lease_ttl_ms must be an integer from {low} to {high}")
    webhook_url = wake_stream = None
    if kind == "webhook":
        webhook = body.get("webhook")
        webhook_url = _text(webhook, "url", 2048) if isinstance(webhook, dict) else None
        if webhook_url is None:
            raise _invalid("a webhook subscription needs webhook.url")
    else:
        wake_stream = _text(body, "wake_stream")
        if wake_stream is None:
            raise _invalid("a pull-wake subscription needs wake_stream")
    return SubscriptionConfig(
        type=kind,
        pattern=pattern.strip("/") if pattern else None,
        streams=sorted(set(streams)),
        webhook_url=webhook_url,
        wake_stream=wake_stream.strip("/") if wake_stream else None,
        lease_ttl_ms=lease_ttl_ms,
        description=_text(body, "description"),
    )


def checked_paths(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(path, str) and path.strip("/") for path in value):
        raise _invalid("streams must be an array of stream paths")
    if len(value) > STREAMS_MAX:
        raise _invalid(f"at most {STREAMS_MAX} streams are allowed in one request")
    return [path.strip("/") for path in value]


def _text(body: Mapping[str, object], name: str, bytes_max: int = TEXT_BYTES_MAX) -> str | None:
    value = body.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value.encode(errors="replace")) > bytes_max:
        raise _invalid(f"{name} must be a string of at most {bytes_max} bytes")
    return value


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="INVALID_REQUEST")
