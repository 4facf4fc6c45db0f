"""Types for JSON messages: which columns a table of them has, and how it grows.

A field of the messages is a column; what is nested in it stays JSON text. A column gets its type from the first batch
that has the field, and keeps it: later fields add columns, they never change one. A message with a value that does not
fit its column has null there, and is kept whole in `_corrupt_record`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import pyarrow as arrow

CORRUPT: Final = "_corrupt_record"
# The columns that say where a message is from; a field of the same name, in whatever case, gets an underscore.
MESSAGE_COLUMNS: Final = ("stream", "offset_start", "offset_end", "position", "appended_at", "bucket", "date", CORRUPT)
FIELDS_MAX: Final = 1_000

Fields = dict[str, str]
"""By field, one of the names in KINDS."""

KINDS: Final = {
    "boolean": arrow.bool_(),
    "long": arrow.int64(),
    "double": arrow.float64(),
    "string": arrow.string(),
    "json": arrow.string(),
}
_LONG: Final = 1 << 63
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()


def kind_of(raw: msgspec.Raw) -> str | None:
    """The kind of a value; None for null, which says nothing."""
    value = bytes(raw)
    first = value.lstrip()[:1]
    if first in (b"{", b"["):
        return "json"
    if first == b'"':
        return "string"
    if first in (b"t", b"f"):
        return "boolean"
    if first == b"n":
        return None
    try:
        number = _ANY.decode(value)
    except msgspec.MsgspecError:
        return "json"  # beyond what a double holds, such as 1e999
    if isinstance(number, float):
        return "double"
    return "long" if -_LONG <= number < _LONG else "json"  # as text it keeps its digits


def wider(one: str, other: str) -> str:
    """The kind that takes values of both, within one batch."""
    if one == other:
        return one
    return "double" if {one, other} == {"long", "double"} else "json"


def observe(fields: Fields, payload: bytes) -> bool:
    """Add what a message shows; returns whether it is an object at all."""
    try:
        found = _OBJECT.decode(payload)
    except msgspec.MsgspecError:
        return False
    for name, raw in found.items():
        kind = kind_of(raw)
        if kind is not None and (name in fields or len(fields) < FIELDS_MAX):
            fields[name] = wider(fields[name], kind) if name in fields else kind
    return True


def merge_fields(known: Mapping[str, str], *found: Mapping[str, str]) -> Fields:
    """The columns after a batch: those there were, as they were, and the new ones, as wide as the batch needs."""
    new: Fields = {}
    for fields in found:
        for name, kind in fields.items():
            if name not in known:
                new[name] = wider(new[name], kind) if name in new else kind
    merged = dict(known)
    for name in sorted(new):
        if len(merged) < FIELDS_MAX:
            merged[name] = new[name]
    return merged


def column_names(fields: Iterable[str]) -> list[str]:
    """The columns of the fields. Engines do not tell names apart by case, so each gets underscores until it differs
    from all before it. Since fields are only ever added at the end, a field's column never changes.
    """
    taken = {name.casefold() for name in MESSAGE_COLUMNS}
    names = []
    for field in fields:
        name = field or "_"
        while name.casefold() in taken:
            name += "_"
        taken.add(name.casefold())
        names.append(name)
    return names


def columns_of(fields: Fields, payloads: Iterable[bytes]) -> list[arrow.Array]:
    """The payloads by field, in the fields' order, and at the end what could not be read."""
    values: dict[str, list[Any]] = {name: [] for name in fields}
    corrupt: list[str | None] = []
    for payload in payloads:
        row, is_whole = _row(fields, payload)
        for name, column in values.items():
            column.append(row.get(name))
        corrupt.append(None if is_whole else payload.decode("utf-8", "replace"))
    arrays = [arrow.array(column, KINDS[fields[name]]) for name, column in values.items()]
    return [*arrays, arrow.array(corrupt, arrow.string())]


def _row(fields: Fields, payload: bytes) -> tuple[dict[str, Any], bool]:
    try:
        found = _OBJECT.decode(payload)
    except msgspec.MsgspecError:
        return {}, False
    row: dict[str, Any] = {}
    is_whole = True
    for name, raw in found.items():
        kind = fields.get(name)
        if kind is None:
            is_whole = is_whole and kind_of(raw) is None
            continue
        actual = kind_of(raw)
        if actual is None:
            continue
        if kind == "json":
            row[name] = bytes(raw).decode()
        elif actual == kind:
            row[name] = _ANY.decode(raw)
        elif kind == "double" and actual == "long":
            row[name] = float(_ANY.decode(raw))
        else:
            is_whole = False
    return row, is_whole
