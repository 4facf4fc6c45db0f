"""Starts real servers for tests: a process of its own, a free port on loopback, a directory of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

PYTHON = sys.executable
START_SECONDS = 30.0


class ServerProcess:
    """A `millstream serve` process. `restart` keeps the port and the data."""

    def __init__(
        self,
        data_dir: Path,
        *,
        settings: tuple[str, ...] = (),
        command: tuple[str, ...] = (PYTHON, "-m", "millstream.cli.main", "serve"),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self._settings = settings
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self._listen = "127.0.0.1:0"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.stderr_path = data_dir.parent / f"{data_dir.name}.stderr"

    def start(self) -> ServerProcess:
        command = [*self._command, "--listen", self._listen, "--data-dir", str(self.data_dir)]
        for setting in self._settings:
            command += ["--set", setting]
        with self.stderr_path.open("a") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=self._environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"(https?)://([^,]+)", line)
        if match is None:
            self._reap()
            raise AssertionError(f"the server did not start: {line!r} {self.stderr()}")
        self._listen = match[2]
        self.url = f"{match[1]}://{match[2]}"
        return self

    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def kill(self) -> None:
        """End it as a power failure would end the process."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def stop(self, timeout: float = 30.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._reap()
        return code

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_for_exit(self, timeout: float = 30.0) -> int:
        assert self.process is not None
        code = self.process.wait(timeout)
        self._reap()
        return code

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        elif self.process is not None:
            self._reap()


def wait_until_healthy(url: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(f"{url}/healthz", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"no server answers at {url}")
        time.sleep(0.05)
