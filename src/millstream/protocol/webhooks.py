"""Webhooks: how they are signed, and which URLs may be called at all.

A webhook URL comes from a client and is fetched by the server, so it must not reach what only the server can
reach. `checked_url` judges the text; `is_forbidden_address` judges every address it resolves to, again at
each delivery, because a name may change its mind.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from base64 import urlsafe_b64encode
from typing import Final
from urllib.parse import SplitResult, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from millstream.errors import InvalidRequest

URL_BYTES_MAX: Final = 2048
_LOOPBACK: Final = re.compile(r"127\.0\.0\.[0-9]{1,3}")
# The last 32 bits of these are an IPv4 address: the deprecated compatible form, and NAT64.
_TRANSLATED: Final = (ipaddress.ip_network("::/96"), ipaddress.ip_network("64:ff9b::/96"))
_LOCAL_TRANSLATION: Final = ipaddress.ip_network("64:ff9b:1::/48")
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class WebhookSigner:
    """Signs deliveries with one Ed25519 key and publishes its public half as a JWK."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        x = _base64url(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        # RFC 7638: the thumbprint of the required members in lexical order names the key.
        thumbprint = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'.encode()).digest()
        self.key_id = f"ds_{_base64url(thumbprint)}"
        self.jwk = {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": self.key_id, "use": "sig", "alg": "EdDSA"}

    def signature_header(self, timestamp_seconds: int, body: bytes) -> str:
        signature = self._key.sign(b"%d.%b" % (timestamp_seconds, body))
        return f"t={timestamp_seconds},kid={self.key_id},ed25519={_base64url(signature)}"


def is_development_host(host: str) -> bool:
    return host == "localhost" or (_LOOPBACK.fullmatch(host) is not None and int(host.rpartition(".")[2]) < 256)


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


def checked_url(url: str) -> SplitResult:
    """The parts of a webhook URL that may be called, or WEBHOOK_URL_REJECTED with the reason."""
    if len(url) > URL_BYTES_MAX or _PRINTABLE.fullmatch(url) is None:
        raise _rejected("it is not a printable URL of reasonable length")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower().removesuffix(".")
        port_given = parts.port
    except ValueError:
        raise _rejected("it is not a valid URL") from None
    if not host or port_given == 0:
        raise _rejected("it names no host and port")
    if parts.username is not None or parts.password is not None:
        raise _rejected("it must not carry credentials")
    if parts.scheme == "http":
        if not is_development_host(host):
            raise _rejected("http is allowed only for localhost and 127.0.0.x; use https")
        return parts
    if parts.scheme != "https":
        raise _rejected("it must use https")
    if host == "localhost" or host.endswith(".localhost"):
        raise _rejected("localhost is reached by http, for development")
    if _is_forbidden_literal(host):
        raise _rejected("it points to a private, loopback or link-local address")
    return parts


def _is_forbidden_literal(host: str) -> bool:
    try:
        return is_forbidden_address(host.partition("%")[0])
    except ValueError:
        # Not an address in its usual form. Resolvers also read 0x7f.1, 127.0x0.0.1 or 2130706433 as one; no public
        # name ends in such a label.
        return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]) is not None


def _rejected(reason: str) -> InvalidRequest:
    return InvalidRequest(f"webhook.url is not allowed: {reason}", code="WEBHOOK_URL_REJECTED")
