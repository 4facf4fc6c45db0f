"""A shard against a plain model of what streams are, through crashes, restarts, checkpoints and time."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.errors import (
    Conflict,
    Gone,
    InvalidRequest,
    MillstreamError,
    NotFound,
    ProducerFenced,
    SequenceGap,
    StreamClosed,
)
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.streams.commands import AppendOutcome
from millstream.tiers.stream_rows import encode_stream
from millstream.units import Milliseconds, Offset
from support.fake_time import FakeClock, FakeTimeLoop, turns
from support.shards import ShardDriver, append, create, open_shard

JSON = "application/json"
TEXT = "text/plain"
names = st.sampled_from(["logs/a", "logs/b", "c", "d/e/f"])
texts = st.text("xyz", min_size=1, max_size=4).map(str.encode)
elements = st.sampled_from([b"1.00", b'"s"', b"[2]", b'{"k":3}', b"123456789012345678901234567890"])
arrays = st.lists(elements, min_size=1, max_size=4)


@dataclass
class Model:
    """What a stream is: whole messages, grouped by the append that wrote them."""

    content_type: str
    appends: list[list[bytes]] = field(default_factory=list)
    closed: bool = False
    closed_by: ProducerClaim | None = None
    seq: str | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)
    ttl: int | None = None
    last_access_ms: int = 0
    source: Model | None = None
    forks: int = 0
    soft_deleted: bool = False

    @property
    def messages(self) -> list[bytes]:
        return [message for one in self.appends for message in one]

    @property
    def tail(self) -> int:
        return sum(map(len, self.messages))

    def boundaries(self) -> list[int]:
        offsets = [0]
        for message in self.messages:
            offsets.append(offsets[-1] + len(message))
        return offsets

    def is_expired(self, now_ms: int) -> bool:
        return self.ttl is not None and now_ms >= self.last_access_ms + self.ttl * 1000


class ShardMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="millstream-model-"))
        self.clock = FakeClock()
        self.loop = FakeTimeLoop(self.clock)
        self.model: dict[StreamKey, Model] = {}
        self.driver = self._open()

    def _open(self) -> ShardDriver:
        driver = open_shard(self.directory, self.clock, segment_bytes=2048)
        self._run(driver.shard.start())
        self._run(turns(2))
        return driver

    def _run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        self._run(self.driver.crash())
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self._run(asyncio.wait(left) if left else turns(1))
        self.loop.close()
        shutil.rmtree(self.directory)

    def _do(self, method: Any, *args: Any) -> Any:
        async def go() -> Any:
            return await self.driver.ask(method, *args)

        return self._run(go())

    # -- the model's own rules -----------------------------------------------------------------------------

    def _purge(self, key: StreamKey) -> None:
        self._release(self.model.pop(key))

    def _release(self, gone: Model) -> None:
        source = gone.source
        if source is not None:
            source.forks -= 1
            if source.soft_deleted and not source.forks:
                for key, model in list(self.model.items()):
                    if model is source:
                        self._purge(key)

    def _end(self, key: StreamKey) -> None:
        if self.model[key].forks:
            self.model[key].soft_deleted = True
        else:
            self._purge(key)

    def _expected_absence(self, key: StreamKey) -> type[MillstreamError] | None:
        model = self.model.get(key)
        if model is None:
            return NotFound
        if model.soft_deleted:
            return Gone
        if model.is_expired(self.clock.ms):
            return Gone if model.forks else NotFound
        return None

    # -- what happens --------------------------------------------------------------------------------------

    @rule(
        path=names,
        is_json=st.booleans(),
        texts=texts | st.just(b""),
        array=arrays | st.just([]),
        closed=st.sampled_from([False, False, True]),
        ttl=st.sampled_from([None, None, 5, 60]),
    )
    def create(self, path: str, is_json: bool, texts: bytes, array: list[bytes], closed: bool, ttl: int | None) -> None:
        command = create(
            path,
            content_type=JSON if is_json else TEXT,
            body=b"[" + b",".join(array) + b"]" if is_json else texts,
            closed=closed,
            expiry=Expiry(ttl_seconds=ttl),
        )
        existing = self.model.get(command.key)
        outcome = self._do(self.driver.shard.create, command)
        if existing is not None and (existing.soft_deleted or (existing.forks and existing.is_expired(self.clock.ms))):
            assert isinstance(outcome, Conflict)
            return
        if existing is not None and not existing.is_expired(self.clock.ms):
            same = (existing.content_type, existing.closed, existing.ttl) == (command.content_type, closed, ttl)
            if same and existing.source is None:
                assert (outcome.is_new, outcome.tail, outcome.closed) == (False, existing.tail, existing.closed)
            else:
                assert isinstance(outcome, Conflict)
            return
        if existing is not None:
            self._purge(command.key)
        first = array if is_json else [texts] if texts else []
        self.model[command.key] = Model(
            JSON if is_json else TEXT,
            [first] if first else [],
            closed,
            ttl=ttl,
            last_access_ms=self.clock.ms,
        )
        assert outcome.is_new
        assert outcome.tail == self.model[command.key].tail

    @rule(path=names, source=names, data=st.data())
    def fork(self, path: str, source: str, data: st.DataObject) -> None:
        offset: int | None = None
        sub_offset = 0
        key, source_key = create(path).key, create(source).key
        origin = self.model.get(source_key)
        if origin is not None:
            offset = data.draw(st.sampled_from([None, *origin.boundaries(), origin.tail + 1]), "offset")
            sub_offset = data.draw(st.integers(0, 4), "sub-offset")
        existing = self.model.get(key)
        outcome = self._do(self.driver.shard.create, create(path, fork=(source_key, offset, sub_offset)))
        now_ms = self.clock.ms
        if existing is not None and (existing.soft_deleted or not existing.is_expired(now_ms) or existing.forks):
            # Whether it is the same fork is tested elsewhere; here it must only leave everything as it was.
            assert isinstance(outcome, Conflict) or outcome.is_new is False
            return
        if origin is None or (origin.is_expired(now_ms) and not origin.forks):
            assert isinstance(outcome, NotFound)
            return
        if origin.soft_deleted or origin.is_expired(now_ms):
            assert isinstance(outcome, Conflict)
            return
        shared = self._shared(origin, origin.tail if offset is None else offset, sub_offset)
        if shared is None:
            assert isinstance(outcome, InvalidRequest)
            return
        if existing is not None:
            self._purge(key)
        origin.forks += 1
        self.model[key] = Model(origin.content_type, shared, ttl=origin.ttl, last_access_ms=now_ms, source=origin)
        assert outcome.is_new
        assert (outcome.tail, outcome.closed) == (self.model[key].tail, False)

    @staticmethod
    def _shared(origin: Model, offset: int, sub_offset: int) -> list[list[bytes]] | None:
        """The appends a fork begins with; None if the request points to no such place."""
        if offset not in origin.boundaries():
            return None
        shared: list[list[bytes]] = []
        at = 0
        for one in origin.appends:
            before = []
            rest = list(one)
            while rest and at < offset:
                before.append(rest.pop(0))
                at += len(before[-1])
            if before:
                shared.append(before)
            if rest:
                if not sub_offset:
                    return shared
                if origin.content_type == JSON:
                    if sub_offset > len(rest):
                        return None
                    # The same append goes on: a fork of the fork counts from within it.
                    return [*shared[:-1], before + rest[:sub_offset]] if before else [*shared, rest[:sub_offset]]
                if sub_offset > len(rest[0]):
                    return None
                return [*shared, [rest[0][:sub_offset]]]
        return None if sub_offset else shared

    @rule(path=names, body=texts, array=arrays, close=st.sampled_from([False, False, False, True]))
    def append(self, path: str, body: bytes, array: list[bytes], close: bool) -> None:
        self._append(path, body, array, close=close)

    @rule(path=names, body=texts, array=arrays, seq=st.sampled_from(["1", "10", "2", "3"]))
    def append_with_seq(self, path: str, body: bytes, array: list[bytes], seq: str) -> None:
        self._append(path, body, array, seq=seq)

    @rule(
        path=names,
        body=texts,
        array=arrays,
        producer=st.builds(ProducerClaim, st.sampled_from(["p", "q"]), st.integers(0, 2), st.integers(0, 3)),
        close=st.sampled_from([False, False, False, True]),
        seq=st.sampled_from([None, None, "2"]),
    )
    def append_as_producer(
        self, path: str, body: bytes, array: list[bytes], producer: Any, close: bool, seq: Any
    ) -> None:
        self._append(path, body, array, producer=producer, close=close, seq=seq)

    @rule(path=names, body=texts, array=arrays, epoch=st.integers(0, 2))
    def append_as_the_producer_in_order(self, path: str, body: bytes, array: list[bytes], epoch: int) -> None:
        model = self.model.get(create(path).key)
        known = model.producers.get("p") if model is not None else None
        following = known[1] + 1 if known is not None and known[0] == epoch else 0
        self._append(path, body, array, producer=ProducerClaim("p", epoch, following))

    @rule(path=names)
    def close(self, path: str) -> None:
        self._append(path, b"", [], close=True)

    def _append(
        self,
        path: str,
        body: bytes,
        array: list[bytes],
        *,
        close: bool = False,
        seq: str | None = None,
        producer: ProducerClaim | None = None,
    ) -> None:
        key = create(path).key
        model = self.model.get(key)
        content_type = model.content_type if model is not None else TEXT
        if content_type == JSON and array:
            body = b"[" + b",".join(array) + b"]"
        messages = array if content_type == JSON else [body] if body else []
        command = append(path, body, content_type=content_type, close=close, seq=seq, producer=producer)
        outcome = self._do(self.driver.shard.append, command)
        absence = self._expected_absence(key)
        if absence is not None:
            assert type(outcome) is absence
            return
        assert model is not None
        known = model.producers.get(producer.id) if producer is not None else None
        if model.closed:
            if producer is None and close and not body:
                assert (outcome.tail, outcome.closed) == (model.tail, True)
            elif producer is not None and producer == model.closed_by:
                assert (outcome.tail, outcome.is_new_data) == (model.tail, False)
            elif known is not None and producer is not None and producer.epoch < known[0]:
                assert isinstance(outcome, ProducerFenced)
            else:
                assert isinstance(outcome, StreamClosed)
                assert outcome.tail == model.tail
            return
        if producer is not None:
            if known is None or producer.epoch == known[0]:
                following = 0 if known is None else known[1] + 1
                if producer.seq > following:
                    assert isinstance(outcome, SequenceGap)
                    assert (outcome.expected, outcome.received) == (following, producer.seq)
                    return
                if producer.seq < following:
                    assert isinstance(outcome, AppendOutcome)
                    assert not outcome.is_new_data
                    assert (outcome.tail, outcome.producer_epoch, outcome.producer_seq) == (model.tail, *(known or ()))
                    return
            elif producer.epoch < known[0]:
                assert isinstance(outcome, ProducerFenced)
                assert outcome.current_epoch == known[0]
                return
            elif producer.seq:
                assert isinstance(outcome, InvalidRequest)
                return
        if seq is not None and model.seq is not None and seq <= model.seq:
            assert isinstance(outcome, Conflict)
            return
        if messages:
            model.appends.append(messages)
        model.last_access_ms = self.clock.ms
        if seq is not None:
            model.seq = seq
        if producer is not None:
            model.producers[producer.id] = (producer.epoch, producer.seq)
        if close:
            model.closed, model.closed_by = True, producer
        assert isinstance(outcome, AppendOutcome)
        assert (outcome.tail, outcome.closed) == (model.tail, model.closed)

    @rule(path=names)
    def delete(self, path: str) -> None:
        key = create(path).key
        outcome = self._do(self.driver.shard.delete, key)
        absence = self._expected_absence(key)
        if absence is not None:
            assert type(outcome) is absence
        else:
            assert outcome is None
            self._end(key)

    @rule(path=names)
    def read_restarts_the_window(self, path: str) -> None:
        key = create(path).key
        if self._expected_absence(key) is None:
            self.driver.shard.deadlines.touch(self.driver.shard.get(key))
            self.driver.shard.deadlines.flush_touches()  # what the tick does within a second
            self._run(self.driver.shard.committer.drain())
            self.model[key].last_access_ms = self.clock.ms

    @precondition(lambda self: any(model.ttl for model in self.model.values()))
    @rule(seconds=st.sampled_from([1, 4, 59]))
    def time_passes(self, seconds: int) -> None:
        """The clock moves, the shard's tick writes down reads and enacts expiry."""
        self.clock.advance(seconds * 1000)

        async def tick() -> None:
            await turns(10)
            await self.driver.shard.committer.drain()
            await turns(5)

        self._run(tick())
        expired = True
        while expired:  # a fork that expires may take its source's last reason to stay with it
            expired = False
            for key, model in list(self.model.items()):
                if not model.soft_deleted and model.is_expired(self.clock.ms) and self.model.get(key) is model:
                    self._end(key)
                    expired = True

    @rule()
    def checkpoint(self) -> None:
        self._run(self.driver.checkpoint())
        # Of streams that only grew the catalog hears by their messages alone; it must not differ from memory either.
        for stream in self.driver.shard.namespace.resident():
            saved = self.driver.catalog.load_incarnation(stream.incarnation)
            assert saved is not None
            assert encode_stream(saved) == encode_stream(stream)

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self._run(self.driver.shard.stop())
        else:
            self._run(self.driver.crash())
        self.driver = self._open()

    # -- what must hold after every step ---------------------------------------------------------------------

    @invariant()
    def the_shard_is_what_the_model_says(self) -> None:
        shard = self.driver.shard
        for path in ("logs/a", "logs/b", "c", "d/e/f"):
            key = create(path).key
            absence = self._expected_absence(key)
            if absence is not None:
                try:
                    found: object = shard.get(key)
                except MillstreamError as error:
                    found = error
                assert type(found) is absence, (path, found)
                continue
            model, stream = self.model[key], shard.get(key)
            assert (stream.tail, stream.closed, stream.seq) == (model.tail, model.closed, model.seq)
            assert stream.content_type == model.content_type
            for name in ("p", "q", *model.producers):
                state = shard.namespace.producer(stream, name, Milliseconds(0))
                assert (state[:2] if state is not None else None) == model.producers.get(name)
            assert stream.forks == model.forks
            result = self._run(shard.reader.read_messages(stream, Offset(0), 1 << 30))
            assert result.messages == model.messages
            assert (result.next_offset, result.up_to_date, result.closed) == (model.tail, True, model.closed)
            boundaries = model.boundaries()
            for index, offset in enumerate(boundaries):
                found = self._run(self.driver.messages(key, offset))
                assert found == model.messages[index:]
        held = sum(1 for model in self.model.values())
        assert sum(bucket.streams for bucket in shard.namespace.buckets.values()) == held


ShardMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShardAgainstModel = ShardMachine.TestCase
