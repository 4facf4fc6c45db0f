"""The token file: the tokens that exist and their scopes, with a hash in place of every secret.

    {"version": 1, "tokens": [{"id": "…", "name": "…", "sha256": "…", "scopes": ["read:team-a"],
                               "created_at_ms": …, "expires_at_ms": … or null}]}

A token is `mst_{id}_{secret}`: the id finds its entry, the secret is 256 random bits. Because it is random, one SHA-256
is enough: nobody can guess it, so a slow hash would protect nothing. The file is replaced atomically, never changed in
place.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from millstream.access.scopes import Principal, Scope, parse_scope
from millstream.clock import Clock
from millstream.errors import ConfigurationError, NotFound

PREFIX: Final = "mst_"
VERSION: Final = 1
TOKENS_MAX: Final = 100_000
NAME_CHARACTERS_MAX: Final = 100

_TOKEN: Final = re.compile(r"mst_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ABSENT: Final = hashlib.sha256(b"").hexdigest()


class TokenEntry(msgspec.Struct, frozen=True):
    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    created_at_ms: int
    expires_at_ms: int | None = None

    @property
    def principal(self) -> Principal:
        scopes = tuple(scope for scope in map(parse_scope, self.scopes) if scope is not None)
        return Principal(f"token:{self.id}", self.name, scopes, self.expires_at_ms)


class _Content(msgspec.Struct):
    version: int
    tokens: list[TokenEntry]


class Tokens:
    """The tokens of a file, as of when it was read."""

    def __init__(self, entries: Sequence[TokenEntry] = ()) -> None:
        self.entries = {entry.id: entry for entry in entries}
        self._principals = {entry.id: entry.principal for entry in entries}

    def find(self, token: str) -> Principal | None:
        """The principal of a token, expired or not. Takes as long for a wrong secret as for an unknown id."""
        match = _TOKEN.fullmatch(token)
        token_id, secret = (match[1], match[2]) if match is not None else ("", "")
        entry = self.entries.get(token_id)
        expected = entry.sha256 if entry is not None else _ABSENT
        is_right = hmac.compare_digest(expected, _hash(secret))
        return self._principals[token_id] if is_right and entry is not None else None


def read_tokens(path: Path) -> Tokens:
    """The tokens in a file; empty if the file does not exist."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Tokens()
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be read: {error.strerror}") from None
    try:
        content = msgspec.json.decode(raw, type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path} is not one: {error}", hint="see docs/security.md") from None
    if content.version != VERSION:
        raise ConfigurationError(f"the token file {path} has version {content.version}; this reads {VERSION}")
    for entry in content.tokens:
        for scope in entry.scopes:
            if parse_scope(scope) is None:
                raise ConfigurationError(f"the token file {path}: {scope!r} of token {entry.id!r} is not a scope")
    return Tokens(content.tokens)


def create_token(
    path: Path, clock: Clock, name: str, scopes: Sequence[Scope], expires_at_ms: int | None
) -> tuple[TokenEntry, str]:
    """Add a token; returns its entry and the token itself, which is stored nowhere else."""
    token_id = clock.random_bytes(6).hex()
    secret = urlsafe_b64encode(clock.random_bytes(32)).rstrip(b"=").decode()
    texts = tuple(str(scope) for scope in scopes)
    entry = TokenEntry(token_id, name, _hash(secret), texts, clock.now_ms(), expires_at_ms)
    with _changing(path) as entries:
        if len(entries) >= TOKENS_MAX:
            raise ConfigurationError(f"the token file {path} is full: {TOKENS_MAX} tokens", hint="revoke some")
        entries.append(entry)
    return entry, f"{PREFIX}{token_id}_{secret}"


def revoke_token(path: Path, token_id: str) -> TokenEntry:
    with _changing(path) as entries:
        found = next((entry for entry in entries if entry.id == token_id), None)
        if found is None:
            raise NotFound(f"there is no token {token_id!r} in {path}", hint="millstream token ls shows the ids")
        entries.remove(found)
    return found


@contextmanager
def _changing(path: Path) -> Iterator[list[TokenEntry]]:
    """The entries of a file, which may be changed; the file is then replaced. One change at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be changed: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = list(read_tokens(path).entries.values())
        yield entries
        _replace(path, msgspec.json.format(msgspec.json.encode(_Content(VERSION, entries))) + b"\n")
    finally:
        os.close(lock)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
