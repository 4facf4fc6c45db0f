"""`POST /v1/tokens`: a token for a URL, for those who may read the stream themselves (`access/url_tokens.py`)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from millstream.access.url_tokens import UrlGrant, make_url_token
from millstream.errors import InvalidRequest, Unavailable
from millstream.protocol.keys import StreamKey, stream_key_of
from millstream.server.http.messages import Request, Response
from millstream.shard.shard import Shard

URL_TOKENS: Final = "url tokens"
DEFAULT_SECONDS: Final = 300
_FIELDS: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    stream: str
    seconds: Annotated[int, msgspec.Meta(ge=1)] | None = None


_WISH: Final = msgspec.json.Decoder(_Wish)


class UrlTokenApi:
    def __init__(self, shard: Shard, seconds_max: float) -> None:
        self._shard = shard
        self._seconds_max = int(seconds_max)

    def make(self, request: Request) -> None:
        wish, key = _wish(request), wished_key(request)
        secret = self._shard.token_key()
        if secret is None:  # a node that has not caught up yet
            raise Unavailable("this node does not have the server's key yet", hint="try again, or ask another node")
        longest = self._seconds_max
        seconds = min(DEFAULT_SECONDS, longest) if wish.seconds is None else wish.seconds
        if seconds > longest:
            raise InvalidRequest(
                f"a token in a URL may last {longest} seconds, not {seconds}",
                code="invalid_lifetime",
                hint="ask for another one before it expires",
            )
        expires_at_ms = self._shard.clock.now_ms() + seconds * 1000
        maker = request.principal
        if maker is not None and maker.expires_at_ms is not None:
            expires_at_ms = min(expires_at_ms, maker.expires_at_ms)
        grant = UrlGrant(key.bucket, key.stream, expires_at_ms, maker.key if maker is not None else "")
        body = {
            "token": make_url_token(secret, grant),
            "stream": f"/v1/stream/{key.v1_path}",
            "expires_at_ms": expires_at_ms,
        }
        request.reply(Response(201, _FIELDS, msgspec.json.encode(body)))


def wished_key(request: Request) -> StreamKey:
    """The stream that a token is wanted for."""
    return stream_key_of(_wish(request).stream.encode())


def _wish(request: Request) -> _Wish:
    try:
        return _WISH.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the body does not say which stream a token is for: {error}",
            code="invalid_body",
            hint='send {"stream": "/v1/stream/team-a/chat", "seconds": 300}',
        ) from None
