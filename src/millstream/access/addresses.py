"""Client addresses, as the limits count them."""

from __future__ import annotations

import ipaddress

from millstream.caches import cached


@cached("networks", 4096)
def network_of(address: str) -> str:
    """The unit that limits count as one address: for IPv6 the /64 network, since one client has all of it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
    return str(ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else str(ip)


@cached("loopback_addresses", 4096)
def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own. A Unix socket has no address and counts as local."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return not address
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
