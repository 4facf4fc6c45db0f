"""The replicated log beyond the common contract: fencing, lost acknowledgements, tails, trimming; at a real broker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.clock import SystemClock
from millstream.errors import NotLeader
from millstream.log.broker_link import BrokerLink
from millstream.log.interface import LogBatch
from millstream.log.jetstream_log import ACKNOWLEDGE_SECONDS, LOOK_BACK, JetStreamLog, LogTrimmed
from millstream.log.log_tail import LogTail
from support.broker import Broker, new_log_name, open_jetstream_log, shared_broker
from support.logs import LogDriver

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def link() -> Iterator[BrokerLink]:
    link = shared_broker().link()
    yield link
    link.close()


def opened(link: BrokerLink, name: str, **options: int) -> JetStreamLog:
    return open_jetstream_log(link, name, SystemClock(), **options)


def content(link: BrokerLink, name: str) -> list[bytes]:
    return [batch.payload for batch in opened(link, name).read()]


def test_a_writer_that_another_has_overtaken_is_refused_and_has_written_nothing(link: BrokerLink) -> None:
    name = new_log_name()
    first, second = LogDriver(opened(link, name)), LogDriver(opened(link, name))
    assert first.append(b"the first's") is None
    outcome = second.append(b"the second's")
    assert isinstance(outcome, NotLeader)
    assert isinstance(second.append(b"once more"), NotLeader)
    assert first.append(b"the first's again") is None
    assert content(link, name) == [b"the first's", b"the first's again"]
    first.log.close()
    second.log.close()


def test_everything_in_flight_is_refused_together_when_another_writer_is_in_between(link: BrokerLink) -> None:
    name = new_log_name()
    old = LogDriver(opened(link, name))
    assert old.append(b"old") is None
    new = LogDriver(opened(link, name))
    assert new.append(b"new") is None
    outcomes = [old.send(b"late %d" % number) for number in range(4)]
    for _ in outcomes:
        old.wait()
    assert all(isinstance(outcome[0], NotLeader) for outcome in outcomes)
    assert new.append(b"new again") is None, "what the old one left behind is in nobody's way"
    assert content(link, name) == [b"old", b"new", b"new again"]
    old.log.close()
    new.log.close()


def test_a_deposed_writer_that_has_caught_up_may_write_again(link: BrokerLink) -> None:
    name = new_log_name()
    one, other = LogDriver(opened(link, name)), LogDriver(opened(link, name))
    assert other.append(b"a") is None
    assert isinstance(one.append(b"x"), NotLeader)
    again = LogDriver(one.log)
    assert again.append(b"b") is None
    assert isinstance(other.append(b"y"), NotLeader)
    assert content(link, name) == [b"a", b"b"]
    one.log.close()
    other.log.close()


def test_acknowledgements_that_come_too_late_are_resolved_by_reading_the_log(tmp_path: Path) -> None:
    broker = Broker(tmp_path).start()
    link = broker.link()
    try:
        driver = LogDriver(opened(link, "slow"))
        assert driver.append(b"before") is None
        assert broker.process is not None
        os.kill(broker.process.pid, signal.SIGSTOP)
        outcomes = [driver.send(b"%d" % number) for number in range(4)]
        time.sleep(ACKNOWLEDGE_SECONDS + 1.0)
        assert outcomes == [[]] * 4, "nobody is told anything while the outcome is open"
        os.kill(broker.process.pid, signal.SIGCONT)
        for _ in outcomes:
            driver.wait()
        assert outcomes == [[None]] * 4
        assert content(link, "slow") == [b"before", b"0", b"1", b"2", b"3"]
        driver.log.close()
    finally:
        link.close()
        broker.stop()


def test_a_broker_that_dies_and_returns_loses_and_repeats_nothing(tmp_path: Path) -> None:
    broker = Broker(tmp_path).start()
    link = broker.link()
    try:
        driver = LogDriver(opened(link, "killed"))
        sent: list[bytes] = []
        outcomes = []
        for round_number in range(3):
            for number in range(4):
                sent.append(b"%d.%d" % (round_number, number))
                outcomes.append(driver.send(sent[-1]))
            broker.stop()
            broker.start()
            for _ in range(4):
                driver.wait()
        assert all(outcome == [None] for outcome in outcomes)
        assert content(link, "killed") == sent
        driver.log.close()
    finally:
        link.close()
        broker.stop()


def test_a_tail_gives_every_batch_once_in_order_pushed_or_fetched(link: BrokerLink) -> None:
    name = new_log_name()
    driver = LogDriver(opened(link, name))
    for number in range(300):  # more than one fetch brings
        assert driver.append(b"%d" % number) is None
    tail = LogTail(link, opened(link, name))
    sequence, found = 0, []
    for number in range(300, 340):
        assert driver.append(b"%d" % number) is None
        for one in link.wait(tail.next(sequence, 0.2)):
            assert one.sequence == sequence + 1
            sequence = one.sequence
            found.append(one.batch.payload)
    while batches := link.wait(tail.next(sequence, 0.2)):
        sequence = batches[-1].sequence
        found += [one.batch.payload for one in batches]
    assert found == [b"%d" % number for number in range(340)]
    link.wait(tail.stop())
    driver.log.close()


def test_a_tail_whose_next_batch_is_trimmed_says_so(link: BrokerLink) -> None:
    name = new_log_name()
    driver = LogDriver(opened(link, name))
    for number in range(200):
        assert driver.append(b"%d" % number) is None
    driver.log.trim(101)
    tail = LogTail(link, opened(link, name))
    with pytest.raises(LogTrimmed):
        link.wait(tail.next(3, 0.2))
    assert next(one.batch for one in link.wait(tail.next(100, 0.2))) == LogBatch(101, 102, b"100")
    link.wait(tail.stop())
    driver.log.close()


def test_reading_may_start_at_a_position_and_finds_the_batch_that_reaches_beyond_it(link: BrokerLink) -> None:
    name = new_log_name()
    driver = LogDriver(opened(link, name))
    for number in range(10):
        assert driver.append(b"%d" % number, span=5) is None
    for position, expected in ((1, b"0"), (6, b"1"), (8, b"1"), (11, b"2"), (50, b"9")):
        log = opened(link, name)
        log.read_from = position
        assert next(iter(log.read())).payload == expected, position
    driver.log.close()


def test_the_newest_trims_are_kept_for_those_who_were_away(link: BrokerLink) -> None:
    name = new_log_name()
    opened(link, name)
    log = JetStreamLog(link, opened(link, name).names, SystemClock(), keep_trims=2)
    driver = LogDriver(log)
    for number in range(300):
        assert driver.append(b"%d" % number) is None
    for position in (101, 151, 201):
        log.trim(position)
    assert next(iter(opened(link, name).read())).payload == b"%d" % (100 - LOOK_BACK)
    log.purge(201)
    assert next(iter(opened(link, name).read())).payload == b"%d" % (200 - LOOK_BACK)
    log.close()


def test_a_batch_larger_than_the_broker_takes_is_refused_for_good_and_nothing_waits_behind_it(link: BrokerLink) -> None:
    name = new_log_name()
    driver = LogDriver(opened(link, name))
    assert driver.append(b"before") is None
    assert driver.log.record_bytes_max < link.payload_bytes_max
    large = driver.send(bytes(link.payload_bytes_max + 1))
    behind = driver.send(b"behind it")
    driver.wait()
    driver.wait()
    assert isinstance(large[0], NotLeader) and isinstance(behind[0], NotLeader)
    assert "refused to store" in large[0].message
    started = time.monotonic()
    driver.log.close()
    assert time.monotonic() - started < 5
    again = LogDriver(opened(link, name))
    assert [batch.payload for batch in again.found] == [b"before"]
    assert again.append(b"after") is None
    again.log.close()


def test_a_batch_larger_than_the_stream_takes_is_refused_for_good(link: BrokerLink) -> None:
    """By an answer of the broker's: somebody has limited the stream's messages."""
    name = new_log_name()
    driver = LogDriver(opened(link, name))
    configuration = link.wait(link.info(driver.log.names.stream))["config"]
    link.wait(link.call(f"STREAM.UPDATE.{driver.log.names.stream}", {**configuration, "max_msg_size": 10_000}))
    assert driver.append(b"small") is None
    refused = driver.append(bytes(20_000))
    assert isinstance(refused, NotLeader) and "refused to store" in refused.message
    driver.log.close()
    found = JetStreamLog(link, driver.log.names, SystemClock()).read()
    assert [batch.payload for batch in found] == [b"small"]
