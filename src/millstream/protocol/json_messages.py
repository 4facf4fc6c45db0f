"""JSON mode: a body becomes messages, messages become a body (§7.1).

Elements are validated and split but never re-encoded: `1.00`, key order and 30-digit integers come back as
they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from millstream.errors import InvalidRequest

_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])


def split_messages(body: bytes) -> list[bytes]:
    """The messages of a JSON body: the elements of an array, or the one value it holds.

    An empty array yields no messages; whether that is allowed depends on the method, not on the body.
    """
    try:
        if not body.isascii():
            body.decode("utf-8")
        if body.lstrip(b" \t\r\n")[:1] == b"[":
            return [bytes(element) for element in _ARRAY.decode(body)]
        return [bytes(_VALUE.decode(body))]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply", code="invalid_json") from None


def join_messages(messages: Iterable[bytes | memoryview]) -> bytes:
    return b"".join((b"[", b",".join(messages), b"]"))
