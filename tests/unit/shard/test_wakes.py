"""Wakes: one at a time, fenced by generation, retried, and still due after a restart."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound, Unauthorized
from millstream.protocol.offsets import format_offset
from millstream.shard.shard import Shard
from millstream.shard.subscription_quotas import SubscriptionSettings
from millstream.shard.wakes import (
    RECORD_LINKS_MAX,
    RETRY_JITTER,
    RETRY_SECONDS,
    TOKEN_LIFETIME_MS,
    Wakes,
)
from millstream.streams.records import AnyRecord, SubscriptionCreated, Wake, encode_record
from millstream.streams.subscriptions import Subscription, parse_config
from millstream.tiers.catalog_rows import encode_singletons
from millstream.units import Milliseconds, Offset
from support.fake_time import FakeClock, run, turns
from support.shards import ShardDriver, append, create, key_of, started

LEASE_MS = 30_000
URL = "https://hooks.example.com/x"
BASE = "http://127.0.0.1:4437"


class WakesDriver:
    """Subscriptions of a running shard, and the webhook deliveries they asked for."""

    def __init__(self, driver: ShardDriver, settings: SubscriptionSettings) -> None:
        self.driver = driver
        self.delivered: list[tuple[str, str, int]] = []
        self.told: dict[str, list[dict[str, Any]]] = {}
        self.wakes = Wakes(driver.shard, self._deliver, settings)

    def _deliver(self, subscription: Subscription, wake: Wake) -> None:
        self.told[subscription.id] = self.wakes.hand_out(subscription, wake)
        self.delivered.append((subscription.id, wake.wake_id, subscription.generation))

    async def ask(self, method: Any, *args: Any, **keywords: Any) -> Any:
        return await self.driver.outcome(method, *args, **keywords)

    async def settle(self) -> None:
        """Until nothing follows from what has happened so far."""
        for _ in range(6):
            await turns(5)
            await self.driver.shard.committer.drain()
        await turns(5)

    async def advance(self, milliseconds: int) -> None:
        clock = self.driver.shard.clock
        assert isinstance(clock, FakeClock)
        clock.advance(milliseconds)
        await self.settle()

    async def subscribe(self, name: str = "sub", **body: Any) -> Any:
        return await self.ask(self.wakes.create, name, parse_config(body), BASE)

    async def webhook(self, **body: Any) -> Any:
        return await self.subscribe(type="webhook", webhook={"url": URL}, **{"pattern": "events/*", **body})

    async def pull_wake(self, **body: Any) -> Any:
        await self.driver.create("wakes", content_type="application/json")
        return await self.subscribe(type="pull-wake", wake_stream="wakes", **{"pattern": "events/*", **body})

    async def event(self, path: str = "events/a", body: bytes = b"x") -> None:
        if self.driver.shard.namespace.find(key_of(path)) is None:
            await self.driver.create(path, content_type="text/plain")
        await self.driver.append(path, body)
        await self.settle()

    async def streams(self, paths: Iterable[str]) -> None:
        """Create many streams."""
        ask, shard = self.driver.ask, self.driver.shard
        waiting = iter(paths)
        while some := list(islice(waiting, 1_000)):
            await asyncio.gather(*[ask(shard.create, create(path, content_type="text/plain")) for path in some])

    def sub(self, name: str = "sub") -> Subscription:
        return self.wakes.get(name)

    async def announced(self) -> list[dict[str, Any]]:
        return [json.loads(message) for message in await self.driver.messages("wakes")]

    async def claim(self, worker: str = "w1") -> tuple[dict[str, Any], str]:
        """Claim as a worker: the body that later calls need, and the token."""
        _, wake, token = await self.ask(self.wakes.claim, "sub", worker)
        return {"wake_id": wake.wake_id, "generation": self.sub().generation}, token

    async def ack(self, token: str, body: dict[str, Any], *, by_webhook: bool = False) -> Any:
        result = await self.ask(self.wakes.acknowledge, "sub", token, body, by_webhook=by_webhook)
        await self.settle()
        return result


@asynccontextmanager
async def subscriptions(directory: Path, clock: FakeClock, **settings: Any) -> AsyncIterator[WakesDriver]:
    async with started(directory, clock) as driver:
        wakes = WakesDriver(driver, SubscriptionSettings(**settings))
        wakes.wakes.resume()
        await wakes.settle()
        try:
            yield wakes
        finally:
            wakes.wakes.stop()


async def refused(attempt: Any, code: str, kind: type[MillstreamError] = Conflict) -> MillstreamError:
    with pytest.raises(kind) as caught:
        await attempt
    assert caught.value.code == code
    return caught.value


def acks(path: str = "events/a", offset: int = 1) -> list[dict[str, str]]:
    return [{"stream": path, "offset": format_offset(offset)}]


# -- links and the resource ------------------------------------------------------------------------------------


def test_existing_streams_link_at_their_tail_and_new_ones_before_their_first_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.event("events/old", b"before")
            await wakes.webhook(streams=["extra", "events/old"])
            links = wakes.sub().links
            assert {path: (link.type, link.acked) for path, link in links.items()} == {
                "events/old": ("explicit", 6),
                "extra": ("explicit", 0),
            }
            assert wakes.delivered == []
            await wakes.event("events/new", b"first")
            assert len(wakes.delivered) == 1
            # Only what has work is told of.
            assert wakes.told["sub"] == [
                {
                    "path": "events/new",
                    "link_type": "glob",
                    "acked_offset": "-1",
                    "tail_offset": format_offset(5),
                    "has_pending": True,
                }
            ]
            listed = await wakes.ask(wakes.wakes.link_infos, wakes.sub(), "events/new", 1)
            assert [info["path"] for info in listed] == ["events/old"]
            await wakes.event("elsewhere/x")
            assert "elsewhere/x" not in wakes.sub().links

    clock = FakeClock()
    run(main(), clock)


def test_the_same_configuration_again_is_found_and_another_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            assert (await wakes.webhook())[1] is True
            assert (await wakes.webhook())[1] is False
            await refused(wakes.webhook(lease_ttl_ms=5000), "SUBSCRIPTION_ALREADY_EXISTS")
            await refused(
                wakes.subscribe("bad", type="webhook", webhook={"url": "https://10.0.0.1/"}, pattern="x"),
                "WEBHOOK_URL_REJECTED",
                InvalidRequest,
            )
            await refused(
                wakes.subscribe("bad", type="pull-wake", wake_stream="none", pattern="x"),
                "INVALID_REQUEST",
                InvalidRequest,
            )
            await wakes.ask(wakes.wakes.delete, "sub")
            await wakes.ask(wakes.wakes.delete, "sub")
            with pytest.raises(NotFound):
                wakes.sub()
            await wakes.event()
            assert wakes.delivered == []

    clock = FakeClock()
    run(main(), clock)


def test_unlinking_an_explicit_stream_leaves_its_glob_link(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.event()
            await wakes.webhook()
            await wakes.ask(wakes.wakes.link, "sub", ["events/a", "other"])
            assert [wakes.sub().links[path].type for path in ("events/a", "other")] == ["explicit"] * 2
            for _ in range(2):
                await wakes.ask(wakes.wakes.unlink, "sub", "events/a")
                await wakes.ask(wakes.wakes.unlink, "sub", "other")
            assert {path: link.type for path, link in wakes.sub().links.items()} == {"events/a": "glob"}

    clock = FakeClock()
    run(main(), clock)


# -- webhooks --------------------------------------------------------------------------------------------------


def test_events_during_a_wake_do_not_wake_again_until_it_is_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            (_, wake_id, generation), *_ = wakes.delivered
            assert generation == 1
            await wakes.event()
            await wakes.event("events/b")
            assert len(wakes.delivered) == 1
            wakes.wakes.delivered("sub", wake_id, is_done=True)
            await wakes.settle()
            # Only what the wake was told of is acknowledged; what came later wakes again.
            assert wakes.sub().links["events/a"].acked == 1
            assert [one[2] for one in wakes.delivered] == [1, 2]
            wakes.wakes.delivered("sub", wakes.delivered[-1][1], is_done=True)
            await wakes.settle()
            assert wakes.sub().wake is None
            assert len(wakes.delivered) == 2
            assert {path: link.acked for path, link in wakes.sub().links.items()} == {"events/a": 2, "events/b": 1}

    clock = FakeClock()
    run(main(), clock)


def test_a_late_answer_to_an_earlier_wake_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            first = wakes.delivered[0][1]
            await wakes.advance(LEASE_MS)
            assert [one[2] for one in wakes.delivered] == [1, 2]
            wakes.wakes.delivered("sub", first, is_done=True)
            wakes.wakes.delivery_failed("sub", first)
            await wakes.settle()
            assert wakes.sub().generation == 2
            assert wakes.sub().links["events/a"].acked == -1
            assert wakes.sub().next_attempt_ms is None

    clock = FakeClock()
    run(main(), clock)


def test_failed_deliveries_are_retried_with_growing_jittered_delays_up_to_a_limit(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            wake_id = wakes.delivered[0][1]
            low, high = RETRY_SECONDS
            for attempt in range(9):
                wakes.wakes.delivery_failed("sub", wake_id)
                await wakes.settle()
                due_ms = wakes.sub().next_attempt_ms
                assert due_ms is not None
                delay = due_ms - clock.ms
                nominal = min(low * 2**attempt, high) * 1000
                assert nominal * (1 - RETRY_JITTER) - 1 <= delay <= nominal * (1 + RETRY_JITTER) + 1
                assert wakes.sub().retry_count == attempt + 1
                await wakes.advance(delay - 1)
                assert len(wakes.delivered) == attempt + 1
                await wakes.advance(1)
                # The same wake of the same generation, told once more.
                assert wakes.delivered[attempt + 1] == ("sub", wake_id, 1)
                assert wakes.sub().next_attempt_ms is None
            wakes.wakes.delivered("sub", wake_id, is_done=False)
            await wakes.settle()
            assert wakes.sub().retry_count == 0

    clock = FakeClock()
    run(main(), clock)


def test_a_lease_runs_from_each_delivery_and_a_callback_extends_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            token = wakes.wakes.token(wakes.sub())
            body = {"wake_id": wakes.delivered[0][1], "generation": 1}
            await wakes.advance(LEASE_MS - 1)
            assert await wakes.ack(token, body, by_webhook=True) is False
            await wakes.advance(LEASE_MS - 1)
            assert len(wakes.delivered) == 1
            await wakes.advance(1)
            assert [one[2] for one in wakes.delivered] == [1, 2]
            await refused(wakes.ack(token, body, by_webhook=True), "FENCED")

    clock = FakeClock()
    run(main(), clock)


def test_a_callback_that_is_done_says_whether_another_wake_follows(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            await wakes.event()
            token = wakes.wakes.token(wakes.sub())
            body = {"wake_id": wakes.delivered[0][1], "generation": 1, "done": True, "acks": acks()}
            assert await wakes.ack(token, body, by_webhook=True) is True
            assert wakes.delivered[-1][2] == 2
            body = {"wake_id": wakes.delivered[1][1], "generation": 2, "done": True, "acks": acks(offset=2)}
            assert await wakes.ack(wakes.wakes.token(wakes.sub()), body, by_webhook=True) is False
            assert wakes.sub().wake is None

    clock = FakeClock()
    run(main(), clock)


# -- pull-wake -------------------------------------------------------------------------------------------------


def test_a_claim_sees_what_its_worker_has_just_appended_though_readers_are_still_being_woken(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
            assert await wakes.ack(token, {**body, "acks": acks(), "done": True}) is False
            listeners = wakes.driver.shard.listeners
            listeners._is_waking = True  # as while very many are told of something else
            await wakes.driver.append("events/a", b"second")
            await wakes.claim()
            assert listeners._changed, "nobody was told before"

    clock = FakeClock()
    run(main(), clock)


def test_a_pull_wake_is_announced_claimed_once_and_finished(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await refused(wakes.claim(), "NO_PENDING_WORK")
            await wakes.event()
            (event,) = await wakes.announced()
            assert event == {
                "type": "wake",
                "subscription_id": "sub",
                "stream": "events/a",
                "generation": 1,
                "ts": clock.ms,
            }
            body, token = await wakes.claim()
            assert body["generation"] == 1
            error = await refused(wakes.claim("w2"), "ALREADY_CLAIMED")
            assert error.details == {"current_holder": "w1", "generation": 1}
            assert await wakes.ack(token, {**body, "acks": acks()}) is False
            assert await wakes.ack(token, {**body, "done": True}) is False
            assert wakes.sub().wake is None
            await refused(wakes.ack(token, body), "FENCED")
            await refused(wakes.claim(), "NO_PENDING_WORK")
            assert len(await wakes.announced()) == 1

    clock = FakeClock()
    run(main(), clock)


def test_an_unclaimed_pull_wake_never_loses_its_lease(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            await wakes.advance(100 * LEASE_MS)
            assert [event["generation"] for event in await wakes.announced()] == [1]
            body, _ = await wakes.claim()
            assert body["generation"] == 1

    clock = FakeClock()
    run(main(), clock)


def test_an_expired_lease_wakes_again_and_fences_the_worker_that_held_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
            await wakes.advance(LEASE_MS - 1)
            await wakes.ack(token, body)  # a heartbeat
            await wakes.advance(LEASE_MS - 1)
            assert wakes.sub().generation == 1
            await wakes.advance(1)
            assert [event["generation"] for event in await wakes.announced()] == [1, 2]
            for attempt in (
                wakes.ack(token, body),
                wakes.ack(token, {**body, "generation": 2}),
                wakes.ask(wakes.wakes.release, "sub", token, body),
            ):
                await refused(attempt, "FENCED")
            newer, newer_token = await wakes.claim("w2")
            assert newer["generation"] == 2
            await refused(wakes.ack(newer_token, {**newer, "wake_id": body["wake_id"]}), "FENCED")
            await refused(wakes.ack(token, newer), "FENCED")
            await wakes.ack(newer_token, {**newer, "acks": acks(), "done": True})
            assert wakes.sub().links["events/a"].acked == 1

    clock = FakeClock()
    run(main(), clock)


def test_an_expired_lease_with_nothing_left_to_do_ends_the_wake(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
            await wakes.ack(token, {**body, "acks": acks()})
            await wakes.advance(LEASE_MS)
            assert wakes.sub().wake is None
            assert len(await wakes.announced()) == 1
            await wakes.event()
            assert [event["generation"] for event in await wakes.announced()] == [1, 2]

    clock = FakeClock()
    run(main(), clock)


def test_a_release_gives_the_work_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
            await wakes.ask(wakes.wakes.release, "sub", token, body)
            await wakes.settle()
            assert [event["generation"] for event in await wakes.announced()] == [1, 2]
            assert (await wakes.claim("w2"))[0]["generation"] == 2

    clock = FakeClock()
    run(main(), clock)


def test_tokens_that_are_wrong_or_too_old_are_unauthorized(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake(lease_ttl_ms=600_000)
            await wakes.event()
            body, token = await wakes.claim()
            await refused(wakes.ack("nonsense", body), "TOKEN_INVALID", Unauthorized)
            await refused(wakes.ack(token[:-2] + "xx", body), "TOKEN_INVALID", Unauthorized)
            clock.ms += TOKEN_LIFETIME_MS + 1
            await refused(wakes.ack(token, body), "TOKEN_EXPIRED", Unauthorized)

    clock = FakeClock()
    run(main(), clock)


def test_offsets_that_make_no_sense_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event(body=b"four")
            body, token = await wakes.claim()
            await wakes.ack(token, {**body, "acks": acks(offset=2)})
            for wrong in (
                acks(offset=5),
                acks(offset=1),
                acks("events/unknown", 0),
                [{"stream": "events/a", "offset": "now"}],
                acks(offset=4) + acks(offset=3),
            ):
                await refused(wakes.ack(token, {**body, "acks": wrong}), "INVALID_OFFSET")
            malformed: object
            for malformed in ("x", [1], [{}], [{"stream": "events/a"}]):
                await refused(wakes.ack(token, {**body, "acks": malformed}), "INVALID_REQUEST", InvalidRequest)
            assert wakes.sub().links["events/a"].acked == 2

    clock = FakeClock()
    run(main(), clock)


def test_a_wake_stream_that_matches_the_pattern_does_not_wake_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake(pattern="**")
            await wakes.event()
            assert len(await wakes.announced()) == 1
            assert "wakes" not in wakes.sub().links

    clock = FakeClock()
    run(main(), clock)


def test_two_claims_at_once_give_the_work_to_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            asked = [wakes.driver.ask(wakes.wakes.claim, "sub", f"w{number}") for number in range(3)]
            answers = await asyncio.gather(*asked)
            assert [isinstance(answer, Conflict) for answer in answers] == [False, True, True]

    clock = FakeClock()
    run(main(), clock)


def test_a_deleted_stream_leaves_with_its_glob_link_and_its_successor_starts_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake(streams=["pinned"])
            await wakes.event("events/a", b"long message")
            await wakes.event("pinned", b"long message")
            body, token = await wakes.claim()
            done = acks("events/a", 12) + acks("pinned", 12)
            await wakes.ack(token, {**body, "acks": done, "done": True})
            await wakes.driver.delete("events/a")
            await wakes.driver.delete("pinned")
            await wakes.settle()
            assert {path: link.acked for path, link in wakes.sub().links.items()} == {"pinned": -1}
            await wakes.event("pinned", b"x")
            assert [event["stream"] for event in await wakes.announced()][-1] == "pinned"

    clock = FakeClock()
    run(main(), clock)


# -- restarts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_webhook_wake_that_may_not_have_been_told_is_told_again_after_a_restart(
    tmp_path: Path, checkpoint: bool
) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            key_id = wakes.wakes.signer.key_id
            token = wakes.wakes.token(wakes.sub())
            told = wakes.delivered[0]
            if checkpoint:
                await wakes.driver.checkpoint()
        async with subscriptions(tmp_path, clock) as wakes:
            assert wakes.delivered == [told]
            assert wakes.wakes.signer.key_id == key_id
            # Tokens live on: the worker may have been at work all the time.
            body = {"wake_id": told[1], "generation": 1, "acks": acks(), "done": True}
            assert await wakes.ack(token, body, by_webhook=True) is False

    clock = FakeClock()
    run(main(), clock)


def test_a_retry_that_was_waiting_still_waits_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            await wakes.event()
            told = wakes.delivered[0]
            for _ in range(4):
                wakes.wakes.delivery_failed("sub", told[1])
                await wakes.settle()
            due_ms, count = wakes.sub().next_attempt_ms, wakes.sub().retry_count
            assert due_ms is not None
        async with subscriptions(tmp_path, clock) as wakes:
            assert (wakes.sub().next_attempt_ms, wakes.sub().retry_count) == (due_ms, count)
            assert wakes.delivered == []
            await wakes.advance(due_ms - clock.ms)
            assert wakes.delivered == [told]

    clock = FakeClock()
    run(main(), clock)


def test_a_lease_that_ran_out_while_the_server_was_down_wakes_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
        clock.advance(LEASE_MS)
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.settle()
            assert [event["generation"] for event in await wakes.announced()] == [1, 2]
            await refused(wakes.ack(token, body), "FENCED")

    clock = FakeClock()
    run(main(), clock)


def test_a_claim_survives_a_restart_within_its_lease(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake()
            await wakes.event()
            body, token = await wakes.claim()
        async with subscriptions(tmp_path, clock) as wakes:
            await refused(wakes.claim("w2"), "ALREADY_CLAIMED")
            assert await wakes.ack(token, {**body, "acks": acks(), "done": True}) is False
            assert len(await wakes.announced()) == 1

    clock = FakeClock()
    run(main(), clock)


def test_an_append_that_a_crash_cut_off_from_its_wake_wakes_after_the_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook(streams=["plain"], pattern=None)
            await wakes.driver.create("plain", content_type="text/plain")
            # As if the process had died between the append and the wake's record.
            wakes.driver.shard.listeners.on_committed = lambda streams: None
            await wakes.driver.outcome(wakes.driver.shard.append, append("plain", b"x"))
        async with subscriptions(tmp_path, clock) as wakes:
            assert [one[2] for one in wakes.delivered] == [1]

    clock = FakeClock()
    run(main(), clock)


# -- many streams ------------------------------------------------------------------------------------------------


class Records:
    """Sizes of the records that a shard is given, as the log has them."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        submit = shard.committer.submit

        def measured(record: AnyRecord, *rest: Any) -> int:
            self.sizes.append(len(encode_record(record)))
            return submit(record, *rest)

        monkeypatch.setattr(shard.committer, "submit", measured)


