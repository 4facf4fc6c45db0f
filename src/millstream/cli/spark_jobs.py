"""Runs Spark for a command: Spark's log goes to a file, its tasks to a progress bar, its errors to one line.

A JVM writes its log to the standard error that it inherits. So it is started with a file as standard error; the file is
named if the job fails, and removed otherwise. Under `spark-submit` the JVM already runs and keeps its own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.cli.progress import Progress
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_SECONDS: Final = 0.3
REASON_CHARACTERS_MAX: Final = 400

# The last line of a Python traceback inside a Spark error: the message of our own code.
_OURS: Final = re.compile(r"^\s*(?:[\w.]*: )?millstream(?:\.\w+)*\.\w+: (.+)$", re.MULTILINE)
_CODE: Final = re.compile(r"^\[[A-Z0-9_.]+\] ")


class JobFailed(MillstreamError):
    code = "spark_job_failed"


@contextmanager
def quiet_start() -> Iterator[Path | None]:
    """A JVM that is started in this context gets a file as its standard error; yields the file."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        yield None
        return
    number, name = tempfile.mkstemp(prefix="millstream-spark-", suffix=".log")
    sys.stderr.flush()
    ours = os.dup(2)
    os.dup2(number, 2)
    try:
        yield Path(name)
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)
        os.close(number)


@contextmanager
def plain_errors(log: list[Path]) -> Iterator[None]:
    """Turn Spark errors into one sentence; `log` has the file with Spark's log, once there is one."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark", "py4j")):
            raise
        hint = f"Spark's log is in {log[0]}" if log else ""
        log.clear()
        raise JobFailed(reason_of(str(error)), hint=hint) from None
    finally:
        for path in log:
            path.unlink(missing_ok=True)


def reason_of(text: str) -> str:
    """The reason in a Spark error, without the Java and Python tracebacks."""
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1]).strip().rstrip(".")[:REASON_CHARACTERS_MAX]
    first = next((line.strip() for line in text.splitlines() if line.strip()), "Spark gives no reason")
    return f"Spark failed: {_CODE.sub('', first)}"[:REASON_CHARACTERS_MAX]


@contextmanager
def tasks_shown(spark: SparkSession, label: str) -> Iterator[None]:
    """Show the tasks of the running stages as a progress bar, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_show, args=(spark, label, is_over), name="millstream-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _show(spark: SparkSession, label: str, is_over: threading.Event) -> None:
    try:
        tracker = spark.sparkContext.statusTracker()
    except Exception:  # Spark Connect has no status tracker; then there is no bar
        return
    while not is_over.wait(LOOK_SECONDS):
        with suppress(Exception):  # the session may be stopping
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            total = sum(stage.numTasks for stage in stages if stage is not None)
            done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
            if total:
                Progress(label, total).advance(done)
    with Progress(label, 0):
        pass  # removes the bar
