"""Which URLs webhooks may call.

A webhook URL comes from a client and is fetched by the server, so it must not reach what only the server can
reach, unless the operator says so (`PrivateTargets`). `checked_url` judges the text; `may_reach` judges every address
it resolves to, again at each delivery, because a name may change its mind.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from millstream.errors import InvalidRequest

URL_BYTES_MAX: Final = 2048
LOCALHOST: Final = "localhost"
# The last 32 bits of these are an IPv4 address: the deprecated compatible form, and NAT64.
_TRANSLATED: Final = (ipaddress.ip_network("::/96"), ipaddress.ip_network("64:ff9b::/96"))
_LOCAL_TRANSLATION: Final = ipaddress.ip_network("64:ff9b:1::/48")
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")
_HOST_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


@dataclass(frozen=True, slots=True)
class PrivateTargets:
    """The private networks and host names that webhooks may reach all the same, by https or http."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> PrivateTargets:
        """From `10.1.0.0/16`, `192.168.0.7` or `hooks.internal`; ValueError if an entry is none of these."""
        networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        hosts: set[str] = set()
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError:
                host = entry.lower().removesuffix(".")
                if _HOST_NAME.fullmatch(host) is None or _ends_as_number(host):
                    raise
                hosts.add(host)
        return cls(tuple(networks), frozenset(hosts))

    def names(self, host: str) -> bool:
        """Whether the operator allows this very host, by its name or as an address."""
        if host in self.hosts:
            return True
        try:
            return self._hold(ipaddress.ip_address(host))
        except ValueError:
            return False

    def may_reach(self, host: str, address: str) -> bool:
        """Whether a webhook to `host` may connect to `address`, to which that name resolves now."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        if host == LOCALHOST:
            return host in self.hosts and ip.is_loopback
        return host in self.hosts or self._hold(ip) or not is_forbidden_address(str(ip))

    def _hold(self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        embedded = _embedded_ipv4(ip) if isinstance(ip, ipaddress.IPv6Address) else None
        return any((embedded or ip) in network for network in self.networks)


def is_forbidden_address(address: str) -> bool:
    """Whether an address is one the outside world could not have reached by itself."""
    ip = ipaddress.ip_address(address)
    embedded = _embedded_ipv4(ip) if isinstance(ip, ipaddress.IPv6Address) else None
    if embedded is not None:
        ip = embedded
    elif isinstance(ip, ipaddress.IPv6Address) and (ip.is_site_local or ip in _LOCAL_TRANSLATION):
        return True
    return not ip.is_global or ip.is_multicast


def _embedded_ipv4(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a network may translate this one to."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip.teredo is not None:
        return ip.teredo[1]
    if any(ip in network for network in _TRANSLATED):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return None


def checked_url(url: str, allowed: PrivateTargets) -> SplitResult:
    """The parts of a webhook URL that may be called, or WEBHOOK_URL_REJECTED with the reason."""
    if len(url) > URL_BYTES_MAX or _PRINTABLE.fullmatch(url) is None:
        raise _rejected("it is not a printable URL of reasonable length")
    try:
        parts = urlsplit(url)
        host = host_of(parts)
        port_given = parts.port
    except ValueError:
        raise _rejected("it is not a valid URL") from None
    if not host or port_given == 0:
        raise _rejected("it names no host and port")
    if parts.username is not None or parts.password is not None:
        raise _rejected("it must not carry credentials")
    if parts.scheme not in ("http", "https"):
        raise _rejected("it must use https")
    if allowed.names(host):
        return parts
    if parts.scheme == "http":
        raise _rejected("http is allowed only to the targets in subscriptions.private_targets; use https")
    if host == LOCALHOST or host.endswith(".localhost"):
        raise _rejected("localhost is not among the targets in subscriptions.private_targets")
    if _is_forbidden_literal(host):
        raise _rejected("it points to a private, loopback or link-local address")
    return parts


def host_of(parts: SplitResult) -> str:
    return (parts.hostname or "").lower().removesuffix(".")


def _is_forbidden_literal(host: str) -> bool:
    try:
        return is_forbidden_address(host.partition("%")[0])
    except ValueError:
        # Not an address in its usual form. Resolvers also read 0x7f.1, 127.0x0.0.1 or 2130706433 as one; no public
        # name ends in such a label.
        return _ends_as_number(host)


def _ends_as_number(host: str) -> bool:
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]) is not None


def _rejected(reason: str) -> InvalidRequest:
    return InvalidRequest(f"webhook.url is not allowed: {reason}", code="WEBHOOK_URL_REJECTED")


NO_PRIVATE_TARGETS: Final = PrivateTargets()
# For development: a server that only this machine reaches calls receivers on this machine.
THIS_MACHINE: Final = PrivateTargets.parse(["127.0.0.0/24", LOCALHOST])
