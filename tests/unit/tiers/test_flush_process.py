"""The jobs of a flush in a process of their own: the same as at home, and a process that dies costs a try, no data."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import Conflict, Corrupt, Unavailable
from millstream.tiers import flush_process, segment_encoder
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, encode_checkpoint
from millstream.tiers.flush_jobs import FlushInput, FlushJobs, LocalJobs, Rows
from millstream.tiers.flush_process import FlushProcess, Priority, encode
from millstream.tiers.segment_encoder import EncodedSegment
from millstream.tiers.stream_rows import encode_captured
from millstream.units import Incarnation, Milliseconds, Offset, Position
from support.segments import Run, run_of, streams_of, unflushed_of

RUNS = [
    *(("one", run_of(f"s{number}", number, 0, [b"%d" % number, b"xyz"], 10 * number)) for number in range(1, 40)),
    ("two", run_of("large", 77, 5, [b"m" * 70_000] * 30, 1000)),
    ("two", run_of("empty", 78, 0, [b""], 2000)),
]


def flush_input() -> FlushInput:
    streams = streams_of(RUNS)
    streams[3].earliest = Offset(1)
    streams[4].seq = "9"
    captured = [encode_captured(stream) for stream in streams]
    return FlushInput(3, Position(1), Position(1 << 40), captured, [], unflushed_of([run for _, run in RUNS]))


def checkpoint(position: int, rows: Rows) -> Checkpoint:
    return Checkpoint(Position(position), rows.streams, [], [], {}, rows.trimmed, [], Milliseconds(7))


def done_by(jobs: FlushJobs) -> tuple[Rows, list[EncodedSegment]]:
    rows, segments = jobs.begin(flush_input())
    return rows, [one._replace(data=memoryview(bytes(one.data))) for one in segments]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog")
    yield opened
    opened.close()


@pytest.fixture
def process(catalog: Catalog) -> Iterator[FlushProcess]:
    made = FlushProcess(catalog)
    yield made
    made.close()


def pid_of(process: FlushProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_rows_and_segments_are_those_that_are_made_at_home(catalog: Catalog, process: FlushProcess) -> None:
    here, there = done_by(LocalJobs(catalog)), done_by(process)
    assert there == here
    assert [one.info.bucket for one in there[1]] == ["one", "two"]
    assert there[0].trimmed == [(4, 1)]


def test_streams_that_only_grew_are_told_of_by_their_messages(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(LocalJobs(catalog))
    catalog.write(checkpoint(500, rows))
    grown = [("one", run_of("s5", 5, 4, [b"a", b"bc"], 600)), ("two", run_of("large", 77, 9, [b"d"], 700))]
    gone, unknown = run_of("s6", 6, 4, [b"e"], 800), run_of("never", 99, 0, [b"f"], 900)
    runs = [run for _, run in grown]

    def done(jobs: FlushJobs, *more: Run) -> tuple[Rows, list[EncodedSegment]]:
        rows, segments = jobs.begin(
            FlushInput(0, Position(500), Position(1000), [], [Incarnation(6)], unflushed_of([*runs, *more]))
        )
        return rows, [one._replace(data=memoryview(bytes(one.data))) for one in segments]

    here, there = done(LocalJobs(catalog), gone), done(process, gone)
    assert there == here
    assert [one.info.rows for one in here[1]] == [2, 1]
    catalog.write(checkpoint(1000, here[0]))
    saved = catalog.load_incarnation(Incarnation(5)), catalog.load_incarnation(Incarnation(77))
    assert [(one.tail, one.last_write_at_ms, one.last_access_ms) for one in saved if one is not None] == [
        (7, runs[0].times[-1], runs[0].times[-1]),
        (10, runs[1].times[-1], runs[1].times[-1]),
    ]
    assert saved[0] is not None
    assert saved[0].seq == "9", "what the messages do not tell is as it was"
    with pytest.raises(Corrupt, match="99"):
        done(LocalJobs(catalog), unknown)
    with pytest.raises(Unavailable, match="99"):
        done(process, unknown)


def test_a_checkpoint_is_in_the_catalog_and_the_owner_sees_it(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(LocalJobs(catalog))
    assert catalog.load_incarnation(Incarnation(77)) is None
    process.write(checkpoint(500, rows))
    assert catalog.position == 500
    found = catalog.load_incarnation(Incarnation(77))
    assert found is not None
    assert found.key.stream == "large"


def test_a_process_that_was_killed_is_replaced(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(process)
    os.kill(pid_of(process), signal.SIGKILL)
    with pytest.raises(Unavailable, match="gone"):
        process.write(checkpoint(500, rows))
    assert catalog.position == 1
    process.write(checkpoint(500, rows))
    assert catalog.position == 500


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no such policy")
def test_it_runs_at_idle_priority_unless_normal_priority_is_asked_for(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(process)
    idle = pid_of(process)
    assert os.sched_getscheduler(idle) == os.SCHED_IDLE
    process.set_priority(Priority.NORMAL)
    process.write(checkpoint(500, rows))
    assert pid_of(process) != idle
    assert os.sched_getscheduler(pid_of(process)) == os.SCHED_OTHER
    assert catalog.position == 500


def test_a_process_at_idle_priority_that_gets_nowhere_is_given_up_soon(
    catalog: Catalog, process: FlushProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_process, "IDLE_ANSWER_SECONDS_MAX", 5.0)  # a busy machine takes a while to start it
    rows, _ = done_by(process)
    stopped = pid_of(process)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="timed out"):
        process.write(checkpoint(500, rows))
    assert not Path(f"/proc/{stopped}").exists()
    monkeypatch.undo()
    process.write(checkpoint(500, rows))
    assert catalog.position == 500


def test_segments_that_nobody_took_do_not_answer_the_next_question(catalog: Catalog, process: FlushProcess) -> None:
    rows, segments = process.begin(flush_input())
    next(segments)
    process.write(checkpoint(500, rows))
    assert catalog.position == 500
    assert done_by(process) == done_by(LocalJobs(catalog))


def test_a_flush_larger_than_a_segment_goes_over_in_slabs(
    catalog: Catalog, process: FlushProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_encoder, "SEGMENT_BYTES", 1 << 20)
    here, there = done_by(LocalJobs(catalog)), done_by(process)
    assert there == here
    assert len(there[1]) > 3


def test_where_no_process_can_be_started_that_is_said(
    catalog: Catalog, process: FlushProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(Unavailable, match="no process can be started"):
        process.begin(flush_input())
    assert process.is_impossible


def test_what_cannot_be_done_is_an_error_and_the_process_goes_on(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(process)
    pid = pid_of(process)
    with pytest.raises(Unavailable, match="DecodeError"):
        process.write(checkpoint(500, rows)._replace(streams=b"\xc1"))
    process.write(checkpoint(500, rows))
    assert pid_of(process) == pid


def test_a_process_that_outlives_its_owner_can_no_longer_write(tmp_path: Path) -> None:
    first = Catalog(tmp_path)
    process = FlushProcess(first)
    try:
        rows, _ = done_by(process)
        first.close()  # as if it had died, and its process had not noticed yet
        second = Catalog(tmp_path)
        process._send(b"write", encode(1), encode_checkpoint(checkpoint(500, rows)))
        with pytest.raises(Unavailable, match="no longer this one's to write"):
            process._receive()
        second.refresh()
        assert second.position == 1
        second.write(checkpoint(600, rows))
        assert second.position == 600
        second.close()
    finally:
        process.close()


def test_a_checkpoint_upon_another_position_than_the_stored_one_is_refused(
    catalog: Catalog, process: FlushProcess
) -> None:
    rows, _ = done_by(process)
    process.write(checkpoint(500, rows))
    process._send(b"write", encode(1), encode_checkpoint(checkpoint(600, rows)))
    with pytest.raises(Unavailable, match="written by another process"):
        process._receive()
    catalog.position = Position(1)
    with pytest.raises(Conflict):
        catalog.write(checkpoint(600, rows))
    catalog.refresh()
    assert catalog.position == 500


def test_interrupts_do_not_end_it_but_its_parent_does(catalog: Catalog, process: FlushProcess) -> None:
    rows, _ = done_by(process)
    pid = pid_of(process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    process.write(checkpoint(500, rows))
    assert pid_of(process) == pid
    assert process._process is not None
    assert process._process.stdin is not None
    process._process.stdin.close()  # what the kernel does when the parent dies
    deadline = time.monotonic() + 10
    while process._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process._process.poll() == 0
