"""A standalone Spark cluster on this machine: one master, two workers of one core, each a process of its own.

Drivers are processes too, started by `Driver` from a small program, so that a test can kill them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyspark

from millstream.spark.java import find_java
from support.ports import free_ports

START_SECONDS = 90.0
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
WORKERS = 2


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_NO_DAEMONIZE": "1",
    }


class SparkCluster:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        port, web = free_ports(2)
        self._web = web
        self.url = f"spark://127.0.0.1:{port}"
        self._port = port

    def __enter__(self) -> SparkCluster:
        master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(self._port)]
        self._start("master", *master, "--webui-port", str(self._web))
        self._wait_for("master", r"I have been elected leader")
        for number in range(WORKERS):
            name = f"worker-{number}"
            flags = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0")
            folder = ("--work-dir", str(self._directory / name))
            self._start(name, "org.apache.spark.deploy.worker.Worker", *flags, *folder, self.url)
        for number in range(WORKERS):
            self._wait_for(f"worker-{number}", r"Successfully registered with master")
        return self

    def _start(self, name: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(SPARK_CLASS), *arguments],
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self._directory,
                start_new_session=True,
            )
        self._processes.append(process)

    def _wait_for(self, name: str, pattern: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        log = self._directory / f"{name}.log"
        while re.search(pattern, log.read_text(errors="replace")) is None:
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def executors(self) -> list[int]:
        """The executors' process ids: the children of our workers that are one."""
        workers = {process.pid for process in self._processes[1:]}
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    command = (path / "cmdline").read_bytes()
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, ValueError):
                    continue
                if b"CoarseGrainedExecutorBackend" in command and parent in workers:
                    found.append(int(path.name))
        return found

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes):
            _kill_group(process)


class Driver:
    """A program that uses a session on a cluster. What it prints last is its result, as JSON."""

    def __init__(self, program: str, directory: Path, **arguments: Any) -> None:
        self._log = directory / f"driver-{time.monotonic_ns()}.log"
        self._output = self._log.with_suffix(".out")
        with self._log.open("wb") as log, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(arguments)],
                stdout=output,
                stderr=log,
                env=environment(),
                cwd=directory,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End the driver, Python and Java, as a lost machine would."""
        _kill_group(self._process)

    def result(self, seconds: float) -> Any:
        try:
            code = self._process.wait(seconds)
        finally:
            _kill_group(self._process)
        assert code == 0, self.log()[-6000:]
        return json.loads(self._output.read_text().strip().splitlines()[-1])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
