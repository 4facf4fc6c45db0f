"""One Spark session for all tests of a pytest process: starting one takes seconds, and a process can have only one."""

from __future__ import annotations

import atexit
import functools
import tempfile
from typing import TYPE_CHECKING

from millstream.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@functools.cache
def shared_session() -> SparkSession:
    """A local session on two cores; it ends with the process."""
    scratch = tempfile.TemporaryDirectory(prefix="millstream-spark-")
    session = spark_session(
        "millstream tests",
        "local[2]",
        **{
            "spark.local.dir": scratch.name,
            "spark.sql.warehouse.dir": f"{scratch.name}/warehouse",
            "spark.sql.shuffle.partitions": "4",
            "spark.log.level": "ERROR",
        },
    )
    atexit.register(scratch.cleanup)
    atexit.register(session.stop)
    return session
