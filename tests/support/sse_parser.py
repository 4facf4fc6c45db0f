"""An event-stream parser written from the WHATWG rules ("Interpreting an event stream"), for use as a judge."""

from __future__ import annotations

import re
from typing import NamedTuple


class Event(NamedTuple):
    type: str
    data: str
    id: str


def parse_events(stream: bytes) -> list[Event]:
    text = stream.decode("utf-8", errors="replace").removeprefix("\ufeff")
    lines = re.split(r"\r\n|\n|\r", text)
    # What follows the last line ending is an unfinished line, and an unfinished event is discarded.
    lines.pop()
    events: list[Event] = []
    kind, data, last_id = "", "", ""
    for line in lines:
        if line == "":
            if data != "":
                events.append(Event(kind or "message", data.removesuffix("\n"), last_id))
            kind, data = "", ""
            continue
        if line.startswith(":"):
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data += value + "\n"
        elif field == "id" and "\0" not in value:
            last_id = value
    return events
