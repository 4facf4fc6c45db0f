"""A real cluster for tests: nodes as processes, each with its broker, over one S3 server.

In front of each broker may be a TCP proxy, so that a test can cut a node off without touching the machine's network:
bytes stop flowing in both directions, as when a cable is pulled, and connections stay open.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from millstream import config as configuration
from millstream.cluster.broker import USER
from millstream.log.broker_link import BrokerLink, BrokerSettings
from millstream.log.jetstream_log import log_names
from millstream.server.node.settings import object_store_settings
from millstream.tiers.objects import ObjectStoreSettings
from support.network import Network
from support.ports import free_ports
from support.s3 import S3Server

START_SECONDS = 60.0
SECRET = "a secret of the tests"


class Cable:
    """What all brokers of a cluster are joined by; `cut` pulls a node out."""

    def __init__(self) -> None:
        self.cut: frozenset[int] = frozenset()


class Socket:
    """A TCP proxy in front of one node's broker: the others know no other address of it."""

    def __init__(self, cable: Cable, number: int, target: tuple[str, int]) -> None:
        self._cable = cable
        self._number = number
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._pairs: dict[tuple[socket.socket, socket.socket], int | None] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self, numbers: frozenset[int]) -> None:
        """Connections of nodes that were cut off have lost bytes: they end."""
        for pair, caller in list(self._pairs.items()):
            if self._number in numbers or caller is None or caller in numbers:
                for one in pair:
                    one.close()

    def stop(self) -> None:
        self._stopped.set()
        self._listening.close()
        for pair in list(self._pairs):
            for one in pair:
                one.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        while self._cable.cut:  # nobody knows yet who is calling
            time.sleep(0.05)
        try:
            far = socket.create_connection(self._target, 5.0)
        except OSError:
            near.close()
            return
        pair = (near, far)
        self._pairs[pair] = None
        try:
            self._carry(near, far)
        except (OSError, ValueError):
            return
        finally:
            del self._pairs[pair]
            near.close()
            far.close()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        caller, said = None, b""
        while True:
            ready, _, _ = select.select((near, far), (), (), 0.2)
            while cut := self._cable.cut:
                if self._number not in cut and caller is not None and caller not in cut:
                    break
                time.sleep(0.05)
            for one in ready:
                data = one.recv(65_536)
                if not data:
                    return
                if one is near and caller is None:
                    # A broker that calls introduces itself: "server_name":"tests-2".
                    said += data
                    if (match := re.search(rb'"server_name":"[^"]*-(\d+)"', said)) is not None:
                        caller = self._pairs[near, far] = int(match[1])
                (far if one is near else near).sendall(data)


SERVE = (sys.executable, "-m", "millstream.cli.main", "serve")


