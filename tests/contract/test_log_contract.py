"""What every log promises (log/interface.py), over every log there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.clock import SystemClock
from millstream.log.file_log import FileLog
from millstream.log.interface import Log, LogBatch
from millstream.units import Position
from support.broker import new_log_name, open_jetstream_log, shared_broker
from support.fake_time import FakeClock
from support.logs import LogDriver

pytestmark = pytest.mark.timeout(60)

OpenLog = Callable[[], Log]


@contextmanager
def _file_log(directory: Path) -> Iterator[OpenLog]:
    """Small segments, so that every test also crosses from one file to the next."""
    yield lambda: FileLog(directory / "log", FakeClock(), segment_bytes=512)


@contextmanager
def _jetstream_log(directory: Path) -> Iterator[OpenLog]:
    """A stream of its own at a real broker, with several batches in flight."""
    link, name = shared_broker().link(), new_log_name()
    try:
        yield lambda: open_jetstream_log(link, name, SystemClock())
    finally:
        link.close()


@pytest.fixture(params=[_file_log, _jetstream_log], ids=["file", "jetstream"])
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    """Opens the same log again each time it is called, as a restart does."""
    with request.param(tmp_path) as opens:
        yield opens


@pytest.fixture(params=[False, True], ids=["never blocking", "blocking"])
def may_block(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def payloads(batches: list[LogBatch]) -> list[bytes]:
    return [batch.payload for batch in batches]


def test_a_new_log_is_empty(open_log: OpenLog) -> None:
    log = open_log()
    assert list(log.read()) == []
    assert log.notices == []
    assert log.failure is None
    log.close()


def test_batches_come_back_after_a_restart_in_order_with_their_positions(open_log: OpenLog, may_block: bool) -> None:
    driver = LogDriver(open_log(), may_block=may_block)
    for number in range(20):
        assert driver.append(b"batch %d" % number, span=number + 1) is None
    driver.log.close()
    reopened = open_log()
    batches = list(reopened.read())
    assert payloads(batches) == [b"batch %d" % number for number in range(20)]
    assert batches[0].first == 1
    for number, (batch, following) in enumerate(pairwise(batches)):
        assert batch.next == following.first
        assert batch.next - batch.first == number + 1
    assert reopened.notices == []
    reopened.close()


def test_appends_go_on_after_a_restart_where_they_ended(open_log: OpenLog) -> None:
    expected: list[bytes] = []
    for number in range(5):
        driver = LogDriver(open_log())
        assert payloads(driver.found) == expected
        for part in range(3):
            payload = b"run %d part %d" % (number, part)
            assert driver.append(payload) is None
            expected.append(payload)
        driver.log.close()


def test_answers_come_in_the_order_of_the_appends(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    outcomes = [driver.send(b"x" * size) for size in (1, 600, 2, 300, 3)]
    for answered in range(1, 6):
        driver.wait()
        assert [len(outcome) for outcome in outcomes] == [1] * answered + [0] * (5 - answered)
    assert all(outcome == [None] for outcome in outcomes)
    driver.log.close()


def test_an_answer_comes_through_the_callers_delivery_never_from_inside_append(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    outcome = driver.send(b"x")
    assert outcome == []
    driver.wait()
    assert outcome == [None]
    driver.log.close()


def test_closing_finishes_what_was_appended(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    for number in range(10):
        driver.send(b"%d" % number)
    driver.log.close()
    reopened = open_log()
    assert payloads(list(reopened.read())) == [b"%d" % number for number in range(10)]
    reopened.close()


def test_a_batch_larger_than_anything_before_is_stored_whole(open_log: OpenLog) -> None:
    large = bytes(range(256)) * 4096
    driver = LogDriver(open_log())
    assert driver.append(b"small") is None
    assert driver.append(large) is None
    assert driver.append(b"after") is None
    driver.log.close()
    reopened = open_log()
    assert payloads(list(reopened.read())) == [b"small", large, b"after"]
    reopened.close()


def test_an_empty_payload_is_a_batch_like_any_other(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    assert driver.append(b"") is None
    driver.log.close()
    reopened = open_log()
    assert list(reopened.read()) == [LogBatch(Position(1), Position(2), b"")]
    reopened.close()


def test_trimming_forgets_only_batches_that_end_at_or_before_the_position(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    for number in range(40):
        assert driver.append(b"%064d" % number) is None
    driver.log.trim(Position(25))
    assert driver.append(b"after") is None
    driver.log.close()
    reopened = open_log()
    batches = list(reopened.read())
    # How much is given back is the log's choice; what lies beyond the position is not.
    assert batches[0].first <= 25
    assert payloads(batches)[-17:] == [b"%064d" % number for number in range(24, 40)] + [b"after"]
    reopened.close()


def test_trimming_twice_or_to_the_very_end_is_harmless(open_log: OpenLog) -> None:
    driver = LogDriver(open_log())
    for number in range(40):
        assert driver.append(b"%064d" % number) is None
    for position in (20, 20, 1, driver.next, driver.next):
        driver.log.trim(Position(position))
    assert driver.append(b"after") is None
    driver.log.close()
    reopened = LogDriver(open_log(), first_position=0)
    assert reopened.found[-1] == LogBatch(Position(41), Position(42), b"after")
    assert reopened.append(b"more") is None
    reopened.log.close()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.binary(max_size=700), st.integers(1, 50)), max_size=12))
def test_whatever_was_acknowledged_is_read_again(open_log: OpenLog, batches: list[tuple[bytes, int]]) -> None:
    # The log of this test function grows from example to example, as a log does.
    driver = LogDriver(open_log())
    expected = list(driver.found)
    for payload, span in batches:
        first = driver.next
        assert driver.append(payload, span) is None
        expected.append(LogBatch(Position(first), Position(first + span), payload))
    driver.log.close()
    reopened = open_log()
    assert list(reopened.read()) == expected
    reopened.close()
