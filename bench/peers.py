"""The servers that are compared: how each is found, started on a free loopback port, watched and stopped.

A peer whose toolchain is missing is skipped with a reason; nothing is downloaded or built except the Node packages
pinned in `package-lock.json`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.client import Client

HERE = Path(__file__).parent
START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 60.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Peer:
    """A kind of server. `prefix` is where streams live; `bucket` is created first where that is needed."""

    name: str
    command: Callable[[int, Path], list[str]]
    is_persistent: bool = True
    prefix: str = "/v1/stream/bench/"
    bucket: str | None = None


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


class ServerFailed(Exception):
    """A server did not start, or ended on its own."""


class Server:
    """A running process of a peer, with a data directory of its own."""

    def __init__(self, peer: Peer, directory: Path) -> None:
        self.peer = peer
        self.name = peer.name
        self._data = directory / "data"
        self._output = directory / "output"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def data(self) -> Path:
        return self._data

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def path(self, stream: str | int) -> str:
        return f"{self.peer.prefix}{stream}"

    def start(self, probe_path: str | None = None) -> float:
        """Start it and return the seconds until it first answers a request; with `probe_path`, answers it with 200."""
        self.port = _free_port()
        begin = time.perf_counter()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self.peer.command(self.port, self._data), stdout=output, stderr=subprocess.STDOUT, cwd=HERE
            )
        while not self._answers(probe_path):
            self._check_is_running()
            if time.perf_counter() - begin > START_SECONDS_MAX:
                raise ServerFailed(f"{self.name} did not answer within {START_SECONDS_MAX:.0f} s")
            time.sleep(0.002)
        seconds = time.perf_counter() - begin
        if self.peer.bucket is not None:
            with Client(self) as client:
                client.request("PUT", self.peer.bucket)
        return seconds

    def _answers(self, probe_path: str | None) -> bool:
        try:
            with Client(self) as client:
                status = client.request("HEAD", probe_path or self.path("absent")).status
        except OSError:
            return False
        return status == 200 if probe_path else True

    def _check_is_running(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            last_lines = self._output.read_text(errors="replace").strip().splitlines()[-3:]
            raise ServerFailed(f"{self.name} ended with code {code}: {' / '.join(last_lines)}")

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def resident_bytes(self) -> int:
        """Memory in use now, of its processes together; what several of them share counts once (Pss)."""
        return 1024 * sum(_proportional_kib(pid) for pid in self._processes())

    def cpu_seconds(self) -> float:
        """Processor time that it and what it has started have used, user and system."""
        return sum(_cpu_seconds(pid) for pid in self._processes())

    def _processes(self) -> list[int]:
        """It, and the processes that it has started."""
        assert self._process is not None
        found = [self._process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found


def _proportional_kib(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _cpu_seconds(pid: int) -> float:
    """Of a process and of those of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    return 0.0


@contextlib.contextmanager
def running(peers: Sequence[Peer], parent: Path) -> Iterator[list[Server]]:
    """Fresh servers, one of each peer, removed with their data afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="millstream-bench-", dir=parent))
    servers: list[Server] = []
    try:
        for index, peer in enumerate(peers):
            own = directory / str(index)
            own.mkdir()
            server = Server(peer, own)
            servers.append(server)
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(directory)


def rehearse(peers: Sequence[Peer], parent: Path) -> tuple[list[Peer], list[Skipped]]:
    """Start each peer once; one that does not start is skipped with what it said instead of ending the run later."""
    usable: list[Peer] = []
    skipped: list[Skipped] = []
    for peer in peers:
        try:
            with running([peer], parent):
                usable.append(peer)
        except ServerFailed as failure:
            skipped.append(Skipped(peer.name, str(failure)))
    return usable, skipped


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- finding them ----------------------------------------------------------------------------------------------


def discover() -> tuple[list[Peer], list[Skipped]]:
    """The peers that can run here, millstream first, and those that cannot with the reason."""
    found: list[Peer] = [Peer("millstream", _millstream_command)]
    skipped: list[Skipped] = []
    reason = _prepare_node()
    if reason is None:
        found.append(Peer("Node, memory", lambda port, data: ["node", "node_server.mjs", str(port)], False))
        found.append(Peer("Node, file", lambda port, data: ["node", "node_server.mjs", str(port), str(data)]))
    else:
        skipped.append(Skipped("Node", reason))
    rust = _binary("durable-streams-server", "MILLSTREAM_BENCH_RUST")
    if rust is None:
        skipped.append(
            Skipped(
                "Rust",
                "no durable-streams-server on PATH, in ~/.cargo/bin or in $MILLSTREAM_BENCH_RUST "
                "(cargo install durable-streams)",
            )
        )
    else:
        found.append(Peer("Rust", lambda port, data: [rust, *_rust_flags(port, data)]))
    ursula = _binary("ursula", "MILLSTREAM_BENCH_URSULA")
    if ursula is None:
        skipped.append(
            Skipped(
                "Ursula",
                "no ursula on PATH, in ~/.cargo/bin or in $MILLSTREAM_BENCH_URSULA (cargo install ursula)",
            )
        )
    else:
        found.append(
            Peer("Ursula", lambda port, data: [ursula, *_ursula_flags(port, data)], prefix="/bench/", bucket="/bench")
        )
    return found, skipped


def millstream(name: str, *settings: str) -> Peer:
    """millstream with settings of its own, such as `cold.flush_interval=1s`, for comparing it with itself."""
    flags = [part for setting in settings for part in ("--set", setting)]
    return Peer(name, lambda port, data: [*_millstream_command(port, data), *flags])


def _millstream_command(port: int, data: Path) -> list[str]:
    serve = [sys.executable, "-m", "millstream.cli.main", "serve"]
    # The hot budget must not end a run: what is measured is the path of an append, not when memory is full.
    return [*serve, "--listen", f"127.0.0.1:{port}", "--data-dir", str(data), "--set", "hot.bytes_max=8GiB"]


def _rust_flags(port: int, data: Path) -> list[str]:
    return ["--port", str(port), "--data-dir", str(data), "--durability", "wal"]


def _ursula_flags(port: int, data: Path) -> list[str]:
    address = f"127.0.0.1:{port}"
    return ["serve", "--node-id", "1", "--listen", address, "--advertise", address, "--data-dir", str(data)]


def _prepare_node() -> str | None:
    """Install the pinned Node packages if they are not there yet; the reason if that cannot be."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are not installed (apt-get install nodejs npm)"
    if (HERE / "node_modules" / "@durable-streams" / "server").is_dir():
        return None
    command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
    outcome = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return None if outcome.returncode == 0 else f"npm ci failed: {outcome.stderr.strip()[-200:]}"


def _binary(name: str, variable: str) -> str | None:
    given = os.environ.get(variable)
    if given:
        return given if os.access(given, os.X_OK) else None
    in_cargo = Path.home() / ".cargo" / "bin" / name
    return shutil.which(name) or (str(in_cargo) if os.access(in_cargo, os.X_OK) else None)
