"""Errors as the Yjs protocol words them, §10: status, code, and the fields that clients act on."""

from __future__ import annotations

import msgspec
import pytest

from millstream.errors import (
    Conflict,
    Gone,
    InvalidRequest,
    MillstreamError,
    NotFound,
    OffsetTrimmed,
    ProducerFenced,
    Unauthorized,
    Unavailable,
)
from millstream.server.http.error_map import error_response, problem, yjs_error
from millstream.server.http.messages import Response


def code_of(response: Response) -> str:
    assert isinstance(response.body, bytes)
    return str(msgspec.json.decode(response.body)["error"]["code"])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("no"), 400, "INVALID_REQUEST"),
        (InvalidRequest("no", code="invalid_framing"), 400, "INVALID_REQUEST"),
        (Unauthorized("no"), 401, "UNAUTHORIZED"),
        (NotFound("no"), 404, "DOCUMENT_NOT_FOUND"),
        (NotFound("no", code="stream_expired"), 404, "DOCUMENT_NOT_FOUND"),
        (NotFound("no", code="snapshot_not_found"), 404, "SNAPSHOT_NOT_FOUND"),
        (OffsetTrimmed("no", earliest=7), 410, "OFFSET_EXPIRED"),
        (Gone("no"), 404, "DOCUMENT_NOT_FOUND"),
        (ProducerFenced("no", current_epoch=3), 403, "PRODUCER_FENCED"),
        (Conflict("no", code="content_type_mismatch"), 409, "CONTENT_TYPE_MISMATCH"),
        (Unavailable("no", code="backpressure"), 503, "BACKPRESSURE"),
    ],
)
def test_our_errors_have_the_protocols_codes(error: MillstreamError, status: int, code: str) -> None:
    ours = error_response(error)
    response = yjs_error(ours)
    assert (response.status, code_of(response)) == (status, code)
    assert response.fields == ours.fields


@pytest.mark.parametrize(
    ("status", "code"), [(401, "UNAUTHORIZED"), (403, "UNAUTHORIZED"), (429, "RATE_LIMITED"), (405, "INVALID_REQUEST")]
)
def test_statuses_have_the_protocols_codes_whoever_made_the_answer(status: int, code: str) -> None:
    assert code_of(yjs_error(problem(status, "some_word", "no"))) == code
