"""Lease tokens: what a worker shows to prove which wake it was given.

`base64url(payload).base64url(hmac-sha256)`, where the payload is `subscription \\n generation \\n expiry`.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode

from millstream.errors import Unauthorized


def issue_token(key: bytes, subscription: str, generation: int, expires_at_ms: int) -> str:
    payload = urlsafe_b64encode(f"{subscription}\n{generation}\n{expires_at_ms}".encode())
    return f"{payload.decode()}.{_signature(key, payload)}"


def token_generation(key: bytes, subscription: str, token: str, now_ms: int) -> int:
    """The generation a token was issued for, once it is known to be ours, this subscription's and alive."""
    payload, dot, signature = token.partition(".")
    if not dot or not token.isascii() or not hmac.compare_digest(_signature(key, payload.encode()), signature):
        raise Unauthorized("the token is not valid", code="TOKEN_INVALID")
    # The signature vouches for the payload's form; a subscription id may itself contain a line break.
    holder, generation, expires_at_ms = urlsafe_b64decode(payload).decode().rsplit("\n", 2)
    if holder != subscription:
        raise Unauthorized("the token belongs to another subscription", code="TOKEN_INVALID")
    if now_ms > int(expires_at_ms):
        raise Unauthorized("the token has expired", code="TOKEN_EXPIRED")
    return int(generation)


def _signature(key: bytes, payload: bytes) -> str:
    return urlsafe_b64encode(hmac.digest(key, payload, hashlib.sha256)).rstrip(b"=").decode()
