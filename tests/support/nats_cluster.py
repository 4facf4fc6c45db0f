"""Three NATS brokers that belong to nobody's node: with TLS for their clients, and users with passwords."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from support.authority import Authority
from support.broker import NATS_SERVER
from support.ports import free_ports

START_SECONDS = 30.0
USER = "streams"
PASSWORD = "s3cr:et/@?"


class NatsCluster:
    def __init__(self, directory: Path, authority: Authority) -> None:
        self._directory = directory
        self._ports = free_ports(3)
        self._routes = free_ports(3)
        self._certificate, self._key = authority.certificate("nats")
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def urls(self) -> list[str]:
        return [f"tls://127.0.0.1:{port}" for port in self._ports]

    def start(self) -> NatsCluster:
        for index in range(3):
            self._processes.append(self._launch(index))
        deadline = time.monotonic() + START_SECONDS
        while not any("metadata leader" in self._log(index).read_text() for index in range(3)):
            assert time.monotonic() < deadline, "the brokers have elected nobody"
            time.sleep(0.1)
        return self

    def kill(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _log(self, index: int) -> Path:
        return self._directory / f"nats{index}.log"

    def _launch(self, index: int) -> subprocess.Popen[bytes]:
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in self._routes)
        file = self._directory / f"nats{index}.conf"
        file.write_text(
            f'server_name: nats{index}\nlisten: "127.0.0.1:{self._ports[index]}"\nmax_payload: 16MB\n'
            f'jetstream {{ store_dir: "{self._directory / f"nats{index}"}", sync_interval: always }}\n'
            f'cluster {{ name: existing, listen: "127.0.0.1:{self._routes[index]}", routes: [{routes}] }}\n'
            f'tls {{ cert_file: "{self._certificate}", key_file: "{self._key}", timeout: 5 }}\n'
            f'authorization {{ users: [{{ user: {USER}, password: "{PASSWORD}" }}] }}\n'
        )
        with self._log(index).open("ab") as log:
            return subprocess.Popen([str(NATS_SERVER), "-c", str(file)], stderr=log)
