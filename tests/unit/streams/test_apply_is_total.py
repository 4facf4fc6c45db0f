"""Whatever a check accepts, apply does; and replaying the log's bytes gives the same state.

Deep chains of forks, appends of thousands of messages, the longest names, subscriptions with thousands of links, many
appends in flight at a time; and batches cut anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.errors import MillstreamError
from millstream.log.interface import LogBatch
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.shard.publisher import Publisher
from millstream.shard.quarantine import records_in
from millstream.streams.checks import Checks
from millstream.streams.limits import StreamLimits
from millstream.streams.machine import StateMachine
from millstream.streams.namespace import Namespace
from millstream.streams.records import (
    AnyRecord,
    SnapshotPublished,
    SnapshotRef,
    StreamDeleted,
    StreamsTouched,
    StreamTrimmed,
    SubscriptionChanged,
    SubscriptionConfig,
    SubscriptionCreated,
    SubscriptionDeleted,
    Wake,
    encode_batch,
    encode_record,
    span,
)
from millstream.streams.state import Stream
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals
from millstream.units import Incarnation, Milliseconds, Offset, Position
from support.shards import append, create

JSON = "application/json"
NOW = 1_800_000_000_000
# Apply has so many frames of stack, and chains are longer: whatever recurses over one fails.
FRAMES = 60
CHAIN = 200
LIMITS = StreamLimits(fork_depth_max=100_000)

names = st.sampled_from(["a", "b/c", "x" * 120, "ü" * 60])
keys = st.builds(StreamKey, st.sampled_from(["one", "b" * 120]), names)
texts = st.text(max_size=8) | st.just("y" * 256)
message_counts = st.sampled_from([0, 1, 2, 3, 1_000, 20_000])
claims = st.none() | st.builds(ProducerClaim, texts, st.integers(0, 3), st.integers(0, 3))


@contextmanager
def little_stack() -> Iterator[None]:
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class Nothing:
    """A catalog that holds nothing yet."""

    def load_key(self, key: object) -> None:
        return None

    def load_incarnation(self, incarnation: int) -> None:
        return None

    def load_producer(self, incarnation: int, producer_id: str) -> None:
        return None

    def producer_count(self, incarnation: int) -> int:
        return 0


class Replica:
    """The state that records make: machine, hot tier and journals."""

    def __init__(self) -> None:
        self.machine = StateMachine(Namespace(Nothing(), LIMITS))
        self.checks = Checks(self.machine.namespace)
        self.hot = HotTier()
        self.journals = Journals()
        self.publisher = Publisher(self.machine, self.hot, self.journals)

    def apply(self, record: AnyRecord, position: int) -> None:
        self.machine.apply(record, Position(position))
        self.publisher.publish(record, Position(position))

    def fingerprint(self) -> object:
        machine, hot = self.machine, self.hot
        return (
            {stream.incarnation: self._of(stream) for stream in machine.namespace.resident()},
            {name: bucket.streams for name, bucket in machine.namespace.buckets.items()},
            dict(machine.namespace.removed),
            machine.namespace.producers._changed.states,
            list(machine.namespace.freed_blobs),
            {
                one.id: (one.generation, one.wake, dict(one.links.items()))
                for one in machine.subscriptions.by_id.values()
            },
            (hot.bytes, len(hot), hot.unflushed.positions, hot.unflushed.messages),
            list(self.journals.notes_between(Position(0), Position(1 << 62))),
        )

    def _of(self, stream: Stream) -> object:
        tail = self.hot.tail(stream)
        state = msgspec.structs.astuple(stream)[:-2]
        return state, (tail.start, tail.messages, tail.ends, tail.positions) if tail is not None else None


class ApplyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica()
        self.now_ms = NOW
        self.next = 1
        self.in_flight: list[tuple[AnyRecord, int]] = []
        self.encoded: list[tuple[bytes, int]] = []
        self.numbers = 0

    # -- the shard's part: one command at a time on a name, appends in flight beside each other ------------------

    def submit(self, record: AnyRecord) -> int:
        position, self.next = self.next, self.next + span(record)
        self.encoded.append((encode_record(record), span(record)))
        self.in_flight.append((record, position))
        return position

    def drain(self) -> Replica:
        with little_stack():
            for record, position in self.in_flight:
                self.replica.apply(record, position)
        self.in_flight.clear()
        return self.replica

    def alone(self, *records: AnyRecord) -> None:
        for record in records:
            self.submit(record)
        self.drain()

    def create_stream(self, key: StreamKey, **fields: Any) -> None:
        records, _ = self.drain().checks.check_create(
            create(key, **fields), Milliseconds(self.now_ms), lambda source, at, sub: (at, [])
        )
        self.alone(*records)

    def some(self, key: StreamKey) -> Stream | None:
        try:
            return self.drain().machine.namespace.get(key, Milliseconds(self.now_ms))
        except MillstreamError:
            return None

    # -- commands ----------------------------------------------------------------------------------------------

    @rule(key=keys, count=message_counts, closed=st.booleans(), ttl=st.none() | st.integers(1, 5), claim=claims)
    def create(self, key: StreamKey, count: int, closed: bool, ttl: int | None, claim: ProducerClaim | None) -> None:
        body = b"[" + b",".join([b"1"] * count) + b"]"
        with suppress(MillstreamError):
            self.create_stream(
                key, content_type=JSON, body=body, closed=closed, expiry=Expiry(ttl, None, None), producer=claim
            )

    @rule(key=keys, source=keys)
    def fork(self, key: StreamKey, source: StreamKey) -> None:
        with suppress(MillstreamError):
            self.create_stream(key, fork=(source,))

    @rule(source=keys, depth=st.sampled_from([1, 3, CHAIN]), keeps_sources=st.booleans())
    def fork_again_and_again(self, source: StreamKey, depth: int, keeps_sources: bool) -> None:
        """And give up what was forked, so that only the last of the chain keeps the others."""
        if self.some(source) is None:
            self.numbers += 1
            source = StreamKey("chains", f"{self.numbers}")
            self.create_stream(source, content_type=JSON)
        for _ in range(depth):
            self.numbers += 1
            key = StreamKey("chains", f"{self.numbers}")
            self.create_stream(key, fork=(source,), body=b"[2]")
            if not keeps_sources:
                self.delete(source)
            source = key
        if depth > 1:
            self.delete(source)

    @rule(
        key=keys, count=message_counts, close=st.sampled_from([False, False, True]), claim=claims, seq=st.none() | texts
    )
    def append(self, key: StreamKey, count: int, close: bool, claim: ProducerClaim | None, seq: str | None) -> None:
        namespace, checks = self.replica.machine.namespace, self.replica.checks
        body = b"[" + b",".join([b'"m"'] * count) + b"]" if count else b""
        command = append(key, body, JSON, close=close, producer=claim, seq=seq)
        try:
            stream = namespace.get(key, Milliseconds(self.now_ms))
            record, outcome = checks.check_append(stream, command, Milliseconds(self.now_ms))
        except MillstreamError:
            return
        if record is not None:
            checks.accept(stream, record, outcome.tail, Position(self.submit(record)))

    @rule(key=keys)
    def delete(self, key: StreamKey) -> None:
        stream = self.some(key)
        if stream is not None:
            self.alone(StreamDeleted(stream.incarnation, Milliseconds(self.now_ms), key))

    @rule(key=keys, trims=st.booleans())
    def publish_snapshot(self, key: StreamKey, trims: bool) -> None:
        stream = self.some(key)
        if stream is not None:
            self.numbers += 1
            ref = SnapshotRef(stream.tail, "text/plain", f"blob-{self.numbers}", 1, 2)
            self.alone(SnapshotPublished(stream.incarnation, Milliseconds(self.now_ms), ref, trims))

    @rule(key=keys)
    def trim(self, key: StreamKey) -> None:
        stream = self.some(key)
        if stream is not None:
            self.alone(StreamTrimmed(stream.incarnation, Milliseconds(self.now_ms), stream.tail))

    @rule(seconds=st.integers(1, 10), incarnations=st.lists(st.integers(1, 100).map(Incarnation), max_size=5))
    def time_passes(self, seconds: int, incarnations: list[Incarnation]) -> None:
        self.now_ms += seconds * 1000
        self.submit(StreamsTouched(dict.fromkeys(incarnations, Milliseconds(self.now_ms))))

    @rule(name=st.sampled_from(["one", "two", "three"]), deletes=st.booleans())
    def change_bucket(self, name: str, deletes: bool) -> None:
        checks = self.drain().checks
        try:
            check = checks.check_delete_bucket if deletes else checks.check_create_bucket
            self.alone(check(name, Milliseconds(self.now_ms)))
        except MillstreamError:
            pass

    @rule(number=st.integers(1, 3), links=st.sampled_from([0, 1, 5_000]), deletes=st.booleans(), more=st.booleans())
    def change_subscription(self, number: int, links: int, deletes: bool, more: bool) -> None:
        config = SubscriptionConfig("pull-wake", "**", [], None, "wakes/w", Milliseconds(1000), None)
        linked = {f"chains/{one}": (["glob"], Offset(0)) for one in range(links)}
        tails = dict.fromkeys(linked, Offset(1))
        if deletes:
            self.alone(SubscriptionDeleted(f"s{number}", Milliseconds(self.now_ms)))
        elif more:
            wake = Wake("w", Milliseconds(self.now_ms), tails, "somebody")
            self.alone(
                SubscriptionChanged(f"s{number}", Milliseconds(self.now_ms), 2, wake, linked=linked, acked=tails)
            )
        else:
            self.alone(SubscriptionCreated(f"s{number}", Milliseconds(self.now_ms), "http://h", config, linked))

    # -- and again from the log's bytes ------------------------------------------------------------------------

    @rule(batch_records=st.integers(1, 50))
    def replay(self, batch_records: int) -> None:
        self.drain()
        again = Replica()
        position = 1
        for start in range(0, len(self.encoded), batch_records):
            some = self.encoded[start : start + batch_records]
            first, position = position, position + sum(count for _, count in some)
            batch = LogBatch(Position(first), Position(position), encode_batch([encoded for encoded, _ in some]))
            for found in records_in(batch):
                assert found.record is not None
                with little_stack():
                    again.apply(found.record, found.position)
        assert position == self.next
        assert again.fingerprint() == self.replica.fingerprint()

    @invariant()
    def counts_are_right(self) -> None:
        if self.in_flight:
            return
        machine = self.replica.machine
        for name, bucket in machine.namespace.buckets.items():
            assert bucket.streams == sum(stream.key.bucket == name for stream in machine.namespace.resident())
        assert not machine.purged


TestApplyIsTotal = ApplyMachine.TestCase
TestApplyIsTotal.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
