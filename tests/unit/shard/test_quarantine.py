"""Records that cannot be applied: the start is refused with their place, and goes on without them when told to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import config as configuration
from millstream.cli.checks import log_records
from millstream.errors import ConfigurationError, Corrupt, OutcomeUnknown
from millstream.log.file_log import FileLog
from millstream.shard.quarantine import REFUSED, SET_ASIDE, Refused, Unapplicable, read_all, set_aside
from millstream.streams.records import (
    AnyRecord,
    Appended,
    StreamCreated,
    StreamDeleted,
    encode_batch,
    encode_record,
    span,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position
from support.fake_time import START_MS, FakeClock, run
from support.logs import LogDriver
from support.shards import key_of, open_shard, started

# A record of a kind that nobody has written yet. It takes as many positions as its batch has left for it.
UNKNOWN = msgspec.msgpack.encode([99, "from a later version"])


def write_log(directory: Path, *batches: list[AnyRecord | tuple[bytes, int]]) -> None:
    """A log as a server would leave it that accepted these; a pair is a record's bytes and its positions."""
    driver = LogDriver(FileLog(directory / "log", FakeClock()))
    for batch in batches:
        parts = [one if isinstance(one, tuple) else (encode_record(one), span(one)) for one in batch]
        assert driver.append(encode_batch([part for part, _ in parts]), sum(count for _, count in parts)) is None
    driver.log.close()


def created(name: str = "s", *messages: bytes) -> StreamCreated:
    return StreamCreated("b", name, Milliseconds(START_MS), "text/plain", list(messages))


def appended(stream: int, offset: int, *messages: bytes) -> Appended:
    return Appended(Incarnation(stream), Offset(offset), Milliseconds(START_MS), list(messages))


def refused_at(directory: Path, position: int, kind: str) -> None:
    for _ in range(2):  # however often it is tried
        with pytest.raises(Unapplicable) as refusal:
            open_shard(directory, FakeClock())
        assert f"position {position} of shard 0 ({kind})" in refusal.value.message
        assert f"millstream quarantine {position}" in (refusal.value.hint or "")
    (kept,) = read_all(directory / "quarantine", REFUSED)
    assert (kept.position, kept.type) == (position, kind)


@pytest.mark.parametrize("together", [False, True], ids=["a batch each", "one batch"])
@pytest.mark.parametrize(
    ("bad", "kind"),
    [((UNKNOWN, 2), "unreadable"), (appended(1, 0, b"bad"), "Appended")],
    ids=["unreadable", "before the tail"],
)
def test_a_record_is_passed_over_and_what_follows_keeps_its_offsets(
    tmp_path: Path, together: bool, bad: AnyRecord | tuple[bytes, int], kind: str
) -> None:
    records = [created("s", b"one"), appended(1, 3, b"two"), bad, appended(1, 9, b"four"), created("t", b"other")]
    write_log(tmp_path, *([records] if together else [[record] for record in records]))
    refused_at(tmp_path, 5, kind)
    with pytest.raises(ConfigurationError, match="no start has been refused"):
        set_aside(tmp_path / "quarantine", 0, Position(3))
    kept = set_aside(tmp_path / "quarantine", 0, Position(5))
    assert kept.record == (bad[0] if isinstance(bad, tuple) else encode_record(bad))
    clock = FakeClock()

    async def check(at_offset_6: list[bytes]) -> None:
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("b/s") == [b"one", b"two", b"four", *at_offset_6[1:]]
            assert await driver.messages("b/s", 6) == at_offset_6
            assert await driver.messages("b/t") == [b"other"]
            outcome = await driver.append("b/s", b"more")
            assert outcome.tail == 13 + 4 * len(at_offset_6)
            if len(at_offset_6) == 2:
                await driver.checkpoint()

    run(check([b"four"]), clock)
    run(check([b"four", b"more"]), clock)
    run(check([b"four", b"more", b"more"]), clock)
    assert read_all(tmp_path / "quarantine", REFUSED) == []
    assert [one.position for one in read_all(tmp_path / "quarantine", SET_ASIDE)] == [5]


def test_a_gap_between_what_is_cold_and_what_is_in_memory_is_passed_over(tmp_path: Path) -> None:
    clock = FakeClock()

    async def begin() -> int:
        async with started(tmp_path, clock) as driver:
            incarnation = (await driver.create("b/s", content_type="text/plain", body=b"cold")).incarnation
            await driver.checkpoint()
            return int(incarnation)

    async def go_on() -> None:
        async with started(tmp_path, clock) as driver:
            for offset in (4, 5, 7):
                assert await driver.messages("b/s", offset) == [b"hot"]
            assert await driver.messages("b/s") == [b"cold", b"hot"]
            stream = driver.shard.get(key_of("b/s"))
            pieces = [
                await driver.shard.reader.fetch(one) for one in driver.shard.reader.cut(stream, Offset(4), stream.tail)
            ]
            assert [bytes(one) for piece in pieces for one in piece] == [b"hot"]

    incarnation = run(begin(), clock)
    write_log(tmp_path, [(UNKNOWN, 2), appended(incarnation, 7, b"hot")])
    with pytest.raises(Unapplicable):
        open_shard(tmp_path, clock)
    (kept,) = read_all(tmp_path / "quarantine", REFUSED)
    set_aside(tmp_path / "quarantine", 0, kept.position)
    run(go_on(), clock)


