"""Leases at a real broker, with clocks that the test moves: nobody takes what its holder still believes in."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream.cluster.membership import Heartbeat, Membership, Settings
from millstream.errors import ConfigurationError
from millstream.log.broker_link import BrokerLink, BrokerRefusal
from support.broker import new_log_name, shared_broker

pytestmark = pytest.mark.timeout(60)

LEASE_SECONDS = 2.0


class SteppedClock:
    """A process's own clock: stands still until the test moves it."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now_ms(self) -> int:
        return int(self.at * 1000)

    def monotonic(self) -> float:
        return self.at

    def uniform(self, low: float, high: float) -> float:
        return low

    def random_bytes(self, count: int) -> bytes:
        return bytes(count)


class Member:
    def __init__(self, name: str, node: int, shards: int = 1) -> None:
        self.clock = SteppedClock()
        self.link: BrokerLink = shared_broker().link()
        heartbeat = Heartbeat(node, f"http://node{node}", f"broker{node}", ready=True)
        self.membership = Membership(self.link, self.clock, Settings(name, shards, 1), heartbeat, LEASE_SECONDS)

    def join(self, *, may_bootstrap: bool) -> None:
        self.link.wait(self.membership.join(may_bootstrap=may_bootstrap, waiting=lambda reason: None), 20.0)

    def close(self) -> None:
        self.link.wait(self.membership.stop(), 10.0)
        self.link.close()


def soon(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def members() -> Iterator[tuple[Member, Member]]:
    name = new_log_name()
    pair = Member(name, 1), Member(name, 2)
    pair[0].join(may_bootstrap=True)
    pair[1].join(may_bootstrap=False)
    yield pair
    for member in pair:
        member.close()


def test_a_lease_is_held_until_its_holders_own_clock_says_otherwise(members: tuple[Member, Member]) -> None:
    one, _ = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    one.link.wait(one.membership.stop(), 10.0)  # it is renewed no more
    one.clock.at += LEASE_SECONDS * 0.85
    assert one.membership.holds(0)
    one.clock.at += LEASE_SECONDS * 0.1
    assert not one.membership.holds(0), "before the others would take it"


def test_another_takes_it_only_after_having_seen_it_unchanged_for_the_whole_lease(
    members: tuple[Member, Member],
) -> None:
    one, other = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    assert soon(lambda: other.membership.view.leases.get(0) is not None)
    other.membership.candidates.add(0)
    one.link.wait(one.membership.stop(), 10.0)
    time.sleep(0.5)
    other.clock.at += LEASE_SECONDS * 0.99
    assert not soon(lambda: other.membership.holds(0), 0.8)
    other.clock.at += LEASE_SECONDS * 0.02
    assert soon(lambda: other.membership.holds(0))
    assert other.membership.generation(0) == 2


def test_one_who_was_stopped_finds_that_the_lease_is_gone(members: tuple[Member, Member]) -> None:
    one, other = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    one.membership.candidates.clear()
    one.link.wait(one.membership.stop(), 10.0)
    other.membership.candidates.add(0)
    assert soon(lambda: other.membership.view.leases.get(0) is not None)
    time.sleep(0.5)
    other.clock.at += LEASE_SECONDS * 1.5
    assert soon(lambda: other.membership.holds(0))
    one.clock.at += LEASE_SECONDS * 1.5
    assert not one.membership.holds(0)
    one.link.wait(one.membership._poll(), 10.0)
    assert not one.membership.is_kept(0), "the newer generation ends the older"


def test_a_lease_that_is_given_back_goes_to_its_successor_at_once(members: tuple[Member, Member]) -> None:
    one, other = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    other.membership.candidates.add(0)
    one.link.wait(one.membership.release(0, 2), 10.0)
    assert soon(lambda: other.membership.holds(0), 3.0), "without any clock having moved"
    assert not one.membership.holds(0)


def test_a_lease_is_given_back_though_the_answer_to_its_last_renewal_was_lost(members: tuple[Member, Member]) -> None:
    one, two = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    lease = one.membership.view.leases[0] if soon(lambda: 0 in one.membership.view.leases) else None
    revision = one.link.wait(one.membership._put("lease.0000", lease), 10.0)  # stored, and nobody was told
    one.link.wait(one.membership.release(0, 2), 10.0)
    stored = one.link.wait(one.link.last(one.membership.leases, one.membership._subject("lease.0000")), 10.0)
    assert stored is not None and stored.sequence > revision
    two.membership.candidates.add(0)
    assert soon(lambda: two.membership.holds(0)), "without waiting for it to run out: the clocks stand still"
    assert not one.membership.holds(0)


def test_a_lease_is_given_back_though_a_renewal_is_just_being_stored(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    store, refusals = one.link.store, [10164, 10163, 10164]  # only replicas have such a moment

    async def busy(*arguments: Any) -> int:
        if refusals:
            raise BrokerRefusal("wrong last sequence", refusals.pop())
        return await store(*arguments)

    monkeypatch.setattr(one.link, "store", busy)
    one.link.wait(one.membership.release(0, 2), 10.0)
    two.membership.candidates.add(0)
    assert soon(lambda: two.membership.holds(0)), "without waiting for it to run out: the clocks stand still"


def test_a_lease_is_taken_while_a_sign_of_life_finds_no_answer(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = members
    one.membership.candidates.add(0)
    assert soon(lambda: one.membership.holds(0))
    store, unanswered = two.link.store, threading.Event()

    async def lost(subject: str, *arguments: Any) -> int:
        if ".node." in subject:
            unanswered.set()
            await asyncio.sleep(60.0)
        return await store(subject, *arguments)

    monkeypatch.setattr(two.link, "store", lost)
    two.membership.announce(ready=True)
    assert unanswered.wait(5.0)
    two.membership.candidates.add(0)
    one.link.wait(one.membership.release(0, 2), 10.0)
    assert soon(lambda: two.membership.holds(0))


def test_a_node_with_other_settings_than_the_cluster_is_refused(members: tuple[Member, Member]) -> None:
    name = members[0].membership.settings.name
    stranger = Member(name, 3, shards=4)
    with pytest.raises(ConfigurationError, match="shards"):
        stranger.join(may_bootstrap=True)
    stranger.close()
