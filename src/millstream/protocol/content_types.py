"""Content types: how they compare and what they imply (§7).

A stream keeps the header value it was created with, byte for byte; comparisons look only at the media type.
"""

from __future__ import annotations

import re
from typing import Final

from millstream.caches import cached
from millstream.errors import InvalidRequest

OCTET_STREAM: Final = "application/octet-stream"
JSON: Final = "application/json"
CONTENT_TYPE_BYTES_MAX: Final = 256

_CONTENT_TYPE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*(;[\t\x20-\x7e]*)?")


@cached("media_types", 1024)
def media_type(content_type: str) -> str:
    """The part that counts: lower case, without parameters."""
    return content_type.partition(";")[0].strip().lower()


@cached("content_types", 1024)
def checked_content_type(value: str) -> str:
    if len(value) > CONTENT_TYPE_BYTES_MAX or _CONTENT_TYPE.fullmatch(value) is None:
        raise InvalidRequest(
            f"{value[:80]!r} is not a content type",
            code="invalid_content_type",
            hint="write it as type/subtype",
        )
    return value


def is_json(content_type: str) -> bool:
    return media_type(content_type) == JSON


def is_text(content_type: str) -> bool:
    """Whether SSE carries the payload as it is rather than as base64 (§5.8)."""
    kind = media_type(content_type)
    return kind.startswith("text/") or kind == JSON
