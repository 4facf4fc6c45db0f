"""The errors of every layer, each defined once.

An error's class says who is at fault, and its fields carry the facts that a caller needs. Only
`server/http/error_map.py` knows the HTTP status of each class.

    MillstreamError
    ├── InvalidRequest        the caller sent something malformed
    │   └── PayloadTooLarge
    ├── NotFound              no such stream, bucket, subscription
    ├── Gone                  it was there, and its bytes or its name no longer are
    │   └── OffsetTrimmed
    ├── Conflict              well-formed, but not in this state
    │   ├── StreamClosed
    │   ├── SequenceGap
    │   └── PreconditionFailed
    ├── ProducerFenced        a newer epoch of the same producer exists
    ├── Unauthorized          a token that is missing, wrong or expired
    ├── Forbidden             a good token that does not allow this
    ├── TooManyRequests       the caller is over its limit; retry later
    ├── Unavailable           nothing was written; retry later
    │   ├── NotLeader         another node leads the shard
    │   ├── ReadOnly          this server accepts no writes at all
    │   └── ObjectMissing     the object store lacks what the catalog names
    ├── OutcomeUnknown        it may or may not have been written
    ├── Corrupt               stored bytes are damaged
    │   └── OtherFormat       stored bytes are intact, but another version of millstream wrote them
    └── ConfigurationError    the operator must change something
"""

from __future__ import annotations

from collections.abc import Mapping


class MillstreamError(Exception):
    """Base of every error that millstream raises on purpose.

    `code` is a stable identifier for programs, the message is a sentence for people, `hint` says what to do next, and
    `details` holds further facts by name.
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details or {}
        if code is not None:
            self.code = code


class InvalidRequest(MillstreamError):
    code = "invalid_request"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"


class NotFound(MillstreamError):
    code = "stream_not_found"


class Gone(MillstreamError):
    code = "stream_gone"


class OffsetTrimmed(Gone):
    """The offset is before the earliest retained one."""

    code = "offset_trimmed"

    def __init__(self, message: str, *, earliest: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.earliest = earliest


class Conflict(MillstreamError):
    code = "conflict"


class StreamClosed(Conflict):
    code = "stream_closed"

    def __init__(self, message: str, *, tail: int) -> None:
        super().__init__(message)
        self.tail = tail


class SequenceGap(Conflict):
    code = "producer_sequence_gap"

    def __init__(self, message: str, *, expected: int, received: int) -> None:
        super().__init__(message)
        self.expected = expected
        self.received = received
        self.details = {"expected_seq": expected, "received_seq": received}


class PreconditionFailed(Conflict):
    code = "precondition_failed"


class ProducerFenced(MillstreamError):
    code = "producer_fenced"

    def __init__(self, message: str, *, current_epoch: int) -> None:
        super().__init__(message)
        self.current_epoch = current_epoch


class Unauthorized(MillstreamError):
    code = "unauthorized"


class Forbidden(MillstreamError):
    code = "forbidden"


class TooManyRequests(MillstreamError):
    code = "too_many_requests"

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None, retry_after_seconds: int = 1):
        super().__init__(message, code=code, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(MillstreamError):
    code = "unavailable"

    def __init__(
        self, message: str, *, code: str | None = None, hint: str | None = None, retry_after_seconds: int = 1
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class NotLeader(Unavailable):
    code = "not_leader"


class ReadOnly(Unavailable):
    code = "read_only"


class ObjectMissing(Unavailable):
    code = "cold_object_missing"


class OutcomeUnknown(MillstreamError):
    code = "outcome_unknown"


class Corrupt(MillstreamError):
    code = "corrupt"


class OtherFormat(Corrupt):
    """Intact, but written by another version of millstream. It must never be treated as missing or damaged."""

    code = "other_format"

    def __init__(self, what: str, *, found: int, known: int) -> None:
        super().__init__(
            f"{what} was written by another version of millstream: it has format {found}, and this version reads format"
            f" {known}",
            hint="nothing was changed: run the version that wrote it. How to move its streams to this version is in"
            " docs/operations.md, under Another version",
            details={"found": found, "known": known},
        )


class ConfigurationError(MillstreamError):
    code = "configuration"
