"""An authority of the tests' own, which signs certificates for loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS_VALID = 30


class Authority:
    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key.public_key())
        own = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str, dns_name: str | None = None) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1, or for a name instead, and its key, as PEM files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        loopback = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
        names = x509.SubjectAlternativeName([loopback if dns_name is None else x509.DNSName(dns_name)])
        builder = _builder(subject, self._name, key.public_key()).add_extension(names, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        certificate_path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate_path, key_path


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS_VALID))
    )
