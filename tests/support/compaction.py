"""Compactions without Spark: planned and written here as the job does it, so that tests can spoil any step."""

from __future__ import annotations

import secrets
from typing import Any

from millstream.pipeline.planning import Group, Limits, groups_of, plan_group, weigh
from millstream.pipeline.rewriting import Part, rewrite_part
from millstream.pipeline.view import load_view
from millstream.streams.records import SegmentRef
from millstream.tiers.cold import compacted_path
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segment_reader import SegmentReader

LIMITS = Limits(128 << 20, 2, 0.3)


async def plan(settings: ObjectStoreSettings, limits: Limits = LIMITS) -> list[Group]:
    objects = open_objects(settings)
    view = await load_view(objects, 0)
    reader = SegmentReader(objects)
    weights = weigh(reader, view, None)
    return [plan_group(reader, view, weights, limits) for weights in groups_of(weights, limits)]


def parts_of(settings: ObjectStoreSettings, group: Group) -> list[Part]:
    first = min(group.sources, key=lambda segment: segment.first_position)
    return [
        Part(
            settings,
            compacted_path(share.bucket, first.first_at_ms, 0, first.first_position, secrets.token_bytes(8)),
            share.bucket,
            group.shard,
            group.sources,
            *edges,
            share.kept_from,
        )
        for share in group.shares()
        for edges in share.ranges()
    ]


async def write(settings: ObjectStoreSettings, group: Group) -> list[SegmentRef]:
    return [await rewrite_part(part) for part in parts_of(settings, group)]


def proposal(group: Group, segments: list[SegmentRef]) -> dict[str, Any]:
    """The body of `POST /cluster/compactions`."""
    fields = SegmentRef.__struct_fields__
    return {
        "replace": [source.path for source in group.sources],
        "segments": [{name: getattr(segment, name) for name in fields} for segment in segments],
    }
