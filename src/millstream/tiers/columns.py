"""Arrow columns from Python's values and back, by their buffers alone.

`arrow.array` and `arrow.scalar` look at every value, and import pandas where it is installed: in a server that is a
second's pause.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute


def integers(values: array[int], kind: arrow.DataType | None = None) -> arrow.Array:
    """The numbers themselves, without a copy; the array must not grow while the column is in use."""
    return arrow.Array.from_buffers(kind or arrow.int64(), len(values), [None, arrow.py_buffer(values)])


def integer(value: int) -> arrow.Scalar:
    return integers(array("q", [value]))[0]


def binaries(values: Sequence[bytes], kind: arrow.DataType | None = None) -> arrow.Array:
    """A column over one joined buffer: a copy, but no object for each value."""
    offsets = array("i", accumulate(map(len, values), initial=0))
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(b"".join(values))]
    return arrow.Array.from_buffers(kind or arrow.binary(), len(values), buffers)


def texts(values: Sequence[str]) -> arrow.Array:
    return binaries([value.encode() for value in values], arrow.string())


def numbers(column: arrow.Array, kind: Literal["i", "q", "Q"] = "q") -> memoryview[Any]:
    """The numbers of a column that was just made, or of one that starts where its buffer does."""
    buffer = column.buffers()[1] if len(column) else b""
    return memoryview(buffer).cast(kind)[: len(column)]


def order_of(*columns: arrow.Array) -> arrow.Array:
    """The row numbers in the order of these columns, the first of them first; equal ones stay as they are."""
    names = [str(number) for number in range(len(columns))]
    table = arrow.Table.from_arrays(list(columns), names=names)
    return compute.sort_indices(table, sort_keys=[(name, "ascending") for name in names])


def last_rows(column: arrow.Array) -> arrow.Array:
    """For each value, in ascending order, the number of the last row that has it."""
    order = order_of(column)
    ends = compute.run_end_encode(column.take(order)).run_ends
    return order.take(compute.subtract(ends, integers(array("i", [1]), arrow.int32())[0]))


class Same(NamedTuple):
    """Consecutive rows with the same value."""

    value: int
    start: int
    stop: int


def run_ends(column: arrow.Array) -> tuple[memoryview[int], memoryview[int]]:
    """The values of rows, once for all that follow each other with the same one, and where each run of them ends."""
    encoded = compute.run_end_encode(column)
    return numbers(encoded.values, "q" if column.type == arrow.int64() else "i"), numbers(encoded.run_ends, "i")


def runs(column: arrow.Array) -> Iterator[Same]:
    start = 0
    for value, stop in zip(*run_ends(column), strict=True):
        yield Same(value, start, stop)
        start = stop
