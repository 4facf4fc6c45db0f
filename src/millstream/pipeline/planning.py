"""Planning a compaction: which segments are merged with which, and where the new ones are cut.

Segments of one bucket and day are merged, so that the layout by day stays true; so are those that buckets share, out
of which a bucket that has enough gets segments of its own. A segment takes part if it is small, or
if much of it is dead. A group of them becomes a few new segments, each a contiguous range of streams and offsets. What
one group takes is bounded in bytes, segments and runs, and so are the memory of a task and the work of the server that
checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from millstream.pipeline.rewriting import Key, shared_name
from millstream.pipeline.view import View
from millstream.streams.records import SegmentRef
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import SHARED, Extent

DAY_MS: Final = 86_400_000
PARTS_PER_GROUP: Final = 2
SEGMENTS_PER_GROUP: Final = 1_000
RUNS_PER_GROUP: Final = 200_000
# A bucket with so much in segments that it shares gets one of its own.
OWN_SEGMENT_BYTES: Final = 1 << 20


class Weight(NamedTuple):
    """What of a segment is alive."""

    segment: SegmentRef
    shard: int
    live_bytes: int
    live_runs: int


class Group(NamedTuple):
    """Segments to be merged, and the keys at which the new ones are cut (the first starts before everything)."""

    bucket: str
    shard: int
    sources: list[SegmentRef]
    live_bytes: int
    cuts: list[Key]
    kept_from: dict[int, int]
    # Of segments that buckets shared: those buckets that have enough for segments of their own by now.
    apart: Sequence[Share] = ()

    def ranges(self) -> Iterator[tuple[Key, Key | None]]:
        return _ranges(self.cuts)

    def shares(self) -> list[Share]:
        """What becomes of the group, bucket by bucket; the last is what they still share."""
        rest = Share(self.bucket, self.cuts, self.kept_from)
        return [*self.apart, rest] if self.kept_from else [*self.apart]


class Share(NamedTuple):
    """The new segments of one bucket."""

    bucket: str
    cuts: list[Key]
    kept_from: dict[int, int]

    def ranges(self) -> Iterator[tuple[Key, Key | None]]:
        return _ranges(self.cuts)


def _ranges(cuts: list[Key]) -> Iterator[tuple[Key, Key | None]]:
    edges: list[Key | None] = [("", -1, -1), *cuts, None]
    for first, last in pairwise(edges):
        assert first is not None
        yield first, last


class Limits(NamedTuple):
    target_bytes: int
    segments_min: int
    dead_share: float


def weigh(reader: SegmentReader, view: View, buckets: set[str] | None) -> list[Weight]:
    """Every segment of the buckets with what is alive in it."""
    segments = [one for one in view.cold.segments.values() if buckets is None or one.bucket in buckets]
    weights = []
    for segment, footer in reader.footers(segments):
        live = [size for extent in footer.extents if (size := live_bytes(extent, view)) > 0]
        weights.append(Weight(segment, footer.info.shard, sum(live), len(live)))
    return weights


def live_bytes(extent: Extent, view: View) -> int:
    """How much of an extent counts. What a trim has cut through is counted as if it were cut exactly there."""
    kept_from = view.kept_from(extent.incarnation)
    return 0 if kept_from is None else max(extent.offset_end - max(extent.offset_start, kept_from), 0)


def groups_of(weights: Iterable[Weight], limits: Limits) -> Iterator[list[Weight]]:
    """The segments that are worth merging, those of one bucket and day together."""
    by_day: dict[tuple[int, str, int], list[Weight]] = {}
    for weight in weights:
        is_small = weight.segment.payload_bytes < limits.target_bytes // 2
        # Those that are wholly dead the server removes by itself.
        if weight.live_bytes > 0 and (is_small or is_worth_rewriting(weight, limits)):
            day = weight.segment.first_at_ms // DAY_MS
            by_day.setdefault((weight.shard, weight.segment.bucket, day), []).append(weight)
    for _, candidates in sorted(by_day.items()):
        candidates.sort(key=lambda weight: weight.segment.first_position)
        for group in _cut(candidates, limits):
            if len(group) >= limits.segments_min or any(is_worth_rewriting(weight, limits) for weight in group):
                yield group


def is_worth_rewriting(weight: Weight, limits: Limits) -> bool:
    """Whether so much of a segment is dead that it pays to write the rest anew."""
    dead = weight.segment.payload_bytes - weight.live_bytes
    return dead >= max(limits.dead_share * weight.segment.payload_bytes, 1)


def _cut(candidates: list[Weight], limits: Limits) -> Iterator[list[Weight]]:
    group: list[Weight] = []
    size = runs = 0
    for weight in candidates:
        is_full = (
            size + weight.live_bytes > PARTS_PER_GROUP * limits.target_bytes
            or runs + weight.live_runs > RUNS_PER_GROUP
            or len(group) >= SEGMENTS_PER_GROUP
        )
        if group and is_full:
            yield group
            group, size, runs = [], 0, 0
        group.append(weight)
        size += weight.live_bytes
        runs += weight.live_runs
    if group:
        yield group


def plan_group(reader: SegmentReader, view: View, weights: list[Weight], limits: Limits) -> Group:
    """Cut a group into new segments of about equal size, none much larger than the target."""
    sources = [weight.segment for weight in weights]
    shared = sources[0].bucket == SHARED
    runs: dict[str, list[tuple[Key, int]]] = {}
    kept_from: dict[str, dict[int, int]] = {}
    for _, footer in reader.footers(sources):
        for bucket, extent in zip(footer.buckets(), footer.extents, strict=True):
            size = live_bytes(extent, view)
            if size > 0:
                runs.setdefault(bucket, []).append(((extent.stream, extent.incarnation, extent.offset_start), size))
                kept_from.setdefault(bucket, {})[extent.incarnation] = view.kept_from(extent.incarnation) or 0
    total = sum(size for of in runs.values() for _, size in of)
    if not shared:
        bucket = sources[0].bucket
        cuts, kept = _cuts(runs.get(bucket, []), limits), kept_from.get(bucket, {})
        return Group(bucket, weights[0].shard, sources, total, cuts, kept)
    large = [bucket for bucket, of in sorted(runs.items()) if sum(size for _, size in of) >= OWN_SEGMENT_BYTES]
    apart = [Share(bucket, _cuts(runs.pop(bucket), limits), kept_from.pop(bucket)) for bucket in large]
    rest = [((shared_name(bucket, key[0]), *key[1:]), size) for bucket, of in runs.items() for key, size in of]
    kept = {incarnation: offset for of in kept_from.values() for incarnation, offset in of.items()}
    return Group(SHARED, weights[0].shard, sources, total, _cuts(rest, limits), kept, apart)


def _cuts(runs: list[tuple[Key, int]], limits: Limits) -> list[Key]:
    """Where segments of about equal size begin, but for the first."""
    runs.sort()
    total = sum(size for _, size in runs)
    parts = max(-(-total // limits.target_bytes), 1)
    cuts: list[Key] = []
    done = 0
    for key, size in runs:
        if done >= total * (len(cuts) + 1) / parts and len(cuts) + 1 < parts:
            cuts.append(key)
        done += size
    return cuts