def test_the_records_of_a_subscription_over_many_streams_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        count = 5 * RECORD_LINKS_MAX // 2
        async with subscriptions(tmp_path, clock) as wakes:
            shard = wakes.driver.shard
            await wakes.streams(f"events/{number:0100}" for number in range(count))
            await wakes.driver.checkpoint()
            records = Records(shard, monkeypatch)
            await wakes.pull_wake()
            assert len(wakes.sub().links) == count
            # A record with the longest names: path, type, offset.
            assert max(records.sizes) < RECORD_LINKS_MAX * 150
            records.sizes.clear()
            await wakes.event(f"events/{7:0100}")
            body, token = await wakes.claim()
            await wakes.ack(token, body)
            await wakes.ack(token, {**body, "acks": acks(f"events/{7:0100}"), "done": True})
            # Append, wake, its event, claim, heartbeat, end: not one of them tells of all streams.
            assert len(records.sizes) >= 6 and max(records.sizes) < 500
            assert shard.machine.subscriptions.bytes > count * 100
            await wakes.ask(wakes.wakes.delete, "sub")
            while shard.machine.subscriptions.links:  # which go some at a time
                await turns(1)
            assert (shard.machine.subscriptions.bytes, shard.machine.subscriptions.by_path) == (0, {})

    clock = FakeClock()
    run(main(), clock)


