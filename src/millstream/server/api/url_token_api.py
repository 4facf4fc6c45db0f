"""`POST /v1/tokens`: makes a URL token, for principals that may read the stream (`access/url_tokens.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from millstream.access.url_tokens import UrlGrant, make_url_token
from millstream.clock import Clock
from millstream.errors import InvalidRequest, Unavailable
from millstream.protocol.keys import StreamKey, stream_key_of
from millstream.server.api.responses import as_json
from millstream.server.http.messages import Answer, Request
from millstream.units import Milliseconds

DEFAULT_SECONDS: Final = 300


class _TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    stream: str
    seconds: Annotated[int, msgspec.Meta(ge=1)] | None = None


_WISH: Final = msgspec.json.Decoder(_TokenRequest)


class UrlTokenApi:
    """`token_key` returns the signing key; None on a cluster node that has not caught up yet."""

    def __init__(self, clock: Clock, token_key: Callable[[], bytes | None], seconds_max: float) -> None:
        self._clock = clock
        self._token_key = token_key
        self._seconds_max = int(seconds_max)

    def make(self, request: Request) -> Answer:
        wanted, key = _token_request(request), requested_key(request)
        secret = self._token_key()
        if secret is None:
            raise Unavailable("this node does not have the server's key yet", hint="try again, or ask another node")
        longest = self._seconds_max
        seconds = min(DEFAULT_SECONDS, longest) if wanted.seconds is None else wanted.seconds
        if seconds > longest:
            raise InvalidRequest(
                f"a token in a URL may last {longest} seconds, not {seconds}",
                code="invalid_lifetime",
                hint="ask for another one before it expires",
            )
        expires_at_ms = self._clock.now_ms() + seconds * 1000
        maker = request.principal
        if maker is not None and maker.expires_at_ms is not None:
            expires_at_ms = min(expires_at_ms, Milliseconds(maker.expires_at_ms))
        grant = UrlGrant(key.bucket, key.stream, expires_at_ms, maker.key if maker is not None else "")
        body = {
            "token": make_url_token(secret, grant),
            "stream": f"/v1/stream/{key.v1_path}",
            "expires_at_ms": expires_at_ms,
        }
        return as_json(body, 201)


def requested_key(request: Request) -> StreamKey:
    """The stream that a token is requested for."""
    return stream_key_of(_token_request(request).stream.encode())


def _token_request(request: Request) -> _TokenRequest:
    try:
        return _WISH.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the body does not say which stream a token is for: {error}",
            code="invalid_body",
            hint='send {"stream": "/v1/stream/team-a/chat", "seconds": 300}',
        ) from None
