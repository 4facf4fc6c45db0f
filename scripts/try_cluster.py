"""`make cluster`: three nodes on this machine, over a SeaweedFS bucket, until Ctrl-C. For trying it out.

Type at it: `kill 2` loses a node as if its machine were gone, `start 2` brings it back, `help` lists the rest. A node
that ends by itself is told of, and the others go on. Data is in a temporary folder that goes with the cluster, or, with
`--directory DIR` (`make cluster DIR=…`), in a folder that stays and can be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

BUCKET: Final = "millstream"
NODES: Final = (1, 2, 3)
START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 90.0
LOG_LINES: Final = 30
HELP: Final = """  status       who is up, and who leads what
  kill NODE    end a node and its broker at once, as if its machine were lost
  stop NODE    stop a node in order
  start NODE   start a node that was killed or stopped (or `start store`)
  log NODE     the last lines of a node's log (or `log store`)
  help         this list
  quit         stop everything; so does Ctrl-C"""


class Failure(Exception):
    """Something did not start; the message says what, and shows its log."""


class Process:
    """One process with its log; it may end and be started again."""

    def __init__(self, name: str, directory: Path, command: list[str], is_ready: Callable[[], bool]) -> None:
        self.name = name
        self.log = directory / f"{name.replace(' ', '')}.log"
        self.is_expected = False  # to be running
        self._command = command
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches only us, and we stop it in order.
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        self.is_expected = True

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if not self.is_running:
                raise Failure(f"{self.name} has ended {self.ending}; the end of {self.log}:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                waited = f"{self.name} is not ready after {START_SECONDS:.0f} s"
                raise Failure(f"{waited}; the end of {self.log}:\n{self.last_lines()}")
            time.sleep(0.2)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str:
        code = self._process.poll() if self._process is not None else None
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:]) or "    (it is empty)"

    def terminate(self) -> None:
        self.is_expected = False
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        self.is_expected = False
        if self._process is not None and self.is_running:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


class Node(Process):
    """A node and, beside it, the broker that outlives a crash of it."""

    def __init__(self, number: int, directory: Path, url: str) -> None:
        command = [sys.executable, "-m", "millstream", "serve", "--config", str(directory / f"node{number}.toml")]
        super().__init__(f"node {number}", directory, command, lambda: _get(f"{url}/readyz/cluster"))
        self.url = url
        self._state_file = directory / f"node{number}" / "broker" / "broker.json"

    def kill_broker(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = int(json.loads(self._state_file.read_text())["pid"])
            if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


class TriedCluster:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        endpoint, command = _store_command(directory)
        self.store = Process("store", directory, command, lambda: _has_bucket(endpoint))
        urls = _write_configurations(directory, endpoint)
        self.nodes = {number: Node(number, directory, url) for number, url in urls.items()}

    def start(self) -> None:
        self.store.start()
        self.store.wait_until_ready()
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_until_ready()

    def watch(self) -> Iterator[str]:
        """What has happened of its own accord since the last look."""
        for one in (self.store, *self.nodes.values()):
            if one.is_expected and not one.is_running:
                one.is_expected = False
                yield f"{one.name} has ended {one.ending}; the others go on. `start {_word(one)}` starts it again."

    def obey(self, line: str) -> Iterator[str]:
        word, _, target = line.strip().partition(" ")
        if word in ("kill", "stop", "start", "log"):
            one = self._named(target.strip())
            if one is None:
                yield f"{word} what? Write `{word} 1`, `{word} 2` or `{word} 3`."
            else:
                yield from getattr(self, f"_{word}")(one)
        elif word == "status":
            yield from self._status()
        elif word:
            yield HELP if word == "help" else f"there is no command {word!r}:\n{HELP}"

    def _named(self, target: str) -> Process | None:
        if target == "store":
            return self.store
        return self.nodes.get(int(target)) if target.isdecimal() else None

    def _kill(self, one: Process) -> Iterator[str]:
        one.kill()
        if isinstance(one, Node):
            one.kill_broker()
        yield f"{one.name} is gone; `start {_word(one)}` brings it back."

    def _stop(self, one: Process) -> Iterator[str]:
        one.terminate()
        one.wait()
        yield f"{one.name} has stopped; `start {_word(one)}` starts it again."

    def _start(self, one: Process) -> Iterator[str]:
        if one.is_running:
            yield f"{one.name} is running (process {one.pid})."
            return
        one.start()
        try:
            one.wait_until_ready()
        except Failure as failure:
            yield str(failure)
        else:
            yield f"{one.name} is ready again."

    def _log(self, one: Process) -> Iterator[str]:
        yield f"{one.log}:\n{one.last_lines()}"

    def _status(self) -> Iterator[str]:
        up = next((node for node in self.nodes.values() if node.is_running), None)
        if up is None:
            yield "no node is running"
            return
        command = [sys.executable, "-m", "millstream", "cluster", "status", "--url", up.url, "--timeout", "5s"]
        done = subprocess.run(command, capture_output=True, text=True)
        yield (done.stdout + done.stderr).rstrip()

    def stop(self) -> None:
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            node.wait()  # the last one finds no majority any more, and waits for it a while
            node.kill_broker()
        self.store.terminate()
        self.store.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description="Three nodes on this machine, to try out.")
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, help="keep the data here (default: a folder that goes away)"
    )
    options = parser.parse_args()
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="millstream-cluster-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cluster = TriedCluster(directory)
    is_kept = options.directory is not None
    try:
        print("starting an object store and three nodes …", flush=True)
        cluster.start()
        _introduce(cluster, directory)
        _attend(cluster)
        return 0
    except Failure as failure:
        is_kept = True
        print(f"{failure}\nThe logs are in {directory}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        print("\nstopping …", flush=True)
        cluster.stop()
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)


def _introduce(cluster: TriedCluster, directory: Path) -> None:
    print("three nodes of the cluster `local` are ready:")
    for number, node in cluster.nodes.items():
        print(f"  node {number}  {node.url}  (process {node.pid}, configuration {directory / f'node{number}.toml'})")
    print(f"look at it with: millstream cluster status --url {cluster.nodes[1].url}")
    print(f"or type here:\n{HELP}", flush=True)


def _attend(cluster: TriedCluster) -> None:
    """Tell what happens, and do what is typed, until `quit`. Without anybody to type, until a signal."""
    waiting, is_open = b"", True
    while True:
        ready, _, _ = select.select([sys.stdin] if is_open else [], [], [], 0.5)
        if ready:
            typed = os.read(sys.stdin.fileno(), 65536)
            is_open, waiting = bool(typed), waiting + typed
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            if line.strip() in (b"quit", b"exit"):
                return
            for said in cluster.obey(line.decode(errors="replace")):
                print(said, flush=True)
        for said in cluster.watch():
            print(said, flush=True)


def _word(one: Process) -> str:
    return one.name.removeprefix("node ")


def _store_command(directory: Path) -> tuple[str, list[str]]:
    ports = _ports(directory / "store.ports", 8)
    data = directory / "store"
    data.mkdir(exist_ok=True)
    names = [f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    weed = str(Path(sys.executable).parent / "weed")
    command = [weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # not needed, and their ports are fixed: a second one fails
    return f"http://127.0.0.1:{ports[0]}", [*command, "-volume.max=16", "-master.volumeSizeLimitMB=256", *flags]


def _write_configurations(directory: Path, endpoint: str) -> dict[int, str]:
    ports = _ports(directory / "nodes.ports", 2 * len(NODES))
    http, brokers = ports[: len(NODES)], ports[len(NODES) :]
    for number in NODES:
        routes = [f'"127.0.0.1:{port}"' for index, port in enumerate(brokers, 1) if index != number]
        (directory / f"node{number}.toml").write_text(
            f'version = 1\n\n[server]\nnode_id = {number}\nlisten = "127.0.0.1:{http[number - 1]}"\n'
            f'data_dir = "{directory / f"node{number}"}"\n\n[cluster]\nname = "local"\n'
            f'listen = "127.0.0.1:{brokers[number - 1]}"\nroutes = [{", ".join(routes)}]\n'
            'bootstrap_node_id = 1\nshards = 3\nreplicas = 3\nsecret = "for trying it out"\n\n[cold]\nbackend = "s3"\n'
            f's3_bucket = "{BUCKET}"\ns3_region = "us-east-1"\ns3_endpoint = "{endpoint}"\n'
            's3_access_key_id = "any"\ns3_secret_access_key = "thing"\n'
        )
    return {number: f"http://127.0.0.1:{http[number - 1]}" for number in NODES}


def _has_bucket(endpoint: str) -> bool:
    return _put(f"{endpoint}/{BUCKET}") and _put(f"{endpoint}/{BUCKET}/ready", b"yes")


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _put(url: str, data: bytes = b"") -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, method="PUT"), timeout=20.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 409
    except (urllib.error.URLError, OSError):
        return False


def _ports(file: Path, number: int) -> list[int]:
    """Free ports, and the same ones the next time the folder is used."""
    if file.exists():
        return [int(port) for port in file.read_text().split()]
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
    file.write_text(" ".join(map(str, ports)))
    return ports


if __name__ == "__main__":
    sys.exit(main())
