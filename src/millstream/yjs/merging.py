"""The process that merges a document's updates: it reads them, applies them to a `pycrdt.Doc`, writes the snapshot.

    python -m millstream.yjs.merging < updates > snapshot

It is a process of its own because pycrdt holds the interpreter while it works, and because what it works on came from
anybody: if it panics or runs out of memory, the server does not. It knows nothing of streams or shards; `pipe` says
what it reads and writes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final, NamedTuple

import pycrdt

from millstream.errors import InvalidRequest
from millstream.protocol.lib0 import read_varuint, split_frames
from millstream.yjs.pipe import pack_records, unpack_records

SKIPPED_TOLD_MAX: Final = 100
NICENESS: Final = 10


class Update(NamedTuple):
    """An update, and where in the input its message starts."""

    place: int
    data: bytes


class Merged(NamedTuple):
    """The snapshot, and what could not be part of it: where, and why."""

    snapshot: bytes
    skipped: list[tuple[int, str]]


def merge(snapshot: bytes, messages: list[bytes]) -> Merged:
    """One update that stands for a snapshot and the messages after it. Places count from the first message on."""
    skipped: list[tuple[int, str]] = []
    updates = [Update(0, snapshot)] if snapshot else []
    place = 0
    for message in messages:
        try:
            updates += [Update(place, data) for data in split_frames(message)]
        except InvalidRequest as error:
            skipped.append((place, error.message))
        place += len(message)
    doc, malformed = _build(updates)
    if snapshot and 0 in malformed:
        raise ValueError(f"the snapshot so far cannot be read: {malformed[0]}")
    skipped += [(updates[number].place, reason) for number, reason in malformed.items()]
    sound = [update.data for number, update in enumerate(updates) if number not in malformed]
    return Merged(_encode(doc, sound), sorted(skipped))


def _build(updates: list[Update]) -> tuple[pycrdt.Doc[Any], dict[int, str]]:
    """A document of all updates that can be applied, and the numbers of those that cannot, with the reason."""
    malformed: dict[int, str] = {}
    while True:
        doc: pycrdt.Doc[Any] = pycrdt.Doc()
        for number, update in enumerate(updates):
            if number in malformed:
                continue
            try:
                doc.apply_update(update.data)
            except ValueError as error:  # it could not be decoded, so nothing of it was applied
                malformed[number] = str(error)
            except BaseException as error:  # a panic is no Exception; the document may be half changed: begin anew
                malformed[number] = str(error) or type(error).__name__
                break
        else:
            return doc, malformed


def _encode(doc: pycrdt.Doc[Any], updates: list[bytes]) -> bytes:
    """The document as one update, with what waits in vain for something it depends on: that may still arrive, and
    `Doc.get_update` leaves it out."""
    state = doc.get_state()
    clocks = _clocks(state)
    waiting = [update for update in updates if _is_waiting(pycrdt.get_update(update, state), clocks)]
    return pycrdt.merge_updates(doc.get_update(), *waiting) if waiting else doc.get_update()


def _clocks(state: bytes) -> dict[int, int]:
    """A state vector: how far each client's changes are known."""
    count, position = read_varuint(state, 0)
    clocks: dict[int, int] = {}
    for _ in range(count):
        client, position = read_varuint(state, position)
        clocks[client], position = read_varuint(state, position)
    return clocks


def _is_waiting(rest: bytes, clocks: dict[int, int]) -> bool:
    """Whether an update's difference to the document has changes in it, or deletes what is not there yet."""
    if rest == b"\0\0":
        return False
    changes, position = read_varuint(rest, 0)
    if changes:
        return True
    clients, position = read_varuint(rest, position)
    for _ in range(clients):
        client, position = read_varuint(rest, position)
        ranges, position = read_varuint(rest, position)
        for _ in range(ranges):
            clock, position = read_varuint(rest, position)
            length, position = read_varuint(rest, position)
            if clock + length > clocks.get(client, 0):
                return True
    return False


def main() -> None:
    os.nice(NICENESS)  # requests go first
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic prints before it can be caught
    snapshot, *messages = unpack_records(sys.stdin.buffer.read())
    try:
        merged = merge(snapshot, messages)
        head: dict[str, object] = {"skipped": merged.skipped[:SKIPPED_TOLD_MAX], "skipped_count": len(merged.skipped)}
        body = merged.snapshot
    except Exception as error:
        head, body = {"error": str(error)}, b""
    sys.stdout.buffer.write(pack_records([json.dumps(head).encode()]) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