def test_without_its_creation_nothing_of_a_stream_is_applied(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        [(UNKNOWN, 2)],
        [appended(1, 3, b"x")],
        [StreamDeleted(Incarnation(1), Milliseconds(START_MS), key_of("b/s"))],
    )
    refused_at(tmp_path, 1, "unreadable")
    set_aside(tmp_path / "quarantine", 0, Position(1))
    clock = FakeClock()

    async def check() -> None:
        async with started(tmp_path, clock) as driver:
            assert driver.shard.namespace.find(key_of("b/s")) is None

    run(check(), clock)


def test_a_name_goes_to_the_successor_of_a_stream_whose_deletion_was_set_aside(tmp_path: Path) -> None:
    write_log(tmp_path, [created("s", b"old")], [(UNKNOWN, 1)], [created("s", b"new")])
    refused_at(tmp_path, 3, "unreadable")
    set_aside(tmp_path / "quarantine", 0, Position(3))
    clock = FakeClock()

    async def check() -> None:
        async with started(tmp_path, clock) as driver:
            assert await driver.messages("b/s") == [b"new"]
            assert driver.shard.namespace.bucket("b").streams == 1
            await driver.checkpoint()

    run(check(), clock)
    run(check(), clock)


def test_two_unreadable_records_of_a_batch_go_together_with_what_is_between_them(tmp_path: Path) -> None:
    write_log(tmp_path, [created("s", b"one")], [(UNKNOWN, 1), appended(1, 3, b"two"), (UNKNOWN, 1)], [created("t")])
    refused_at(tmp_path, 3, "unreadable")
    kept = set_aside(tmp_path / "quarantine", 0, Position(3))
    assert kept.record == UNKNOWN + encode_record(appended(1, 3, b"two")) + UNKNOWN
    open_shard(tmp_path, FakeClock()).catalog.close()


def test_a_record_that_cannot_be_applied_stops_writes_with_its_place_and_doctor_names_it(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        async with started(tmp_path, clock) as driver:
            stream = (await driver.create("b/s", content_type="text/plain", body=b"one")).incarnation
            with pytest.raises(OutcomeUnknown, match=r"\(Appended\) cannot be applied") as refused:
                await driver.shard.committer.commit(appended(stream, 0, b"bad"))
            assert refused.value.code == "apply_failed"
            with pytest.raises(OutcomeUnknown, match="cannot be applied"):
                await driver.append("b/s", b"after")
            assert await driver.messages("b/s") == [b"one"]

    run(scenario(), clock)
    config = configuration.load(None, {}, (f"server.data_dir={tmp_path}",))
    (finding,) = log_records(config, clock)
    assert finding.level == "problem" and "(Appended) could not be applied" in finding.message
    (kept,) = read_all(tmp_path / "quarantine", REFUSED)
    set_aside(tmp_path / "quarantine", 0, kept.position)
    (finding,) = log_records(config, clock)
    assert finding.level == "warning" and str(kept.position) in finding.message


# -- the files ------------------------------------------------------------------------------------------------------

REFUSALS = st.builds(
    Refused, st.integers(0, 9999), st.integers(1, 10**19), st.text(), st.text(), st.binary(max_size=60)
)


def path_of(directory: Path, refused: Refused, kind: str) -> Path:
    return directory / f"{refused.shard:04d}-{refused.position:020d}{kind}"


@pytest.fixture(scope="module")
def quarantine_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quarantine")


@given(REFUSALS)
def test_a_file_of_the_quarantine_survives_the_round_trip(quarantine_directory: Path, refused: Refused) -> None:
    path = path_of(quarantine_directory, refused, SET_ASIDE)
    path.write_bytes(msgspec.json.encode(refused))
    try:
        assert read_all(quarantine_directory, SET_ASIDE) == [refused]
    finally:
        path.unlink()


@given(REFUSALS, st.data())
def test_a_damaged_file_never_sets_another_record_aside(
    quarantine_directory: Path, refused: Refused, data: st.DataObject
) -> None:
    encoded = bytearray(msgspec.json.encode(refused))
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = path_of(quarantine_directory, refused, SET_ASIDE)
    path.write_bytes(encoded)
    try:
        (found,) = read_all(quarantine_directory, SET_ASIDE)
        assert (found.shard, found.position) == (refused.shard, refused.position)
    except Corrupt as error:
        assert path.name in error.message
    finally:
        path.unlink()
