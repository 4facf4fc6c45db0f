"""Wakes: handing out a subscription's work, once at a time, until it is acknowledged.

Every step is a record before it has an effect: a generation exists durably before anybody is told of it, so a
worker of an earlier one is fenced even after a crash. What a crash may repeat is the telling. Commands on one
subscription run one after the other.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, Final, TypeVar

import msgspec

from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound
from millstream.pending import Pending
from millstream.protocol.globs import Patterns, literal_prefix
from millstream.protocol.keys import parse_v1_path
from millstream.protocol.offsets import START, format_offset
from millstream.protocol.tokens import issue_token, token_generation
from millstream.protocol.webhooks import WebhookSigner
from millstream.shard.pattern_matching import PatternMatching
from millstream.shard.shard import Shard
from millstream.shard.slices import in_slices
from millstream.shard.subscription_quotas import SubscriptionQuotas, SubscriptionSettings
from millstream.streams.commands import AppendMessages
from millstream.streams.records import (
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
)
from millstream.streams.state import Stream
from millstream.streams.subscriptions import EXPLICIT, GLOB, NOTHING_ACKED, Subscription, acked_token
from millstream.units import Milliseconds, Offset

logger = logging.getLogger("millstream.subscriptions")

T = TypeVar("T")

TOKEN_LIFETIME_MS: Final = 24 * 3600 * 1000
RETRY_SECONDS: Final = (1.0, 60.0)
RETRY_JITTER: Final = 0.2
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

Links = dict[str, tuple[list[str], Offset]]


class Wakes:
    """`deliver` is told of each webhook wake that is due; it calls `delivered` or `delivery_failed` in the end."""

    def __init__(
        self, shard: Shard, deliver: Callable[[Subscription, Wake], None], settings: SubscriptionSettings
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._deliver = deliver
        self._state = shard.machine.subscriptions
        self._quotas = SubscriptionQuotas(settings, shard.machine, shard.budget)
        self._matching = PatternMatching(self._state, self._consider)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Subscriptions that will be looked at, as soon as nothing else is under way on them.
        self._considered: set[str] = set()
        # What the wake that is out was told of, for a webhook that is done with all of it.
        self._handed_out: dict[str, tuple[str, dict[str, Offset]]] = {}
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
        self._matching.clear()
        self._considered.clear()
        self._handed_out.clear()
        for subscription in list(self._state.by_id.values()):
            if subscription.is_complete:
                self._exclusively(subscription.id, partial(self._resume, subscription)).when_settled(_log_failure)
            else:  # nobody was told that it exists
                self.delete(subscription.id).when_settled(_log_failure)
        if self._state.patterns:
            # A crash may have come between the first append to a stream and its link.
            self._matching.match([stream.key.v1_path for stream in self._shard.namespace.resident() if stream.tail])

    async def _resume(self, subscription: Subscription) -> None:
        subscription.pending.clear()
        await in_slices(self._survey(subscription))
        wake = subscription.wake
        if self._is_paused:
            return
        if wake is None:
            self._consider(subscription)
        elif subscription.is_webhook and subscription.next_attempt_ms is None:
            self._deliver(subscription, wake)
        elif not subscription.is_webhook and wake.holder is None:
            self._write_wake_event(subscription)
        self._arm(subscription)

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
        self, subscription_id: str, config: SubscriptionConfig, base_url: str, *, owner: str = ""
    ) -> Pending[tuple[Subscription, bool]]:
        """The subscription, and whether it is new."""
        return self._exclusively(subscription_id, partial(self._create, subscription_id, config, base_url, owner))

    async def _create(
        self, subscription_id: str, config: SubscriptionConfig, base_url: str, owner: str
    ) -> tuple[Subscription, bool]:
        existing = self._state.by_id.get(subscription_id)
        if existing is not None and existing.is_complete:
            if existing.config != config:
                raise Conflict(
                    f"subscription {subscription_id!r} exists with another configuration",
                    code="SUBSCRIPTION_ALREADY_EXISTS",
                )
            return existing, False
        self._quotas.check_config(config, owner)
        links: dict[str, int] = {}
        await in_slices(self._initial_links(config, links))
        rest = iter(links.items())
        some = _links(islice(rest, RECORD_LINKS_MAX))
        is_all = len(some) == len(links)
        now_ms = self._shard.clock.now_ms()
        record = SubscriptionCreated(subscription_id, now_ms, base_url, config, some, owner, is_all)
        try:
            await self._shard.committer.commit(record)
            subscription = self._state.by_id[subscription_id]
            await self._complete(subscription, rest)
        except MillstreamError:
            if subscription_id in self._state.by_id:
                removal = SubscriptionDeleted(subscription_id, self._shard.clock.now_ms())
                self._shard.committer.commit(removal).when_settled(_log_failure)
            raise
        # Appends that came after their stream was looked at are its first work.
        await in_slices(self._survey(subscription))
        self._matching.forget_all()
        self._consider(subscription)
        return subscription, True

    async def _complete(self, subscription: Subscription, rest: Iterator[tuple[str, int]]) -> None:
        """Link the rest of the streams that a new subscription covers, some with each record."""
        while not subscription.is_complete:
            some = _links(islice(rest, RECORD_LINKS_MAX))
            await self._change(subscription, linked=some, completes=not some)

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
                self._quotas.check_room(len(links), len(config.streams))
                yield
        for name in config.streams:
            path = parse_v1_path(name).v1_path
            known = links.get(path)
            links[path] = (self.tail_of(path) << 2 if known is None else known) | BY_NAME
            yield
        self._quotas.check_room(len(links), len(config.streams))

    def delete(self, subscription_id: str) -> Pending[None]:
        return self._exclusively(subscription_id, partial(self._delete, subscription_id))

    async def _delete(self, subscription_id: str) -> None:
        try:
            if subscription_id in self._state.by_id:
                await self._shard.committer.commit(SubscriptionDeleted(subscription_id, self._shard.clock.now_ms()))
        finally:
            timer = self._timers.pop(subscription_id, None)
            if timer is not None:
                timer.cancel()
            self._matching.found.pop(subscription_id, None)
            self._handed_out.pop(subscription_id, None)
            in_slices(iter(self._state.tidy, False)).when_settled(_log_failure)

    def link(self, subscription_id: str, paths: list[str]) -> Pending[None]:
        """Link streams explicitly, so many with each record; after a crash between two, asking again links the rest."""
        return self._exclusively(subscription_id, partial(self._link, subscription_id, paths))

    async def _link(self, subscription_id: str, paths: list[str]) -> None:
        subscription = self.get(subscription_id)
        links = subscription.links
        names = list(dict.fromkeys(parse_v1_path(path).v1_path for path in paths))
        new = sum(name not in links for name in names)
        explicit = sum(name not in links.explicit for name in names)
        self._quotas.check_room(len(links) + new, len(links.explicit) + explicit, more=new)
        for first in range(0, len(names), RECORD_LINKS_MAX):
            some = names[first : first + RECORD_LINKS_MAX]
            await self._change(subscription, linked={name: ([EXPLICIT], self.tail_of(name)) for name in some})

    def unlink(self, subscription_id: str, path: str) -> Pending[None]:
        return self._exclusively(subscription_id, partial(self._unlink, subscription_id, path))

    async def _unlink(self, subscription_id: str, path: str) -> None:
        subscription = self.get(subscription_id)
        if path in subscription.links:
            await self._change(subscription, unlinked=[path])

    # -- work in progress ------------------------------------------------------------------------------------

    def claim(self, subscription_id: str, worker: str) -> Pending[tuple[Subscription, Wake, str]]:
        """The subscription, its wake, and the worker's token."""
        return self._exclusively(subscription_id, partial(self._claim, subscription_id, worker))

    async def _claim(self, subscription_id: str, worker: str) -> tuple[Subscription, Wake, str]:
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
            generation, claimed = subscription.generation, msgspec.structs.replace(claimed, wake_id=wake.wake_id)
        await self._change(subscription, wake=claimed, generation=generation)
        return subscription, claimed, self._token(subscription_id, generation)

    def acknowledge(
        self, subscription_id: str, token: str, body: dict[str, object], *, by_webhook: bool
    ) -> Pending[bool]:
        """Progress on a wake: acknowledges offsets, extends the lease, and with `done` ends the wake.

        The outcome is whether another wake follows.
        """
        work = partial(self._acknowledge, subscription_id, token, body, by_webhook=by_webhook)
        return self._exclusively(subscription_id, work)

    async def _acknowledge(
        self, subscription_id: str, token: str, body: dict[str, object], *, by_webhook: bool
    ) -> bool:
        subscription = self.get(subscription_id) if by_webhook else self._pull_wake(subscription_id)
        wake = self._fenced(subscription, token, body)
        acked = subscription.checked_acks(body.get("acks"), self.tail_of)
        if body.get("done") is True:
            return await self._end_wake(subscription, acked)
        extended = msgspec.structs.replace(wake, lease_until_ms=self._lease_until(subscription))
        await self._change(subscription, wake=extended, acked=acked)
        return False

    def release(self, subscription_id: str, token: str, body: dict[str, object]) -> Pending[bool]:
        """Give a wake back; the outcome is whether another one follows."""
        return self._exclusively(subscription_id, partial(self._release, subscription_id, token, body))

    async def _release(self, subscription_id: str, token: str, body: dict[str, object]) -> bool:
        subscription = self._pull_wake(subscription_id)
        self._fenced(subscription, token, body)
        return await self._end_wake(subscription, {})

    def delivered(self, subscription_id: str, wake_id: str, *, is_done: bool) -> None:
        """A webhook answered with success; `is_done` acknowledges all it was told of."""
        work = partial(self._delivered, subscription_id, wake_id, is_done=is_done)
        self._exclusively(subscription_id, work).when_settled(_log_failure)

    async def _delivered(self, subscription_id: str, wake_id: str, *, is_done: bool) -> None:
        subscription = self._waiting_for(subscription_id, wake_id)
        if subscription is None:
            return
        if is_done:
            told_wake, told = self._handed_out.get(subscription_id, ("", {}))
            acked = {
                path: tail
                for path, tail in (told if told_wake == wake_id else {}).items()
                if path in subscription.links and tail > subscription.links[path].acked
            }
            await self._end_wake(subscription, acked)
        elif subscription.retry_count:
            await self._change(subscription)

    def delivery_failed(self, subscription_id: str, wake_id: str, reason: str = "") -> None:
        work = partial(self._delivery_failed, subscription_id, wake_id, reason)
        self._exclusively(subscription_id, work).when_settled(_log_failure)

    async def _delivery_failed(self, subscription_id: str, wake_id: str, reason: str) -> None:
        subscription = self._waiting_for(subscription_id, wake_id)
        if subscription is None:
            return
        low, high = RETRY_SECONDS
        delay = min(low * 2**subscription.retry_count, high)
        delay *= self._shard.clock.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)
        await self._change(
            subscription,
            retry_count=min(subscription.retry_count + 1, 32),
            next_attempt_ms=self._shard.clock.now_ms() + int(delay * 1000),
            last_error=reason[:ERROR_BYTES_MAX],
        )

    def _waiting_for(self, subscription_id: str, wake_id: str) -> Subscription | None:
        """The subscription, if that wake is still out."""
        subscription = self._state.by_id.get(subscription_id)
        wake = subscription.wake if subscription is not None else None
        return subscription if wake is not None and wake.wake_id == wake_id else None

    # -- what appends and time do ------------------------------------------------------------------------------

    def _committed(self, streams: Iterable[Stream]) -> None:
        if not self._state.by_id or self._is_paused:
            return
        by_path, matching, new = self._state.by_path, self._matching, []
        for stream in streams:
            path = stream.key.v1_path
            if stream.deleted:
                matching.forget([path])
                for subscription in by_path.get(path, ()):
                    subscription.pending.pop(path, None)
                continue
            for subscription in by_path.get(path, ()):
                subscription.note(path, stream.tail)
                if subscription.wake is None and subscription.pending and not subscription.is_deleted:
                    self._consider(subscription)
            if stream.tail and not matching.is_matched(path):
                new.append(path)
        if new and self._state.patterns:
            matching.match(new)

    def _consider(self, subscription: Subscription) -> None:
        """Link what is new and wake the subscription if it is idle and has work."""
        if subscription.id not in self._considered:
            self._considered.add(subscription.id)
            self._exclusively(subscription.id, partial(self._look_at, subscription.id)).when_settled(_log_failure)

    async def _look_at(self, subscription_id: str) -> None:
        self._considered.discard(subscription_id)
        subscription = self._state.by_id.get(subscription_id)
        if subscription is None or not subscription.is_complete or self._is_paused:
            return
        linked = self._links_found(subscription)
        if subscription.wake is None and (linked or subscription.pending):
            await self._issue(subscription, linked=linked)
        elif linked:
            await self._change(subscription, linked=linked)

    def _links_found(self, subscription: Subscription) -> Links:
        """The next streams to be linked by the pattern, as many as fit into a record and as there is room for."""
        found = self._matching.found.pop(subscription.id, {})
        room = self._quotas.room(subscription)
        linked: Links = {}
        for path in list(islice(found, RECORD_LINKS_MAX)):
            del found[path]
            if path in subscription.links or not self.tail_of(path):
                continue
            if len(linked) < room:
                linked[path] = ([GLOB], NOTHING_ACKED)
                continue
            self._matching.forget([path])  # its next append asks again
            if not subscription.is_full:
                subscription.is_full = True
                logger.warning(
                    "subscription %s has as many streams as it may have: %s is left out", subscription.id, path
                )
        if found:
            self._matching.found[subscription.id] = found
            self._consider(subscription)
        return linked

    async def _end_wake(self, subscription: Subscription, acked: dict[str, Offset]) -> bool:
        """Close the present wake. If work remains, the next one takes its place in the same record; says whether."""
        self._handed_out.pop(subscription.id, None)
        if any(tail > acked.get(path, NOTHING_ACKED) for path, tail in subscription.pending.items()):
            await self._issue(subscription, acked=acked)
            return True
        await self._change(subscription, wake=None, acked=acked)
        return False

    async def _issue(
        self, subscription: Subscription, *, linked: Links | None = None, acked: dict[str, Offset] | None = None
    ) -> None:
        wake, generation = self._new_wake(subscription), subscription.generation + 1
        await self._change(subscription, wake=wake, generation=generation, linked=linked, acked=acked)
        if subscription.wake is not None:
            if subscription.is_webhook:
                self._deliver(subscription, subscription.wake)
            else:
                self._write_wake_event(subscription)

    def _new_wake(self, subscription: Subscription, *, holder: str | None = None) -> Wake:
        return Wake(
            wake_id=f"w_{self._shard.clock.random_bytes(12).hex()}",
            # A pull-wake that nobody holds has no lease to lose.
            lease_until_ms=self._lease_until(subscription) if subscription.is_webhook or holder else Milliseconds(0),
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

        append = AppendMessages(key, stream.content_type, msgspec.json.encode(event))
        self._shard.append(append).when_settled(written)

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
        self._exclusively(subscription_id, partial(self._end_lease_or_retry, subscription_id)).when_settled(
            _log_failure
        )

    async def _end_lease_or_retry(self, subscription_id: str) -> None:
        subscription = self._state.by_id.get(subscription_id)
        wake = subscription.wake if subscription is not None else None
        now_ms = self._shard.clock.now_ms()
        if subscription is None or wake is None:
            return
        if subscription.next_attempt_ms is not None and now_ms >= subscription.next_attempt_ms:
            renewed = msgspec.structs.replace(wake, lease_until_ms=self._lease_until(subscription))
            retries, error = subscription.retry_count, subscription.last_error
            await self._change(subscription, wake=renewed, retry_count=retries, last_error=error)
            self._deliver(subscription, renewed)
        elif subscription.next_attempt_ms is None and wake.lease_until_ms and now_ms >= wake.lease_until_ms:
            await self._end_wake(subscription, {})
        else:
            self._arm(subscription)

    # -- small parts -----------------------------------------------------------------------------------------

    def _exclusively(self, subscription_id: str, work: Callable[[], Coroutine[Any, Any, T]]) -> Pending[T]:
        return self._shard.exclusively(("subscription", subscription_id), lambda: self._shard.background.run(work()))

    async def _change(
        self,
        subscription: Subscription,
        *,
        wake: Wake | msgspec.UnsetType | None = msgspec.UNSET,
        generation: int | None = None,
        retry_count: int = 0,
        next_attempt_ms: Milliseconds | None = None,
        linked: Links | None = None,
        unlinked: list[str] | None = None,
        acked: dict[str, Offset] | None = None,
        completes: bool = False,
        last_error: str | None = None,
    ) -> None:
        """Put a change of a subscription into the log, and follow it up once it is true."""
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
        await self._shard.committer.commit(record)
        for path in [*(linked or ()), *(acked or ())]:
            if path in subscription.links:
                subscription.note(path, self.tail_of(path))
        self._matching.forget(unlinked or ())
        self._arm(subscription)

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

    def _lease_until(self, subscription: Subscription) -> Milliseconds:
        return self._shard.clock.now_ms() + subscription.config.lease_ttl_ms

    def tail_of(self, path: str) -> Offset:
        stream = self._shard.namespace.peek_key(parse_v1_path(path))
        return stream.tail if stream is not None and not stream.deleted else START

    def hand_out(self, subscription: Subscription, wake: Wake) -> list[dict[str, object]]:
        """The streams that a wake tells of: some of those with work, and the next time others."""
        page = dict(islice(subscription.pending.items(), self._settings.page_streams_max))
        self._handed_out[subscription.id] = (wake.wake_id, page)
        for path in page:
            subscription.pending[path] = subscription.pending.pop(path)
        return [
            {**self._link_info(subscription, path), "tail_offset": format_offset(tail), "has_pending": True}
            for path, tail in page.items()
        ]

    async def link_infos(self, subscription: Subscription, after: str, limit: int) -> list[dict[str, object]]:
        """A page of all links, by path."""
        page: list[str] = []

        def sort() -> Iterator[None]:
            paths = list(subscription.links)
            for first in range(0, len(paths), SORTED_SLICE):
                some = (path for path in paths[first : first + SORTED_SLICE] if path > after)
                page[:] = heapq.nsmallest(limit, chain(page, some))
                yield

        await in_slices(sort())
        return [self._link_info(subscription, path) for path in page if path in subscription.links]

    @staticmethod
    def _link_info(subscription: Subscription, path: str) -> dict[str, object]:
        link = subscription.links[path]
        return {"path": path, "link_type": link.type, "acked_offset": acked_token(link.acked)}


def _links(packed: Iterable[tuple[str, int]]) -> Links:
    return {path: (_TYPES[value & (BY_PATTERN | BY_NAME)], Offset(value >> 2)) for path, value in packed}


def _log_failure(outcome: object) -> None:
    if isinstance(outcome, MillstreamError):
        logger.warning("a subscription could not be updated: %s", outcome)
