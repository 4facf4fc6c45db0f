"""Typed columns from JSON payloads, with the modes that `from_json` and the JSON reader have.

A whole batch is parsed at once by Arrow's JSON reader, which refuses it if one record does not fit the schema. Such a
batch is gone through record by record: fields that do not fit are null, and the record counts as malformed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.json as arrow_json
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from millstream.protocol.content_types import is_json
from millstream.spark.columns import Layout
from millstream.spark.errors import SourceError

_INTEGERS: Final[dict[type[DataType], int]] = {
    ByteType: 1 << 7,
    ShortType: 1 << 15,
    IntegerType: 1 << 31,
    LongType: 1 << 63,
}
# What Arrow's reader gives the same meaning as Spark does. Text is not among them: a number there is text to Spark.
_ARROW_PARSES: Final = (BooleanType, IntegerType, LongType, DoubleType, StringType, ArrayType, StructType)
_LINE_BREAKS: Final = bytes.maketrans(b"\r\n", b"  ")


class Typed(NamedTuple):
    """The typed columns of a batch, and for each record whether it fits the schema."""

    columns: list[arrow.Array]
    fits: arrow.Array | None  # None if all do


class Malformed(ValueError):
    """A value that its type cannot take."""


def parse(table: arrow.Table, layout: Layout) -> Typed:
    payloads = _one(table.column("payload"))
    types = compute.unique(table.column("content_type")).to_pylist()
    if all(is_json(content_type) for content_type in types) and _arrow_can(layout.typed):
        columns = _parse_at_once(payloads, layout)
        if columns is not None:
            return Typed(columns, None)
    return _parse_each(payloads, table.column("content_type").to_pylist(), layout)


def check(table: arrow.Table, fits: arrow.Array) -> None:
    """For FAILFAST: the first record that does not fit, as an error."""
    bad = compute.index(fits, arrow.scalar(False)).as_py()
    if bad >= 0:
        row = table.slice(bad, 1).to_pylist()[0]
        raise SourceError(
            f"a message of stream {row['stream']!r} at offset {row['offset_start']} does not fit the schema:"
            f" {bytes(row['payload'][:200])!r}",
            hint="with the option mode=PERMISSIVE such records are kept with nulls, with mode=DROPMALFORMED dropped",
        )


def _one(column: arrow.ChunkedArray) -> arrow.Array:
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return array.chunk(0) if isinstance(array, arrow.ChunkedArray) else array


# -- a batch at once ---------------------------------------------------------------------------------------------


def _arrow_can(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_arrow_can(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _arrow_can(kind.elementType)
    return isinstance(kind, _ARROW_PARSES)


def _parse_at_once(payloads: arrow.Array, layout: Layout) -> list[arrow.Array] | None:
    if not len(payloads):
        return [arrow.array([], layout.arrow_schema.field(field.name).type) for field in layout.typed.fields]
    # Arrow's reader crashes the process if the first record is `null`, so an empty object goes before it.
    lines = b"{}\n" + _lines(payloads)
    if not _is_text(lines):
        return None  # Arrow would hand on as text what is none
    schema = arrow.schema([layout.arrow_schema.field(field.name) for field in layout.typed.fields])
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    try:
        table = arrow_json.read_json(arrow.BufferReader(lines), reading, parsing)
    except arrow.ArrowInvalid:
        return None
    if table.num_rows != len(payloads) + 1:
        return None
    return [_one(table.column(field.name)).slice(1) for field in layout.typed.fields]


def _is_text(lines: bytes) -> bool:
    if lines.isascii():
        return True
    try:
        lines.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines(payloads: arrow.Array) -> bytes:
    """One record a line. Line breaks inside a record can only stand between its tokens."""
    whole = arrow.ListArray.from_arrays(arrow.array([0, len(payloads)], arrow.int32()), payloads)
    lines = bytes(compute.binary_join(whole, b"\n")[0].as_buffer())
    if lines.count(b"\n") == len(payloads) - 1 and b"\r" not in lines:
        return lines
    return b"\n".join(bytes(payload).translate(_LINE_BREAKS) for payload in payloads.to_pylist())


# -- record by record --------------------------------------------------------------------------------------------


def _parse_each(payloads: arrow.Array, content_types: list[str], layout: Layout) -> Typed:
    readers = [(field.name, _reader(field.dataType)) for field in layout.typed.fields]
    columns: list[list[Any]] = [[] for _ in readers]
    fits = []
    for payload, content_type in zip(payloads.to_pylist(), content_types, strict=True):
        record = _object(payload) if is_json(content_type) else None
        is_good = record is not None
        for column, (name, read) in zip(columns, readers, strict=True):
            value = None
            try:
                found = record.get(name) if record is not None else None
                value = read(found) if found is not None else None
            except (Malformed, ValueError, TypeError, OverflowError, InvalidOperation, RecursionError):
                is_good = False
            column.append(value)
        fits.append(is_good)
    arrays = [
        _array(column, layout.arrow_schema.field(name).type, fits)
        for column, (name, _) in zip(columns, readers, strict=True)
    ]
    return Typed(arrays, None if all(fits) else arrow.array(fits, arrow.bool_()))


def _array(values: list[Any], kind: arrow.DataType, fits: list[bool]) -> arrow.Array:
    """The values as a column. What Arrow cannot hold (half a surrogate pair, a time out of range) is null."""
    try:
        return arrow.array(values, type=kind)
    except (arrow.ArrowException, ValueError, TypeError, OverflowError):
        pass
    for row, value in enumerate(values):
        try:
            arrow.array([value], type=kind)
        except (arrow.ArrowException, ValueError, TypeError, OverflowError):
            values[row], fits[row] = None, False
    return arrow.array(values, type=kind)


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if found is None:
        return {}  # nothing but nulls, as Spark has it
    return found if isinstance(found, dict) else None


def _reader(kind: DataType) -> Callable[[Any], Any]:
    """What turns a JSON value, never null, into a value of a Spark type."""
    if isinstance(kind, StructType):
        return _struct_reader(kind)
    if isinstance(kind, ArrayType):
        return _array_reader(kind)
    if isinstance(kind, MapType):
        return _map_reader(kind)
    if type(kind) in _INTEGERS:
        return _integer_reader(_INTEGERS[type(kind)])
    if isinstance(kind, DecimalType):
        return _decimal_reader(kind)
    simple: dict[type[DataType], Callable[[Any], Any]] = {
        StringType: _text,
        BooleanType: _boolean,
        FloatType: _number,
        DoubleType: _number,
        BinaryType: _binary,
        DateType: _date,
        TimestampType: _moment,
        TimestampNTZType: lambda value: _moment(value).replace(tzinfo=None),
    }
    reader = simple.get(type(kind))
    if reader is None:
        raise SourceError(
            f"the schema has a field of type {kind.simpleString()}, which cannot be read from JSON",
            hint="read it as STRING and cast it",
        )
    return reader


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Malformed
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed
    return float(value)


def _binary(value: Any) -> bytes:
    return base64.b64decode(_exactly(str, value), validate=True)


def _date(value: Any) -> date:
    return date.fromisoformat(_exactly(str, value))


def _moment(value: Any) -> datetime:
    moment = datetime.fromisoformat(_exactly(str, value))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _exactly(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Malformed
    return value


def _integer_reader(limit: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not -limit <= value < limit:
            raise Malformed
        return value

    return read


def _decimal_reader(kind: DecimalType) -> Callable[[Any], Decimal]:
    unit = Decimal(1).scaleb(-kind.scale)

    def read(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Malformed
        number = Decimal(str(value)).quantize(unit)
        if abs(number) >= Decimal(10) ** (kind.precision - kind.scale):
            raise Malformed
        return number

    return read


def _array_reader(kind: ArrayType) -> Callable[[Any], list[Any]]:
    read = _reader(kind.elementType)
    return lambda value: [None if one is None else read(one) for one in _exactly(list, value)]


def _struct_reader(kind: StructType) -> Callable[[Any], dict[str, Any]]:
    readers = [(field.name, _reader(field.dataType)) for field in kind.fields]

    def read(value: Any) -> dict[str, Any]:
        found = _exactly(dict, value)
        return {name: None if found.get(name) is None else read(found[name]) for name, read in readers}

    return read


def _map_reader(kind: MapType) -> Callable[[Any], list[tuple[str, Any]]]:
    if not isinstance(kind.keyType, StringType):
        raise SourceError(
            "the schema has a map whose keys are not text, which JSON cannot have", hint="use MAP<STRING, …>"
        )
    read = _reader(kind.valueType)
    return lambda value: [(key, None if one is None else read(one)) for key, one in _exactly(dict, value).items()]
