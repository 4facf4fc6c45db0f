"""The columns a read offers, and how segments' and feeds' columns become them.

A schema without more is the message columns. In a schema of the user's own, fields with those names are the message
columns and all others are read from the payload as JSON, beside them.
"""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import pyarrow as arrow
import pyarrow.compute as compute
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.spark.errors import SourceError
from millstream.spark.options import ReadOptions

MESSAGE_COLUMNS: Final[dict[str, DataType]] = {
    "bucket": StringType(),
    "stream": StringType(),
    "offset_start": LongType(),
    "offset_end": LongType(),
    "position": LongType(),
    "appended_at": TimestampType(),
    "content_type": StringType(),
    "payload": BinaryType(),
    "incarnation": LongType(),
}
# Read only if it is named: which of the streams that had a name one after the other a message is of.
ON_REQUEST: Final = frozenset({"incarnation"})
# Those that a segment has too, under the same names; the bucket is the same in every row and is not read.
STORED: Final = frozenset(MESSAGE_COLUMNS) - {"bucket"}


def message_schema(columns: tuple[str, ...] = ()) -> StructType:
    """The message columns, all or the named ones."""
    unknown = [name for name in columns if name not in MESSAGE_COLUMNS]
    if unknown:
        raise SourceError(
            f"the option 'columns' names {unknown[0]!r}, which is no column", hint=f"there are {_all_columns()}"
        )
    names = columns or [name for name in MESSAGE_COLUMNS if name not in ON_REQUEST]
    return StructType([StructField(name, MESSAGE_COLUMNS[name]) for name in names])


def typed_schema(fields: StructType | str, columns: tuple[str, ...] = ()) -> StructType:
    """For `.schema(...)`: the message columns, and beside them fields that are read from JSON payloads."""
    typed = fields if isinstance(fields, StructType) else cast("StructType", StructType.fromDDL(fields))
    return StructType([*message_schema(columns).fields, *typed.fields])


class Layout(NamedTuple):
    """What a read has to deliver: which message columns, which fields of the JSON, whether the bad records' text."""

    schema: StructType
    arrow_schema: arrow.Schema
    messages: tuple[str, ...]
    typed: StructType
    corrupt: str | None

    @property
    def stored(self) -> set[str]:
        """The columns of a segment that this takes."""
        needed = set(self.messages) & STORED
        if self.typed.fields or self.corrupt is not None:
            needed |= {"payload", "content_type", "stream", "offset_start"}
        return needed or {"position"}  # a count needs no column, but something to count


def layout_of(schema: StructType, options: ReadOptions) -> Layout:
    messages, typed, corrupt = [], [], None
    for field in schema.fields:
        if field.name in MESSAGE_COLUMNS:
            expected = MESSAGE_COLUMNS[field.name]
            if field.dataType != expected:
                raise SourceError(
                    f"the schema has {field.name!r} as {field.dataType.simpleString()}, and the column of that name is"
                    f" {expected.simpleString()}",
                    hint="cast it after the load; a JSON field of the same name is read with get_json_object(payload)",
                )
            messages.append(field.name)
        elif field.name == options.corrupt_column and isinstance(field.dataType, StringType):
            corrupt = field.name
        else:
            typed.append(field)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    return Layout(schema, arrow_schema, tuple(messages), StructType(typed), corrupt)


def message_arrays(bucket: str, table: arrow.Table, layout: Layout) -> dict[str, arrow.Array]:
    """The message columns of a table with a segment's column names."""
    arrays: dict[str, arrow.Array] = {}
    for name in layout.messages:
        kind = layout.arrow_schema.field(name).type
        if name == "bucket":
            arrays[name] = arrow.repeat(arrow.scalar(bucket, kind), table.num_rows)
        else:
            column = table.column(name)
            array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
            if isinstance(array, arrow.ChunkedArray):
                array = array.chunk(0)
            arrays[name] = array if array.type == kind else compute.cast(array, kind)
    return arrays


def _all_columns() -> str:
    return ", ".join(MESSAGE_COLUMNS)
