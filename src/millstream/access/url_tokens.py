"""URL tokens: tokens in a URL that read one stream for a short time. Pure functions and values.

A browser's EventSource cannot send an Authorization header, and a URL is stored in more places than a header. So such a
token names one stream, allows reading only, lasts a short time, and ends with the token of its maker. It is not stored:
a signature with the server's key makes it valid at every node and after a restart.

    msu_{base64url(claims)}.{base64url(HMAC-SHA256 of everything before the dot)}

The claims are a JSON array: bucket, stream, expiry in milliseconds, and the key of its maker's principal.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

import msgspec

from millstream.errors import Unauthorized
from millstream.protocol.keys import StreamKey

PREFIX: Final = "msu_"
TOKEN_BYTES_MAX: Final = 2048
# The server's secret signs other things too. This prefix prevents that one of those is accepted as a token.
_PURPOSE: Final = b"millstream url token 1"


class UrlGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a URL token allows: reading one stream until a time, on behalf of its maker."""

    bucket: str
    stream: str
    expires_at_ms: int
    maker: str

    @property
    def key(self) -> StreamKey:
        return StreamKey(self.bucket, self.stream)


_GRANT: Final = msgspec.json.Decoder(UrlGrant)


def make_url_token(secret: bytes, grant: UrlGrant) -> str:
    signed = PREFIX + urlsafe_b64encode(msgspec.json.encode(grant)).rstrip(b"=").decode()
    return f"{signed}.{_signature(secret, signed)}"


def read_url_token(secret: bytes, token: str, now_ms: int) -> UrlGrant:
    """The grant of a token with a valid signature that has not expired; Unauthorized repeats nothing of the token."""
    signed, dot, signature = token.partition(".")
    if (
        not dot
        or not token.isascii()
        or len(token) > TOKEN_BYTES_MAX
        or not signed.startswith(PREFIX)
        or not hmac.compare_digest(_signature(secret, signed), signature)
    ):
        raise Unauthorized("the token in the URL is not valid", code="invalid_token")
    # Only this server signs tokens, so signed content has the right form.
    encoded = signed.removeprefix(PREFIX)
    grant = _GRANT.decode(urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    if now_ms >= grant.expires_at_ms:
        raise Unauthorized("the token in the URL has expired", code="invalid_token", hint="ask for another one")
    return grant


def _signature(secret: bytes, signed: str) -> str:
    key = hmac.digest(secret, _PURPOSE, "sha256")
    return urlsafe_b64encode(hmac.digest(key, signed.encode(), "sha256")).rstrip(b"=").decode()
