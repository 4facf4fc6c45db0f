"""Segmenting: runs become segments that are in order, of one bucket and day, and no larger than they should be."""

from __future__ import annotations

import asyncio
from array import array
from itertools import accumulate

import pytest

from millstream.protocol.keys import StreamKey
from millstream.shard import segmenting
from millstream.tiers.segment_encoder import StreamRun

DAY_MS = 86_400_000


def run_of(bucket: str, stream: str, messages: list[bytes], times: list[int]) -> StreamRun:
    ends = array("q", accumulate(map(len, messages)))
    positions = array("q", range(1, len(messages) + 1))
    return StreamRun(StreamKey(bucket, stream), 7, "text/plain", 0, messages, ends, positions, array("q", times))


def cut(*runs: StreamRun) -> list[tuple[str, list[StreamRun]]]:
    async def collect() -> list[tuple[str, list[StreamRun]]]:
        return [segment async for segment in segmenting.segments_of(list(runs))]

    return asyncio.run(collect())


def test_a_long_run_fills_several_segments_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 10)
    messages = [b"aaaa", b"bbbb", b"cc", b"d" * 25, b"eee"]
    segments = cut(run_of("b", "s", messages, [5] * 5))
    pieces = [piece for _, [piece] in segments]
    assert [piece.messages for piece in pieces] == [[b"aaaa", b"bbbb", b"cc"], [b"d" * 25], [b"eee"]]
    assert [(piece.start, piece.ends[-1]) for piece in pieces] == [(0, 10), (10, 35), (35, 38)]
    assert [list(piece.positions) for piece in pieces] == [[1, 2, 3], [4], [5]]


def test_a_run_over_midnight_is_cut_there() -> None:
    segments = cut(run_of("b", "s", [b"x", b"y", b"z"], [DAY_MS - 1, DAY_MS, DAY_MS + 1]))
    assert [piece.messages for _, [piece] in segments] == [[b"x"], [b"y", b"z"]]


def test_streams_of_a_bucket_share_a_segment_in_order_and_buckets_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SLICE_RUNS", 2)
    runs = [run_of(bucket, stream, [b"x"], [1]) for stream in "dacb" for bucket in ("two", "one")]
    assert [(bucket, [run.key.stream for run in chosen]) for bucket, chosen in cut(*runs)] == [
        ("one", ["a", "b", "c", "d"]),
        ("two", ["a", "b", "c", "d"]),
    ]
