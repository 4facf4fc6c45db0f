"""Which segments a compaction takes, and where it cuts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipeline.planning import DAY_MS, PARTS_PER_GROUP, Group, Limits, Weight, groups_of
from millstream.streams.records import SegmentRef
from millstream.units import Milliseconds, Position

LIMITS = Limits(1_000, 2, 0.3)


def weight(position: int, payload: int, live: int | None = None, bucket: str = "b", day: int = 1) -> Weight:
    at = day * DAY_MS
    segment = SegmentRef(
        f"s{position}",
        bucket,
        payload,
        0,
        1,
        payload,
        Position(position),
        Position(position),
        Milliseconds(at),
        Milliseconds(at),
        1,
        0,
    )
    return Weight(segment, 0, payload if live is None else live, 1)


def paths(groups: list[list[Weight]]) -> list[list[str]]:
    return [[one.segment.path for one in group] for group in groups]


def test_small_segments_of_one_bucket_and_day_are_merged_and_large_ones_left() -> None:
    weights = [weight(1, 10), weight(2, 900), weight(3, 10), weight(4, 10, bucket="c"), weight(5, 10, day=2)]
    assert paths(list(groups_of(weights, LIMITS))) == [["s1", "s3"]]


def test_a_worn_segment_is_written_anew_and_a_wholly_dead_one_is_left_to_the_server() -> None:
    weights = [weight(1, 900, 500), weight(2, 900, 0), weight(3, 10, 0), weight(4, 900, 800)]
    assert paths(list(groups_of(weights, LIMITS))) == [["s1"]]


def test_one_small_segment_alone_is_nothing_to_do() -> None:
    assert list(groups_of([weight(1, 10)], LIMITS)) == []
    assert len(list(groups_of([weight(1, 10), weight(2, 10)], Limits(1_000, 3, 0.3)))) == 0


@given(st.lists(st.integers(1, 499), min_size=2, max_size=60))
def test_groups_hold_every_small_segment_once_and_stay_within_their_bytes(sizes: list[int]) -> None:
    weights = [weight(number, size) for number, size in enumerate(sizes)]
    groups = list(groups_of(weights, Limits(1_000, 1, 0.3)))
    assert sorted(path for group in paths(groups) for path in group) == sorted(one.segment.path for one in weights)
    for group in groups:
        assert sum(one.live_bytes for one in group) <= PARTS_PER_GROUP * 1_000
        assert all(a.segment.first_position < b.segment.first_position for a, b in pairwise(group))


def test_the_ranges_of_a_group_cover_everything_without_overlap() -> None:
    group = Group("b", 0, [], 10, [("m", 1, 5), ("t", 2, 0)], {})
    ranges = list(group.ranges())
    assert [first for first, _ in ranges] == [("", -1, -1), ("m", 1, 5), ("t", 2, 0)]
    assert [last for _, last in ranges] == [("m", 1, 5), ("t", 2, 0), None]
