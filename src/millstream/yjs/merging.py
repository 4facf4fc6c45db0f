"""The process that merges a document's updates: it reads them, applies them to a `pycrdt.Doc`, writes the snapshot.

    python -m millstream.yjs.merging MEMORY_BYTES < updates > snapshot

It is a process of its own because pycrdt holds the interpreter while it works, and because what it works on came from
anybody. An update can end the process that reads it: nested deep enough it overflows the stack, which no `except` sees.
So each attempt is made by a child with limits of its own, which notes what it is about to do before it does it. If the
child dies, the update that killed it is left out, and another child tries; provided that the update kills a child by
itself, too. If it does not, something else is wrong, memory perhaps, and leaving a good update out would be worse than
to have no new snapshot. `pipe` says what is read and written; nothing is known here of streams or shards.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pycrdt

from millstream.errors import InvalidRequest
from millstream.protocol.lib0 import read_varuint, split_frames
from millstream.yjs.pipe import LENGTH, pack_records, unpack_records

SKIPPED_TOLD_MAX: Final = 100
NICENESS: Final = 10
# Processor time of one attempt.
ATTEMPT_SECONDS: Final = 60
DEADLY_UPDATES_MAX: Final = 20

# What a child may be about to do, beside the number of an update.
_NOTHING: Final = 0xFFFFFFFF
_ENCODING: Final = 0xFFFFFFFE


class Update(NamedTuple):
    """An update, and where in the input its message starts."""

    place: int
    data: bytes


class Merged(NamedTuple):
    """The snapshot, and what could not be part of it: where, and why."""

    snapshot: bytes
    skipped: list[tuple[int, str]]


class Built(NamedTuple):
    """What came of the updates: a snapshot, and the numbers of those that are not in it, with the reason."""

    snapshot: bytes
    malformed: dict[int, str]


class Died(NamedTuple):
    """How an attempt's process ended, and which update it was at; None if at all of them."""

    number: int | None
    how: str


Note = Callable[[int], None]
Attempt = Callable[[list[Update], Mapping[int, str]], Built | Died]
"""Build a document of updates, without those that are named."""


def build_in_process(updates: list[Update], left_out: Mapping[int, str], note: Note = lambda number: None) -> Built:
    doc, malformed = _build(updates, left_out, note)
    sound = [(number, update.data) for number, update in enumerate(updates) if number not in malformed]
    return Built(_encode(doc, sound, note), malformed)


def merge(snapshot: bytes, messages: list[bytes], attempt: Attempt = build_in_process) -> Merged:
    """One update that stands for a snapshot and the messages after it. Places count from the first message on."""
    updates, skipped = _split(snapshot, messages)
    deadly: dict[int, str] = {}
    while isinstance(outcome := attempt(updates, deadly), Died):
        number = outcome.number if outcome.number is not None else _bisect(updates, deadly, attempt)
        alone = attempt([updates[number]], {})
        if not isinstance(alone, Died):
            raise ValueError(f"the process {outcome.how}, and no single update is the reason")
        deadly[number] = f"the process that reads it {alone.how}"
        _check_snapshot(snapshot, deadly)
        if len(deadly) > DEADLY_UPDATES_MAX:
            raise ValueError(f"more than {DEADLY_UPDATES_MAX} updates end the process that reads them")
    _check_snapshot(snapshot, outcome.malformed)
    skipped += [(updates[number].place, reason) for number, reason in outcome.malformed.items()]
    return Merged(outcome.snapshot, sorted(skipped))


def _check_snapshot(snapshot: bytes, malformed: Mapping[int, str]) -> None:
    if snapshot and 0 in malformed:
        raise ValueError(f"the snapshot so far cannot be read: {malformed[0]}")


