"""Exposure: which clients can reach the server, and whether that is intended."""

from __future__ import annotations

import ipaddress

from millstream.config import Config
from millstream.errors import ConfigurationError


def check_exposure(config: Config) -> str | None:
    """Refuse to listen on the network without protection unless configured to; then returns a warning."""
    host, port = config.server.listen
    missing = []
    if not config.auth.enabled:
        missing.append("[auth], so whoever reaches it may read, write and delete everything")
    if config.tls.cert is None:
        missing.append("[tls], so what is sent can be read and changed on its way")
    if is_loopback_host(host) or not missing:
        return None
    lacks = f"{host}:{port} can be reached from other machines, without {', and without '.join(missing)}"
    if not config.server.insecure:
        raise ConfigurationError(
            lacks,
            hint="set auth.enabled=true, tls.cert and tls.key; listen on 127.0.0.1 behind a proxy; or, if you mean it,"
            " start with --insecure",
        )
    return f"insecure, as demanded: {lacks}"


def is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
