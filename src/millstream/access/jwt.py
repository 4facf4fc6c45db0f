"""JSON Web Tokens (RFC 7519) signed with HS256, RS256 or EdDSA, verified with the keys of a JWK set.

A key has one algorithm, fixed by its type, and a token is checked with that algorithm only: what the token's header
says can choose among keys, never what is done with one. So neither `none` nor an RSA key used as an HMAC secret works.
"""

from __future__ import annotations

import hmac
import math
import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.hashes import SHA256

from millstream.access.scopes import Principal, parse_scopes
from millstream.errors import ConfigurationError, Unauthorized

TOKEN_BYTES_MAX: Final = 8 << 10
KEYS_MAX: Final = 1000
HMAC_KEY_BYTES_MIN: Final = 32
RSA_BITS: Final = (2048, 16384)

_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*")

Verify = Callable[[bytes, bytes], bool]


class VerificationKey(NamedTuple):
    key_id: str | None
    algorithm: str
    verify: Verify


class JwtRules(NamedTuple):
    """What a token must say."""

    issuer: str = ""
    audience: str = ""
    scope_claim: str = "scope"
    leeway_ms: int = 5000


class JwtVerifier:
    def __init__(self, keys: list[VerificationKey], rules: JwtRules) -> None:
        self.keys = keys
        self._rules = rules

    def verify(self, token: str, now_ms: int) -> Principal:
        """Who a token says its bearer is, once its signature and its claims are good."""
        if len(token) > TOKEN_BYTES_MAX:
            raise _refused("the token is too long")
        parts = token.split(".")
        if len(parts) != 3:
            raise _refused("the token is not a JWT")
        header, claims, signature = _object(parts[0]), _object(parts[1]), _decoded(parts[2])
        if "crit" in header:
            raise _refused("the token demands an extension that is not known")
        key = self._key(header)
        if not key.verify(signature, f"{parts[0]}.{parts[1]}".encode()):
            raise _refused("the token's signature does not verify")
        return self._principal(claims, now_ms)

    def _key(self, header: Mapping[str, Any]) -> VerificationKey:
        algorithm, key_id = header.get("alg"), header.get("kid")
        candidates = [key for key in self.keys if key.algorithm == algorithm]
        if key_id is not None:
            candidates = [key for key in candidates if key.key_id == key_id]
        if len(candidates) != 1:
            raise _refused("no key fits the token's header")
        return candidates[0]

    def _principal(self, claims: Mapping[str, Any], now_ms: int) -> Principal:
        rules = self._rules
        expires = _time(claims, "exp")
        if expires is None:
            raise _refused("the token never expires")
        expires_at_ms = int(expires * 1000) + rules.leeway_ms
        if now_ms >= expires_at_ms:
            raise _refused("the token has expired")
        starts = _time(claims, "nbf")
        if starts is not None and now_ms < starts * 1000 - rules.leeway_ms:
            raise _refused("the token is not valid yet")
        if rules.issuer and claims.get("iss") != rules.issuer:
            raise _refused("the token's issuer is not the one expected")
        self._check_audience(claims)
        subject, issuer = claims.get("sub"), claims.get("iss")
        if not isinstance(subject, str) or not subject or not subject.isprintable() or len(subject) > 256:
            raise _refused("the token names no subject")
        scopes = claims.get(rules.scope_claim, "")
        texts = scopes.split() if isinstance(scopes, str) else scopes
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _refused("the token's scopes are neither text nor a list of texts")
        return Principal(f"jwt:{issuer}:{subject}", subject, parse_scopes(texts), expires_at_ms)

    def _check_audience(self, claims: Mapping[str, Any]) -> None:
        """A token for somebody else is refused, whether or not we have a name of our own (RFC 7519 §4.1.3)."""
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [] if audience is None else [audience]
        if self._rules.audience not in audiences if self._rules.audience else audiences:
            raise _refused("the token is meant for somebody else")


def read_jwks(raw: bytes, origin: str) -> list[VerificationKey]:
    """The keys of a JWK set (RFC 7517) that can verify; one that is malformed or weak is an error."""
    try:
        keys = msgspec.json.decode(raw)["keys"]
        if not isinstance(keys, list) or len(keys) > KEYS_MAX:
            raise TypeError
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        raise ConfigurationError(f"{origin} is not a JWK set", hint='it looks like {"keys": [{"kty": …}]}') from None
    found = []
    for number, jwk in enumerate(keys):
        if isinstance(jwk, dict) and jwk.get("use", "sig") == "sig":
            try:
                key = _key_of(jwk)
            except (KeyError, ValueError, TypeError, Unauthorized) as error:
                reason = str(error) if isinstance(error, ValueError) else "a member is missing or malformed"
                raise ConfigurationError(f"{origin}: key number {number} cannot be used: {reason}") from None
            if key is not None:
                found.append(key)
    return found


def _key_of(jwk: dict[str, Any]) -> VerificationKey | None:
    kind = jwk["kty"]
    if kind == "oct":
        algorithm, verify = "HS256", _hmac_verifier(_decoded(jwk["k"]))
    elif kind == "RSA":
        algorithm, verify = "RS256", _rsa_verifier(_integer(jwk["n"]), _integer(jwk["e"]))
    elif kind == "OKP" and jwk.get("crv") == "Ed25519":
        algorithm, verify = "EdDSA", _ed25519_verifier(_decoded(jwk["x"]))
    else:
        return None  # a key for an algorithm that is not spoken here
    if jwk.get("alg", algorithm) != algorithm:
        return None
    key_id = jwk.get("kid")
    return VerificationKey(key_id if isinstance(key_id, str) else None, algorithm, verify)


def _hmac_verifier(secret: bytes) -> Verify:
    if len(secret) < HMAC_KEY_BYTES_MIN:
        raise ValueError(f"an HS256 key has at least {HMAC_KEY_BYTES_MIN} bytes")
    return lambda signature, data: hmac.compare_digest(hmac.digest(secret, data, "sha256"), signature)


def _rsa_verifier(n: int, e: int) -> Verify:
    if not RSA_BITS[0] <= n.bit_length() <= RSA_BITS[1]:
        raise ValueError(f"an RSA key has {RSA_BITS[0]} to {RSA_BITS[1]} bits")
    key = RSAPublicNumbers(e, n).public_key()
    return lambda signature, data: _is_valid(lambda: key.verify(signature, data, PKCS1v15(), SHA256()))


def _ed25519_verifier(x: bytes) -> Verify:
    key = Ed25519PublicKey.from_public_bytes(x)
    return lambda signature, data: _is_valid(lambda: key.verify(signature, data))


def _is_valid(check: Callable[[], None]) -> bool:
    try:
        check()
    except InvalidSignature:
        return False
    return True


def _decoded(text: str) -> bytes:
    """Base64url without padding, and nothing else."""
    if _BASE64URL.fullmatch(text) is None or len(text) % 4 == 1:
        raise _refused("the token is not base64url")
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _integer(text: str) -> int:
    return int.from_bytes(_decoded(text), "big")


def _object(text: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(_decoded(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _refused("the token is not a JWT") from None
    if not isinstance(decoded, dict):
        raise _refused("the token is not a JWT")
    return decoded


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e12:
        raise _refused(f"the token's {name} is not a time")
    return float(value)


def _refused(reason: str) -> Unauthorized:
    return Unauthorized(reason, code="invalid_token")
