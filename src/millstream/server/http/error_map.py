"""Errors as HTTP responses: the only module that knows their status codes."""

from __future__ import annotations

import logging

import msgspec

from millstream.errors import (
    Conflict,
    Corrupt,
    Forbidden,
    Gone,
    InvalidRequest,
    MillstreamError,
    NotFound,
    ObjectMissing,
    OffsetTrimmed,
    OutcomeUnknown,
    PayloadTooLarge,
    PreconditionFailed,
    ProducerFenced,
    SequenceGap,
    StreamClosed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from millstream.protocol.offsets import format_offset
from millstream.server.http.messages import Request, Response

logger = logging.getLogger("millstream.server")

# Subclasses come before their base classes.
_STATUS: tuple[tuple[type[MillstreamError], int], ...] = (
    (PayloadTooLarge, 413),
    (InvalidRequest, 400),
    (NotFound, 404),
    (Gone, 410),
    (PreconditionFailed, 412),
    (Conflict, 409),
    (ProducerFenced, 403),
    (Unauthorized, 401),
    (Forbidden, 403),
    (TooManyRequests, 429),
    (Unavailable, 503),
    (OutcomeUnknown, 503),
    (Corrupt, 500),
)

RETRY_SECONDS = 30

# RFC 6750 §3: no error code where no credentials were shown.
_CHALLENGE = b'Bearer realm="millstream"'
_CHALLENGES = {"invalid_token": _CHALLENGE + b', error="invalid_token"'}


def status_of(error: MillstreamError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_response(error: MillstreamError) -> Response:
    if error.code == "object_not_found":
        # The requested stream exists; a missing object in the store must not look like a missing stream.
        error = ObjectMissing(error.message, hint=error.hint, retry_after_seconds=RETRY_SECONDS)
    fields = b"cache-control: no-store\r\n"
    if isinstance(error, StreamClosed):
        fields += b"stream-closed: true\r\nstream-next-offset: %b\r\n" % format_offset(error.tail).encode()
    elif isinstance(error, ProducerFenced):
        fields += b"producer-epoch: %d\r\n" % error.current_epoch
    elif isinstance(error, SequenceGap):
        fields += b"producer-expected-seq: %d\r\nproducer-received-seq: %d\r\n" % (
            error.expected,
            error.received,
        )
    elif isinstance(error, OffsetTrimmed):
        fields += b"stream-earliest-offset: %b\r\n" % format_offset(error.earliest).encode()
    elif isinstance(error, Unavailable | TooManyRequests):
        fields += b"retry-after: %d\r\n" % error.retry_after_seconds
    elif isinstance(error, Unauthorized):
        fields += b"www-authenticate: %b\r\n" % (_CHALLENGES.get(error.code, _CHALLENGE))
    elif isinstance(error, Forbidden):
        fields += b'www-authenticate: %b, error="insufficient_scope"\r\n' % _CHALLENGE
    return problem(status_of(error), error.code, error.message, hint=error.hint, fields=fields, **error.details)


def defect_response(request: Request) -> Response:
    """Log the unexpected exception that is being handled, and return a response for its request."""
    logger.exception("%s %r failed", request.method, request.path, extra={"request_id": request.id})
    return problem(500, "internal_error", "the server failed to handle this request; its log says why")


def problem(
    status: int, code: str, message: str, *, hint: str | None = None, fields: bytes = b"", **details: object
) -> Response:
    """An error body: `{"error": {"code", "message", "hint"}}`."""
    error: dict[str, object] = {"code": code, "message": message}
    if hint is not None:
        error["hint"] = hint
    error.update(details)
    return Response(status, b"content-type: application/json\r\n" + fields, msgspec.json.encode({"error": error}))


# The error codes of the Yjs protocol (§10); a code that it does not define is kept.
_YJS_CODES: dict[int, str] = {
    400: "INVALID_REQUEST",
    401: "UNAUTHORIZED",
    403: "UNAUTHORIZED",
    404: "DOCUMENT_NOT_FOUND",
    405: "INVALID_REQUEST",
    410: "OFFSET_EXPIRED",
    429: "RATE_LIMITED",
}
# Yjs codes by our own code, where one status has several Yjs codes.
_YJS_CODES_BY_OURS = {
    Gone.code: "DOCUMENT_NOT_FOUND",
    ProducerFenced.code: "PRODUCER_FENCED",
    "snapshot_not_found": "SNAPSHOT_NOT_FOUND",
    "awareness_not_found": "STREAM_NOT_FOUND",
}


def yjs_error(response: Response) -> Response:
    """An error in the format of the Yjs protocol."""
    assert isinstance(response.body, bytes)
    error: dict[str, object] = msgspec.json.decode(response.body)["error"]
    code, status = str(error["code"]), response.status
    if code.isupper():
        return response  # another node has converted it already
    if code == Gone.code:
        status = 404
    error["code"] = _YJS_CODES_BY_OURS.get(code) or _YJS_CODES.get(status, code.upper())
    if status == 410:
        error["hint"] = "start again with offset=snapshot"
    return Response(status, response.fields, msgspec.json.encode({"error": error}))
