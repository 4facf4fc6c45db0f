"""A producer's state against a model of the server: whatever is lost or overtaken, every message once and in order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import errors
from millstream.client.errors import BadRequest, Conflict, ProducerFenced, SequenceGap, StreamClosed
from millstream.client.messages import Response
from millstream.client.producing import Batch, ProducerOptions, ProducerState, prepare, send_batch
from millstream.client.results import Appended
from millstream.protocol.producers import ProducerState as Known
from millstream.protocol.producers import is_duplicate
from support.conversations import Script, lost, settings

JSON = "application/json"


def state(*, content_type: str = JSON, **options: Any) -> ProducerState:
    return ProducerState(ProducerOptions("p", **options), content_type)


class Server:
    """What a server keeps of one producer: the same rules as in production, and the messages themselves."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.known: Known | None = None

    def receive(self, producer: ProducerState, batch: Batch) -> Appended | SequenceGap:
        try:
            is_repeat = is_duplicate(self.known, producer.claim_of(batch))
        except errors.SequenceGap as gap:
            headers = {"producer-expected-seq": str(gap.expected), "producer-received-seq": str(gap.received)}
            return SequenceGap("gap", status=409, headers=headers)
        if not is_repeat:
            self.known = Known(producer.epoch, batch.seq)
            self.messages += json.loads(batch.body)
        return Appended(f"{len(self.messages):010d}", is_repeat, False)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=120),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_every_message_arrives_once_and_in_order(
    values: list[int], events: list[tuple[int, int]], in_flight: int, batch_bytes: int
) -> None:
    """Events: append, send, deliver any batch in flight, lose its answer (so that it is delivered again later)."""
    server, producer = Server(), state(in_flight=in_flight, batch_bytes=batch_bytes, linger=0.0)
    unsent, flying = list(values), list[Batch]()

    def step(event: int, which: int) -> None:
        if event == 0 and unsent:
            producer.add(producer.encode(unsent.pop(0)), 0.0)
        elif event <= 2:
            batch = producer.take(0.0)
            if batch is not None:
                flying.append(batch)
                assert len(flying) <= in_flight
        elif flying:
            batch = flying[which % len(flying)]
            outcome = server.receive(producer, batch)
            if event == 3:
                return  # the answer is lost: the lane repeats the batch, in one of the later steps
            flying.remove(batch)
            if isinstance(outcome, SequenceGap):
                producer.failed(batch, outcome)
            else:
                producer.succeeded(batch, outcome)

    for event, which in events:
        step(event, which)
    for _ in range(10_000):  # and then all goes well
        if not unsent and producer.is_idle:
            break
        for event in (0, 1, 4):
            step(event, 0)
    assert producer.failure is None
    assert server.messages == values
    assert (producer.acknowledged, producer.accepted, producer.buffered_bytes) == (len(values), len(values), 0)


def test_messages_gather_until_they_are_due_or_enough() -> None:
    producer = state(linger=1.0, batch_bytes=10)
    assert producer.add(b"1", 5.0) and not producer.add(b"2", 5.5)
    assert producer.due_in(5.5) == 0.5 and producer.take(5.9) is None
    batch = producer.take(6.0)
    assert batch is not None and (batch.body, batch.count) == (b"[1,2]", 2)
    producer.succeeded(batch, Appended("1", False, False))
    assert producer.add(b'"12345678"', 7.0)
    batch = producer.take(7.0)
    assert batch is not None and batch.body == b'["12345678"]'


def test_before_the_first_answer_batches_go_one_at_a_time() -> None:
    producer = state(linger=0.0, batch_bytes=1, in_flight=3)
    for _ in range(4):
        producer.add(b"1", 0.0)
    first = producer.take(0.0)
    assert first is not None and producer.take(0.0) is None and producer.due_in(0.0) is None
    producer.succeeded(first, Appended("1", False, False))
    assert [producer.take(0.0) is not None for _ in range(4)] == [True, True, True, False]


def test_a_gap_that_is_not_a_matter_of_order_ends_the_producer() -> None:
    producer = state(linger=0.0)
    producer.add(b"1", 0.0)
    batch = producer.take(0.0)
    assert batch is not None
    gap = SequenceGap("the server has forgotten", status=409)
    producer.failed(batch, gap)
    assert producer.failure is gap and producer.take(0.0) is None


def test_closing_waits_for_everything_else() -> None:
    producer = state(linger=0.0, batch_bytes=1, in_flight=3)
    for _ in range(2):
        producer.add(b"1", 0.0)
    first = producer.take(0.0)
    assert first is not None
    producer.succeeded(first, Appended("1", False, False))
    producer.seal_and_close()
    second = producer.take(0.0)
    assert second is not None and producer.take(0.0) is None
    producer.succeeded(second, Appended("2", False, False))
    last = producer.take(0.0)
    assert last is not None and last.close and last.body == b""
    with pytest.raises(BadRequest, match="closed"):
        producer.add(b"1", 0.0)


