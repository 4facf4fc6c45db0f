"""`kill -9` under load, again and again: every acknowledged append is there once, in order, and nothing else is."""

from __future__ import annotations

import random
import threading
import time
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from millstream.client import Client
from support.load import Account, StreamUnderLoad, Tailer, Writer, decode, split
from support.server import ServerProcess

SETTINGS = (
    # Small, so that kills also fall into checkpoints and the start of segments.
    "log.segment_bytes=256KiB",
    "cold.flush_interval=150ms",
    "read.long_poll_timeout=500ms",
    "read.sse_lifetime=1s",
)


def test_eight_kills_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    _run(tmp_path, kills=8, streams=24, producers=5, appenders=2, seed=random.randrange(2**32))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_hundred_kills_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    _run(tmp_path, kills=200, streams=200, producers=8, appenders=4, seed=random.randrange(2**32))


def _run(tmp_path: Path, *, kills: int, streams: int, producers: int, appenders: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    loaded = [StreamUnderLoad(f"/v1/stream/load/{number}", number % 2 == 0) for number in range(streams)]
    stopping = threading.Event()
    with ServerProcess(tmp_path / "data", settings=SETTINGS) as server:
        with Client(server.url) as client:
            for stream in loaded:
                assert client.stream(stream.name).create(content_type=stream.content_type).is_new
        writers = [
            # Every stream has several producers; appenders share streams with them.
            Writer(
                f"w{number}",
                server.url,
                loaded[number % 3 :: 3],
                idempotent=number < producers,
                stopping=stopping,
                seed=seed + number,
            )
            for number in range(producers + appenders)
        ]
        tailers = [Tailer(server.url, stream, mode, stopping) for stream in loaded[:4] for mode in ("sse", "long-poll")]
        for thread in (*writers, *tailers):
            thread.start()
        try:
            for _ in range(kills):
                time.sleep(chance.uniform(0.05, 0.5))
                if stopping.is_set():
                    break
                server.kill()
                server.start()
            time.sleep(0.2)
        finally:
            stopping.set()
            for thread in (*writers, *tailers):
                thread.join(60)
        problems = [problem for thread in (*writers, *tailers) for problem in thread.problems]
        assert not problems, problems[:5]
        assert not any(thread.is_alive() for thread in (*writers, *tailers))
        # Once more from disk alone.
        server.kill()
        server.start()
        with Client(server.url) as client:
            for stream in loaded:
                chunks = client.stream(stream.name).read()
                _check(stream, [one for chunk in chunks for one in split(stream, chunk.data)], writers, tailers)
        assert server.stop() == 0
        assert "Traceback" not in server.stderr()
    assert any(tailer.seen for tailer in tailers)
    assert sum(len(account.acknowledged) for writer in writers for account in writer.accounts) > kills * 20


def _check(stream: StreamUnderLoad, messages: list[bytes], writers: list[Writer], tailers: list[Tailer]) -> None:
    ends = list(accumulate(map(len, messages), initial=0))
    found: dict[str, list[tuple[int, int]]] = {}  # writer → (number, index of its first message)
    decoded = [decode(stream, message) for message in messages]
    for index, message in enumerate(decoded):
        if message.part == 0:
            found.setdefault(message.writer, []).append((message.number, index))
    stored = 0
    for writer in writers:
        for account in writer.accounts:
            if account.stream == stream:
                stored += _check_account(writer, account, found.get(writer.name, []), messages, ends)
    assert stored == len(messages), f"{stream.path} holds messages that nobody sent"
    for tailer in tailers:
        if tailer.stream == stream:
            _check_tail(tailer, messages, ends)


def _check_account(
    writer: Writer, account: Account, found: list[tuple[int, int]], messages: list[bytes], ends: list[int]
) -> int:
    """Hold what one writer knows against what is there; returns how many messages are its own."""
    where = f"{writer.name} in {account.stream.path}"
    numbers = [number for number, _ in found]
    assert all(before < after for before, after in pairwise(numbers)), f"{where}: repeated or out of order"
    missing = account.acknowledged.keys() - set(numbers)
    assert not missing, f"{where}: acknowledged but lost: {sorted(missing)[:5]}"
    extra = set(numbers) - account.acknowledged.keys()
    if writer.idempotent:
        assert not extra, f"{where}: there, though never acknowledged: {sorted(extra)[:5]}"
        assert numbers == list(range(len(numbers))), f"{where}: a gap in the producer's sequence"
    else:
        assert extra <= account.unanswered, f"{where}: refused or never sent, but there: {sorted(extra)[:5]}"
    stored = 0
    for number, index in found:
        sent = account.sent[number]
        assert messages[index : index + len(sent)] == sent, f"{where}: {number} is not as it was sent"
        stored += len(sent)
        end = account.acknowledged.get(number, -1)
        assert end in (-1, ends[index + len(sent)]), f"{where}: {number} does not end at the offset it was told"
    return stored


def _check_tail(tailer: Tailer, messages: list[bytes], ends: list[int]) -> None:
    index_at = {end: index for index, end in enumerate(ends)}
    for seen in tailer.seen:
        expected = messages[index_at[seen.start] : index_at[seen.end]]
        assert split(tailer.stream, seen.content) == expected, f"{tailer.stream.path}: a reader saw something else"
