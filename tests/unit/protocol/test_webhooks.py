"""Webhooks: signatures anybody can verify from the JWK, and URLs that cannot reach inside."""

from __future__ import annotations

import hashlib
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from ipaddress import IPv4Address, IPv6Address

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.protocol.webhook_targets import (
    NO_PRIVATE_TARGETS,
    THIS_MACHINE,
    PrivateTargets,
    checked_url,
    is_forbidden_address,
)
from millstream.protocol.webhooks import WebhookSigner

PRIVATE_V4 = ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"]
LOCAL_V4 = ["127.0.0.1", "127.255.255.254", "0.0.0.0", "169.254.1.1", "255.255.255.255", "240.0.0.1"]
METADATA_V4 = ["169.254.169.254", "169.254.170.2", "100.100.100.200"]
FORBIDDEN_V4 = [*PRIVATE_V4, *LOCAL_V4, *METADATA_V4]


def unpadded(text: str) -> bytes:
    assert "=" not in text
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def verify(jwk: dict[str, str], header: str, body: bytes) -> None:
    """What a receiver does, from the published key alone."""
    parts = dict(part.split("=", 1) for part in header.split(","))
    assert parts["kid"] == jwk["kid"]
    public = Ed25519PublicKey.from_public_bytes(unpadded(jwk["x"]))
    public.verify(unpadded(parts["ed25519"]), parts["t"].encode() + b"." + body)


@settings(max_examples=50)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**40), st.binary(max_size=200), st.integers(0, 10**6))
def test_a_signature_verifies_with_the_public_jwk_and_only_for_its_body_and_time(
    seed: bytes, timestamp: int, body: bytes, flip: int
) -> None:
    signer = WebhookSigner(seed)
    header = signer.signature_header(timestamp, body)
    verify(signer.jwk, header, body)
    changed = bytearray(body or b"x")
    changed[flip % len(changed)] ^= 1
    with pytest.raises(InvalidSignature):
        verify(signer.jwk, header, bytes(changed))
    with pytest.raises(InvalidSignature):
        verify(signer.jwk, header.replace(f"t={timestamp}", f"t={timestamp + 1}"), body)


def test_the_key_id_is_the_rfc_7638_thumbprint_and_the_same_for_the_same_seed() -> None:
    signer = WebhookSigner(b"s" * 32)
    required = json.dumps(
        {name: signer.jwk[name] for name in ("crv", "kty", "x")}, separators=(",", ":"), sort_keys=True
    )
    thumbprint = urlsafe_b64encode(hashlib.sha256(required.encode()).digest()).rstrip(b"=").decode()
    assert signer.key_id == signer.jwk["kid"] == f"ds_{thumbprint}"
    assert WebhookSigner(b"s" * 32).jwk == signer.jwk
    assert WebhookSigner(b"t" * 32).key_id != signer.key_id


def test_the_jwk_holds_no_private_half() -> None:
    assert set(WebhookSigner(b"s" * 32).jwk) == {"kty", "crv", "x", "kid", "use", "alg"}


def reason(url: str, allowed: PrivateTargets = NO_PRIVATE_TARGETS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checked_url(url, allowed)
    assert caught.value.code == "WEBHOOK_URL_REJECTED"
    return caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "https://EXAMPLE.com:8443/hook?x=1#f",
        "https://93.184.216.34/",
        "https://[2606:2800:220:1:248:1893:25c8:1946]/",
        "https://0xdeadbeef.example.com/",
        "https://10.example.com/",
    ],
)
def test_a_public_https_url_is_allowed(url: str) -> None:
    assert checked_url(url, NO_PRIVATE_TARGETS).hostname


DEVELOPMENT = ["http://localhost:9000/hook", "http://LOCALHOST./x", "http://127.0.0.1:9000/", "http://127.0.0.42/"]


@pytest.mark.parametrize("url", DEVELOPMENT)
def test_this_machine_is_a_target_only_where_that_is_allowed(url: str) -> None:
    assert checked_url(url, THIS_MACHINE).hostname
    assert "private_targets" in reason(url)
    assert "private_targets" in reason(url, PrivateTargets.parse(["10.0.0.0/8"]))


@pytest.mark.parametrize("url", ["http://127.0.1.1/", "http://[::1]/", "https://10.0.0.1/", "http://169.254.169.254/"])
def test_where_this_machine_is_allowed_nothing_else_private_is(url: str) -> None:
    reason(url, THIS_MACHINE)


