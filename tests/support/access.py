"""Tokens, keys and certificates for tests, made the way a user or an issuer makes them."""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import json
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from millstream.access.scopes import Scope, parse_scope
from millstream.access.token_file import create_token
from millstream.clock import SystemClock


def make_token(path: Path, *scopes: str, name: str = "", seconds: float | None = None) -> str:
    """A token in a file, as `millstream token create` makes it."""
    clock = SystemClock()
    parsed = [parse_scope(scope) for scope in scopes]
    expires = None if seconds is None else clock.now_ms() + int(seconds * 1000)
    return create_token(path, clock, name, [scope for scope in parsed if isinstance(scope, Scope)], expires)[1]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def _coordinate(value: int) -> str:
    return b64(value.to_bytes(32, "big"))


class Issuer:
    """Signs JWTs with a key of each kind."""

    def __init__(self) -> None:
        self.secret = b"0123456789abcdef0123456789abcdef"
        self.rsa = rsa.generate_private_key(65537, 2048)
        self.ed25519 = ed25519.Ed25519PrivateKey.generate()
        self.p256 = ec.generate_private_key(ec.SECP256R1())

    def jwks(self) -> dict[str, Any]:
        numbers = self.rsa.public_key().public_numbers()
        x = self.ed25519.public_key().public_bytes_raw()
        point = self.p256.public_key().public_numbers()
        return {
            "keys": [
                {"kty": "oct", "kid": "shared", "k": b64(self.secret)},
                {"kty": "RSA", "kid": "rsa", "n": _number(numbers.n), "e": _number(numbers.e)},
                {"kty": "OKP", "crv": "Ed25519", "kid": "ed", "x": b64(x)},
                {"kty": "EC", "crv": "P-256", "kid": "p256", "x": _coordinate(point.x), "y": _coordinate(point.y)},
            ]
        }

    def sign(self, claims: dict[str, Any], algorithm: str = "EdDSA", **header: Any) -> str:
        head = b64(json.dumps({"alg": algorithm, "typ": "JWT", **header}).encode())
        signed = f"{head}.{b64(json.dumps(claims).encode())}"
        return f"{signed}.{b64(self.signature(algorithm, signed.encode()))}"

    def signature(self, algorithm: str, data: bytes) -> bytes:
        if algorithm == "HS256":
            return hmac.digest(self.secret, data, "sha256")
        if algorithm == "RS256":
            return self.rsa.sign(data, padding.PKCS1v15(), hashes.SHA256())
        if algorithm == "ES256":
            r, s = decode_dss_signature(self.p256.sign(data, ec.ECDSA(hashes.SHA256())))
            return r.to_bytes(32, "big") + s.to_bytes(32, "big")
        return self.ed25519.sign(data)

    def rsa_public_pem(self) -> bytes:
        return self.rsa.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )


def make_certificate(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """A self-signed certificate for loopback and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / f"{name}.pem", directory / f"{name}.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path
