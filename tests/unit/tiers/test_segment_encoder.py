"""Encoding segments: each is of one bucket and day, in order and not too large, and nothing is lost between them."""

from __future__ import annotations

import io

import pyarrow.parquet as parquet
import pytest

from millstream.tiers import segment_encoder
from millstream.tiers.segment_encoder import DAY_MS, EncodedSegment, Owners, encode_segments
from millstream.tiers.segments import decode_extents
from millstream.units import Incarnation, Offset, Position
from support.segments import Run, run_of, streams_of, unflushed_of

FOREVER = 1 << 62


def flush(
    runs: list[tuple[str, Run]],
    *,
    deleted: tuple[int, ...] = (),
    trimmed: dict[Incarnation, Offset] | None = None,
    first_position: int = 1,
    position: int = FOREVER,
) -> list[EncodedSegment]:
    """The segments that a flush of these runs makes; each comes with its bucket."""
    streams = streams_of([(bucket, run) for bucket, run in runs if run.incarnation not in deleted])
    owners = Owners(streams, list((trimmed or {}).items()))
    return list(
        encode_segments(unflushed_of([run for _, run in runs]), Position(first_position), Position(position), owners, 0)
    )


def rows(encoded: EncodedSegment) -> list[tuple[str, int, bytes]]:
    table = parquet.read_table(io.BytesIO(encoded.data), columns=["stream", "offset_end", "payload"])
    return [tuple(row.values()) for row in table.to_pylist()]


def payloads(encoded: list[EncodedSegment]) -> list[list[bytes]]:
    return [[payload for _, _, payload in rows(one)] for one in encoded]


def test_a_long_run_fills_several_segments_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_encoder, "SEGMENT_BYTES", 10)
    messages = [b"aaaa", b"bbbb", b"cc", b"d" * 25, b"eee"]
    made = flush([("bucket", run_of("s", 7, 0, messages))])
    assert payloads(made) == [[b"aaaa", b"bbbb", b"cc"], [b"d" * 25], [b"eee"]]
    extents = [decode_extents(one.extents) for one in made]
    assert [(one[0].offset_start, one[-1].offset_end) for one in extents] == [(0, 10), (10, 35), (35, 38)]
    assert [(one.info.first_position, one.info.last_position) for one in made] == [(1, 3), (4, 4), (5, 5)]


def test_very_many_messages_are_put_in_order_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_encoder, "SLAB_ROWS", 2)
    made = flush([("bucket", run_of("s", 7, 0, [b"a", b"b", b"c", b"d", b"e"]))])
    assert payloads(made) == [[b"a", b"b"], [b"c", b"d"], [b"e"]]


def test_a_run_over_midnight_is_cut_there() -> None:
    run = Run("s", 7, 0, [b"x", b"y", b"z"], [1, 2, 3], [DAY_MS - 1, DAY_MS, DAY_MS + 1])
    made = flush([("bucket", run)])
    assert payloads(made) == [[b"x"], [b"y", b"z"]]
    assert [(one.info.first_at_ms, one.info.last_at_ms) for one in made] == [
        (DAY_MS - 1, DAY_MS - 1),
        (DAY_MS, DAY_MS + 1),
    ]


def test_streams_of_a_bucket_share_a_segment_in_order_and_buckets_do_not() -> None:
    names = [(bucket, stream) for stream in ("d", "a", "c", "b") for bucket in ("two", "one")]
    made = flush([(bucket, run_of(stream, 7 + n, 0, [b"x"], 1 + n)) for n, (bucket, stream) in enumerate(names)])
    found = {one.info.bucket: [stream for stream, _, _ in rows(one)] for one in made}
    assert found == {"one": ["a", "b", "c", "d"], "two": ["a", "b", "c", "d"]}


def test_messages_that_came_in_turns_are_together_and_in_order() -> None:
    ones = Run("one", 8, 0, [b"1", b"2", b"3"], [1, 3, 5], [5, 5, 5])
    twos = Run("two", 7, 100, [b"a", b"b"], [2, 4], [5, 5])
    (made,) = flush([("bucket", twos), ("bucket", ones)])
    assert rows(made) == [("one", 1, b"1"), ("one", 2, b"2"), ("one", 3, b"3"), ("two", 101, b"a"), ("two", 102, b"b")]


def test_what_was_deleted_trimmed_or_flushed_before_is_left_out() -> None:
    gone = run_of("gone", 1, 0, [b"x"] * 3, 10)
    trimmed = run_of("trimmed", 2, 0, [b"aa", b"bb", b"cc"], 20)
    older = run_of("older", 3, 0, [b"m", b"n", b"o"], 8)
    runs = [("bucket", run) for run in (gone, trimmed, older)]
    (made,) = flush(runs, deleted=(1,), trimmed={Incarnation(2): Offset(4)}, first_position=9, position=22)
    assert rows(made) == [("older", 2, b"n"), ("older", 3, b"o")]
    (made,) = flush(runs, deleted=(1,), trimmed={Incarnation(2): Offset(4)}, first_position=11)
    assert rows(made) == [("trimmed", 6, b"cc")]


def test_a_flush_without_messages_makes_no_segment() -> None:
    assert flush([]) == []
    assert flush([("bucket", run_of("gone", 1, 0, [b"x"]))], deleted=(1,)) == []
