"""The columns of an export: they grow, they never change, and nothing that does not fit is lost."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipeline import export_files
from millstream.pipeline.typing_json import (
    KINDS,
    MESSAGE_COLUMNS,
    Fields,
    column_names,
    columns_of,
    merge_fields,
    observe,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
OBJECTS = st.dictionaries(st.sampled_from("abcde"), VALUES, max_size=5)


def observed(messages: list[Any]) -> Fields:
    fields: Fields = {}
    for message in messages:
        observe(fields, json.dumps(message).encode())
    return fields


def test_kinds_are_as_narrow_as_the_batch_allows() -> None:
    messages = [{"l": 1, "d": 1, "s": "x", "b": True, "j": {"a": 1}, "m": 1, "n": None}, {"d": 1.5, "m": "x"}]
    assert observed(messages) == {
        "l": "long",
        "d": "double",
        "s": "string",
        "b": "boolean",
        "j": "json",
        "m": "json",
    }


def test_later_batches_add_columns_and_change_none() -> None:
    known = merge_fields({}, {"a": "long"}, {"a": "double", "b": "string"})
    assert known == {"a": "double", "b": "string"}
    assert merge_fields(known, {"a": "json", "c": "boolean"}) == {"a": "double", "b": "string", "c": "boolean"}


def test_fields_that_differ_by_case_or_are_called_like_a_column_get_columns_of_their_own() -> None:
    fields = merge_fields({}, observed([{"id": 1, "ID": 2, "stream": "x", "stream_": "y", "Stream": "z", "": 0}]))
    named = dict(zip(fields, column_names(fields), strict=True))
    assert named == {
        "": "_",
        "ID": "ID",
        "id": "id_",
        "Stream": "Stream_",
        "stream": "stream__",
        "stream_": "stream___",
    }
    later = merge_fields(fields, {"Id": "long", "a": "long"})
    assert column_names(later)[: len(fields)] == column_names(fields), "what has a column keeps it"
    table = export_files.typed_schema(later)
    assert len({name.casefold() for name in table.names}) == len(table.names)


@given(st.lists(st.text(max_size=3) | st.sampled_from(MESSAGE_COLUMNS), unique=True))
def test_columns_are_unique_whatever_the_fields(fields: list[str]) -> None:
    names = [name.casefold() for name in (*MESSAGE_COLUMNS, *column_names(fields))]
    assert len(set(names)) == len(names) and "" not in names


def test_number_beyond_a_double_is_kept_as_text() -> None:
    payloads = [b'{"n": 1e999}', b'{"n": 1.5}']
    fields: Fields = {}
    assert [observe(fields, payload) for payload in payloads] == [True, True]
    assert [column.to_pylist() for column in columns_of(fields, payloads)] == [["1e999", "1.5"], [None, None]]
    known, corrupt = columns_of({"n": "double"}, payloads)
    assert known.to_pylist() == [None, 1.5] and corrupt.to_pylist() == ['{"n": 1e999}', None]


def test_what_does_not_fit_is_null_and_kept_whole() -> None:
    payloads = [b'{"a": 1}', b'{"a": "one"}', b"17", b'{"a": null}', b'{"new": 1}']
    a, corrupt = columns_of({"a": "long"}, payloads)
    assert a.to_pylist() == [1, None, None, None, None]
    assert corrupt.to_pylist() == [None, '{"a": "one"}', "17", None, '{"new": 1}']


@given(st.lists(OBJECTS, min_size=1, max_size=8))
def test_a_batch_fits_the_columns_it_was_observed_for(messages: list[dict[str, Any]]) -> None:
    payloads = [json.dumps(message).encode() for message in messages]
    fields = observed(messages)
    *columns, corrupt = columns_of(fields, payloads)
    assert corrupt.null_count == len(messages)
    for (name, kind), column in zip(fields.items(), columns, strict=True):
        assert column.type == KINDS[kind]
        for message, value in zip(messages, column.to_pylist(), strict=True):
            expected = message.get(name)
            if expected is None:
                assert value is None
            else:
                assert (json.loads(value) if kind == "json" else value) == expected or kind == "double"