def test_bytes_are_joined_only_if_they_may_be() -> None:
    for concatenate, expected in ((False, [b"a", b"b"]), (True, [b"ab"])):
        producer = state(content_type="text/plain", concatenate=concatenate, linger=0.0)
        for message in (b"a", b"b"):
            producer.add(message, 0.0)
        bodies = []
        while (batch := producer.take(0.0)) is not None:
            bodies.append(batch.body)
            producer.succeeded(batch, Appended("1", False, False))
        assert bodies == expected


def test_a_batch_holds_no_more_messages_than_it_may() -> None:
    producer = state(linger=9.0, batch_messages=2)
    assert [producer.add(b"%d" % number, 0.0) for number in range(3)] == [True, True, True]
    batch = producer.take(0.0)
    assert batch is not None and batch.body == b"[0,1]" and producer.take(0.0) is None


def test_a_final_message_closes_the_stream_in_the_same_append() -> None:
    producer = state(linger=9.0)
    producer.add(b"1", 0.0)
    producer.seal_and_close(b"2")
    first = producer.take(0.0)
    assert first is not None and (first.body, first.close) == (b"[1]", False)
    producer.succeeded(first, Appended("1", False, False))
    last = producer.take(0.0)
    assert last is not None and (last.body, last.close) == (b"[2]", True)
    producer.succeeded(last, Appended("2", False, True))
    assert (producer.accepted, producer.acknowledged, producer.buffered_bytes) == (2, 2, 0)


def test_an_epoch_taken_after_the_claim_gives_way_to_the_next_one() -> None:
    producer = state(claim=True, linger=0.0, batch_bytes=1)
    for message in (b"1", b"2"):
        producer.add(message, 0.0)
    for current in (5, 9):
        batch = producer.take(0.0)
        assert batch is not None and batch.seq == 0
        producer.failed(batch, ProducerFenced("taken", status=403, headers={"producer-epoch": str(current)}))
        assert producer.failure is None and producer.epoch == current + 1
    batch = producer.take(0.0)
    assert batch is not None
    producer.succeeded(batch, Appended("1", False, False))
    later = producer.take(0.0)
    assert later is not None and later.seq == 1
    producer.failed(later, ProducerFenced("taken over", status=403, headers={"producer-epoch": "11"}))
    assert isinstance(producer.failure, ProducerFenced)


def test_a_batch_that_may_be_written_is_not_sent_again_under_another_epoch() -> None:
    producer = state(claim=True, linger=0.0)
    producer.add(b"1", 0.0)
    batch = producer.take(0.0)
    assert batch is not None
    with pytest.raises(ProducerFenced) as fenced:
        Script(lost(), FENCED).run(send_batch("/s", batch, producer, settings()))
    producer.failed(batch, fenced.value)
    assert producer.failure is fenced.value


def test_nonsense_is_refused_by_name() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"batch_bytes": 0},
        {"batch_messages": 0},
        {"in_flight": 0},
        {"buffer_bytes": 0},
        {"linger": -1.0},
        {"epoch": -1},
    )
    for options in wrong:
        with pytest.raises(BadRequest, match=next(iter(options))):
            state(**options)
    with pytest.raises(BadRequest, match="id is empty"):
        ProducerOptions("")
    with pytest.raises(BadRequest, match="empty message"):
        state(content_type="text/plain").add(b"", 0.0)


GAP_AT_0 = Response(409, {"producer-expected-seq": "0", "producer-received-seq": "9"})
GAP_AT_5 = Response(409, {"producer-expected-seq": "5", "producer-received-seq": "9"})
FENCED = Response(403, {"producer-epoch": "7"})
NEWER = Response(400, {}, b"New epoch must start with sequence 0")


@pytest.mark.parametrize(
    ("answer", "epoch"), [(GAP_AT_0, 3), (GAP_AT_5, 4), (FENCED, 8), (NEWER, 3)], ids=["new", "used", "older", "newer"]
)
def test_a_claim_finds_the_next_free_epoch(answer: Response, epoch: int) -> None:
    producer = state(epoch=3, claim=True)
    script = Script(answer)
    script.run(prepare("/s", producer, settings()))
    assert producer.epoch == epoch
    ((_, request),) = script.asked
    assert request.headers["producer-seq"] == str(2**53 - 1)


def test_a_claim_on_a_closed_stream_says_so() -> None:
    with pytest.raises(StreamClosed):
        Script(Response(409, {"stream-closed": "true"})).run(prepare("/s", state(claim=True), settings()))


def test_two_that_claim_the_same_epoch_are_told_apart() -> None:
    producer = state(claim=True, linger=0.0)
    producer.add(b"1", 0.0)
    batch = producer.take(0.0)
    assert batch is not None
    repeat = Response(204, {"stream-next-offset": "1"})
    with pytest.raises(Conflict, match="has taken epoch 0"):
        Script(repeat).run(send_batch("/s", batch, producer, settings()))