def test_a_wake_tells_of_some_pending_streams_at_a_time_and_of_others_the_next_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock, page_streams_max=3) as wakes:
            await wakes.webhook()
            for name in "abcdefg":
                await wakes.event(f"events/{name}")
            seen = [info["path"] for info in wakes.told["sub"]]
            for is_done in (False, True, True, True, True):
                wake_id = wakes.delivered[-1][1]
                if is_done:
                    wakes.wakes.delivered("sub", wake_id, is_done=True)
                    await wakes.settle()
                else:
                    # Who does nothing about some streams does not keep others from being told of.
                    await wakes.advance(LEASE_MS)
                told = [info["path"] for info in wakes.told["sub"]]
                assert len(told) <= 3
                seen += told
            assert set(seen) == {f"events/{name}" for name in "abcdefg"}
            assert wakes.sub().wake is None and not wakes.sub().pending
            assert {link.acked for link in wakes.sub().links.values()} == {1}

    clock = FakeClock()
    run(main(), clock)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_links_and_what_is_pending_are_the_same_after_a_restart(tmp_path: Path, checkpoint: bool) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.pull_wake(streams=["pinned", "events/b"])
            for path in ("events/a", "events/b", "pinned"):
                await wakes.event(path)
            body, token = await wakes.claim()
            await wakes.ack(token, {**body, "acks": acks("events/b")})
            if checkpoint:
                await wakes.driver.checkpoint()
            links, pending = dict(wakes.sub().links), dict(wakes.sub().pending)
            size = wakes.driver.shard.machine.subscriptions.bytes
            assert set(pending) == {"events/a", "pinned"}
        async with subscriptions(tmp_path, clock) as wakes:
            assert dict(wakes.sub().links) == links
            assert wakes.sub().pending == pending
            assert wakes.sub().links.explicit == {"pinned", "events/b"}
            assert wakes.driver.shard.machine.subscriptions.bytes == size
            await wakes.event("events/later")
            assert "events/later" in wakes.sub().links

    clock = FakeClock()
    run(main(), clock)


