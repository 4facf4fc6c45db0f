"""The state machine alone: the order of judgement, and what creation compares."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed, ProducerFenced, StreamClosed
from millstream.protocol.etags import format_etag
from millstream.protocol.expiry import Expiry, parse_expiry
from millstream.protocol.offsets import OFFSET_MAX, format_offset
from millstream.protocol.producers import ProducerClaim
from millstream.streams.checks import Checks
from millstream.streams.commands import ForkRequest
from millstream.streams.machine import StateMachine
from millstream.streams.namespace import Namespace
from millstream.streams.records import span
from millstream.streams.state import Stream
from millstream.units import Milliseconds, Offset, Position
from support.shards import append, create, key_of

NOW = 1_800_000_000_000


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


def boundary(source: Stream, offset: Offset, sub_offset: int) -> tuple[Offset, list[bytes]]:
    return offset + sub_offset, []


class Bed:
    def __init__(self) -> None:
        self.namespace = Namespace(Nothing())
        self.machine = StateMachine(self.namespace)
        self.checks = Checks(self.namespace)
        self.position = 1

    def stream(self, path: str) -> Stream:
        found = self.namespace.find(key_of(path))
        assert found is not None
        return found

    def apply(self, record: Any) -> None:
        self.machine.apply(record, Position(self.position))
        self.position += span(record)

    def create(self, path: str, now_ms: int = NOW, **fields: Any) -> Any:
        records, existing = self.checks.check_create(create(path, **fields), Milliseconds(now_ms), boundary)
        for record in records:
            self.apply(record)
        return existing or self.namespace.find(key_of(path))

    def append(self, path: str, body: bytes = b"", now_ms: int = NOW, **fields: Any) -> Any:
        stream = self.namespace.get(key_of(path), Milliseconds(now_ms))
        record, outcome = self.checks.check_append(stream, append(path, body, **fields), Milliseconds(now_ms))
        if record is not None:
            self.apply(record)
        return outcome


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_a_closed_stream_is_refused_with_its_tail_before_anything_else_is_looked_at(bed: Bed) -> None:
    bed.create("s", content_type="application/json", body=b"[12]", closed=True)
    for body, fields in (
        (b"x", {"content_type": "text/plain"}),
        (b"not json", {"content_type": "application/json"}),
        (b"1", {"content_type": None}),
        (b"1", {"producer": ProducerClaim("p", 0, 9)}),
        (b"1", {"if_match": '"none"'}),
        (b"1", {"close": True}),
    ):
        with pytest.raises(StreamClosed) as caught:
            bed.append("s", body, **fields)
        assert caught.value.tail == 2


def test_closing_again_without_a_body_succeeds(bed: Bed) -> None:
    bed.create("s", content_type="text/plain", body=b"x")
    assert bed.append("s", close=True).closed
    again = bed.append("s", close=True)
    assert (again.tail, again.closed, again.is_new_data) == (1, True, False)


def test_only_the_producer_that_closed_a_stream_may_repeat_it(bed: Bed) -> None:
    bed.create("s", content_type="text/plain")
    bed.append("s", b"a", producer=ProducerClaim("p", 1, 0))
    bed.append("s", b"b", producer=ProducerClaim("p", 1, 1), close=True)
    assert bed.append("s", b"b", producer=ProducerClaim("p", 1, 1), close=True).producer_seq == 1
    for claim in (ProducerClaim("p", 1, 0), ProducerClaim("p", 1, 2), ProducerClaim("q", 1, 1)):
        with pytest.raises(StreamClosed):
            bed.append("s", b"b", producer=claim, close=True)
    with pytest.raises(ProducerFenced):
        bed.append("s", b"b", producer=ProducerClaim("p", 0, 1), close=True)


def test_the_content_type_is_judged_before_the_body_and_the_producer(bed: Bed) -> None:
    bed.create("s", content_type="application/json")
    with pytest.raises(Conflict) as mismatch:
        bed.append("s", b"{{{", content_type="text/plain", producer=ProducerClaim("p", 0, 5))
    assert mismatch.value.code == "content_type_mismatch"
    with pytest.raises(InvalidRequest) as malformed:
        bed.append("s", b"{{{", content_type="APPLICATION/JSON; charset=utf-8", producer=ProducerClaim("p", 0, 5))
    assert malformed.value.code == "invalid_json"
    with pytest.raises(InvalidRequest) as missing:
        bed.append("s", b"1", content_type=None)
    assert missing.value.code == "missing_content_type"
    with pytest.raises(InvalidRequest) as empty:
        bed.append("s", b" [] ", content_type="application/json")
    assert empty.value.code == "empty_append"


def test_a_repeat_by_a_producer_is_recognised_before_stream_seq_and_the_precondition(bed: Bed) -> None:
    bed.create("s", content_type="text/plain")
    claim = ProducerClaim("p", 0, 0)
    bed.append("s", b"a", producer=claim, seq="5")
    repeat = bed.append("s", b"a", producer=claim, seq="5", if_match='"none"')
    assert not repeat.is_new_data
    with pytest.raises(PreconditionFailed):
        bed.append("s", b"b", producer=ProducerClaim("p", 0, 1), seq="5", if_match='"none"')
    with pytest.raises(Conflict) as caught:
        bed.append("s", b"b", producer=ProducerClaim("p", 0, 1), seq="5")
    assert caught.value.code == "sequence_conflict"
    # The refused append took no sequence: the same one succeeds with a greater Stream-Seq.
    assert bed.append("s", b"b", producer=ProducerClaim("p", 0, 1), seq="6").is_new_data


def test_stream_seq_compares_as_text(bed: Bed) -> None:
    bed.create("s", content_type="text/plain")
    bed.append("s", b"a", seq="9")
    with pytest.raises(Conflict):
        bed.append("s", b"b", seq="10")
    bed.append("s", b"b", seq="91")


def test_a_precondition_names_the_state_exactly(bed: Bed) -> None:
    stream = bed.create("s", content_type="text/plain", body=b"x")
    tag = format_etag(stream.incarnation, "-1", format_offset(1), False)
    assert bed.append("s", b"y", if_match=tag).tail == 2
    with pytest.raises(PreconditionFailed):
        bed.append("s", b"z", if_match=tag)
    assert bed.append("s", b"z", if_match="*").tail == 3
    with pytest.raises(PreconditionFailed):
        bed.create("absent", if_match="*")


def test_an_append_beyond_the_greatest_offset_is_refused(bed: Bed) -> None:
    stream = bed.create("s", content_type="text/plain")
    stream.tail = OFFSET_MAX - 2
    with pytest.raises(Conflict) as caught:
        bed.append("s", b"xyz")
    assert caught.value.code == "stream_full"
    assert bed.append("s", b"xy").tail == OFFSET_MAX


@pytest.mark.parametrize(
    ("asked", "differs"),
    [
        ({"content_type": "text/html"}, "content type"),
        ({}, "content type"),
        ({"content_type": "text/plain", "closed": True}, "closure"),
        ({"content_type": "text/plain", "expiry": Expiry(ttl_seconds=61)}, "expiry"),
        ({"content_type": "text/plain", "expiry": parse_expiry(None, "2030-01-01T00:00:00Z")}, "expiry"),
        ({"content_type": "text/plain", "expiry": Expiry(ttl_seconds=60), "fork": ("source",)}, "fork"),
    ],
)
def test_creating_again_with_another_configuration_is_refused_and_says_what_differs(
    bed: Bed, asked: dict[str, Any], differs: str
) -> None:
    bed.create("source", content_type="text/plain")
    bed.create("s", content_type="text/plain", expiry=Expiry(ttl_seconds=60))
    with pytest.raises(Conflict, match=differs) as caught:
        bed.create("s", **asked)
    assert caught.value.code == "stream_exists"


def test_creating_again_as_it_is_finds_the_stream_whatever_the_spelling(bed: Bed) -> None:
    made = bed.create("s", content_type="text/plain", body=b"x", expiry=Expiry(ttl_seconds=60))
    found = bed.create("s", content_type="TEXT/PLAIN; charset=x", body=b"other", expiry=Expiry(ttl_seconds=60))
    assert (found.is_new, found.incarnation, found.tail) == (False, made.incarnation, 1)
    assert found.content_type == "text/plain"


def test_a_fork_repeated_with_or_without_its_offset_is_the_same_fork(bed: Bed) -> None:
    bed.create("source", content_type="text/plain", body=b"abc", expiry=Expiry(ttl_seconds=60))
    made = bed.create("fork", fork=("source", 1, 1))
    assert (made.tail, made.expiry.ttl_seconds, made.content_type) == (2, 60, "text/plain")
    for same in (("source", 1, 1), ("source", None, 1)):
        assert bed.create("fork", fork=same).incarnation == made.incarnation
    for other in (("source", 1, 0), ("source", 2, 1), ("other", 1, 1)):
        with pytest.raises(Conflict):
            bed.create("fork", fork=other)
    assert bed.stream("source").forks == 1


def test_a_refused_fork_leaks_no_reference(bed: Bed) -> None:
    bed.create("source", content_type="text/plain", body=b"abc")
    with pytest.raises(Conflict):
        bed.create("fork", content_type="application/json", fork=("source",))
    with pytest.raises(NotFound):
        bed.create("fork", fork=("absent",))
    assert bed.stream("source").forks == 0
    assert bed.namespace.find(key_of("fork")) is None


def test_a_fork_keeps_neither_closure_nor_producers_nor_sequence(bed: Bed) -> None:
    bed.create("source", content_type="text/plain")
    bed.append("source", b"a", producer=ProducerClaim("p", 4, 0), seq="9")
    bed.append("source", close=True)
    fork = bed.create("fork", fork=ForkRequest(key_of("source")))
    assert (fork.closed, fork.seq) == (False, None)
    assert bed.namespace.producer(fork, "p", Milliseconds(NOW)) is None
    assert bed.append("fork", b"b", producer=ProducerClaim("p", 0, 0), seq="1").tail == 2


def test_an_expired_stream_gives_up_its_name_in_a_record_of_its_own(bed: Bed) -> None:
    old = bed.create("s", content_type="text/plain", body=b"x", expiry=Expiry(ttl_seconds=5))
    later = NOW + 5_000
    with pytest.raises(NotFound) as caught:
        bed.namespace.get(key_of("s"), Milliseconds(later))
    assert caught.value.code == "stream_expired"
    records, existing = bed.checks.check_create(create("s"), Milliseconds(later), boundary)
    assert existing is None
    assert [type(record).__name__ for record in records] == ["StreamDeleted", "StreamCreated"]
    new = bed.create("s", now_ms=later)
    assert new.incarnation != old.incarnation
    assert new.tail == 0


def test_replaying_the_same_records_gives_the_same_state(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = Bed()
    original = bed.machine.apply

    def both(record: Any, position: int) -> Any:
        replayed.machine.apply(record, Position(position))
        return original(record, Position(position))

    monkeypatch.setattr(bed.machine, "apply", both)
    bed.create("s", content_type="text/plain", body=b"x")
    bed.append("s", b"y", producer=ProducerClaim("p", 0, 0), seq="1")
    bed.create("f", fork=("s",))
    bed.append("s", close=True)
    for path in ("s", "f"):
        one, other = (one_bed.namespace.find(key_of(path)) for one_bed in (bed, replayed))
        assert one is not other
        assert {name: getattr(one, name) for name in Stream.__struct_fields__} == {
            name: getattr(other, name) for name in Stream.__struct_fields__
        }
