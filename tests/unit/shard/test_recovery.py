"""Start-up: what was acknowledged is there again, from the log alone or behind a checkpoint, or it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millstream.errors import Corrupt, Gone, NotFound, ProducerFenced
from millstream.protocol.expiry import Expiry
from millstream.protocol.producers import ProducerClaim
from support.fake_time import FakeClock, run, turns
from support.shards import ShardDriver, key_of, open_shard, started


async def fill(driver: ShardDriver) -> None:
    await driver.create("logs/a", content_type="text/plain", body=b"one")
    await driver.append("logs/a", b"two", producer=ProducerClaim("p", 3, 0), seq="s1")
    await driver.create("j", content_type="application/json", body=b'[1.00,{"k":2}]')
    await driver.append("j", b"[3,4]", content_type="application/json", close=True)
    await driver.create("gone", content_type="text/plain", body=b"x")
    await driver.delete("gone")
    await driver.create("source", content_type="text/plain", body=b"shared")
    await driver.create("fork", fork=("source", 0, 3))
    await driver.append("fork", b"own")
    await driver.delete("source")


async def check(driver: ShardDriver) -> None:
    assert await driver.messages("logs/a") == [b"one", b"two"]
    assert await driver.messages("j") == [b"1.00", b'{"k":2}', b"3", b"4"]
    assert driver.shard.get(key_of("j")).closed
    assert await driver.messages("fork") == [b"sha", b"own"]
    with pytest.raises(NotFound):
        driver.shard.get(key_of("gone"))
    with pytest.raises(Gone):
        driver.shard.get(key_of("source"))
    stream = driver.shard.get(key_of("logs/a"))
    assert stream.seq == "s1"
    with pytest.raises(ProducerFenced):
        await driver.append("logs/a", b"ghost", producer=ProducerClaim("p", 2, 0))
    repeat = await driver.append("logs/a", b"two", producer=ProducerClaim("p", 3, 0), seq="s1")
    assert not repeat.is_new_data
    assert {name: bucket.streams for name, bucket in driver.shard.namespace.buckets.items()} == {
        "logs": 1,
        "_default": 3,
    }


@pytest.mark.parametrize("checkpoint", ["never", "before", "after", "both"])
@pytest.mark.parametrize("crash", [True, False], ids=["crash", "stop"])
def test_a_shard_comes_back_as_it_was(tmp_path: Path, checkpoint: str, crash: bool) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, crash=crash) as driver:
            await driver.create("early", content_type="text/plain", body=b"e")
            if checkpoint in ("before", "both"):
                await driver.checkpoint()
            await driver.delete("early")
            await fill(driver)
            if checkpoint in ("after", "both"):
                await driver.checkpoint()
            secrets = driver.shard.machine.secrets
        for _ in range(2):
            async with started(tmp_path, clock, crash=crash) as driver:
                assert driver.shard.machine.secrets == secrets
                await check(driver)

    run(main(), clock)


def test_records_a_checkpoint_reflects_are_not_applied_again(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await fill(driver)
            before = driver.shard.committer.applied_position
            assert await driver.checkpoint() == before
            await driver.append("logs/a", b"three")
        async with started(tmp_path, clock) as driver:
            # The record that sealed the flush lies behind it, then the append.
            assert "recovered: 2 records replayed" in driver.shard.notices
            assert await driver.messages("logs/a") == [b"one", b"two", b"three"]

    run(main(), clock)


def test_a_catalog_that_was_lost_is_rebuilt_from_a_whole_log(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, crash=False) as driver:
            await fill(driver)
        shutil.rmtree(tmp_path / "catalog")
        async with started(tmp_path, clock) as driver:
            await check(driver)

    run(main(), clock)


def test_a_name_used_again_after_a_checkpoint_shows_only_its_new_bytes(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain", body=b"old", closed=True)
            await driver.checkpoint()
            await driver.delete("s")
            await driver.create("s", content_type="application/json", body=b"[1]")
        for checkpointed in (False, True):
            async with started(tmp_path, clock) as driver:
                assert await driver.messages("s") == [b"1"]
                assert not driver.shard.get(key_of("s")).closed
                if not checkpointed:
                    await driver.checkpoint()

    run(main(), clock)


def test_a_stream_deleted_after_a_checkpoint_stays_away(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("s", content_type="text/plain", body=b"old")
            await driver.checkpoint()
            await driver.delete("s")
        for _ in range(2):
            async with started(tmp_path, clock) as driver:
                with pytest.raises(NotFound):
                    driver.shard.get(key_of("s"))
                assert driver.shard.hot.bytes == 0
                await driver.checkpoint()

    run(main(), clock)


def test_expiry_that_came_due_while_the_server_was_down_is_enacted(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock) as driver:
            await driver.create("saved", content_type="text/plain", body=b"x", expiry=Expiry(ttl_seconds=60))
            await driver.checkpoint()
            await driver.create("unsaved", content_type="text/plain", body=b"x", expiry=Expiry(ttl_seconds=60))
            await driver.create("longer", content_type="text/plain", expiry=Expiry(ttl_seconds=600))
        clock.advance(61_000)
        async with started(tmp_path, clock) as driver:
            for name in ("saved", "unsaved"):
                with pytest.raises(NotFound) as caught:
                    driver.shard.get(key_of(name))
                assert caught.value.code == "stream_expired"
            clock.advance(1_000)
            await turns()
            await driver.shard.committer.drain()
            assert driver.shard.namespace.find(key_of("saved")) is None
            assert driver.shard.namespace.find(key_of("unsaved")) is None
            assert driver.shard.get(key_of("longer"))

    run(main(), clock)


def test_a_read_keeps_a_stream_alive_across_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, crash=False) as driver:
            await driver.create("s", content_type="text/plain", expiry=Expiry(ttl_seconds=60))
            await driver.checkpoint()
            clock.advance(50_000)
            driver.shard.deadlines.touch(driver.shard.get(key_of("s")))
        clock.advance(50_000)
        async with started(tmp_path, clock) as driver:
            assert driver.shard.get(key_of("s"))
            clock.advance(10_000)
            with pytest.raises(NotFound):
                driver.shard.get(key_of("s"))

    run(main(), clock)


# -- refusing to start -----------------------------------------------------------------------------------------


def written(directory: Path, *, checkpoint: bool) -> list[Path]:
    clock = FakeClock()

    async def main() -> None:
        async with started(directory, clock, segment_bytes=256) as driver:
            await driver.create("s", content_type="text/plain", body=b"first")
            if checkpoint:
                await driver.checkpoint()
            for number in range(20):
                await driver.append("s", b"%050d" % number)

    run(main(), clock)
    segments = sorted((directory / "log").glob("*.log"))
    assert len(segments) > 4
    return segments


def refusal(directory: Path) -> Corrupt:
    with pytest.raises(Corrupt) as caught:
        open_shard(directory, FakeClock(), segment_bytes=256)
    assert caught.value.hint
    return caught.value


def test_a_torn_last_batch_is_cut_and_reported(tmp_path: Path) -> None:
    segments = written(tmp_path, checkpoint=False)
    segments[-1].write_bytes(segments[-1].read_bytes().rstrip(b"\0")[:-3])
    clock = FakeClock()

    async def main() -> None:
        async with started(tmp_path, clock, segment_bytes=256) as driver:
            assert segments[-1].name in driver.shard.notices[0]
            assert (await driver.messages("s"))[1:] == [b"%050d" % number for number in range(19)]
            await driver.append("s", b"again")
        async with started(tmp_path, clock, segment_bytes=256) as driver:
            assert len(driver.shard.notices) == 1
            assert (await driver.messages("s"))[-1] == b"again"

    run(main(), clock)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_damage_in_the_middle_refuses_to_start_naming_file_and_position(tmp_path: Path, checkpoint: bool) -> None:
    segments = written(tmp_path, checkpoint=checkpoint)
    data = bytearray(segments[2].read_bytes())
    data[50] ^= 1
    segments[2].write_bytes(data)
    message = refusal(tmp_path).message
    assert str(segments[2]) in message
    assert "byte 32" in message


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("which", [0, 2])
def test_a_missing_segment_refuses_to_start(tmp_path: Path, which: int, checkpoint: bool) -> None:
    segments = written(tmp_path, checkpoint=checkpoint)
    first = int(segments[which + 1].stem)
    segments[which].unlink()
    message = refusal(tmp_path).message
    assert f"position {first}" in message
    if which:
        assert str(segments[which + 1]) in message


def test_a_log_that_is_gone_refuses_to_start_when_there_is_a_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, checkpoint=True)
    shutil.rmtree(tmp_path / "log")
    assert "the log is missing" in refusal(tmp_path).message


def test_a_batch_of_records_from_the_future_refuses_to_start(tmp_path: Path) -> None:
    from millstream.log.file_log import FileLog
    from support.logs import LogDriver

    driver = LogDriver(FileLog(tmp_path / "log", FakeClock()))
    assert driver.append(b"\xdd\0\0\0\1\x92\xcd\xff\xff\x01") is None
    driver.log.close()
    assert "cannot read" in refusal(tmp_path).message


def test_a_stop_without_anything_in_flight_is_quick_and_repeats_nothing(tmp_path: Path) -> None:
    clock = FakeClock()

    async def main() -> None:
        for _ in range(3):
            async with started(tmp_path, clock, crash=False) as driver:
                pass
        async with started(tmp_path, clock) as driver:
            # At most the record that sealed the last flush and a claim of the store for each start: a stop never adds
            # more to do for the next one.
            assert int(driver.shard.notices[-1].split()[1]) <= 4

    run(main(), clock)