def test_a_subscription_that_a_crash_left_half_linked_is_gone_after_the_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            config = parse_config({"type": "webhook", "webhook": {"url": URL}, "pattern": "events/*"})
            half = SubscriptionCreated(
                "sub", Milliseconds(clock.ms), BASE, config, {"events/a": (["glob"], Offset(0))}, complete=False
            )
            await wakes.driver.shard.committer.commit(half)
            with pytest.raises(NotFound):
                wakes.sub()
            # Whoever asks again in the meantime makes it anew.
            assert (await wakes.webhook())[1] is True
            await wakes.driver.shard.committer.commit(half)
        async with subscriptions(tmp_path, clock) as wakes:
            assert wakes.driver.shard.machine.subscriptions.by_id == {}
            assert wakes.driver.shard.machine.subscriptions.by_path == {}

    clock = FakeClock()
    run(main(), clock)


def test_a_new_stream_that_a_crash_cut_off_from_its_link_is_linked_after_the_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.webhook()
            wakes.driver.shard.listeners.on_committed = lambda streams: None
            await wakes.driver.create("events/new", content_type="text/plain")
            await wakes.driver.outcome(wakes.driver.shard.append, append("events/new", b"x"))
        async with subscriptions(tmp_path, clock) as wakes:
            assert [info["path"] for info in wakes.told["sub"]] == ["events/new"]

    clock = FakeClock()
    run(main(), clock)


