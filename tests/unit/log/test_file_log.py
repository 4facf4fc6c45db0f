"""The file log on disks that tear, rot, fill up and fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.errors import Corrupt, OutcomeUnknown, Unavailable
from millstream.log.file_log import FileLog
from millstream.log.frames import (
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)
from millstream.units import Position
from support.disks import FailingDisk
from support.fake_time import FakeClock
from support.logs import LogDriver

FRAME = FRAME_HEADER_BYTES + 64
# Three frames fit into a segment, a fourth does not.
SEGMENT = SEGMENT_HEADER_BYTES + 3 * FRAME


def payload(number: int) -> bytes:
    return b"%064d" % number


@contextmanager
def opened(directory: Path, disk: FailingDisk | None = None, *, shard: int = 0) -> Iterator[LogDriver]:
    log = FileLog(directory, FakeClock(), segment_bytes=SEGMENT, disk=disk, shard=shard)
    try:
        yield LogDriver(log)
    finally:
        log.close()


def written(directory: Path, count: int) -> list[Path]:
    with opened(directory) as driver:
        for number in range(count):
            assert driver.append(payload(number)) is None
    return sorted(directory.glob("*.log"))


def numbers(driver: LogDriver) -> list[int]:
    return [int(batch.payload) for batch in driver.found]


def refusal(directory: Path) -> Corrupt:
    log = FileLog(directory, FakeClock(), segment_bytes=SEGMENT)
    try:
        with pytest.raises(Corrupt) as caught:
            list(log.read())
    finally:
        log.close()
    return caught.value


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


# -- segments --------------------------------------------------------------------------------------------------


def test_a_full_segment_is_followed_by_one_named_by_its_first_position(tmp_path: Path) -> None:
    segments = written(tmp_path, 7)
    assert [path.name for path in segments] == [f"{first:020d}.log" for first in (1, 4, 7)]
    headers = [decode_segment_header(path.read_bytes()) for path in segments]
    assert [header and header.first for header in headers] == [1, 4, 7]
    # Each has a salt of its own, so that bytes of one never check in another.
    assert len({header and header.salt for header in headers}) == 3
    with opened(tmp_path) as driver:
        assert numbers(driver) == list(range(7))


def test_trim_removes_segments_that_end_at_or_before_the_position_and_keeps_the_last(tmp_path: Path) -> None:
    written(tmp_path, 7)
    with opened(tmp_path) as driver:
        for position, kept in ((3, [1, 4, 7]), (4, [4, 7]), (6, [4, 7]), (1000, [7])):
            driver.log.trim(Position(position))
            assert [int(path.stem) for path in sorted(tmp_path.glob("*.log"))] == kept
        assert driver.append(payload(7)) is None
    with opened(tmp_path) as driver:
        assert numbers(driver) == [6, 7]


def test_zeros_allocated_ahead_are_cut_at_the_next_start(tmp_path: Path) -> None:
    (segment,) = written(tmp_path, 1)
    assert segment.stat().st_size == SEGMENT
    log = FileLog(tmp_path, FakeClock(), segment_bytes=SEGMENT)
    assert len(list(log.read())) == 1
    log.close()
    assert log.notices == []
    assert segment.stat().st_size == SEGMENT_HEADER_BYTES + FRAME


@pytest.mark.parametrize("content", [b"", b"\0" * 10, b"\0" * 4096], ids=["empty", "short", "zeros"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_segment_that_was_being_created_at_the_crash_is_created_anew(
    tmp_path: Path, content: bytes, before: int
) -> None:
    if before:
        written(tmp_path, before)
    (tmp_path / f"{before + 1:020d}.log").write_bytes(content)
    with opened(tmp_path) as driver:
        assert numbers(driver) == list(range(before))
        assert driver.log.notices == []
        assert driver.append(payload(before)) is None
    with opened(tmp_path) as driver:
        assert numbers(driver) == list(range(before + 1))


def test_a_segment_that_holds_only_its_header_is_used_after_the_crash(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (tmp_path / f"{4:020d}.log").write_bytes(encode_segment_header(SegmentHeader(1, 0, 4, 99)))
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0, 1, 2]
        assert driver.append(payload(3)) is None
    assert len(list(tmp_path.glob("*.log"))) == 2


# -- torn and damaged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, FRAME_HEADER_BYTES, FRAME_HEADER_BYTES + 1, FRAME - 1])
@pytest.mark.parametrize("fill", [b"", b"\0" * 4096], ids=["short", "allocated"])
def test_a_torn_last_batch_is_cut_with_a_notice_that_names_file_and_place(
    tmp_path: Path, cut: int, fill: bytes
) -> None:
    (segment,) = written(tmp_path, 3)
    at = SEGMENT_HEADER_BYTES + 2 * FRAME
    segment.write_bytes(segment.read_bytes()[: at + cut] + fill)
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0, 1]
        (notice,) = driver.log.notices
        assert segment.name in notice
        assert f"byte {at}" in notice
        assert driver.append(payload(9)) is None
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0, 1, 9]
        assert driver.log.notices == []


def test_a_torn_batch_whose_middle_never_reached_the_disk_is_cut(tmp_path: Path) -> None:
    # Pages of one write may land in any order: the end can be there without the middle.
    (segment,) = written(tmp_path, 2)
    data = bytearray(segment.read_bytes())
    at = SEGMENT_HEADER_BYTES + FRAME
    data[at : at + 40] = bytes(40)
    segment.write_bytes(data)
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0]
        assert len(driver.log.notices) == 1


@pytest.mark.parametrize("place", [0, 4, 8, 24, FRAME_HEADER_BYTES, FRAME - 1])
def test_damage_before_other_records_refuses_to_start_and_names_file_and_position(tmp_path: Path, place: int) -> None:
    segments = written(tmp_path, 7)
    at = SEGMENT_HEADER_BYTES + FRAME
    flip(segments[0], at + place)
    error = refusal(tmp_path)
    assert str(segments[0]) in error.message
    assert f"byte {at}" in error.message
    assert error.hint is not None
    assert "acknowledged" in error.hint


@pytest.mark.parametrize("frame", [0, 1])
def test_damage_before_other_records_of_the_last_segment_refuses_to_start(tmp_path: Path, frame: int) -> None:
    (segment,) = written(tmp_path, 3)
    flip(segment, SEGMENT_HEADER_BYTES + frame * FRAME + 40)
    error = refusal(tmp_path)
    assert str(segment) in error.message
    assert f"byte {SEGMENT_HEADER_BYTES + frame * FRAME}" in error.message
    # Refusing is all it does: the evidence stays.
    assert segment.stat().st_size == SEGMENT


def test_damage_at_the_end_of_a_segment_that_has_a_successor_refuses_to_start(tmp_path: Path) -> None:
    segments = written(tmp_path, 4)
    flip(segments[0], SEGMENT_HEADER_BYTES + 2 * FRAME + 40)
    assert str(segments[0]) in refusal(tmp_path).message


def test_a_segment_cut_short_between_frames_refuses_to_start_when_others_follow(tmp_path: Path) -> None:
    segments = written(tmp_path, 4)
    segments[0].write_bytes(segments[0].read_bytes()[: SEGMENT_HEADER_BYTES + 2 * FRAME])
    error = refusal(tmp_path)
    assert str(segments[1]) in error.message
    assert "starts at position 4" in error.message
    assert "ended at 3" in error.message


def test_a_missing_segment_refuses_to_start_and_names_the_one_after_the_hole(tmp_path: Path) -> None:
    segments = written(tmp_path, 10)
    segments[1].unlink()
    error = refusal(tmp_path)
    assert str(segments[2]) in error.message
    assert "starts at position 7" in error.message
    assert "ended at 4" in error.message


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_segment_header_refuses_to_start(tmp_path: Path, which: int) -> None:
    segments = written(tmp_path, 7)
    flip(segments[which], 20)
    error = refusal(tmp_path)
    assert str(segments[which]) in error.message
    assert "byte 0" in error.message


def test_a_log_of_a_newer_format_refuses_to_start_and_says_which(tmp_path: Path) -> None:
    (tmp_path / f"{1:020d}.log").write_bytes(encode_segment_header(SegmentHeader(2, 0, 1, 5)))
    error = refusal(tmp_path)
    assert "format 2" in error.message
    assert error.hint


def test_a_log_of_another_shard_refuses_to_start(tmp_path: Path) -> None:
    with opened(tmp_path, shard=3) as driver:
        assert driver.append(b"x") is None
    assert "shard 3, not 0" in refusal(tmp_path).message


# -- disks that fail -------------------------------------------------------------------------------------------


def test_a_full_disk_stores_nothing_and_the_log_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        disk.failing = {"allocate"}
        error = driver.append(payload(0))
        assert isinstance(error, Unavailable)
        assert error.code == "disk_full"
        assert error.hint is not None
        assert "free space" in error.hint
        assert error.retry_after_seconds > 0
        assert driver.log.failure is None
        disk.failing = set()
        assert driver.append(payload(1)) is None
    with opened(tmp_path) as driver:
        assert numbers(driver) == [1]
        assert driver.log.notices == []


def test_a_disk_that_fills_up_when_a_segment_is_full_stores_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        for number in range(3):
            assert driver.append(payload(number)) is None
        disk.failing = {"sync"}
        assert isinstance(driver.append(payload(3)), Unavailable)
        assert len(list(tmp_path.glob("*.log"))) == 1
        disk.failing = set()
        assert driver.append(payload(4)) is None
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0, 1, 2, 4]


def test_an_error_that_is_not_a_full_disk_says_so(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        disk.failing, disk.error = {"allocate"}, errno.EROFS
        error = driver.append(payload(0))
        assert isinstance(error, Unavailable)
        assert error.code == "log_write_failed"
        assert "Read-only" in error.message


def test_a_failed_sync_stops_the_log_for_good(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        assert driver.append(payload(0)) is None
        disk.failing, disk.error = {"write_durably"}, errno.EIO
        error = driver.append(payload(1))
        assert isinstance(error, OutcomeUnknown)
        assert error.code == "log_stopped"
        assert driver.log.failure is not None
        assert "Input/output error" in driver.log.failure
        disk.failing = set()
        calls = len(disk.calls)
        assert isinstance(driver.append(payload(2)), OutcomeUnknown)
        # Not retried: the kernel reports lost pages only once.
        assert len(disk.calls) == calls
    with opened(tmp_path) as driver:
        assert numbers(driver) == [0]


def test_a_write_that_can_neither_be_done_nor_undone_stops_the_log(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        disk.failing = {"allocate", "truncate"}
        assert isinstance(driver.append(payload(0)), OutcomeUnknown)
        assert driver.log.failure is not None
        assert "could not be undone" in driver.log.failure


def test_batches_behind_a_failed_sync_are_refused_with_it(tmp_path: Path) -> None:
    disk = FailingDisk()
    with opened(tmp_path, disk) as driver:
        disk.failing, disk.error = {"write_durably"}, errno.EIO
        outcomes = [driver.send(payload(number)) for number in range(3)]
        for _ in outcomes:
            driver.wait()
        assert all(isinstance(outcome[0], OutcomeUnknown) for outcome in outcomes)
    with opened(tmp_path) as driver:
        assert numbers(driver) == []


class StopwatchDisk(FailingDisk):
    """A disk whose syncs take as long as told, on the clock of the test, and that notes which thread they ran on."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.sync_ms = 0
        self.threads: list[str] = []

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        super().write_durably(descriptor, data, at)
        self.clock.advance(self.sync_ms)
        self.threads.append(threading.current_thread().name)


