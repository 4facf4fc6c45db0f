"""JSON Web Tokens (RFC 7519) signed with HS256, RS256, ES256 or EdDSA, verified by PyJWT with the keys of a JWK set.

A key has one algorithm, fixed by its type, and a token is checked with that algorithm only. The token's header can
choose among keys but never the algorithm, so neither `none` nor an RSA key used as an HMAC secret works. Times are
compared here and not by PyJWT, which would read the wall clock itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.types import Options

from millstream.access.scopes import Principal, parse_scopes
from millstream.errors import ConfigurationError, Unauthorized

TOKEN_BYTES_MAX: Final = 8 << 10
KEYS_MAX: Final = 1000
RSA_BITS_MAX: Final = 16384

# The algorithm of a key, by its type and curve.
_ALGORITHMS: Final = {
    ("oct", None): "HS256",
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
}
_PUBLIC_MEMBERS: Final = ("k", "n", "e", "x", "y")
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*")
_TIME_MAX_S: Final = 1e12
_CLAIMS_CHECKED: Final[Options] = {
    "verify_iss": True,
    "verify_aud": True,
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_sub": False,
    "verify_jti": False,
}


class JwtRules(NamedTuple):
    """The claims that a token must have."""

    issuer: str = ""
    audience: str = ""
    scope_claim: str = "scope"
    leeway_ms: int = 5000


class JwtVerifier:
    def __init__(self, keys: list[jwt.PyJWK], rules: JwtRules) -> None:
        self.keys = keys
        self._rules = rules

    def verify(self, token: str, now_ms: int) -> Principal:
        """The principal of a token whose signature and claims are valid."""
        if len(token) > TOKEN_BYTES_MAX:
            raise _refused("the token is too long")
        if not token.isascii():
            raise _refused("the token is not a JWT")
        return self._principal(self._claims(token), now_ms)

    def _claims(self, token: str) -> Mapping[str, Any]:
        """The claims of a token, if one of our keys signed it and its issuer and audience are right."""
        key = self._key(_header(token))
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                options=_CLAIMS_CHECKED,
                issuer=self._rules.issuer or None,
                # If no audience is configured, a token that names one is meant for another system (RFC 7519 §4.1.3).
                audience=self._rules.audience or None,
            )
        except jwt.InvalidTokenError as error:
            raise _refused(_reason(error)) from None

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        algorithm, key_id = header.get("alg"), header.get("kid")
        candidates = [key for key in self.keys if key.algorithm_name == algorithm]
        if key_id is not None:
            candidates = [key for key in candidates if key.key_id == key_id]
        if len(candidates) != 1:
            raise _refused("no key fits the token's header")
        return candidates[0]

    def _principal(self, claims: Mapping[str, Any], now_ms: int) -> Principal:
        leeway_ms = self._rules.leeway_ms
        expires = _time(claims, "exp")
        if expires is None:
            raise _refused("the token never expires")
        expires_at_ms = int(expires * 1000) + leeway_ms
        if now_ms >= expires_at_ms:
            raise _refused("the token has expired")
        starts = _time(claims, "nbf")
        if starts is not None and now_ms < starts * 1000 - leeway_ms:
            raise _refused("the token is not valid yet")
        subject, issuer = claims.get("sub"), claims.get("iss")
        if not isinstance(subject, str) or not subject or not subject.isprintable() or len(subject) > 256:
            raise _refused("the token names no subject")
        scopes = claims.get(self._rules.scope_claim, "")
        texts = scopes.split() if isinstance(scopes, str) else scopes
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _refused("the token's scopes are neither text nor a list of texts")
        return Principal(f"jwt:{issuer}:{subject}", subject, parse_scopes(texts), expires_at_ms)


def read_jwks(raw: bytes, origin: str) -> list[jwt.PyJWK]:
    """The verification keys of a JWK set (RFC 7517); a malformed or weak key is an error."""
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
            except (KeyError, ValueError, TypeError, jwt.PyJWTError) as error:
                # PyJWT's message may contain the key.
                reason = str(error) if isinstance(error, ValueError) else "a member is missing or malformed"
                raise ConfigurationError(f"{origin}: key number {number} cannot be used: {reason}") from None
            if key is not None:
                found.append(key)
    return found


def _key_of(jwk: Mapping[str, Any]) -> jwt.PyJWK | None:
    algorithm = _ALGORITHMS.get((jwk["kty"], jwk.get("crv")))
    if algorithm is None or jwk.get("alg", algorithm) != algorithm:
        return None  # an algorithm that is not supported
    for name in _PUBLIC_MEMBERS:
        if _BASE64URL.fullmatch(jwk.get(name, "")) is None:
            raise ValueError(f"its {name} is not base64url")
    # Only the public half of a private key is needed to verify.
    key = jwt.PyJWK({name: value for name, value in jwk.items() if name != "d"}, algorithm)
    key.Algorithm.prepare_key(key.key)
    weakness = key.Algorithm.check_key_length(key.key)
    if weakness is not None:
        raise ValueError(weakness)
    if isinstance(key.key, RSAPublicKey) and key.key.key_size > RSA_BITS_MAX:
        raise ValueError(f"an RSA key has at most {RSA_BITS_MAX} bits")
    return key


def _header(token: str) -> Mapping[str, Any]:
    encoded, _, _ = token.partition(".")
    try:
        # Only the header is passed: PyJWT would decode the other parts too, and again when it verifies.
        header = jwt.get_unverified_header(f"{encoded}..")
    except jwt.DecodeError:
        raise _refused("the token is not a JWT") from None
    except jwt.InvalidTokenError:
        raise _refused("the token's header has a malformed key id or demands an extension that is not known") from None
    if "crit" in header:
        raise _refused("the token demands an extension that is not known")
    return header


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    # NaN compares false with everything.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _TIME_MAX_S:
        raise _refused(f"the token's {name} is not a time")
    return float(value)


def _reason(error: jwt.InvalidTokenError) -> str:
    """Why PyJWT refused a token, in words that repeat nothing of the token."""
    missing = error.claim if isinstance(error, jwt.MissingRequiredClaimError) else None
    if isinstance(error, jwt.InvalidSignatureError):
        return "the token's signature does not verify"
    if isinstance(error, jwt.InvalidIssuerError) or missing == "iss":
        return "the token's issuer is not the one expected"
    if isinstance(error, jwt.InvalidAudienceError) or missing == "aud":
        return "the token is meant for somebody else"
    return "the token is not a JWT"


def _refused(reason: str) -> Unauthorized:
    return Unauthorized(reason, code="invalid_token")
