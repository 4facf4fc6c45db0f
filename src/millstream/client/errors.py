"""The client's errors, by HTTP status, and which of them are worth a retry.

    ClientError
    ├── ConnectionFailed      no server answered; `was_sent` says whether the request may have reached one
    ├── OutcomeUnknown        an append was sent and no answer came: it may or may not have been written
    ├── BadAnswer             the answer is not one the protocol knows
    ├── BadRequest            400
    │   └── PayloadTooLarge   413
    ├── Unauthorized          401: the token is missing, wrong or expired
    ├── Forbidden             403: the token does not allow it
    ├── ProducerFenced        403: a newer epoch of the same producer exists
    ├── NotFound              404
    ├── Gone                  410
    │   └── OffsetTrimmed     the offset lies before `earliest_offset`; bootstrap is the way in
    ├── Conflict              409
    │   ├── StreamClosed      with the final `next_offset`
    │   ├── SequenceGap       a producer skipped `expected`
    │   └── PreconditionFailed   412
    ├── Unavailable           503, 502, 504, 408: try again
    │   └── TooManyRequests   429
    └── ServerError           any other 5xx; a 500 is worth another try, unless it answers a plain append

Offsets are the server's tokens and stay text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millstream.client.messages import Request, Response
from millstream.errors import MillstreamError


class ClientError(MillstreamError):
    """Base of what `millstream.client` raises; `status` is None if no server answered.

    `is_servers` says whether code and message come from a durable streams server.
    """

    code = "client_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        details: Mapping[str, object] | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint, details=details)
        self.status = status
        self.headers = headers or {}
        self.is_servers = status is not None and code is not None


class ConnectionFailed(ClientError):
    code = "connection_failed"

    def __init__(
        self,
        message: str,
        *,
        was_sent: bool,
        was_reused: bool = False,
        timed_out: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.was_sent = was_sent
        self.was_reused = was_reused
        self.timed_out = timed_out


class OutcomeUnknown(ClientError):
    code = "outcome_unknown"


class BadAnswer(ClientError):
    code = "bad_answer"


class BadRequest(ClientError):
    code = "invalid_request"


class PayloadTooLarge(BadRequest):
    code = "payload_too_large"


class Unauthorized(ClientError):
    code = "unauthorized"


class Forbidden(ClientError):
    code = "forbidden"


class ProducerFenced(ClientError):
    code = "producer_fenced"

    @property
    def current_epoch(self) -> int:
        return int(self.headers["producer-epoch"])


class NotFound(ClientError):
    code = "not_found"


class Gone(ClientError):
    code = "gone"


class OffsetTrimmed(Gone):
    code = "offset_trimmed"

    @property
    def earliest_offset(self) -> str:
        return self.headers["stream-earliest-offset"]


class Conflict(ClientError):
    code = "conflict"


class StreamClosed(Conflict):
    code = "stream_closed"

    @property
    def next_offset(self) -> str | None:
        return self.headers.get("stream-next-offset")


class SequenceGap(Conflict):
    code = "producer_sequence_gap"

    @property
    def expected(self) -> int:
        return int(self.headers["producer-expected-seq"])

    @property
    def received(self) -> int:
        return int(self.headers["producer-received-seq"])


class PreconditionFailed(Conflict):
    code = "precondition_failed"


class Unavailable(ClientError):
    code = "unavailable"

    @property
    def retry_after_seconds(self) -> float | None:
        value = self.headers.get("retry-after", "")
        return float(value) if value.isascii() and value.isdigit() else None


class TooManyRequests(Unavailable):
    code = "too_many_requests"


class ServerError(ClientError):
    code = "server_error"


_BY_STATUS: dict[int, type[ClientError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: Unavailable,
    409: Conflict,
    410: Gone,
    412: PreconditionFailed,
    413: PayloadTooLarge,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}
_WORDS: dict[int, str] = {
    400: "malformed",
    401: "the token is missing, wrong or expired",
    403: "not allowed",
    404: "there is no such thing",
    410: "it is no longer there",
    429: "too many requests",
    503: "not available at the moment",
}
# Errors that a header decides, in addition to the status.
_BY_HEADER: tuple[tuple[int, str, type[ClientError]], ...] = (
    (403, "producer-epoch", ProducerFenced),
    (409, "producer-expected-seq", SequenceGap),
    (409, "stream-closed", StreamClosed),
    (410, "stream-earliest-offset", OffsetTrimmed),
)


def error_of(request: Request, response: Response) -> ClientError:
    """The error for an answer with status 400 or more, with the server's own message if it has one."""
    code, message, hint, details = _described(request, response)
    kind = next(
        (kind for status, name, kind in _BY_HEADER if status == response.status and name in response.headers), None
    )
    if kind is None:
        kind = _BY_STATUS.get(response.status) or (ServerError if response.status >= 500 else ClientError)
    if kind is Unavailable and code == "outcome_unknown":
        kind = OutcomeUnknown
    return kind(message, code=code, hint=hint, details=details, status=response.status, headers=response.headers)


def _described(request: Request, response: Response) -> tuple[str | None, str, str | None, dict[str, object]]:
    try:
        error = msgspec.json.decode(response.body)["error"]
        code, message, hint = error.pop("code", None), str(error.pop("message")), error.pop("hint", None)
        return code, message, hint, error
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        # An answer to HEAD has no body, and a proxy's body is not the server's.
        said = response.body[:200].decode("utf-8", "replace").strip() or _WORDS.get(response.status, "no reason given")
        path = request.target.partition("?")[0]
        return None, f"{request.method} {path} was answered with {response.status}: {said}", None, {}