def test_the_operator_names_private_networks_and_hosts() -> None:
    allowed = PrivateTargets.parse(["10.1.0.0/16", "fd00:1::/32", "192.168.7.7", "hooks.internal"])
    for url in (
        "http://10.1.2.3:8080/x",
        "https://10.1.2.3/",
        "http://[fd00:1::5]/",
        "https://192.168.7.7/",
        "http://Hooks.Internal./",
        "http://[::ffff:10.1.2.3]/",
        "https://example.com/",
    ):
        checked_url(url, allowed)
    for url in ("http://10.2.0.1/", "https://192.168.7.8/", "https://127.0.0.1/", "http://a.hooks.internal/"):
        reason(url, allowed)
    # What a name resolves to is judged again when it is called.
    assert allowed.may_reach("example.com", "10.1.9.9") and not allowed.may_reach("example.com", "10.2.9.9")
    assert allowed.may_reach("hooks.internal", "172.16.0.1")
    assert not allowed.may_reach("localhost", "127.0.0.1")
    assert THIS_MACHINE.may_reach("localhost", "::1") and not THIS_MACHINE.may_reach("localhost", "10.1.0.1")
    assert not THIS_MACHINE.may_reach("example.com", "::1")


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "10.0.0.0/33", "1.2.3", "0x7f.1", "a b", "http://x", "x:80", "-x"])
def test_a_private_target_that_is_no_network_or_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError):
        PrivateTargets.parse([entry])


@pytest.mark.parametrize("address", FORBIDDEN_V4)
def test_a_private_or_local_address_is_refused_in_every_spelling(address: str) -> None:
    value = int(IPv4Address(address))
    a, b, c, d = IPv4Address(address).packed
    spellings = [
        address,
        f"{address}.",
        str(value),
        hex(value),
        hex(value).upper().replace("X", "x"),
        f"{a}.{b}.{(c << 8) | d}",
        f"{a}.{(b << 16) | (c << 8) | d}",
        ".".join(f"0{octet:o}" for octet in (a, b, c, d)),
        ".".join(hex(octet) for octet in (a, b, c, d)),
        f"[::ffff:{address}]",
        f"[::ffff:{a:02x}{b:02x}:{c:02x}{d:02x}]",
        f"[64:ff9b::{a:02x}{b:02x}:{c:02x}{d:02x}]",
        f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::1]",
    ]
    for host in spellings:
        reason(f"https://{host}/hook")
        reason(f"https://{host}:8443/hook")


@pytest.mark.parametrize(
    "address",
    ["::1", "::", "fe80::1", "fe80::1%25eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"],
)
def test_a_private_or_local_ipv6_address_is_refused(address: str) -> None:
    reason(f"https://[{address}]/")


@given(st.sampled_from(["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16"]), st.data())
def test_every_address_of_a_private_network_is_forbidden_also_when_mapped(network: str, data: st.DataObject) -> None:
    base, _, bits = network.partition("/")
    host = data.draw(st.integers(0, 2 ** (32 - int(bits)) - 1))
    value = int(IPv4Address(base)) + host
    assert is_forbidden_address(str(IPv4Address(value)))
    assert is_forbidden_address(str(IPv6Address((0xFFFF << 32) | value)))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_a_public_address_is_not_forbidden(address: str) -> None:
    assert not is_forbidden_address(address)


@pytest.mark.parametrize("address", ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"])
def test_a_multicast_address_is_forbidden(address: str) -> None:
    assert is_forbidden_address(address)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.com/", "use https"),
        ("http://localhost.example.com/", "use https"),
        ("http://127.0.0.1.example.com/", "use https"),
        ("http://127.0.1.1/", "use https"),
        ("http://[::1]/", "use https"),
        ("http://10.0.0.1/", "use https"),
        ("http://169.254.169.254/latest/meta-data", "use https"),
        ("ftp://example.com/", "https"),
        ("file:///etc/passwd", "host"),
        ("//example.com/", "https"),
        ("example.com", "host"),
        ("https://", "host"),
        ("https:///path", "host"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "URL"),
        ("https://example.com:port/", "URL"),
        ("https://[::1/", "URL"),
        ("https://user@example.com/", "credentials"),
        ("https://user:secret@example.com/", "credentials"),
        ("https://:@example.com/", "credentials"),
        ("http://127.0.0.1@example.com/", "credentials"),
        ("https://localhost/", "localhost"),
        ("https://api.localhost/", "localhost"),
        ("https://example.com/a b", "printable"),
        ("https://example.com/\r\nx: y", "printable"),
        ("https://example.com/\0", "printable"),
        ("https://exämple.com/", "printable"),
        ("https://１２７.0.0.1/", "printable"),
        ("https://example.com/" + "a" * 2048, "length"),
        ("", "printable"),
    ],
)
def test_any_other_url_is_refused_with_its_reason(url: str, why: str) -> None:
    assert why in reason(url)


@given(st.text(max_size=60) | st.text(st.sampled_from("htps:/[]@%.0127localx?#\\"), max_size=40))
def test_whatever_the_text_the_answer_is_parts_or_a_refusal(url: str) -> None:
    try:
        parts = checked_url(url, THIS_MACHINE)
    except InvalidRequest:
        return
    assert parts.hostname
    assert parts.scheme in ("http", "https")
    assert parts.scheme == "https" or THIS_MACHINE.names(parts.hostname.lower().removesuffix("."))
