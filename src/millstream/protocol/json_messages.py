"""JSON mode: a body becomes messages, messages become a body (§7.1).

Elements are validated and split but never re-encoded: `1.00`, key order and 30-digit integers come back as
they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from millstream.errors import InvalidRequest, PayloadTooLarge

_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])

# Elements are counted by quotes, brackets and commas alone, a slice at a time: each takes about a millisecond, so that
# a thread that counts lets others run.
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{},'))
_COUNTED_SLICE: Final = 64 << 10
_FLAT: Final = re.compile(rb"[\[{],*[\]}]")
_FLAT_PASSES: Final = 4
_RUN: Final = re.compile(rb",+|[\[{]+|[\]}]+")


def split_messages(body: bytes, messages_max: int | None = None) -> list[bytes]:
    """The messages of a JSON body: the elements of an array, or the one value it holds.

    An empty array yields no messages; whether that is allowed depends on the method, not on the body. An array of more
    than `messages_max` elements is refused before any of them is made: an element may be two bytes long, and takes
    fifty times as much in memory.
    """
    try:
        if not body.isascii():
            body.decode("utf-8")
        if body.lstrip(b" \t\r\n")[:1] == b"[":
            if messages_max is not None and body.count(b",") >= messages_max and _has_more(body, messages_max):
                raise PayloadTooLarge(
                    f"the array has more than {messages_max} elements, and each is a message",
                    code="too_many_messages",
                    hint="send it in several parts; streams.append_messages_max is the limit",
                )
            return [bytes(element) for element in _ARRAY.decode(body)]
        return [bytes(_VALUE.decode(body))]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply", code="invalid_json") from None


def _has_more(body: bytes, count_max: int) -> bool:
    """Whether a JSON array has more than so many elements, from its structure alone.

    As long as the body is valid, the commas counted at any point are those that separate its elements; and what comes
    after the first error does not matter, since decoding ends there.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # no quote is left that does not begin or end a string
    count, depth, in_string = 1, 0, False
    for start in range(0, len(body), _COUNTED_SLICE):
        structure = body[start : start + _COUNTED_SLICE].translate(None, _NOT_STRUCTURE)
        structure = structure.replace(b'""', b"")  # two quotes with nothing between them change nothing
        pieces = structure.split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        for _ in range(_FLAT_PASSES):
            outside, found = _FLAT.subn(b"", outside)
            if not found:
                break
        for run in _RUN.findall(outside):
            if run[0] == 0x2C:
                count += len(run) if depth == 1 else 0
            else:
                depth += len(run) if run[0] in b"[{" else -len(run)
        if count > count_max:
            return True
    return False


def join_messages(messages: Iterable[bytes | memoryview]) -> bytes:
    return b"".join((b"[", b",".join(messages), b"]"))
