"""TLS: the server's certificate, and replacing it while connections stay open."""

from __future__ import annotations

import ssl
from pathlib import Path

from millstream.config import TlsSection
from millstream.errors import ConfigurationError


def tls_context(section: TlsSection) -> ssl.SSLContext | None:
    """A context with the configured certificate; None if there is none."""
    if section.cert is None and section.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, section)
    return context


def reload_certificate(context: ssl.SSLContext, section: TlsSection) -> None:
    """Use the current files for new connections. If certificate and key do not match, the old pair stays in use."""
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), section)
    _load(context, section)


def _load(context: ssl.SSLContext, section: TlsSection) -> None:
    if section.cert is None or section.key is None:
        missing = "tls.key" if section.key is None else "tls.cert"
        raise ConfigurationError(f"{missing} is not set", hint="TLS needs both tls.cert and tls.key")
    for name, path in (("tls.cert", section.cert), ("tls.key", section.key)):
        _check_readable(name, path)
    try:
        # Without a password callback OpenSSL would ask on the terminal.
        context.load_cert_chain(section.cert, section.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"tls.cert {section.cert} and tls.key {section.key} are no certificate and its key: {error}",
            hint="both are PEM, the certificate first in its chain, the key without a password",
        ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{name} {path} cannot be read: {error.strerror}") from None
