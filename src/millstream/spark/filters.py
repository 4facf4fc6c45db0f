"""Filters that Spark pushes down: what they say about segments and row groups, and about single rows.

A `Selection` is a conservative summary: whatever it excludes, the filters exclude. The rows that are left are checked
exactly, so Spark need not look at these filters again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from typing import Any, Final, NamedTuple

import pyarrow.compute as compute
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from millstream.spark.columns import STORED
from millstream.streams.records import SegmentRef
from millstream.tiers.segments import Extent, Footer

LOWEST: Final = -(2**62)
HIGHEST: Final = 2**62

_COMPARED: Final = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
_NUMBERS: Final = ("offset_start", "offset_end", "position")
_TEXTS: Final = ("bucket", "stream", "content_type")


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included."""

    low: int = LOWEST
    high: int = HIGHEST

    def intersection(self, other: Span) -> Span:
        return Span(max(self.low, other.low), min(self.high, other.high))

    def overlaps(self, low: int, high: int) -> bool:
        return low <= self.high and high >= self.low

    def holds(self, low: int, high: int) -> bool:
        """Whether all from one number to another lie in it."""
        return self.low <= low and high <= self.high


class NameRange(NamedTuple):
    """Names from `low` up to, and without, `high`; None is beyond all names."""

    low: str = ""
    high: str | None = None

    def has(self, name: str) -> bool:
        return self.low <= name and (self.high is None or name < self.high)


@dataclass(frozen=True)
class Selection:
    """What a read is about: names, offsets, positions and times outside of which nothing is wanted."""

    streams: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    names: NameRange = NameRange()
    offset_start: Span = field(default_factory=Span)
    offset_end: Span = field(default_factory=Span)
    position: Span = field(default_factory=Span)
    at_ms: Span = field(default_factory=Span)

    def has_segment(self, segment: SegmentRef) -> bool:
        return self.position.overlaps(segment.first_position, segment.last_position) and self.at_ms.overlaps(
            segment.first_at_ms, segment.last_at_ms
        )

    def has_stream(self, stream: str) -> bool:
        if self.streams is not None and stream not in self.streams:
            return False
        return self.names.has(stream) and all(stream.startswith(prefix) for prefix in self.prefixes)

    @property
    def is_of_all_names(self) -> bool:
        return self.streams is None and not self.prefixes and self.names == NameRange()

    def has_extent(self, extent: Extent) -> bool:
        return (
            self.has_stream(extent.stream)
            and self.offset_start.overlaps(extent.offset_start, extent.offset_end - 1)
            and self.offset_end.overlaps(extent.offset_start + 1, extent.offset_end)
        )

    def groups(self, segment: SegmentRef, footer: Footer) -> list[int]:
        """The row groups of a segment that may hold something wanted."""
        groups = list(range(footer.metadata.num_row_groups))
        if not self.is_of_all_names or self.offset_start != Span() or self.offset_end != Span():
            groups = sorted({extent.row_group for extent in footer.extents if self.has_extent(extent)})
        if self.position.holds(segment.first_position, segment.last_position) and self.at_ms.holds(
            segment.first_at_ms, segment.last_at_ms
        ):
            return groups
        return [group for group in groups if self.has_group(footer, group)]

    def has_group(self, footer: Footer, group: int) -> bool:
        """Whether a row group's statistics leave room for anything wanted."""
        row_group = footer.metadata.row_group(group)
        for name, span in (("position", self.position), ("appended_at", self.at_ms)):
            if span == Span():
                continue
            statistics = row_group.column(_index_of(footer, name)).statistics
            if statistics is None or not statistics.has_min_max:
                continue
            low, high = statistics.min, statistics.max
            if isinstance(low, datetime):
                low, high = _milliseconds(low), _milliseconds(high)
            if not span.overlaps(low, high):
                return False
        return True


def _index_of(footer: Footer, name: str) -> int:
    return int(footer.metadata.schema.names.index(name))


def is_supported(one: Filter) -> bool:
    """Whether this filter is one of those that are understood here to the last row."""
    if isinstance(one, IsNotNull):
        return one.attribute[0] in STORED or one.attribute == ("bucket",)
    if isinstance(one, In):
        return _fits(one.attribute, one.value)
    if isinstance(one, StringStartsWith):
        return _fits(one.attribute, (one.value,))
    return isinstance(one, _COMPARED) and _fits(one.attribute, (one.value,))


