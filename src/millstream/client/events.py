"""Server-sent events as they arrive (WHATWG, "Interpreting an event stream"): bytes in, whole events out."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from millstream.client.errors import BadAnswer

EVENT_BYTES_MAX: Final = 256 << 20

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    type: str
    data: bytes
    id: str


class EventParser:
    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of a line whose end has not arrived
        self._ended_with_cr = False
        self._is_first = True
        self._type = ""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""

    def feed(self, received: bytes) -> list[Event]:
        if self._ended_with_cr and received[:1] == b"\n":
            received = received[1:]
            self._ended_with_cr = False
        if not received:
            return []
        self._ended_with_cr = received.endswith(b"\r")
        self._size += len(received)
        if self._size > EVENT_BYTES_MAX:
            raise BadAnswer(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        lines = _LINE_END.split(received) if b"\r" in received else received.split(b"\n")
        events: list[Event] = []
        last = lines.pop()
        for line in lines:
            if self._line:
                self._line.append(line)
                line = b"".join(self._line)
                self._line.clear()
            if self._take(line):
                events.append(Event(self._type or "message", b"\n".join(self._data), self._id))
                self._reset(len(last))
            elif not line:
                self._reset(len(last))
        if last:
            self._line.append(last)
        return events

    def _take(self, line: bytes) -> bool:
        """Take a line; returns whether it ends an event that has data."""
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return bool(self._data)
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        return False

    def _reset(self, size: int) -> None:
        self._type = ""
        self._data = []
        self._size = size
