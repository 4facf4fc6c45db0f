"""The checks of `millstream doctor` on access: exposure, certificate and tokens.

They read the files as the server does at its start, as the user who runs the check.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from jwt import PyJWK

from millstream.access.authenticator import auth_settings, tokens_path
from millstream.access.exposure import check_exposure, is_loopback_host
from millstream.access.jwt import read_jwks
from millstream.access.token_file import read_tokens
from millstream.cli.findings import Finding, counted
from millstream.clock import Clock
from millstream.config import Config
from millstream.errors import ConfigurationError
from millstream.server.http.tls import tls_context

EXPIRES_SOON_DAYS: Final = 21
NAMES_SHOWN_MAX: Final = 3


def exposure(config: Config, clock: Clock) -> Iterator[Finding]:
    """Whether the exposure is intended: beyond loopback the server needs [auth] and [tls], or --insecure."""
    name, host = "exposure", config.server.listen[0]
    try:
        warning = check_exposure(config)
    except ConfigurationError as error:
        yield Finding(name, "problem", f"the server would not start: {error.message}", error.hint)
        return
    if warning is not None:
        yield Finding(name, "warning", warning, "set auth.enabled=true, tls.cert and tls.key")
    elif is_loopback_host(host):
        yield Finding(name, "ok", f"{host} is reached from this machine only")
    else:
        yield Finding(name, "ok", f"{host} is reached from other machines, with [auth] and [tls]")


# -- TLS -----------------------------------------------------------------------------------------------------------


def certificate(config: Config, clock: Clock) -> Iterator[Finding]:
    """Whether certificate and key can be read, match, and stay valid for a while."""
    name = "certificate"
    try:
        context = tls_context(config.tls)
    except ConfigurationError as error:
        yield Finding(name, "problem", error.message, error.hint or "give the server's user read access")
        return
    cert, key = config.tls.cert, config.tls.key
    if context is None or cert is None or key is None:
        yield Finding(name, "ok", "none: the server speaks plain HTTP")
        return
    yield _validity(name, cert, clock)
    yield from _kept_private(name, "tls.key", key)


def _validity(name: str, path: Path, clock: Clock) -> Finding:
    first = x509.load_pem_x509_certificates(path.read_bytes())[0]
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    until = first.not_valid_after_utc
    about = f"{path} is for {_names(first)}"
    renew = "renew it; SIGHUP makes a running server take the new one"
    if now < first.not_valid_before_utc:
        message = f"{about} and not valid before {first.not_valid_before_utc:%Y-%m-%d %H:%M}Z"
        return Finding(name, "problem", message, "check this machine's clock, or wait")
    if now >= until:
        return Finding(name, "problem", f"{about} and expired on {until:%Y-%m-%d %H:%M}Z", renew)
    days = (until - now).days
    message = f"{about}, fits its key, and is valid until {until:%Y-%m-%d} ({counted(days, 'day')})"
    if days < EXPIRES_SOON_DAYS:
        return Finding(name, "warning", message, renew)
    return Finding(name, "ok", message)


def _names(found: x509.Certificate) -> str:
    """The names in a certificate, shortened if there are many."""
    try:
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name (clients will refuse it)"
    names = [str(one.value) for one in extension]
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


# -- tokens --------------------------------------------------------------------------------------------------------


def access(config: Config, clock: Clock) -> Iterator[Finding]:
    """Whether the token and key files can be used, and whether any token can do anything."""
    name, settings = "access", auth_settings(config)
    if not config.auth.enabled:
        named = [key for key in ("tokens_file", "jwks_file") if getattr(config.auth, key) is not None]
        if named:
            message = f"auth.{named[0]} is set, but auth.enabled is not: requests need no token"
            yield Finding(name, "warning", message, "set auth.enabled=true")
        else:
            yield Finding(name, "ok", "requests need no token")
        return
    try:
        tokens = list(read_tokens(settings.tokens_file).entries.values())
        keys = _keys(settings.jwks_file)
    except ConfigurationError as error:
        hint = error.hint or "give the server's user read access, or name another file in [auth]"
        yield Finding(name, "problem", error.message, hint)
        return
    expired = sum(token.principal.is_expired(clock.now_ms()) for token in tokens)
    message = f"{counted(len(tokens), 'token')} in {settings.tokens_file}"
    if expired:
        message += f", {expired} of them expired"
    if settings.jwks_file is not None:
        message += f"; {counted(len(keys), 'key')} for JWTs in {settings.jwks_file}"
    if len(tokens) == expired and not keys:
        hint = "make a token: millstream token create --bucket '*' --admin"
        yield Finding(name, "warning", f"{message}: nobody may do anything", hint)
    else:
        yield Finding(name, "ok", message)
    yield from _kept_private(name, "the token file", tokens_path(config))
    if settings.jwks_file is not None and any(key.algorithm_name == "HS256" for key in keys):
        yield from _kept_private(name, "auth.jwks_file, which has a shared secret,", settings.jwks_file)


def _keys(path: Path | None) -> list[PyJWK]:
    if path is None:
        return []
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the key file {path} cannot be read: {error.strerror}") from None
    return read_jwks(raw, str(path))


def _kept_private(name: str, what: str, path: Path) -> Iterator[Finding]:
    """A finding if a file can be read by others than its owner and group, or written by others than its owner."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # not created yet
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        message = f"{what} {path} can be read or changed by others (mode {stat.S_IMODE(mode):04o})"
        yield Finding(name, "warning", message, f"chmod 600 {path}")
