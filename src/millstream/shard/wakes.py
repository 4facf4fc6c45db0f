"""Wakes: handing out a subscription's work, once at a time, until it is acknowledged.

Every step is a record before it has an effect: a generation exists durably before anybody is told of it, so a
worker of an earlier one is fenced even after a crash. What a crash may repeat is the telling. Commands on one
subscription run one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound
from millstream.protocol.globs import literal_prefix, matches
from millstream.protocol.keys import parse_v1_path
from millstream.protocol.offsets import format_offset
from millstream.protocol.tokens import issue_token, token_generation
from millstream.protocol.webhooks import WebhookSigner, checked_url
from millstream.shard.committer import Reply
from millstream.shard.shard import Shard
from millstream.streams.commands import AppendMessages
from millstream.streams.records import (
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
)
from millstream.streams.state import Stream
from millstream.streams.subscriptions import NOTHING_ACKED, Subscription, acked_token

logger = logging.getLogger("millstream.subscriptions")

SUBSCRIPTIONS_MAX: Final = 10_000
TOKEN_LIFETIME_MS: Final = 24 * 3600 * 1000
RETRY_SECONDS: Final = (1.0, 60.0)
RETRY_JITTER: Final = 0.2
COVERING_CACHE_MAX: Final = 100_000

Links = dict[str, tuple[list[str], int]]


class Wakes:
    """`deliver` is told of each webhook wake that is due; it calls `delivered` or `delivery_failed` in the end."""

    def __init__(self, shard: Shard, deliver: Callable[[Subscription, Wake], None]) -> None:
        self._shard = shard
        self._deliver = deliver
        self._state = shard.machine.subscriptions
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._covering: dict[str, list[Subscription]] = {}
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
        self._covering.clear()
        for subscription in list(self._state.by_id.values()):
            if subscription.wake is None:
                self._consider(subscription, ())
            elif subscription.is_webhook and subscription.next_attempt_ms is None:
                self._deliver(subscription, subscription.wake)
            elif not subscription.is_webhook and subscription.wake.holder is None:
                self._write_wake_event(subscription)
            self._arm(subscription)

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
        if subscription is None:
            raise NotFound(f"subscription {subscription_id!r} does not exist", code="SUBSCRIPTION_NOT_FOUND")
        return subscription

    def create(self, subscription_id: str, config: SubscriptionConfig, base_url: str, reply: Reply) -> None:
        """The reply gets (subscription, whether it is new), or an error."""

        def action(done: Reply) -> None:
            existing = self._state.by_id.get(subscription_id)
            if existing is not None:
                if existing.config != config:
                    raise Conflict(
                        f"subscription {subscription_id!r} exists with another configuration",
                        code="SUBSCRIPTION_ALREADY_EXISTS",
                    )
                done((existing, False))
                return
            self._check_config(config)
            record = SubscriptionCreated(
                subscription_id, self._shard.clock.now_ms(), base_url, config, self._initial_links(config)
            )
            self._shard.submit(record, lambda outcome: done(outcome or self._created(subscription_id)))

        self._alone(subscription_id, action, reply)

    def _created(self, subscription_id: str) -> tuple[Subscription, bool]:
        self._covering.clear()
        return self._state.by_id[subscription_id], True

    def _check_config(self, config: SubscriptionConfig) -> None:
        if len(self._state.by_id) >= SUBSCRIPTIONS_MAX:
            raise Conflict(f"there are {SUBSCRIPTIONS_MAX} subscriptions already", code="TOO_MANY_SUBSCRIPTIONS")
        if config.webhook_url is not None:
            checked_url(config.webhook_url)
        if config.wake_stream is not None and self._shard.machine.find(parse_v1_path(config.wake_stream)) is None:
            raise InvalidRequest(f"the wake stream {config.wake_stream!r} does not exist", code="INVALID_REQUEST")

    def _initial_links(self, config: SubscriptionConfig) -> Links:
        links: Links = {}
        if config.pattern is not None:
            for stream in self._shard.scan_paths(literal_prefix(config.pattern)):
                path = stream.key.v1_path
                if path != config.wake_stream and matches(config.pattern, path):
                    links[path] = (["glob"], stream.tail)
        for name in config.streams:
            path = parse_v1_path(name).v1_path
            types, acked = links.get(path, ([], self.tail_of(path)))
            links[path] = ([*types, "explicit"], acked)
        return links

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
            self._covering.clear()
            reply(outcome)

        self._alone(subscription_id, action, finish)

    def link(self, subscription_id: str, paths: list[str], reply: Reply) -> None:
        def action(done: Reply) -> None:
            subscription = self.get(subscription_id)
            names = [parse_v1_path(path).v1_path for path in paths]
            linked: Links = {name: (["explicit"], self.tail_of(name)) for name in names}
            self._change(subscription, done, linked=linked)

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
            subscription = self._pull_wake(subscription_id)
            wake = subscription.wake
            if wake is not None and wake.holder is not None:
                raise Conflict(
                    f"the wake is claimed by {wake.holder!r}",
                    code="ALREADY_CLAIMED",
                    details={"current_holder": wake.holder, "generation": subscription.generation},
                )
            if not subscription.pending_streams(self.tail_of):
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
                acked = {
                    path: tail
                    for path, tail in wake.tails.items()
                    if path in subscription.links and tail > subscription.links[path].acked
                }
                self._end_wake(subscription, done, acked)
            elif subscription.retry_count:
                self._change(subscription, done, wake=wake)
            else:
                done(None)

        self._alone(subscription_id, action, _ignore)

    def delivery_failed(self, subscription_id: str, wake_id: str) -> None:
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
            )

        self._alone(subscription_id, action, _ignore)

    # -- what appends and time do ------------------------------------------------------------------------------

    def _committed(self, streams: Iterable[Stream]) -> None:
        if not self._state.by_id or self._is_paused:
            return
        for stream in streams:
            if stream.deleted:
                self._covering.clear()
                continue
            path = stream.key.v1_path
            covering = self._covering.get(path)
            if covering is None:
                if len(self._covering) >= COVERING_CACHE_MAX:
                    self._covering.clear()
                covering = self._covering[path] = self._state.covering(path)
            for subscription in covering:
                is_new = path not in subscription.links
                if stream.tail and (is_new or subscription.wake is None):
                    self._consider(subscription, (path,) if is_new else ())

    def _consider(self, subscription: Subscription, new_paths: Iterable[str]) -> None:
        """Link what is new and wake the subscription if it is idle and has work."""

        def action(done: Reply) -> None:
            if subscription.id not in self._state.by_id:
                done(None)
                return
            linked: Links = {path: (["glob"], NOTHING_ACKED) for path in new_paths if path not in subscription.links}
            pending = bool(linked) or bool(subscription.pending_streams(self.tail_of))
            if subscription.wake is None and pending:
                self._issue(subscription, done, linked=linked)
            elif linked:
                self._change(subscription, done, wake=subscription.wake, linked=linked)
            else:
                done(None)

        self._alone(subscription.id, action, _ignore)

    def _end_wake(self, subscription: Subscription, done: Reply, acked: dict[str, int]) -> None:
        """Close the present wake; if work remains, the next one takes its place in the same record."""
        remaining = any(
            self.tail_of(path) > max(acked.get(path, link.acked), 0) for path, link in subscription.links.items()
        )
        if remaining:
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
        wake = self._new_wake(subscription, extra=linked or {})

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

    def _new_wake(self, subscription: Subscription, *, holder: str | None = None, extra: Iterable[str] = ()) -> Wake:
        return Wake(
            wake_id=f"w_{self._shard.clock.random_bytes(12).hex()}",
            # A pull-wake that nobody holds has no lease to lose.
            lease_until_ms=self._lease_until(subscription) if subscription.is_webhook or holder else 0,
            tails={path: self.tail_of(path) for path in [*subscription.links, *extra]},
            holder=holder,
        )

    def _write_wake_event(self, subscription: Subscription) -> None:
        """Append the wake to the wake stream, where workers wait for it."""
        assert subscription.config.wake_stream is not None
        key = parse_v1_path(subscription.config.wake_stream)
        stream = self._shard.machine.find(key)
        if stream is None:
            logger.warning("subscription %s: its wake stream %s does not exist", subscription.id, key)
            return
        pending = subscription.pending_streams(self.tail_of)
        event = {
            "type": "wake",
            "subscription_id": subscription.id,
            "stream": pending[0] if pending else "",
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
                self._change(subscription, retry, wake=renewed, retry_count=subscription.retry_count)
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
        )

        def applied(error: object) -> None:
            if error is None:
                if linked or unlinked:
                    self._covering.clear()
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
        stream = self._shard.machine.find(parse_v1_path(path))
        return stream.tail if stream is not None and not stream.deleted else 0

    def stream_infos(self, subscription: Subscription) -> list[dict[str, object]]:
        infos: list[dict[str, object]] = []
        for path, link in sorted(subscription.links.items()):
            tail = self.tail_of(path)
            infos.append(
                {
                    "path": path,
                    "link_type": link.type,
                    "acked_offset": acked_token(link.acked),
                    "tail_offset": format_offset(tail),
                    "has_pending": tail > max(link.acked, 0),
                }
            )
        return infos


def _ignore(outcome: object) -> None:
    if isinstance(outcome, MillstreamError):
        logger.warning("a subscription could not be updated: %s", outcome)
