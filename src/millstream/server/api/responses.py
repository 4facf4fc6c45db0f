"""Answers that several handlers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from millstream.pending import Pending
from millstream.server.http.error_map import problem
from millstream.server.http.messages import Answer, Response

JSON_FIELDS: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"


def as_json(body: object, status: int = 200) -> Response:
    return Response(status, JSON_FIELDS, msgspec.json.encode(body))


def method_not_allowed(method: str, methods: Mapping[str, Any]) -> Response:
    allowed = ", ".join([*methods, "HEAD", "OPTIONS"] if "HEAD" not in methods else [*methods, "OPTIONS"])
    fields = b"allow: %b\r\n" % allowed.encode()
    return problem(405, "method_not_allowed", f"{method} is not possible here", fields=fields)


def no_content(_: object = None) -> Response:
    return Response(204)


def then(answer: Answer, step: Callable[[Response], Answer]) -> Answer:
    """Apply a step to a response, now or when it is there."""
    return answer.then(step) if isinstance(answer, Pending) else step(answer)
