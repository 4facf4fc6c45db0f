"""What subscriptions may take: how many there are, how many streams each covers, and what a pattern may be."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.errors import Conflict, InvalidRequest
from millstream.protocol.globs import wildcards_of
from millstream.protocol.keys import parse_v1_path
from millstream.protocol.webhook_targets import NO_PRIVATE_TARGETS, PrivateTargets, checked_url
from millstream.shard.budget import MemoryBudget
from millstream.streams.machine import StateMachine
from millstream.streams.records import SubscriptionConfig
from millstream.streams.subscriptions import LINK_BYTES, SUBSCRIPTION_BYTES, Subscription


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


class SubscriptionQuotas:
    def __init__(self, settings: SubscriptionSettings, machine: StateMachine, budget: MemoryBudget) -> None:
        self._settings = settings
        self._machine = machine
        self._state = machine.subscriptions
        self._budget = budget

    def check_config(self, config: SubscriptionConfig, owner: str) -> None:
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
        if config.wake_stream is not None and self._machine.namespace.find(parse_v1_path(config.wake_stream)) is None:
            raise _invalid(f"the wake stream {config.wake_stream!r} does not exist")
        self.check_room(len(config.streams), len(config.streams))

    def check_room(self, count: int, explicit: int, *, more: int | None = None) -> None:
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
        if new * LINK_BYTES + SUBSCRIPTION_BYTES > self._budget.subscription_bytes_left:
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

    def room(self, subscription: Subscription) -> int:
        """How many more streams a subscription may cover."""
        return min(
            self._budget.subscription_bytes_left // LINK_BYTES,
            self._settings.links_max - len(subscription.links),
            self._settings.links_total_max - self._state.links,
        )


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="INVALID_REQUEST")