class NodeProcess:
    """One node of a cluster: a `millstream serve` process and the broker it looks after."""

    def __init__(
        self,
        number: int,
        directory: Path,
        configuration: str,
        url: str,
        environment: dict[str, str],
        command: tuple[str, ...],
    ) -> None:
        self.number = number
        self.data_dir = directory / f"node{number}"
        self.file = directory / f"node{number}.toml"
        self.file.write_text(configuration)
        self.stderr_path = directory / f"node{number}.stderr"
        self.url = url
        self._command = command
        self.environment = {**os.environ, **environment}
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, wait: bool = True) -> NodeProcess:
        with self.stderr_path.open("a") as stderr:
            self.process = subprocess.Popen(
                [*self._command, "--config", str(self.file)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
                env=self.environment,
            )
        if wait:
            self.wait_until_ready()
        return self

    def is_ready(self, probe: str = "cluster") -> bool:
        try:
            return httpx.get(f"{self.url}/readyz/{probe}", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        wait_until(self.is_ready, f"node {self.number} is ready", seconds, self.stderr)

    def stderr(self) -> str:
        return self.stderr_path.read_text() if self.stderr_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def broker_pid(self) -> int:
        return int(json.loads((self.data_dir / "broker" / "broker.json").read_text())["pid"])

    def kill(self) -> None:
        """End the server as `kill -9` does; its broker goes on."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def kill_broker(self) -> None:
        os.kill(self.broker_pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End server and broker at once, as the loss of the machine does."""
        if self.is_running:
            self.kill()
        try:
            self.kill_broker()
        except (OSError, ValueError, KeyError):
            return

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout: float = 40.0) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


class Cluster:
    """Nodes that know each other. `nodes` grows when one is added."""

    def __init__(
        self,
        directory: Path,
        s3: S3Server,
        *,
        nodes: int = 3,
        shards: int = 1,
        settings: str = "",
        proxied: bool = False,
        network: Network | None = None,
        command: tuple[str, ...] = SERVE,
        environment: dict[str, str] | None = None,
        forwarding: tuple[int, ...] = (),
        cluster_settings: str = "",
        prefix: str | None = None,
    ) -> None:
        self._forwarding = forwarding
        self._cluster_settings = cluster_settings
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._s3 = s3
        self.prefix = prefix or s3.new_prefix()
        self.shards = shards
        self._settings = settings
        self._extra = environment or {}
        self._command = command
        self._ports = {number: free_ports(2) for number in range(1, nodes + 1)}
        self._network = network
        self._cable = Cable()
        self._sockets: dict[int, Socket] = {}
        if proxied:
            self._sockets = {
                number: Socket(self._cable, number, ("127.0.0.1", ports[1])) for number, ports in self._ports.items()
            }
        self.nodes: dict[int, NodeProcess] = {number: self._node(number) for number in self._ports}

    def _node(self, number: int) -> NodeProcess:
        port, cluster_port = self._ports[number]
        network = self._network
        front = network.front(number) if network is not None else "127.0.0.1"
        addresses = {
            other: self._sockets[other].address if other in self._sockets else (self._back(other), ports[1])
            for other, ports in self._ports.items()
        }
        advertise = "{}:{}".format(*addresses[number])
        routes = [f"{host}:{port}" for other, (host, port) in addresses.items() if other != number]
        configuration = (
            f'version = 1\n[server]\nnode_id = {number}\nlisten = "{front}:{port}"\n'
            f"insecure = {json.dumps(network is not None)}\n"
            f'data_dir = "{self.directory / f"node{number}"}"\n'
            f'[cluster]\nname = "tests"\nlisten = "{self._back(number)}:{cluster_port}"\n'
            f'advertise = "{advertise}"\nroutes = {json.dumps(routes)}\n'
            f"forward = {json.dumps(number in self._forwarding)}\n"
            f'bootstrap_node_id = 1\nshards = {self.shards}\nreplicas = 3\nsecret = "{SECRET}"\n'
            f"{self._cluster_settings}"
            f"{_as_toml(self._s3.settings(self.prefix))}{self._settings}"
        )
        command = (*(network.inside(number) if network is not None else ()), *self._command)
        environment = {**self._s3.environment, **self._extra}
        return NodeProcess(number, self.directory, configuration, f"http://{front}:{port}", environment, command)

    def _back(self, number: int) -> str:
        return self._network.back(number) if self._network is not None else "127.0.0.1"

    @property
    def store(self) -> ObjectStoreSettings:
        """The object store that all nodes share."""
        node = self.nodes[1]
        return object_store_settings(configuration.load(node.file, node.environment, []))

    def add(self) -> NodeProcess:
        """Another node, which is told of all the others; they learn of it by itself."""
        number = max(self._ports) + 1
        self._ports[number] = free_ports(2)
        self.nodes[number] = self._node(number)
        return self.nodes[number]

    def start(self) -> Cluster:
        for node in self.nodes.values():
            node.start(wait=False)
        for node in self.nodes.values():
            node.wait_until_ready()
        return self

    def cut_off(self, number: int) -> None:
        """From the other nodes: clients still reach it, and it the object store."""
        if self._network is not None:
            self._network.cut_off(number)
        self._cable.cut = frozenset([number])

    def mend(self) -> None:
        """Traffic flows again; connections of a proxy from before have lost bytes and are dropped."""
        if self._network is not None:
            self._network.mend()
        for one in self._sockets.values():
            one.drop(self._cable.cut)
        self._cable.cut = frozenset()

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes.values()]

    def status(self, number: int | None = None) -> dict[str, Any]:
        candidates = [self.nodes[number]] if number is not None else list(self.nodes.values())
        for node in candidates:
            if node.is_running:
                try:
                    return dict(httpx.get(f"{node.url}/cluster/status", timeout=2.0).json())
                except (httpx.TransportError, ValueError):
                    continue
        raise AssertionError("no node answers")

    def leader(self, shard: int = 0, *, seconds: float = 30.0) -> NodeProcess:
        """The node that leads, asked until one says so of itself."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for node in self.nodes.values():
                if node.is_running:
                    try:
                        answer = httpx.get(f"{node.url}/cluster/status", timeout=1.0).json()
                    except (httpx.TransportError, ValueError):
                        continue
                    if answer["shards"][shard]["role"] == "leading":
                        return node
            time.sleep(0.05)
        raise AssertionError(f"shard {shard} has no leader")

    def broker_leader(self, shard: int = 0) -> NodeProcess:
        """The node whose broker leads the replicas of a shard's log."""
        port = json.loads((self.leader(shard).data_dir / "broker" / "broker.json").read_text())["port"]
        link = BrokerLink(BrokerSettings([f"nats://127.0.0.1:{port}"], USER, SECRET), "tests")
        try:
            link.wait(link.connect(), 10.0)
            info = link.wait(link.info(log_names("tests", shard).stream), 10.0)
        finally:
            link.close()
        return self.nodes[int(info["cluster"]["leader"].rpartition("-")[2])]

    def wait_until_balanced(self) -> None:
        """Until no node leads so much more than another that it is about to hand something over, and all know it."""

        def is_balanced() -> bool:
            leaders = [self.leader(shard).number for shard in range(self.shards)]
            counts = [leaders.count(number) for number in self.nodes]
            views = [[shard["leader_id"] for shard in self.status(number)["shards"]] for number in self.nodes]
            return max(counts) - min(counts) <= 1 and all(view == leaders for view in views)

        wait_until(is_balanced, "the shards are spread over the nodes")

    def brokers_said(self, words: str, since: float, until: float) -> list[float]:
        """When, between two moments of the monotonic clock, the brokers' logs have a line with these words."""
        offset = time.time() - time.monotonic()
        found = []
        for node in self.nodes.values():
            for line in (node.data_dir / "broker" / "broker.log").read_text(errors="replace").splitlines():
                match = re.match(r"\[\d+\] (\d+/\d+/\d+ \d+:\d+:\d+)(\.\d+) ", line)
                if words in line and match is not None:
                    seconds = time.mktime(time.strptime(match[1], "%Y/%m/%d %H:%M:%S")) + float(match[2])
                    found.append(seconds - offset)
        return sorted(at for at in found if since < at < until)

    def followers(self, shard: int = 0) -> list[NodeProcess]:
        leader = self.leader(shard)
        return [node for node in self.nodes.values() if node is not leader]

    def stop(self) -> None:
        for node in self.nodes.values():
            if node.is_running:
                node.resume()
            node.kill_all()
        for one in self._sockets.values():
            one.stop()


def _as_toml(settings: tuple[str, ...]) -> str:
    """`section.key=value` settings as the sections of a file."""
    sections: dict[str, list[str]] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        quoted = value if re.fullmatch(r"[0-9]+|true|false", value) else json.dumps(value)
        sections.setdefault(section, []).append(f"{name} = {quoted}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = 30.0, explain: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{explain()[-4000:]}"
        time.sleep(0.05)


@contextmanager
def running(directory: Path, s3: S3Server, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(directory, s3, **options)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
