"""Authentication: from an Authorization header to a principal, by token file or JWT.

Both files are read at the start, on request, and when they have changed. Verified tokens are cached by their hash, up
to a limit, until a file changes or the token expires.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from millstream.access.jwt import JwtRules, JwtVerifier, read_jwks
from millstream.access.scopes import BY_URL, Need, Principal, Scope
from millstream.access.token_file import PREFIX, Tokens, read_tokens
from millstream.caches import show
from millstream.clock import Clock
from millstream.config import Config
from millstream.errors import ConfigurationError, Unauthorized

REMEMBERED_MAX: Final = 10_000
AUTHORIZATION_BYTES_MAX: Final = 10 << 10

_Stamp = tuple[int, int, int] | None


class AuthSettings(NamedTuple):
    tokens_file: Path
    jwks_file: Path | None
    rules: JwtRules


def auth_settings(config: Config) -> AuthSettings:
    auth = config.auth
    rules = JwtRules(auth.jwt_issuer, auth.jwt_audience, auth.jwt_scope_claim, int(auth.jwt_leeway * 1000))
    return AuthSettings(tokens_path(config), auth.jwks_file, rules)


def tokens_path(config: Config) -> Path:
    return config.auth.tokens_file or config.server.data_dir / "tokens.json"


class Authenticator:
    def __init__(self, settings: AuthSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._remembered: dict[bytes, Principal] = {}
        show("tokens", self._remembered, REMEMBERED_MAX)
        self._tokens = Tokens()
        self._jwts: JwtVerifier | None = None
        self._stamps: list[_Stamp] = []
        self.reload()

    def reload(self, settings: AuthSettings | None = None) -> str:
        """Read the files again, all or nothing; returns a summary of their content."""
        settings = settings or self._settings
        stamps = _stamps(settings)
        tokens = read_tokens(settings.tokens_file)
        jwts = None
        if settings.jwks_file is not None:
            try:
                raw = settings.jwks_file.read_bytes()
            except OSError as error:
                raise ConfigurationError(
                    f"the key file {settings.jwks_file} cannot be read: {error.strerror}"
                ) from None
            jwts = JwtVerifier(read_jwks(raw, str(settings.jwks_file)), settings.rules)
        self._settings, self._stamps = settings, stamps
        self._tokens, self._jwts = tokens, jwts
        self._remembered.clear()
        return f"{len(tokens.entries)} tokens" + (f", {len(jwts.keys)} JWT keys" if jwts is not None else "")

    def has_changed(self) -> bool:
        """Whether a file has changed since the last call; each change is reported once."""
        stamps = _stamps(self._settings)
        has_changed = stamps != self._stamps
        self._stamps = stamps
        return has_changed

    def principal(self, authorization: bytes | None) -> Principal:
        """The principal of an Authorization header; raises Unauthorized with a reason that repeats nothing of the
        header."""
        if authorization is None:
            raise Unauthorized("this server needs a token", hint="send Authorization: Bearer with a token")
        digest = hashlib.sha256(authorization).digest()
        principal = self._remembered.get(digest)
        if principal is None:
            principal = self._verified(authorization)
            if len(self._remembered) >= REMEMBERED_MAX:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[digest] = principal
        if principal.is_expired(self._clock.now_ms()):
            self._remembered.pop(digest, None)
            raise _refused("the token has expired")
        return principal

    def _verified(self, authorization: bytes) -> Principal:
        scheme, _, raw = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or len(authorization) > AUTHORIZATION_BYTES_MAX or not raw.isascii():
            raise _refused("the Authorization header is not Bearer with a token")
        token = raw.strip().decode()
        if token.startswith(PREFIX):
            principal = self._tokens.find(token)
            if principal is None:
                raise _refused("the token is not known")
            return principal
        if self._jwts is None:
            raise _refused("the token is not known")
        return self._jwts.verify(token, self._clock.now_ms())

    def is_valid(self, principal: Principal) -> bool:
        """Whether a principal that was valid still is, according to the files."""
        if principal.is_by_url:
            kind, _, token_id = principal.key.removeprefix(BY_URL).partition(":")
            return kind != "token" or self._allows(token_id, principal.scopes)
        kind, _, token_id = principal.key.partition(":")
        return kind != "token" or (
            token_id in self._tokens.entries and self._tokens.entries[token_id].principal == principal
        )

    def _allows(self, token_id: str, scopes: tuple[Scope, ...]) -> bool:
        """Whether a token that made URL tokens still exists and has the scopes they need."""
        entry = self._tokens.entries.get(token_id)
        maker = entry.principal if entry is not None else None
        return maker is not None and all(maker.may(Need(scope.action, scope.bucket, scope.prefix)) for scope in scopes)


def _stamps(settings: AuthSettings) -> list[_Stamp]:
    return [_stamp(path) for path in (settings.tokens_file, settings.jwks_file) if path is not None]


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _refused(reason: str) -> Unauthorized:
    return Unauthorized(reason, code="invalid_token")