def _fits(attribute: tuple[str, ...], values: Iterable[Any]) -> bool:
    if len(attribute) != 1:
        return False
    name = attribute[0]
    if name in _TEXTS:
        return all(isinstance(value, str) for value in values)
    if name in _NUMBERS:
        return all(type(value) is int for value in values)
    return name == "appended_at" and all(isinstance(value, datetime) for value in values)


def narrow(selection: Selection, filters: Iterable[Filter]) -> Selection:
    for one in filters:
        selection = _narrowed(selection, one)
    return selection


def _narrowed(selection: Selection, one: Filter) -> Selection:
    if isinstance(one, StringStartsWith) and one.attribute == ("stream",):
        return replace(selection, prefixes=(*selection.prefixes, one.value))
    if isinstance(one, In | EqualTo | EqualNullSafe) and one.attribute == ("stream",):
        named = frozenset(one.value if isinstance(one, In) else (one.value,))
        return replace(selection, streams=named if selection.streams is None else selection.streams & named)
    if isinstance(one, In | EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        name = one.attribute[0]
        if name in _NUMBERS:
            return replace(selection, **{name: getattr(selection, name).intersection(_span(one))})
        if name == "appended_at":
            return replace(selection, at_ms=selection.at_ms.intersection(_span(one)))
    return selection


def _span(one: Any) -> Span:
    """The numbers a comparison allows; times in milliseconds, rounded outwards."""
    values = one.value if isinstance(one, In) else (one.value,)
    if not values:
        return Span(0, -1)
    numbers = [_milliseconds(value) if isinstance(value, datetime) else value for value in values]
    is_time = isinstance(values[0], datetime)
    low, high = min(numbers), max(numbers)
    if isinstance(one, GreaterThan | GreaterThanOrEqual):
        return Span(low if is_time or isinstance(one, GreaterThanOrEqual) else low + 1, HIGHEST)
    if isinstance(one, LessThan | LessThanOrEqual):
        return Span(LOWEST, high if is_time or isinstance(one, LessThanOrEqual) else high - 1)
    return Span(low, high)


def _milliseconds(value: datetime) -> int:
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000_000) // 1000


# -- rows --------------------------------------------------------------------------------------------------------


def stored_columns(filters: Iterable[Filter]) -> set[str]:
    """The columns of a segment that checking rows against these filters takes."""
    return {_column(one) for one in filters if not isinstance(one, IsNotNull)} & STORED


def _column(one: Any) -> str:
    """The column a supported filter is about: each of those kinds has it, though Spark's base class does not."""
    return str(one.attribute[0])


def excludes_bucket(filters: Iterable[Filter], bucket: str) -> bool:
    """Whether a filter on the bucket's name leaves nothing of this one."""
    return not all(_holds(one, bucket) for one in filters if getattr(one, "attribute", None) == ("bucket",))


def _holds(one: Any, value: str) -> bool:
    if isinstance(one, In):
        return value in one.value
    if isinstance(one, StringStartsWith):
        return value.startswith(one.value)
    tests = {
        EqualTo: value.__eq__,
        EqualNullSafe: value.__eq__,
        GreaterThan: value.__gt__,
        GreaterThanOrEqual: value.__ge__,
        LessThan: value.__lt__,
        LessThanOrEqual: value.__le__,
    }
    test = tests.get(type(one))
    return test is None or bool(test(one.value))


def row_condition(filters: Iterable[Filter]) -> compute.Expression | None:
    """What a row must satisfy, over a segment's column names; None if there is no condition."""
    terms = [_term(one) for one in filters if not isinstance(one, IsNotNull) and _column(one) != "bucket"]
    return reduce(and_, terms) if terms else None


def _term(one: Any) -> compute.Expression:
    column = compute.field(one.attribute[0])
    if isinstance(one, In):
        return column.isin([_value(value) for value in one.value])
    if isinstance(one, StringStartsWith):
        return compute.starts_with(column, one.value)
    value = _value(one.value)
    if isinstance(one, GreaterThan):
        return column > value
    if isinstance(one, GreaterThanOrEqual):
        return column >= value
    if isinstance(one, LessThan):
        return column < value
    if isinstance(one, LessThanOrEqual):
        return column <= value
    return column == value


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return value
