"""A real NATS broker for tests that need one without a cluster around it: one node, everything synced."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from millstream.clock import Clock
from millstream.log.broker_link import BrokerLink, BrokerSettings
from millstream.log.jetstream_log import JetStreamLog, log_names, stream_configuration
from support.ports import free_port

START_SECONDS = 20.0
NATS_SERVER = Path(sys.executable).parent / "nats-server"

_names = count(1)


class Broker:
    """One `nats-server` process on a free loopback port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Broker:
        configuration = self.directory / "broker.conf"
        configuration.write_text(
            f'server_name: tests\nlisten: "127.0.0.1:{self.port}"\nmax_payload: 16MB\n'
            f'jetstream {{ store_dir: "{self.directory / "store"}", sync_interval: always }}\n'
        )
        with (self.directory / "broker.log").open("ab") as log:
            self.process = subprocess.Popen([str(NATS_SERVER), "-c", str(configuration)], stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return self
            except OSError:
                assert time.monotonic() < deadline, (self.directory / "broker.log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def link(self) -> BrokerLink:
        link = BrokerLink(BrokerSettings([f"nats://127.0.0.1:{self.port}"], "", ""), "tests")
        link.wait(link.connect(), START_SECONDS)
        return link


def new_log_name() -> str:
    return f"test{next(_names)}"


def open_jetstream_log(link: BrokerLink, name: str, clock: Clock, *, window: int = 4) -> JetStreamLog:
    """A log of that name, made if it is not there yet."""
    names = log_names(name, 0)
    link.wait(link.call(f"STREAM.CREATE.{names.stream}", stream_configuration(names, 1)), START_SECONDS)
    return JetStreamLog(link, names, clock, window=window)


_shared: list[Broker] = []


def shared_broker() -> Broker:
    """The one broker of a test session, started when first asked for and ended with the process."""
    if not _shared:
        directory = Path(tempfile.mkdtemp(prefix="millstream-broker-"))
        broker = Broker(directory).start()
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        atexit.register(broker.stop)
        _shared.append(broker)
    return _shared[0]
