"""Typed columns from JSON payloads: no payload may crash or stop a task, and both ways to parse agree."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.spark import typed
from millstream.spark.columns import Layout, layout_of
from millstream.spark.options import read_options

# Arrow's reader takes the first as a whole; the second has types that are read record by record.
NUMBERS = StructType(
    [
        StructField("n", IntegerType()),
        StructField("flag", BooleanType()),
        StructField("list", ArrayType(LongType())),
        StructField("inner", StructType([StructField("x", DoubleType()), StructField("s", StringType())])),
    ]
)
OTHERS = StructType(
    [
        StructField("n", DecimalType(10, 2)),
        StructField("at", TimestampType()),
        StructField("day", DateType()),
        StructField("labels", MapType(StringType(), StringType())),
        StructField("s", StringType()),
    ]
)

names = st.sampled_from(["n", "flag", "list", "inner", "x", "s", "at", "day", "labels", "other", "N", ""])
texts = st.text(max_size=8) | st.sampled_from(["2026-01-31", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
documents = values.map(lambda value: json.dumps(value).encode())
payloads = documents | st.sampled_from(
    [
        b"null",
        b" null ",
        b"{}",
        b"",
        b" ",
        b'{"s":"\\ud800"}',
        b'{"s":"\xff"}',
        b'{"n":1}\n',
        b'{"n":1e999}',
        b"\xef\xbb\xbf{}",
    ]
)


def layout(schema: StructType) -> Layout:
    return layout_of(schema, read_options({"url": "http://127.0.0.1:1", "bucket": "runs"}))


def parsed(messages: list[bytes], schema: StructType) -> tuple[list[dict[str, Any]], list[bool]]:
    """The records that typed columns make of messages, and whether each fits."""
    table = arrow.table(
        {"payload": arrow.array(messages, arrow.binary()), "content_type": ["application/json"] * len(messages)}
    )
    found = typed.parse(table, layout(schema))
    for column in found.columns:
        column.validate(full=True)
    rows = arrow.table(found.columns, names=schema.fieldNames()).to_pylist()
    return rows, [True] * len(messages) if found.fits is None else found.fits.to_pylist()


@pytest.mark.parametrize("messages", [[b"null"], [b"null", b'{"n":1}'], [b" null", b"null"], [b'{"n":1}', b"null"]])
def test_null_as_a_message_is_a_row_of_nulls(messages: list[bytes]) -> None:
    rows, fits = parsed(messages, NUMBERS)
    assert [row["n"] for row in rows] == [1 if b"1" in message else None for message in messages]
    assert fits == [True] * len(messages)


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"n":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"list":[' + b"9" * 5_000 + b"]}",
        b'{"inner":{"s":"\\ud800"}}',
        b'{"inner":{"s":"\xff"}}',
    ],
    ids=["deep array", "deep object", "long number", "half a surrogate pair", "no UTF-8"],
)
def test_message_that_cannot_be_read_spoils_no_other(payload: bytes) -> None:
    rows, fits = parsed([b'{"n":1}', payload, b'{"n":2}'], NUMBERS)
    assert [row["n"] for row in rows] == [1, None, 2]
    assert fits == [True, False, True]


@pytest.mark.parametrize("schema", [NUMBERS, OTHERS], ids=["at once", "record by record"])
@given(messages=st.lists(payloads, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_payloads_give_a_row_each(schema: StructType, messages: list[bytes]) -> None:
    rows, fits = parsed(messages, schema)
    assert len(rows) == len(fits) == len(messages)
    for message, row, is_good in zip(messages, rows, fits, strict=True):
        alone, alone_fits = parsed([message], schema)
        assert (repr(row), is_good) == (repr(alone[0]), alone_fits[0])


@given(messages=st.lists(documents, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_batch_at_once_gives_what_its_records_give_one_by_one(messages: list[bytes]) -> None:
    array = arrow.array(messages, arrow.binary())
    at_once = typed._parse_at_once(array, layout(NUMBERS))
    if at_once is not None:
        each = typed._parse_each(array, ["application/json"] * len(messages), layout(NUMBERS))
        assert [repr(column.to_pylist()) for column in at_once] == [repr(one.to_pylist()) for one in each.columns]
