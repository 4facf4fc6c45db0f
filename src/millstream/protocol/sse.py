"""Server-sent events: how messages and their control records look on a live connection (§5.8)."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from typing import Final

from millstream.protocol.content_types import is_json, is_text
from millstream.protocol.json_messages import join_messages

_LINE_BREAK: Final = re.compile(rb"\r\n|\r|\n")
_LEADING_SPACE: Final = re.compile(rb"^data: ", re.MULTILINE)

HEARTBEAT: Final = b": keep-alive\n\n"


def is_base64(content_type: str) -> bool:
    """Whether data events of such a stream are base64 text, announced by Stream-SSE-Data-Encoding."""
    return not is_text(content_type)


def encode_event(name: bytes, payload: bytes, event_id: bytes) -> bytes:
    """One event, with the id that a browser shows in `Last-Event-ID` when it reconnects after it.

    A lone CR ends a line in SSE as LF does, so both start a new `data:` line.
    """
    if b"\n" in payload or b"\r" in payload:
        payload = _LINE_BREAK.sub(b"\ndata:", payload)
    data = b"data:" + payload
    if b"data: " in data:
        # Parsers drop one space after the colon: a line that starts with one needs another.
        data = _LEADING_SPACE.sub(b"data:  ", data)
    return b"id: %b\nevent: %b\n%b\n\n" % (event_id, name, data)


def encode_data(content_type: str, messages: Sequence[bytes | memoryview], next_offset: str) -> bytes:
    """The data event that carries a run of messages; its id is where to go on after them."""
    event_id = next_offset.encode()
    if is_json(content_type):
        return encode_event(b"data", join_messages(messages), event_id)
    payload = b"".join(messages)
    return encode_event(b"data", payload if is_text(content_type) else b64encode(payload), event_id)


def encode_control(next_offset: str, *, cursor: str | None, up_to_date: bool, closed: bool) -> bytes:
    """The control event that follows data. A closed stream needs no cursor: nobody will reconnect."""
    token = next_offset.encode()
    if closed:
        return b'id: %b\nevent: control\ndata:{"streamNextOffset":"%b","upToDate":true,"streamClosed":true}\n\n' % (
            token,
            token,
        )
    return b'id: %b\nevent: control\ndata:{"streamNextOffset":"%b","streamCursor":"%b"%b}\n\n' % (
        token,
        token,
        (cursor or "").encode(),
        b',"upToDate":true' if up_to_date else b"",
    )
