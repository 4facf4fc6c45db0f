"""The process that merges a document's updates: it reads them, applies them to a `pycrdt.Doc`, writes a snapshot.

    python -m millstream.yjs.merging MEMORY_BYTES < updates > snapshot

It is a separate process because pycrdt holds the interpreter lock while it works, and because any client may have sent
the updates. An update can kill the process that reads it: deep nesting overflows the stack, which no `except` can
catch. So each attempt runs in a child process with its own limits. The child writes down each step before it takes it.
If the child dies, the update it was working on is left out and another child tries again, but only if that update alone
kills a child too. Otherwise the cause is something else, such as memory, and no new snapshot is better than one without
a valid update. `pipe` defines the input and output. This module knows nothing of streams or shards.
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
# The processor time limit of one attempt.
ATTEMPT_SECONDS: Final = 60
DEADLY_UPDATES_MAX: Final = 20

# The steps a child writes down, besides the number of an update.
_NOTHING: Final = 0xFFFFFFFF
_ENCODING: Final = 0xFFFFFFFE


class Update(NamedTuple):
    """An update, and where its message starts in the input."""

    place: int
    data: bytes


class Merged(NamedTuple):
    """The snapshot, and what was left out of it: where, and why."""

    snapshot: bytes
    skipped: list[tuple[int, str]]


class Built(NamedTuple):
    """The result of an attempt: a snapshot, and the numbers of updates that are not in it, with the reason for each."""

    snapshot: bytes
    malformed: dict[int, str]


class Died(NamedTuple):
    """How a child process ended, and which update it was working on; None if it was working on all of them."""

    number: int | None
    how: str


Note = Callable[[int], None]
Attempt = Callable[[list[Update], Mapping[int, str]], Built | Died]
"""Builds a document from updates, leaving out the given ones."""


def build_in_process(updates: list[Update], left_out: Mapping[int, str], note: Note = lambda number: None) -> Built:
    doc, malformed = _build(updates, left_out, note)
    sound = [(number, update.data) for number, update in enumerate(updates) if number not in malformed]
    return Built(_encode(doc, sound, note), malformed)


def merge(snapshot: bytes, messages: list[bytes], attempt: Attempt = build_in_process) -> Merged:
    """One update that represents a snapshot and the messages after it. Places count from the first message."""
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
    """The snapshot, if there is one, and the updates in the messages; and the messages whose framing is invalid."""
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


# -- attempts, each in its own process -------------------------------------------------------------------------


def build_in_child(memory_bytes: int, updates: list[Update], left_out: Mapping[int, str]) -> Built | Died:
    """Run `build_in_process` in a child process, which may die."""
    with mmap.mmap(-1, LENGTH.size) as noted, tempfile.TemporaryFile() as result:
        LENGTH.pack_into(noted, 0, _NOTHING)
        child = os.fork()
        if child == 0:
            # In every case the child must exit here and not return into its parent's code.
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
    # Added to what the updates themselves take, which are in memory already.
    allowed = _address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_bytes().split()[0]
    return int(pages) * resource.getpagesize()


def _exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _bisect(updates: list[Update], left_out: Mapping[int, str], attempt: Attempt) -> int:
    """The first update that cannot be merged with those before it."""
    sound, deadly = 0, len(updates)
    while deadly - sound > 1:
        middle = (sound + deadly) // 2
        if isinstance(attempt(updates[:middle], left_out), Died):
            deadly = middle
        else:
            sound = middle
    return sound


def _build(updates: list[Update], left_out: Mapping[int, str], note: Note) -> tuple[pycrdt.Doc[Any], dict[int, str]]:
    """A document of all updates that can be applied, and the numbers of those that cannot, with the reason for each."""
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
            except BaseException as error:  # a panic is no Exception; the document may be half changed: start again
                malformed[number] = str(error) or type(error).__name__
                break
        else:
            return doc, malformed


def _encode(doc: pycrdt.Doc[Any], updates: list[tuple[int, bytes]], note: Note) -> bytes:
    """The document as one update, including updates that wait for others they depend on. Those may still arrive, and
    `Doc.get_update` leaves the waiting ones out."""
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
    """Decode a state vector: how many changes of each client are known."""
    count, position = read_varuint(state, 0)
    clocks: dict[int, int] = {}
    for _ in range(count):
        client, position = read_varuint(state, position)
        clocks[client], position = read_varuint(state, position)
    return clocks


def _is_waiting(rest: bytes, clocks: dict[int, int]) -> bool:
    """Whether an update's difference to the document contains changes, or deletes items that are not there yet."""
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
    os.nice(NICENESS)  # requests have priority
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic prints to standard error before it can be caught
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
