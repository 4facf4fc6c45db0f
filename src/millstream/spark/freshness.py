"""`refresh`: let a DataFrame, and the views made of it, see what was appended since they were first used.

Spark plans a Python source once and keeps the plan on the source object that every frame and view derived from one
`load()` shares. There is no public call that forgets it (`REFRESH TABLE` does not), so this goes to the Java object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.spark.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME: Final = "millstream"
_TABLE: Final = "org.apache.spark.sql.execution.datasources.v2.python.PythonTable"


def refresh(frame: DataFrame) -> DataFrame:
    """The same query, planned anew when it is used next: it then reads the buckets as they are at that moment.

    Whatever else was derived from the same `load()` is planned anew too, unless its rows are cached.
    """
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        raise SourceError(
            "refresh needs a session with a JVM of its own, and this DataFrame is of Spark Connect",
            hint="call load() again",
        )
    sources = _sources(java_frame.queryExecution().analyzed())
    if not sources:
        raise SourceError("this DataFrame does not read millstream", hint="refresh what load() returned")
    for source in sources:
        source.setReadInfo(None)
    # A frame keeps its physical plan; a new one over the same query has none yet.
    return frame.select("*")


def _sources(plan: Any) -> list[Any]:
    """The source objects of a logical plan, those of its subqueries included."""
    found = []
    leaves = plan.collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        table = leaf.table() if leaf.getClass().getSimpleName() == "DataSourceV2Relation" else None
        if table is not None and table.getClass().getName() == _TABLE and table.name() == NAME:
            field = table.getClass().getDeclaredField("ds")
            field.setAccessible(True)
            found.append(field.get(table))
    subqueries = plan.subqueriesAll()
    for number in range(subqueries.size()):
        found += _sources(subqueries.apply(number))
    return found
