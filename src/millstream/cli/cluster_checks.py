"""The checks of `millstream doctor` on a cluster node: what `serve` refuses, its broker's port, and other brokers.

They connect to the other brokers' ports, wait for a broker's greeting, and send nothing.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import urlsplit

from millstream.cli.findings import Finding
from millstream.clock import Clock
from millstream.config import Config
from millstream.errors import ConfigurationError
from millstream.server.node.cluster_checks import check_cluster, check_directory

GREETING: Final = b"INFO "
GREETING_SECONDS: Final = 2.0
NATS_PORT: Final = 4222

Address = tuple[str, int]


def cluster(config: Config, clock: Clock) -> Iterator[Finding]:
    """Whether this node would start, and whether it would reach the others."""
    name = "cluster"
    if not config.cluster.name:
        return
    try:
        check_cluster(config)
        check_directory(config)
    except ConfigurationError as error:
        hint = error.hint or "see docs/cluster.md"
        yield Finding(name, "problem", f"the node would not start: {error.message}", hint)
        return
    about = f"node {config.server.node_id} of cluster {config.cluster.name!r}"
    if config.cluster.nats_url:
        yield Finding(name, "ok", f"{about}, on brokers that are there already")
        yield from _brokers([_of_url(one) for one in config.cluster.nats_url.split(",") if one.strip()])
        return
    yield Finding(name, "ok", f"{about}, with {len(config.cluster.routes)} others")
    yield _own_broker(config.cluster.listen)
    yield from _brokers(config.cluster.routes)


def _of_url(url: str) -> Address:
    parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
    return parts.hostname or "", parts.port or NATS_PORT


def _own_broker(address: Address) -> Finding:
    name, where = "broker's port", _written(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding(name, "problem", f"cannot listen on {where}: {error.strerror}", "correct cluster.listen")
        if _greeting(address) == GREETING:
            return Finding(name, "ok", f"a broker listens on {where}")
        return Finding(name, "problem", f"another program listens on {where}", "stop it, or change cluster.listen")
    return Finding(name, "ok", f"{where} is free")


def _brokers(addresses: Iterable[Address]) -> Iterator[Finding]:
    for address in addresses:
        name, where = "other broker", _written(address)
        try:
            greeting = _greeting(address)
        except OSError as error:
            reason = error.strerror or str(error) or "no answer"
            hint = "start that node, or check cluster.routes and the firewall between the nodes"
            yield Finding(name, "warning", f"nobody answers at {where}: {reason}", hint)
            continue
        if greeting == GREETING:
            yield Finding(name, "ok", f"a broker answers at {where}")
        else:
            hint = "cluster.routes names the other nodes' cluster.listen, not the addresses of their HTTP"
            yield Finding(name, "problem", f"what answers at {where} is no broker", hint)


def _greeting(address: Address) -> bytes:
    """The first bytes that the server at an address sends unasked; empty if it sends none."""
    with socket.create_connection(address, GREETING_SECONDS) as connection:
        try:
            return connection.recv(len(GREETING), socket.MSG_WAITALL)
        except TimeoutError:
            return b""


def _written(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
