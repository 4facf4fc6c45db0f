"""Tasks: a function run on Spark's executors, once for each of a list of arguments.

Through `mapInArrow`, so that it works on a Spark Connect server too, where there are no RDDs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as arrow
import pyarrow.compute as compute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")


def run_tasks(spark: SparkSession, arguments: Sequence[T], work: Callable[[T], bytes]) -> list[bytes]:
    """What `work` returns for each argument, in their order. Arguments and function travel pickled."""
    if not arguments:
        return []

    def one(numbered: tuple[int, T]) -> Iterator[arrow.RecordBatch]:
        number, argument = numbered
        result = [arrow.array([number], arrow.int64()), arrow.array([work(argument)], arrow.binary())]
        yield arrow.record_batch(result, ["id", "result"])

    found = map_tasks(spark, list(enumerate(arguments)), one, "id long, result binary").collect()
    results = {row["id"]: bytes(row["result"]) for row in found}
    return [results[number] for number in range(len(arguments))]


def map_tasks(
    spark: SparkSession, arguments: Sequence[T], work: Callable[[T], Iterator[arrow.RecordBatch]], columns: str
) -> DataFrame:
    """The batches that `work` yields for each argument, as one DataFrame; one partition for each argument."""
    pickled = [pickle.dumps(argument) for argument in arguments]

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from work(pickle.loads(pickled[number]))

    return spark.range(0, len(arguments), 1, max(len(arguments), 1)).mapInArrow(each, columns)


def run_edges(column: arrow.Array) -> list[int]:
    """Where runs of equal values begin in a column, and at the end its length."""
    encoded = compute.run_end_encode(column)
    return [0, *encoded.run_ends.to_pylist()]
