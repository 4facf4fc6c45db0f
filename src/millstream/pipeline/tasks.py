"""Tasks: a function run on Spark's executors, once for each of a list of arguments.

Through `mapInArrow`, so that it works on a Spark Connect server too, where there are no RDDs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


def run_tasks(spark: SparkSession, arguments: Sequence[T], work: Callable[[T], bytes], name: str) -> list[bytes]:
    """What `work` returns for each argument, in their order. Arguments and function travel pickled."""
    if not arguments:
        return []
    pickled = [pickle.dumps(argument) for argument in arguments]
    rows = spark.range(0, len(arguments), 1, len(arguments))

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                result = work(pickle.loads(pickled[number]))
                yield arrow.record_batch(
                    [arrow.array([number], arrow.int64()), arrow.array([result], arrow.binary())], ["id", "result"]
                )

    found = rows.mapInArrow(each, "id long, result binary").collect()
    results = {row["id"]: bytes(row["result"]) for row in found}
    return [results[number] for number in range(len(arguments))]