def test_a_caller_that_may_block_does_so_only_while_syncs_are_quick(tmp_path: Path) -> None:
    clock = FakeClock()
    disk = StopwatchDisk(clock)
    log = FileLog(tmp_path, clock, disk=disk, block_seconds_max=0.001)
    driver = LogDriver(log, may_block=True)
    own, other = threading.current_thread().name, "millstream-log"

    def thread_of_the_next() -> str:
        assert driver.append(b"x") is None
        return disk.threads[-1]

    assert thread_of_the_next() == other, "nothing is known of the disk yet"
    assert [thread_of_the_next() for _ in range(20)] == [own] * 20
    disk.sync_ms = 50
    assert thread_of_the_next() == own, "nobody could know"
    assert [thread_of_the_next() for _ in range(20)] == [other] * 20
    disk.sync_ms = 0
    assert [thread_of_the_next() for _ in range(200)][-20:] == [own] * 20, "the disk has recovered"
    driver.may_block = False
    assert thread_of_the_next() == other
    log.close()


def test_a_limit_of_nothing_never_blocks(tmp_path: Path) -> None:
    clock = FakeClock()
    disk = StopwatchDisk(clock)
    log = FileLog(tmp_path, clock, disk=disk, block_seconds_max=0.0)
    driver = LogDriver(log, may_block=True)
    for _ in range(10):
        assert driver.append(b"x") is None
    assert set(disk.threads) == {"millstream-log"}
    log.close()
