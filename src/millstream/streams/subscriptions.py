"""Subscriptions: durable cursors over many streams, and the wakes that hand their work out.

This module keeps their state and says what follows from it; issuing wakes, timing leases and calling webhooks is
the shard's and the server's part. A subscription is pending when some linked stream's tail lies beyond the offset
acknowledged for it, and at most one wake is out at a time, fenced by `generation`.

There may be very many links. Each is a number in a table by path, so that a checkpoint can encode them all at once, and
`by_path` leads from a stream to its subscriptions without asking each. What is pending follows from links and tails: it
is no part of the durable state, and whoever hands work out keeps it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from millstream.errors import Conflict, InvalidRequest
from millstream.protocol.globs import Patterns
from millstream.protocol.offsets import BEGINNING_TOKEN, format_offset, parse_offset
from millstream.streams.records import (
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
)
from millstream.units import Milliseconds, Offset

LEASE_TTL_MS_DEFAULT: Final = 30_000
LEASE_TTL_MS_RANGE: Final = (1_000, 600_000)
STREAMS_MAX: Final = 10_000
ACKS_MAX: Final = 2_000
TEXT_BYTES_MAX: Final = 1024
NOTHING_ACKED: Final = Offset(-1)

EXPLICIT: Final = "explicit"
GLOB: Final = "glob"

# What a link and a subscription take in memory, roughly; a subscription beside its texts.
LINK_BYTES: Final = 400
SUBSCRIPTION_BYTES: Final = 2_000

TIDY_LINKS: Final = 1_000

TailOf = Callable[[str], Offset]


class Link(NamedTuple):
    """One stream of a subscription: how it came to be linked, and up to where it is done."""

    acked: Offset
    is_explicit: bool
    is_glob: bool

    @property
    def type(self) -> str:
        return EXPLICIT if self.is_explicit else GLOB

    @property
    def pending_beyond(self) -> int:
        return max(self.acked, 0)


class Links(Mapping[str, Link]):
    """Links by path, each packed into a number: `(acked + 1) << 2 | is_explicit << 1 | is_glob`."""

    def __init__(self, packed: dict[str, int] | None = None) -> None:
        self.packed = packed if packed is not None else {}
        self.explicit = {path for path, value in self.packed.items() if value & 2}

    def __getitem__(self, path: str) -> Link:
        value = self.packed[path]
        return Link(Offset((value >> 2) - 1), bool(value & 2), bool(value & 1))

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def __contains__(self, path: object) -> bool:
        return path in self.packed

    def put(self, path: str, link: Link) -> None:
        self.packed[path] = (link.acked + 1) << 2 | link.is_explicit << 1 | link.is_glob
        if link.is_explicit:
            self.explicit.add(path)
        else:
            self.explicit.discard(path)

    def drop(self, path: str) -> None:
        del self.packed[path]
        self.explicit.discard(path)


class Subscription:
    __slots__ = (
        "base_url",
        "config",
        "created_at_ms",
        "generation",
        "id",
        "is_complete",
        "is_deleted",
        "is_full",
        "itself",
        "last_error",
        "links",
        "next_attempt_ms",
        "owner",
        "pending",
        "retry_count",
        "wake",
    )

    def __init__(
        self,
        subscription_id: str,
        created_at_ms: Milliseconds,
        base_url: str,
        config: SubscriptionConfig,
        owner: str = "",
    ) -> None:
        self.id = subscription_id
        self.itself = (self,)
        self.created_at_ms = created_at_ms
        self.base_url = base_url
        self.config = config
        self.owner = owner
        self.links = Links()
        self.generation = 0
        self.wake: Wake | None = None
        self.retry_count = 0
        self.next_attempt_ms: Milliseconds | None = None
        self.last_error: str | None = None
        # Whether the streams that existed when it was made are all linked: until then it is not there for anybody.
        self.is_complete = True
        self.is_deleted = False
        # Not durable: streams with work and their tails, in the order in which they are handed out; and whether a
        # stream could not be linked because there are too many.
        self.pending: dict[str, Offset] = {}
        self.is_full = False

    @property
    def is_webhook(self) -> bool:
        return self.config.type == "webhook"

    def note(self, path: str, tail: Offset) -> None:
        """A linked stream has this tail: it has work if that lies beyond what was acknowledged."""
        if tail > self.links[path].pending_beyond:
            self.pending[path] = tail
        else:
            self.pending.pop(path, None)

    def checked_acks(self, acks: object, tail_of: TailOf) -> dict[str, Offset]:
        """The offsets a worker acknowledges, or INVALID_OFFSET: they must move forward and not past the tail."""
        if acks is None:
            return {}
        if not isinstance(acks, list):
            raise InvalidRequest("acks must be an array", code="INVALID_REQUEST")
        if len(acks) > ACKS_MAX:
            raise InvalidRequest(f"at most {ACKS_MAX} acks are allowed in one request", code="INVALID_REQUEST")
        checked: dict[str, Offset] = {}
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
        self.by_path: dict[str, tuple[Subscription, ...]] = {}
        self.patterns = Patterns()
        self.owned: Counter[str] = Counter()
        self.links = 0
        # Deleted ones whose links are still in `by_path`: there may be very many, and they go some at a time.
        self._leaving: list[Subscription] = []
        # What all this takes in memory, roughly.
        self.bytes = 0

    def restore(self, subscription: Subscription) -> None:
        """Take in a subscription with its links, from a checkpoint."""
        self._forget(subscription.id)
        self.by_id[subscription.id] = subscription
        self.owned[subscription.owner] += 1
        self.bytes += _size(subscription)
        if subscription.config.pattern is not None:
            self.patterns.add(subscription.id, subscription.config.pattern)
        for path in subscription.links:
            self._index(subscription, path)

    def created(self, record: SubscriptionCreated) -> None:
        subscription = Subscription(record.id, record.at_ms, record.base_url, record.config, record.owner)
        subscription.is_complete = record.complete
        self.restore(subscription)
        self._link(subscription, record.links)

    def deleted(self, record: SubscriptionDeleted) -> None:
        self._forget(record.id)

    def _forget(self, subscription_id: str) -> None:
        subscription = self.by_id.pop(subscription_id, None)
        if subscription is None:
            return
        self.owned[subscription.owner] -= 1
        if not self.owned[subscription.owner]:
            del self.owned[subscription.owner]
        self.bytes -= _size(subscription)
        if subscription.config.pattern is not None:
            self.patterns.remove(subscription_id, subscription.config.pattern)
        subscription.is_deleted = True
        self._leaving.append(subscription)
        self.tidy()

    def tidy(self) -> bool:
        """Forget some links of deleted subscriptions; says whether there are more."""
        for _ in range(TIDY_LINKS):
            if not self._leaving:
                return False
            subscription = self._leaving[-1]
            if subscription.links.packed:
                path, _ = subscription.links.packed.popitem()
                self._unindex(subscription, path)
            else:
                self._leaving.pop()
        return True

    def changed(self, record: SubscriptionChanged) -> None:
        self.tidy()
        subscription = self.by_id.get(record.id)
        if subscription is None:
            return
        subscription.generation = record.generation
        subscription.wake = record.wake
        subscription.retry_count = record.retry_count
        subscription.next_attempt_ms = record.next_attempt_ms
        subscription.last_error = record.last_error
        subscription.is_complete = subscription.is_complete or record.completes
        links = subscription.links
        for path in record.unlinked:
            link = links.get(path)
            if link is not None:
                self._put(subscription, path, link._replace(is_explicit=False))
        self._link(subscription, record.linked)
        for path, acked in record.acked.items():
            link = links.get(path)
            if link is not None:
                links.put(path, link._replace(acked=acked))

    def stream_purged(self, path: str) -> None:
        """A stream is gone: glob links go with it, explicit ones wait for its successor from the start."""
        for subscription in self.by_path.get(path, ()):
            link = subscription.links[path]
            subscription.pending.pop(path, None)
            self._put(subscription, path, link._replace(is_glob=False, acked=NOTHING_ACKED))

    def _link(self, subscription: Subscription, linked: Mapping[str, tuple[Iterable[str], Offset]]) -> None:
        for path, (types, acked) in linked.items():
            link = subscription.links.get(path)
            if link is None:
                link = Link(acked, EXPLICIT in types, GLOB in types)
                self._index(subscription, path)
            else:
                link = Link(link.acked, link.is_explicit or EXPLICIT in types, link.is_glob or GLOB in types)
            subscription.links.put(path, link)

    def _put(self, subscription: Subscription, path: str, link: Link) -> None:
        """Change a link; one that is neither explicit nor a pattern's any more is none."""
        if link.is_explicit or link.is_glob:
            subscription.links.put(path, link)
            return
        subscription.links.drop(path)
        subscription.pending.pop(path, None)
        subscription.is_full = False
        self._unindex(subscription, path)

    def _index(self, subscription: Subscription, path: str) -> None:
        others = self.by_path.get(path)
        # Most streams have one subscription, and its streams share one tuple: very many would burden the collector.
        self.by_path[path] = subscription.itself if others is None else (*others, subscription)
        self.links += 1
        self.bytes += LINK_BYTES

    def _unindex(self, subscription: Subscription, path: str) -> None:
        others = tuple(one for one in self.by_path[path] if one is not subscription)
        if others:
            self.by_path[path] = others
        else:
            del self.by_path[path]
        self.links -= 1
        self.bytes -= LINK_BYTES


def _size(subscription: Subscription) -> int:
    config = subscription.config
    texts = (subscription.id, subscription.base_url, config.pattern, config.webhook_url, config.description)
    return SUBSCRIPTION_BYTES + sum(sys.getsizeof(text) for text in (*texts, *config.streams))


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
        lease_ttl_ms=Milliseconds(lease_ttl_ms),
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