def test_subscriptions_count_against_the_memory_of_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            budget = wakes.driver.shard.budget
            hook = {"type": "webhook", "webhook": {"url": URL}}
            before = budget.used
            await wakes.subscribe("one", **hook, streams=[str(number) for number in range(100)])
            assert budget.used - before == wakes.driver.shard.machine.subscriptions.bytes > 100 * 200
            budget.bytes_max = 4 * (wakes.driver.shard.machine.subscriptions.bytes + 10_000)
            more = [str(number) for number in range(100, 200)]
            await refused(wakes.subscribe("two", **hook, streams=more), "TOO_MANY_LINKS")
            await refused(wakes.ask(wakes.wakes.link, "one", more), "TOO_MANY_LINKS")
            await wakes.ask(wakes.wakes.delete, "one")
            await wakes.settle()
            assert budget.used == before
            budget.bytes_max = 40_000 * 100
            monkeypatch.setattr("millstream.shard.budget.SUBSCRIPTIONS_SHARE", 100)
            await wakes.subscribe("two", **hook, pattern="events/*")
            for number in range(100):
                await wakes.event(f"events/{number}")
            assert 50 < len(wakes.sub("two").links) < 100 and wakes.sub("two").is_full

    clock = FakeClock()
    run(main(), clock)


def test_every_quota_is_a_clear_refusal(tmp_path: Path) -> None:
    async def main() -> None:
        limits = {
            "count_max": 3,
            "principal_count_max": 2,
            "links_max": 4,
            "links_total_max": 6,
            "explicit_links_max": 3,
            "pattern_bytes_max": 20,
            "pattern_wildcards_max": 3,
        }
        async with subscriptions(tmp_path, clock, **limits) as wakes:
            hook = {"type": "webhook", "webhook": {"url": URL}}
            for name in "abcde":
                await wakes.driver.create(f"many/{name}", content_type="text/plain")
            await refused(wakes.subscribe("x", **hook, pattern="many/*"), "TOO_MANY_LINKS")
            await refused(wakes.subscribe("x", **hook, streams=["1", "2", "3", "4"]), "TOO_MANY_LINKS")
            for pattern in ("a" * 21, "*/*/*/*", "**/a/**/a/**/a/**"):
                await refused(wakes.subscribe("x", **hook, pattern=pattern), "INVALID_REQUEST", InvalidRequest)
            await wakes.subscribe("one", **hook, streams=["1", "2"])
            await refused(wakes.ask(wakes.wakes.link, "one", ["3", "4"]), "TOO_MANY_LINKS")
            await wakes.ask(wakes.wakes.link, "one", ["2", "3"])
            await refused(wakes.subscribe("two", **hook, streams=["1", "2", "3", "4"]), "TOO_MANY_LINKS")
            config = parse_config({**hook, "pattern": "grows/*"})
            for name in ("two", "three"):
                await wakes.ask(wakes.wakes.create, name, config, BASE, owner="somebody")
            await refused(wakes.ask(wakes.wakes.create, "four", config, BASE, owner="else"), "TOO_MANY_SUBSCRIPTIONS")
            await wakes.ask(wakes.wakes.delete, "one")
            await refused(wakes.ask(wakes.wakes.create, "x", config, BASE, owner="somebody"), "TOO_MANY_SUBSCRIPTIONS")
            await wakes.ask(wakes.wakes.delete, "three")
            # Streams that come later than there is room for are left out, until there is room and an append.
            for name in "abcde":
                await wakes.event(f"grows/{name}")
            assert len(wakes.sub("two").links) == 4 and wakes.sub("two").is_full
            await wakes.driver.delete("grows/a")
            await wakes.settle()
            await wakes.event("grows/e")
            assert set(wakes.sub("two").links) == {f"grows/{name}" for name in "bcde"}

    clock = FakeClock()
    run(main(), clock)


