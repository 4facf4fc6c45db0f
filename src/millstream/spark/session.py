"""`spark_session`: a Spark session with the settings that the data source and the jobs work best with.

The source works in any other session too.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigurationError
from millstream.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"

# What may be set on a session that is running already, on a Connect server too.
SQL_SETTINGS: Final = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
START_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}
# The tasks' Arrow. Its default allocator gives memory back with every batch and gets it anew: merging segments took a
# third longer, and reading them a tenth.
if sys.platform == "linux":
    START_SETTINGS["spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL"] = "jemalloc"
LOCAL_SETTINGS: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    # For throughput, which is what jobs are about: with Java's default one, which is about pauses, reads took a third
    # longer, Spark's own of Parquet too.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    "spark.sql.shuffle.partitions": "8",
    # Between the JVM and its Python workers; a twentieth faster to read than by TCP.
    "spark.python.unix.domain.socket.enabled": "true",
}


def spark_session(app: str, master: str = LOCAL, **conf: object) -> SparkSession:
    """A session on `master`, or the one there is; `conf` has Spark's own names (`**{"spark.driver.memory": "4g"}`).

    Under `spark-submit` its `--master` decides. `sc://host:port` is a Spark Connect server.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigurationError(
            "PySpark is not installed", hint="pip install 'millstream[spark]' brings PySpark 4.3 and what it needs"
        ) from None
    builder = SparkSession.builder.appName(app)
    if master.startswith("sc://"):
        settings = dict(SQL_SETTINGS)
        builder = builder.remote(master)
    else:
        settings = SQL_SETTINGS | START_SETTINGS
        if "PYSPARK_GATEWAY_PORT" not in os.environ:  # no spark-submit has chosen Java and master before us
            os.environ["JAVA_HOME"] = str(find_java().home)
            builder = builder.master(master)
            if master.startswith("local"):
                settings |= LOCAL_SETTINGS
                os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Driver and executors run one Python: this one, if it is on both.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings |= {name: str(value) for name, value in conf.items()}
    for name, value in settings.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session
