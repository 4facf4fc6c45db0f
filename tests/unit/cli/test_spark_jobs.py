"""Errors of Spark, as a command tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli.spark_jobs import JobFailed, plain_errors, reason_of
from millstream.errors import NotFound

IN_A_TASK = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "batch.py", line 58, in read
    for table in segment_tables():
millstream.spark.errors.SourceError: segment a.parquet is damaged: no. Run `millstream cold verify`.

JVM stacktrace:
org.apache.spark.api.python.PythonException
\tat org.apache.spark.api.python.BasePythonRunner.java:500
"""


def test_reason_is_what_our_own_code_said() -> None:
    assert reason_of(IN_A_TASK) == "segment a.parquet is damaged: no. Run `millstream cold verify`"
    assert reason_of("\n[PATH_NOT_FOUND] Path does not exist: x.\nat java") == "Spark failed: Path does not exist: x."


def test_errors_of_spark_become_one_line_and_others_stay(tmp_path: Path) -> None:
    spark_error = type("PySparkException", (Exception,), {"__module__": "pyspark.errors.base"})
    log = tmp_path / "spark.log"
    log.write_text("java")
    with pytest.raises(JobFailed, match="is damaged") as caught, plain_errors([log]):
        raise spark_error(IN_A_TASK)
    assert str(log) in (caught.value.hint or "") and log.exists()
    with pytest.raises(NotFound), plain_errors([log]):
        raise NotFound("no bucket")
    assert not log.exists(), "nobody needs the log of what did not fail in Spark"
