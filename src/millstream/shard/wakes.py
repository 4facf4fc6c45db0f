"""Wakes: handing out a subscription's work, once at a time, until it is acknowledged.

Every step is a record before it has an effect: a generation exists durably before anybody is told of it, so a
worker of an earlier one is fenced even after a crash. What a crash may repeat is the telling. Commands on one
subscription run one after the other.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Final

import msgspec

from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound
from millstream.protocol.globs import Patterns, literal_prefix, wildcards_of
from millstream.protocol.keys import parse_v1_path
from millstream.protocol.offsets import format_offset
from millstream.protocol.tokens import issue_token, token_generation
from millstream.protocol.webhook_targets import NO_PRIVATE_TARGETS, PrivateTargets, checked_url
from millstream.protocol.webhooks import WebhookSigner
from millstream.shard.committer import Reply
from millstream.shard.shard import Shard
from millstream.shard.slices import in_slices
from millstream.streams.commands import AppendMessages
from millstream.streams.records import (
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
)
from millstream.streams.state import Stream
from millstream.streams.subscriptions import (
    EXPLICIT,
    GLOB,
    LINK_BYTES,
    NOTHING_ACKED,
    SUBSCRIPTION_BYTES,
    Subscription,
    acked_token,
)

logger = logging.getLogger("millstream.subscriptions")

TOKEN_LIFETIME_MS: Final = 24 * 3600 * 1000
RETRY_SECONDS: Final = (1.0, 60.0)
RETRY_JITTER: Final = 0.2
MATCHED_PATHS_MAX: Final = 100_000
# Links in one record: with the longest names that is 150 KB.
RECORD_LINKS_MAX: Final = 1_000
SORTED_SLICE: Final = 5_000
BY_PATTERN: Final = 1
BY_NAME: Final = 2
_TYPES: Final[dict[int, list[str]]] = {
    BY_PATTERN: [GLOB],
    BY_NAME: [EXPLICIT],
    BY_PATTERN | BY_NAME: [GLOB, EXPLICIT],
}
ERROR_BYTES_MAX: Final = 256

Links = dict[str, tuple[list[str], int]]


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """What subscriptions may take; `[subscriptions]` of the configuration says what each is."""

    private_targets: PrivateTargets = NO_PRIVATE_TARGETS
    count_max: int = 10_000
    principal_count_max: int = 1_000
    links_max: int = 200_000
    links_total_max: int = 1_000_000
    explicit_links_max: int = 10_000
    pattern_bytes_max: int = 256
    pattern_wildcards_max: int = 8
    page_streams_max: int = 1_000


class Wakes:
    """`deliver` is told of each webhook wake that is due; it calls `delivered` or `delivery_failed` in the end."""

    def __init__(
        self, shard: Shard, deliver: Callable[[Subscription, Wake], None], settings: SubscriptionSettings
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._deliver = deliver
        self._state = shard.machine.subscriptions
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Paths that no pattern was compared with yet, and those that were since the patterns last changed.
        self._unmatched: dict[str, None] = {}
        self._matched: set[str] = set()
        self._is_matching = False
        # By subscription: paths that its pattern fits and that are to be linked.
        self._found: dict[str, dict[str, None]] = {}
        # Subscriptions that will be looked at, as soon as nothing else is under way on them.
        self._considered: set[str] = set()
        # What the wake that is out was told of, for a webhook that is done with all of it.
        self._told: dict[str, tuple[str, dict[str, int]]] = {}
        self._signer: WebhookSigner | None = None
        self._is_paused = False
        shard.listeners.on_committed = self._committed

    @property
    def signer(self) -> WebhookSigner:
        if self._signer is None:
            assert self._shard.machine.secrets is not None
            self._signer = WebhookSigner(self._shard.machine.secrets.webhook_seed)
        return self._signer

    def resume(self) -> None:
        """After a restart: tell again what may not have been told, and time what is running."""
        self._is_paused = False
        for memory in (self._unmatched, self._matched, self._found, self._considered, self._told):
            memory.clear()
        for subscription in list(self._state.by_id.values()):
            if subscription.is_complete:
                self._alone(subscription.id, partial(self._resume, subscription), _ignore)
            else:  # nobody was told that it exists
                self.delete(subscription.id, _ignore)
        if self._state.patterns:
            # A crash may have come between the first append to a stream and its link.
            self._match([stream.key.v1_path for stream in self._shard.namespace.resident() if stream.tail])

    def _resume(self, subscription: Subscription, done: Reply) -> None:
        def surveyed(error: MillstreamError | None) -> None:
            wake = subscription.wake
            if self._is_paused:
                done(error)
                return
            if wake is None:
                self._consider(subscription)
            elif subscription.is_webhook and subscription.next_attempt_ms is None:
                self._deliver(subscription, wake)
            elif not subscription.is_webhook and wake.holder is None:
                self._write_wake_event(subscription)
            self._arm(subscription)
            done(error)

        subscription.pending.clear()
        in_slices(self._survey(subscription), surveyed)

    def _survey(self, subscription: Subscription) -> Iterator[None]:
        """Find out what is pending."""
        for path in list(subscription.links):
            if path in subscription.links:
                subscription.note(path, self.tail_of(path))
            yield

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def pause(self) -> None:
        """Leave the work to another node, until `resume`."""
        self._is_paused = True
        self.stop()
        self._timers.clear()

    # -- the resource --------------------------------------------------------------------------------------

    def get(self, subscription_id: str) -> Subscription:
        subscription = self._state.by_id.get(subscription_id)
        if subscription is None or not subscription.is_complete:
            raise NotFound(f"subscription {subscription_id!r} does not exist", code="SUBSCRIPTION_NOT_FOUND")
        return subscription

    def create(
        self, subscription_id: str, config: SubscriptionConfig, base_url: str, reply: Reply, *, owner: str = ""
    ) -> None:
        """The reply gets (subscription, whether it is new), or an error."""

        def action(done: Reply) -> None:
            existing = self._state.by_id.get(subscription_id)
            if existing is not None and existing.is_complete:
                if existing.config != config:
                    raise Conflict(
                        f"subscription {subscription_id!r} exists with another configuration",
                        code="SUBSCRIPTION_ALREADY_EXISTS",
                    )
                done((existing, False))
                return
            self._check_config(config, owner)
            links: dict[str, int] = {}

            def linked(error: MillstreamError | None) -> None:
                if error is not None:
                    done(error)
                else:
                    now_ms = self._shard.clock.now_ms()
                    rest = iter(links.items())
                    some = _links(islice(rest, RECORD_LINKS_MAX))
                    is_all = len(some) == len(links)
                    record = SubscriptionCreated(subscription_id, now_ms, base_url, config, some, owner, is_all)
                    self._shard.submit(record, partial(self._complete, subscription_id, rest, done))

            in_slices(self._initial_links(config, links), linked)

        self._alone(subscription_id, action, reply)

    def _complete(self, subscription_id: str, rest: Iterator[tuple[str, int]], done: Reply, error: object) -> None:
        """Link the rest of the streams that a new subscription covers, some with each record."""
        if isinstance(error, MillstreamError):
            if subscription_id in self._state.by_id:
                self._shard.submit(SubscriptionDeleted(subscription_id, self._shard.clock.now_ms()), _ignore)
            done(error)
            return
        subscription = self._state.by_id[subscription_id]
        if not subscription.is_complete:
            some = _links(islice(rest, RECORD_LINKS_MAX))
            then = partial(self._complete, subscription_id, rest, done)
            self._change(subscription, then, linked=some, completes=not some)
            return

        def surveyed(error: MillstreamError | None) -> None:
            self._matched.clear()
            self._consider(subscription)
            done(error or (subscription, True))

        # Appends that came after their stream was looked at are its first work.
        in_slices(self._survey(subscription), surveyed)

    def _check_config(self, config: SubscriptionConfig, owner: str) -> None:
        settings, state = self._settings, self._state
        if len(state.by_id) >= settings.count_max:
            raise Conflict(f"there are {settings.count_max} subscriptions already", code="TOO_MANY_SUBSCRIPTIONS")
        if owner and state.owned[owner] >= settings.principal_count_max:
            raise Conflict(
                f"this principal has {settings.principal_count_max} subscriptions already",
                code="TOO_MANY_SUBSCRIPTIONS",
                hint="delete some; subscriptions.principal_count_max is the limit",
            )
        if config.pattern is not None:
            if len(config.pattern.encode()) > settings.pattern_bytes_max:
                raise _invalid(f"pattern must have at most {settings.pattern_bytes_max} bytes")
            if wildcards_of(config.pattern) > settings.pattern_wildcards_max:
                raise _invalid(f"pattern must have at most {settings.pattern_wildcards_max} segments * and **")
        if config.webhook_url is not None:
            checked_url(config.webhook_url, settings.private_targets)
        if config.wake_stream is not None and self._shard.namespace.find(parse_v1_path(config.wake_stream)) is None:
            raise _invalid(f"the wake stream {config.wake_stream!r} does not exist")
        self._check_room(len(config.streams), len(config.streams))

    def _check_room(self, count: int, explicit: int, *, more: int | None = None) -> None:
        """Refuse more links than a subscription, or all of them together, may have."""
        settings = self._settings
        if count > settings.links_max or explicit > settings.explicit_links_max:
            limit = "links_max" if count > settings.links_max else "explicit_links_max"
            raise Conflict(
                f"the subscription would have more than {getattr(settings, limit)} streams",
                code="TOO_MANY_LINKS",
                hint=f"subscriptions.{limit} is the limit; make several with narrower patterns",
            )
        new = count if more is None else more
        if new * LINK_BYTES + SUBSCRIPTION_BYTES > self._shard.budget.subscription_bytes_left:
            raise Conflict(
                "subscriptions take as much memory as they may",
                code="TOO_MANY_LINKS",
                hint="delete some, or raise hot.bytes_max, of which they may have a quarter",
            )
        if self._state.links + new > settings.links_total_max:
            raise Conflict(
                f"all subscriptions together would have more than {settings.links_total_max} streams",
                code="TOO_MANY_LINKS",
                hint="subscriptions.links_total_max is the limit",
            )

    def _initial_links(self, config: SubscriptionConfig, links: dict[str, int]) -> Iterator[None]:
        """Fill in the links that a new subscription begins with: tails, with the types in their last bits."""
        if config.pattern is not None:
            pattern = Patterns()
            pattern.add("", config.pattern)
            for streams in self._shard.scan_paths_in_slices(literal_prefix(config.pattern)):
                for stream in streams:
                    path = stream.key.v1_path
                    if path != config.wake_stream and pattern.matching(path):
                        links[path] = stream.tail << 2 | BY_PATTERN
                self._check_room(len(links), len(config.streams))
                yield
        for name in config.streams:
            path = parse_v1_path(name).v1_path
            known = links.get(path)
            links[path] = (self.tail_of(path) << 2 if known is None else known) | BY_NAME
            yield
        self._check_room(len(links), len(config.streams))

    def delete(self, subscription_id: str, reply: Reply) -> None:
        def action(done: Reply) -> None:
            if subscription_id not in self._state.by_id:
                done(None)
                return
            self._shard.submit(SubscriptionDeleted(subscription_id, self._shard.clock.now_ms()), done)

        def finish(outcome: object) -> None:
            timer = self._timers.pop(subscription_id, None)
            if timer is not None:
                timer.cancel()
            self._found.pop(subscription_id, None)
            self._told.pop(subscription_id, None)
            in_slices(iter(self._state.tidy, False), _ignore)
            reply(outcome)

        self._alone(subscription_id, action, finish)

    def link(self, subscription_id: str, paths: list[str], reply: Reply) -> None:
        """Link streams explicitly, so many with each record; after a crash between two, asking again links the rest."""

        def action(done: Reply) -> None:
            subscription = self.get(subscription_id)
            links = subscription.links
            names = list(dict.fromkeys(parse_v1_path(path).v1_path for path in paths))
            new = sum(name not in links for name in names)
            explicit = sum(name not in links.explicit for name in names)
            self._check_room(len(links) + new, len(links.explicit) + explicit, more=new)
            some = iter(names)

            def link_more(error: object) -> None:
                now = list(islice(some, RECORD_LINKS_MAX))
                if error is not None or not now:
                    done(error)
                else:
                    linked: Links = {name: ([EXPLICIT], self.tail_of(name)) for name in now}
                    self._change(subscription, link_more, linked=linked)

            link_more(None)

        self._alone(subscription_id, action, reply)

    def unlink(self, subscription_id: str, path: str, reply: Reply) -> None:
        def action(done: Reply) -> None:
            subscription = self.get(subscription_id)
            if path in subscription.links:
                self._change(subscription, done, unlinked=[path])
            else:
                done(None)

        self._alone(subscription_id, action, reply)

    # -- work in progress ------------------------------------------------------------------------------------

    def claim(self, subscription_id: str, worker: str, reply: Reply) -> None:
        """The reply gets (subscription, its wake, the worker's token), or an error."""

        def action(done: Reply) -> None:
            self._shard.listeners.tell_committed()
            subscription = self._pull_wake(subscription_id)
            wake = subscription.wake
            if wake is not None and wake.holder is not None:
                raise Conflict(
                    f"the wake is claimed by {wake.holder!r}",
                    code="ALREADY_CLAIMED",
                    details={"current_holder": wake.holder, "generation": subscription.generation},
                )
            if not subscription.pending:
                raise Conflict("the subscription has no pending work", code="NO_PENDING_WORK")
            claimed = self._new_wake(subscription, holder=worker)
            generation = subscription.generation + 1
            if wake is not None:
                generation, claimed = (
                    subscription.generation,
                    msgspec.structs.replace(claimed, wake_id=wake.wake_id),
                )
            self._change(
                subscription,
                lambda error: done(error or (subscription, claimed, self._token(subscription_id, generation))),
                wake=claimed,
                generation=generation,
            )

        self._alone(subscription_id, action, reply)

    def acknowledge(
        self, subscription_id: str, token: str, body: dict[str, object], reply: Reply, *, by_webhook: bool
    ) -> None:
        """Progress on a wake: acknowledges offsets, extends the lease, and with `done` ends the wake.

        The reply gets whether another wake follows, or an error.
        """

        def action(done: Reply) -> None:
            subscription = self.get(subscription_id) if by_webhook else self._pull_wake(subscription_id)
            wake = self._fenced(subscription, token, body)
            acked = subscription.checked_acks(body.get("acks"), self.tail_of)
            if body.get("done") is True:
                self._end_wake(subscription, done, acked)
                return
            extended = msgspec.structs.replace(wake, lease_until_ms=self._lease_until(subscription))
            self._change(subscription, lambda error: done(error or False), wake=extended, acked=acked)

        self._alone(subscription_id, action, reply)

    def release(self, subscription_id: str, token: str, body: dict[str, object], reply: Reply) -> None:
        def action(done: Reply) -> None:
            subscription = self._pull_wake(subscription_id)
            self._fenced(subscription, token, body)
            self._end_wake(subscription, done, {})

        self._alone(subscription_id, action, reply)

    def delivered(self, subscription_id: str, wake_id: str, *, is_done: bool) -> None:
        """A webhook answered with success; `is_done` acknowledges all it was told of."""

        def action(done: Reply) -> None:
            subscription = self._state.by_id.get(subscription_id)
            wake = subscription.wake if subscription is not None else None
            if subscription is None or wake is None or wake.wake_id != wake_id:
                done(None)
            elif is_done:
                told_wake, told = self._told.get(subscription_id, ("", {}))
                acked = {
                    path: tail
                    for path, tail in (told if told_wake == wake_id else {}).items()
                    if path in subscription.links and tail > subscription.links[path].acked
                }
                self._end_wake(subscription, done, acked)
            elif subscription.retry_count:
                self._change(subscription, done, wake=wake)
            else:
                done(None)

        self._alone(subscription_id, action, _ignore)

    def delivery_failed(self, subscription_id: str, wake_id: str, reason: str = "") -> None:
        def action(done: Reply) -> None:
            subscription = self._state.by_id.get(subscription_id)
            wake = subscription.wake if subscription is not None else None
            if subscription is None or wake is None or wake.wake_id != wake_id:
                done(None)
                return
            low, high = RETRY_SECONDS
            delay = min(low * 2**subscription.retry_count, high)
            delay *= self._shard.clock.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)
            self._change(
                subscription,
                done,
                wake=wake,
                retry_count=min(subscription.retry_count + 1, 32),
                next_attempt_ms=self._shard.clock.now_ms() + int(delay * 1000),
                last_error=reason[:ERROR_BYTES_MAX],
            )

        self._alone(subscription_id, action, _ignore)

    # -- what appends and time do ------------------------------------------------------------------------------

    def _committed(self, streams: Iterable[Stream]) -> None:
        if not self._state.by_id or self._is_paused:
            return
        by_path, matched, new = self._state.by_path, self._matched, []
        for stream in streams:
            path = stream.key.v1_path
            if stream.deleted:
                matched.discard(path)
                for subscription in by_path.get(path, ()):
                    subscription.pending.pop(path, None)
                continue
            for subscription in by_path.get(path, ()):
                subscription.note(path, stream.tail)
                if subscription.wake is None and subscription.pending and not subscription.is_deleted:
                    self._consider(subscription)
            if stream.tail and path not in matched:
                new.append(path)
        if new and self._state.patterns:
            self._match(new)

    def _match(self, paths: Iterable[str]) -> None:
        """Find out, soon, whose patterns these paths fit."""
        self._unmatched.update(dict.fromkeys(paths))
        if not self._is_matching:
            self._is_matching = True
            in_slices(self._matching(), self._all_matched)

    def _all_matched(self, error: MillstreamError | None) -> None:
        self._is_matching = False

    def _matching(self) -> Iterator[None]:
        patterns = self._state.patterns
        while self._unmatched:
            path = next(iter(self._unmatched))
            version = patterns.version
            names: set[str] = set()
            for fitting in patterns.steps(path):
                names = fitting
                yield
            if version != patterns.version:
                continue  # the patterns changed half-way: once more
            self._unmatched.pop(path, None)
            if len(self._matched) >= MATCHED_PATHS_MAX:
                self._matched.clear()
            self._matched.add(path)
            for name in names:
                subscription = self._state.by_id.get(name)
                if subscription and path not in subscription.links and path != subscription.config.wake_stream:
                    self._found.setdefault(name, {})[path] = None
                    self._consider(subscription)

    def _consider(self, subscription: Subscription) -> None:
        """Link what is new and wake the subscription if it is idle and has work."""
        if subscription.id not in self._considered:
            self._considered.add(subscription.id)
            self._alone(subscription.id, partial(self._look_at, subscription.id), _ignore)

    def _look_at(self, subscription_id: str, done: Reply) -> None:
        self._considered.discard(subscription_id)
        subscription = self._state.by_id.get(subscription_id)
        if subscription is None or not subscription.is_complete or self._is_paused:
            done(None)
            return
        linked = self._links_found(subscription)
        if subscription.wake is None and (linked or subscription.pending):
            self._issue(subscription, done, linked=linked)
        elif linked:
            self._change(subscription, done, linked=linked)
        else:
            done(None)

    def _links_found(self, subscription: Subscription) -> Links:
        """The next streams to be linked by the pattern, as many as fit into a record and as there is room for."""
        found = self._found.pop(subscription.id, {})
        room = min(
            self._shard.budget.subscription_bytes_left // LINK_BYTES,
            self._settings.links_max - len(subscription.links),
            self._settings.links_total_max - self._state.links,
        )
        linked: Links = {}
        for path in list(islice(found, RECORD_LINKS_MAX)):
            del found[path]
            if path in subscription.links or not self.tail_of(path):
                continue
            if len(linked) < room:
                linked[path] = ([GLOB], NOTHING_ACKED)
                continue
            self._matched.discard(path)  # its next append asks again
            if not subscription.is_full:
                subscription.is_full = True
                logger.warning(
                    "subscription %s has as many streams as it may have: %s is left out", subscription.id, path
                )
        if found:
            self._found[subscription.id] = found
            self._consider(subscription)
        return linked

    def _end_wake(self, subscription: Subscription, done: Reply, acked: dict[str, int]) -> None:
        """Close the present wake; if work remains, the next one takes its place in the same record."""
        self._told.pop(subscription.id, None)
        if any(tail > acked.get(path, NOTHING_ACKED) for path, tail in subscription.pending.items()):
            self._issue(subscription, lambda error: done(error or True), acked=acked)
        else:
            self._change(subscription, lambda error: done(error or False), wake=None, acked=acked)

    def _issue(
        self,
        subscription: Subscription,
        done: Reply,
        *,
        linked: Links | None = None,
        acked: dict[str, int] | None = None,
    ) -> None:
        wake = self._new_wake(subscription)

        def issued(error: object) -> None:
            if error is None and subscription.wake is not None:
                if subscription.is_webhook:
                    self._deliver(subscription, subscription.wake)
                else:
                    self._write_wake_event(subscription)
            done(error)

        self._change(
            subscription,
            issued,
            wake=wake,
            generation=subscription.generation + 1,
            linked=linked or {},
            acked=acked or {},
        )

    def _new_wake(self, subscription: Subscription, *, holder: str | None = None) -> Wake:
        return Wake(
            wake_id=f"w_{self._shard.clock.random_bytes(12).hex()}",
            # A pull-wake that nobody holds has no lease to lose.
            lease_until_ms=self._lease_until(subscription) if subscription.is_webhook or holder else 0,
            holder=holder,
        )

    def _write_wake_event(self, subscription: Subscription) -> None:
        """Append the wake to the wake stream, where workers wait for it."""
        assert subscription.config.wake_stream is not None
        key = parse_v1_path(subscription.config.wake_stream)
        stream = self._shard.namespace.find(key)
        if stream is None:
            logger.warning("subscription %s: its wake stream %s does not exist", subscription.id, key)
            return
        event = {
            "type": "wake",
            "subscription_id": subscription.id,
            "stream": next(iter(subscription.pending), ""),
            "generation": subscription.generation,
            "ts": self._shard.clock.now_ms(),
        }

        def written(outcome: object) -> None:
            if isinstance(outcome, MillstreamError):
                logger.warning("subscription %s: the wake could not be written: %s", subscription.id, outcome)

        self._shard.append(AppendMessages(key, stream.content_type, msgspec.json.encode(event)), written)

    def _arm(self, subscription: Subscription) -> None:
        """Set the subscription's timer to whatever comes next: a retry, or the end of the lease."""
        timer = self._timers.pop(subscription.id, None)
        if timer is not None:
            timer.cancel()
        due_ms = subscription.next_attempt_ms
        if due_ms is None and subscription.wake is not None:
            due_ms = subscription.wake.lease_until_ms
        if due_ms:
            delay = max(0.0, (due_ms - self._shard.clock.now_ms()) / 1000)
            loop = asyncio.get_running_loop()
            self._timers[subscription.id] = loop.call_later(delay, self._due, subscription.id)

    def _due(self, subscription_id: str) -> None:
        self._timers.pop(subscription_id, None)

        def action(done: Reply) -> None:
            subscription = self._state.by_id.get(subscription_id)
            wake = subscription.wake if subscription is not None else None
            now_ms = self._shard.clock.now_ms()
            if subscription is None or wake is None:
                done(None)
            elif subscription.next_attempt_ms is not None:
                if now_ms < subscription.next_attempt_ms:
                    self._arm(subscription)
                    done(None)
                    return
                renewed = msgspec.structs.replace(wake, lease_until_ms=self._lease_until(subscription))
                retry = partial(self._retry, subscription, renewed, done)
                self._change(
                    subscription,
                    retry,
                    wake=renewed,
                    retry_count=subscription.retry_count,
                    last_error=subscription.last_error,
                )
            elif wake.lease_until_ms and now_ms >= wake.lease_until_ms:
                self._end_wake(subscription, done, {})
            else:
                self._arm(subscription)
                done(None)

        self._alone(subscription_id, action, _ignore)

    def _retry(self, subscription: Subscription, wake: Wake, done: Reply, error: object) -> None:
        if error is None:
            self._deliver(subscription, wake)
        done(error)

    # -- small parts -----------------------------------------------------------------------------------------

    def _alone(self, subscription_id: str, action: Callable[[Reply], None], reply: Reply) -> None:
        self._shard.alone(("subscription", subscription_id), action, reply)

    def _change(
        self,
        subscription: Subscription,
        done: Reply,
        *,
        wake: Wake | msgspec.UnsetType | None = msgspec.UNSET,
        generation: int | None = None,
        retry_count: int = 0,
        next_attempt_ms: int | None = None,
        linked: Links | None = None,
        unlinked: list[str] | None = None,
        acked: dict[str, int] | None = None,
        completes: bool = False,
        last_error: str | None = None,
    ) -> None:
        record = SubscriptionChanged(
            subscription.id,
            self._shard.clock.now_ms(),
            subscription.generation if generation is None else generation,
            subscription.wake if isinstance(wake, msgspec.UnsetType) else wake,
            retry_count,
            next_attempt_ms,
            linked or {},
            unlinked or [],
            acked or {},
            completes,
            last_error,
        )

        def applied(error: object) -> None:
            if error is None:
                for path in [*(linked or ()), *(acked or ())]:
                    if path in subscription.links:
                        subscription.note(path, self.tail_of(path))
                self._matched.difference_update(unlinked or ())
                self._arm(subscription)
            done(error)

        self._shard.submit(record, applied)

    def _pull_wake(self, subscription_id: str) -> Subscription:
        subscription = self.get(subscription_id)
        if subscription.is_webhook:
            raise InvalidRequest("only pull-wake subscriptions are claimed", code="INVALID_REQUEST")
        return subscription

    def _fenced(self, subscription: Subscription, token: str, body: dict[str, object]) -> Wake:
        """The present wake, if the token and the body are both of its generation."""
        assert self._shard.machine.secrets is not None
        generation = token_generation(
            self._shard.machine.secrets.token_key, subscription.id, token, self._shard.clock.now_ms()
        )
        wake = subscription.wake
        if (
            wake is None
            or not generation == body.get("generation") == subscription.generation
            or body.get("wake_id") != wake.wake_id
        ):
            raise Conflict("this wake is over; another generation has begun or none is out", code="FENCED")
        return wake

    def _token(self, subscription_id: str, generation: int) -> str:
        assert self._shard.machine.secrets is not None
        expires_at_ms = self._shard.clock.now_ms() + TOKEN_LIFETIME_MS
        return issue_token(self._shard.machine.secrets.token_key, subscription_id, generation, expires_at_ms)

    def token(self, subscription: Subscription) -> str:
        return self._token(subscription.id, subscription.generation)

    def _lease_until(self, subscription: Subscription) -> int:
        return self._shard.clock.now_ms() + subscription.config.lease_ttl_ms

    def tail_of(self, path: str) -> int:
        stream = self._shard.namespace.peek_key(parse_v1_path(path))
        return stream.tail if stream is not None and not stream.deleted else 0

    def hand_out(self, subscription: Subscription, wake: Wake) -> list[dict[str, object]]:
        """The streams that a wake tells of: some of those with work, and the next time others."""
        page = dict(islice(subscription.pending.items(), self._settings.page_streams_max))
        self._told[subscription.id] = (wake.wake_id, page)
        for path in page:
            subscription.pending[path] = subscription.pending.pop(path)
        return [
            {**self._link_info(subscription, path), "tail_offset": format_offset(tail), "has_pending": True}
            for path, tail in page.items()
        ]

    def link_infos(self, subscription: Subscription, after: str, limit: int, reply: Reply) -> None:
        """The reply gets a page of all links, by path."""
        page: list[str] = []

        def sort() -> Iterator[None]:
            paths = list(subscription.links)
            for first in range(0, len(paths), SORTED_SLICE):
                some = (path for path in paths[first : first + SORTED_SLICE] if path > after)
                page[:] = heapq.nsmallest(limit, chain(page, some))
                yield

        def sorted_(error: MillstreamError | None) -> None:
            reply([self._link_info(subscription, path) for path in page if path in subscription.links])

        in_slices(sort(), sorted_)

    @staticmethod
    def _link_info(subscription: Subscription, path: str) -> dict[str, object]:
        link = subscription.links[path]
        return {"path": path, "link_type": link.type, "acked_offset": acked_token(link.acked)}


def _links(packed: Iterable[tuple[str, int]]) -> Links:
    return {path: (_TYPES[value & (BY_PATTERN | BY_NAME)], value >> 2) for path, value in packed}


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="INVALID_REQUEST")


def _ignore(outcome: object) -> None:
    if isinstance(outcome, MillstreamError):
        logger.warning("a subscription could not be updated: %s", outcome)