def _split(snapshot: bytes, messages: list[bytes]) -> tuple[list[Update], list[tuple[int, str]]]:
    """The snapshot, if there is one, and the updates in the messages; and the messages that are not framed."""
    skipped: list[tuple[int, str]] = []
    updates = [Update(0, snapshot)] if snapshot else []
    place = 0
    for message in messages:
        try:
            updates += [Update(place, data) for data in split_frames(message)]
        except InvalidRequest as error:
            skipped.append((place, error.message))
        place += len(message)
    return updates, skipped


# -- attempts, each in a process of its own --------------------------------------------------------------------


def build_in_child(memory_bytes: int, updates: list[Update], left_out: Mapping[int, str]) -> Built | Died:
    """The same as `build_in_process` in a child that may die of it."""
    with mmap.mmap(-1, LENGTH.size) as noted, tempfile.TemporaryFile() as result:
        LENGTH.pack_into(noted, 0, _NOTHING)
        child = os.fork()
        if child == 0:
            # Whatever happens, a child must not go on as if it were its parent.
            try:
                _limit(memory_bytes)
                built = build_in_process(updates, left_out, lambda number: LENGTH.pack_into(noted, 0, number))
                result.write(pack_records([json.dumps(list(built.malformed.items())).encode()]) + built.snapshot)
                result.flush()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        (number,) = LENGTH.unpack_from(noted, 0)
        if status == 0:
            result.seek(0)
            (length,) = LENGTH.unpack(result.read(LENGTH.size))
            malformed = dict(json.loads(result.read(length)))
            return Built(result.read(), malformed)
        if number == _NOTHING:
            raise ValueError(f"merging could not begin: the process {_exit_reason(status)}")
        return Died(number if number < _ENCODING else None, _exit_reason(status))


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (ATTEMPT_SECONDS, ATTEMPT_SECONDS))
    # Beside what the updates themselves take, which are in memory already.
    allowed = _address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_bytes().split()[0]
    return int(pages) * resource.getpagesize()


def _exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _bisect(updates: list[Update], left_out: Mapping[int, str], attempt: Attempt) -> int:
    """The first update with which those before it cannot be merged."""
    sound, deadly = 0, len(updates)
    while deadly - sound > 1:
        middle = (sound + deadly) // 2
        if isinstance(attempt(updates[:middle], left_out), Died):
            deadly = middle
        else:
            sound = middle
    return sound


def _build(updates: list[Update], left_out: Mapping[int, str], note: Note) -> tuple[pycrdt.Doc[Any], dict[int, str]]:
    """A document of all updates that can be applied, and the numbers of those that cannot, with the reason."""
    malformed = dict(left_out)
    while True:
        doc: pycrdt.Doc[Any] = pycrdt.Doc()
        for number, update in enumerate(updates):
            if number in malformed:
                continue
            note(number)
            try:
                doc.apply_update(update.data)
            except ValueError as error:  # it could not be decoded, so nothing of it was applied
                malformed[number] = str(error)
            except BaseException as error:  # a panic is no Exception; the document may be half changed: begin anew
                malformed[number] = str(error) or type(error).__name__
                break
        else:
            return doc, malformed


def _encode(doc: pycrdt.Doc[Any], updates: list[tuple[int, bytes]], note: Note) -> bytes:
    """The document as one update, with what waits in vain for something it depends on: that may still arrive, and
    `Doc.get_update` leaves it out."""
    note(_ENCODING)
    state = doc.get_state()
    clocks = _clocks(state)
    waiting: list[bytes] = []
    for number, update in updates:
        note(number)
        if _is_waiting(pycrdt.get_update(update, state), clocks):
            waiting.append(update)
    note(_ENCODING)
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
        merged = merge(snapshot, messages, partial(build_in_child, int(sys.argv[1])))
        head: dict[str, object] = {"skipped": merged.skipped[:SKIPPED_TOLD_MAX], "skipped_count": len(merged.skipped)}
        body = merged.snapshot
    except Exception as error:
        head, body = {"error": str(error)}, b""
    sys.stdout.buffer.write(pack_records([json.dumps(head).encode()]) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
