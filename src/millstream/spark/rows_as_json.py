"""Rows as messages: the column `payload` as it is, or all other columns as one JSON object a row.

Objects look as `to_json` would write them: nulls are left out, times are ISO 8601 in UTC, bytes are base64.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as arrow
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from millstream.spark.errors import SourceError

NOT_CONTENT: Final = ("bucket", "stream", "content_type")

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


def encoder_of(schema: StructType) -> Callable[[arrow.Table], list[bytes]]:
    """What turns some rows into their messages."""
    if "payload" in schema.fieldNames():
        return _payloads
    fields = [(field.name, _converter(field.dataType)) for field in schema.fields if field.name not in NOT_CONTENT]

    def encode(table: arrow.Table) -> list[bytes]:
        names = [name for name, _ in fields]
        columns = [
            column if convert is None else [None if value is None else convert(value) for value in column]
            for column, (_, convert) in zip((table.column(name).to_pylist() for name in names), fields, strict=True)
        ]
        return [
            _ENCODER.encode({name: value for name, value in zip(names, row, strict=True) if value is not None})
            for row in zip(*columns, strict=True)
        ]

    return encode


def _payloads(table: arrow.Table) -> list[bytes]:
    column = table.column("payload")
    if column.null_count:
        raise SourceError("the column 'payload' is null in some rows", hint="filter them out: a message has content")
    payloads: list[bytes] = column.cast(arrow.binary()).to_pylist()
    return payloads


def _converter(kind: DataType) -> Callable[[Any], Any] | None:
    """What makes of an Arrow value one that is encoded as it should be; None where nothing is to be done."""
    if isinstance(kind, TimestampType):
        return _utc
    if isinstance(kind, StructType):
        return _struct_converter(kind)
    if isinstance(kind, ArrayType):
        inner = _converter(kind.elementType)
        return None if inner is None else lambda value: [None if one is None else inner(one) for one in value]
    if isinstance(kind, MapType):
        return _map_converter(kind)
    return None


def _utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


def _struct_converter(kind: StructType) -> Callable[[Any], Any]:
    fields = [(field.name, _converter(field.dataType)) for field in kind.fields]

    def convert(value: Any) -> Any:
        return {
            name: inner(value[name]) if inner is not None else value[name]
            for name, inner in fields
            if value[name] is not None
        }

    return convert


def _map_converter(kind: MapType) -> Callable[[Any], Any]:
    inner = _converter(kind.valueType)

    def convert(pairs: Any) -> Any:
        return {str(key): value if inner is None or value is None else inner(value) for key, value in pairs}

    return convert