STALL_SECONDS_MAX = 0.1


@contextmanager
def no_stalls() -> Iterator[None]:
    """Nothing may hold the loop for long, by the time of its own processor: other processes do not count, nor does what
    else the collector would find in this one."""
    gc.collect()
    gc.freeze()
    loop, ticks, longest = asyncio.get_running_loop(), True, 0.0
    last = time.thread_time()

    def tick() -> None:
        nonlocal last, longest
        now = time.thread_time()
        last, longest = now, max(longest, now - last)
        if ticks:
            loop.call_soon(tick)

    loop.call_soon(tick)
    try:
        yield
    finally:
        ticks = False
        gc.unfreeze()
    assert longest < STALL_SECONDS_MAX


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_nothing_that_is_done_with_very_many_streams_holds_the_loop(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            await wakes.streams(f"events/{number:080}" for number in range(count))
            await wakes.driver.checkpoint()
            with no_stalls():
                await wakes.pull_wake()
                assert len(wakes.sub().links) == count
                await wakes.event(f"events/{7:080}")
                body, token = await wakes.claim()
                done = acks(f"events/{7:080}")
                assert await wakes.ack(token, {**body, "acks": done, "done": True}) is False
                assert len(await wakes.ask(wakes.wakes.link_infos, wakes.sub(), "events/", 1_000)) == 1_000
                await wakes.ask(wakes.wakes.link, "sub", [f"events/{number:080}" for number in range(9_000)])
                encode_singletons(wakes.driver.shard.machine)
        async with started(tmp_path, clock) as driver:
            again = WakesDriver(driver, SubscriptionSettings())
            with no_stalls():
                again.wakes.resume()
                await refused(again.claim(), "NO_PENDING_WORK")
                await again.ask(again.wakes.delete, "sub")
            again.wakes.stop()

    clock = FakeClock()
    run(main(), clock)


@pytest.mark.parametrize(
    "pattern",
    [
        "{0}/**/b/**/c/**/d/**/e/**/f/**/{0}",
        "**/a/*/**/{0}/**/a/a/a/a/**/a/a/*/a/a/**",
        "a/*/a/*/a/*/a/*/a/*/a/*/a/*/{0}",
        "**/{0}",
        "a/" * 50 + "{0}/**",
    ],
)
def test_a_thousand_long_patterns_do_not_hold_the_loop_for_a_new_path(tmp_path: Path, pattern: str) -> None:
    async def main() -> None:
        async with subscriptions(tmp_path, clock) as wakes:
            hook = {"type": "webhook", "webhook": {"url": URL}}
            for number in range(1_000):
                config = parse_config({**hook, "pattern": pattern.format(f"p{number}")})
                asked = wakes.driver.ask(wakes.wakes.create, f"sub-{number}", config, BASE)
            assert not isinstance(await asked, MillstreamError)
            with no_stalls():
                await wakes.event("/".join("a" * 60))
                await wakes.event("p7/" + "/".join("abcdef" * 9) + "/p7")

    clock = FakeClock()
    run(main(), clock)
