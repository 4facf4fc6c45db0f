"""Records that cannot be applied: kept, named, and set aside only when an operator says so.

Apply is total (docs/ARCHITECTURE.md), so such a record is a defect, or damage that no checksum caught. Whoever meets
one stops there, because everything behind it was checked on top of it, and leaves a copy in the data directory:

    quarantine/<shard>-<position>.refused    a record that could not be applied, with the reason
    quarantine/<shard>-<position>.record     the same, set aside by `millstream quarantine`: passed over from then on

Both are JSON (`Refused`), and what they say of shard and position must be what their names say: a file in which a digit
has changed must not set another record aside. Files of the second kind are never deleted; those of the first go when a
start succeeds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from millstream.errors import ConfigurationError, Corrupt
from millstream.log.interface import LogBatch
from millstream.streams.records import AnyRecord, decode_batch, decode_record, encode_record, span
from millstream.units import Position

logger = logging.getLogger("millstream.shard")

REFUSED: Final = ".refused"
SET_ASIDE: Final = ".record"


class Refused(msgspec.Struct):
    """A record that could not be applied. `record` holds its bytes as the log has them, in base64."""

    shard: int
    position: Position
    type: str
    reason: str
    record: bytes


class Unapplicable(Corrupt):
    """A record of the log cannot be applied; nothing behind it may be."""

    code = "record_not_applicable"


class Found(NamedTuple):
    """A record of a batch; one that cannot even be read has an error instead."""

    position: Position
    record: AnyRecord | None
    encoded: bytes
    error: str = ""


class Quarantine:
    """Of one shard. Without a directory nothing is kept, and nothing is ever set aside."""

    def __init__(self, directory: Path | None = None, shard: int = 0) -> None:
        self._directory = directory
        self._shard = shard
        self.positions = {one.position for one in read_all(directory, SET_ASIDE) if one.shard == shard}

    def holds(self, position: Position) -> bool:
        return position in self.positions

    def refuse(self, found: Found, error: BaseException | str) -> Unapplicable:
        """Keep a copy of a record that cannot be applied; returns what to raise."""
        kind = type(found.record).__name__ if found.record is not None else "unreadable"
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"[:1000]
        encoded = found.encoded or (encode_record(found.record) if found.record is not None else b"")
        refused = Refused(self._shard, found.position, kind, reason, encoded)
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                _write(self._directory / _name(refused, REFUSED), msgspec.json.encode(refused))
            except OSError as failure:
                logger.error("the record at position %d could not be copied: %s", found.position, failure)
        return Unapplicable(
            f"the record at position {found.position} of shard {self._shard} ({kind}) cannot be applied: {reason}",
            hint=how_to_set_aside(refused),
        )

    def succeeded(self) -> None:
        """Everything was applied: what was refused before is no trouble any more."""
        for refused in read_all(self._directory, REFUSED):
            if refused.shard == self._shard and self._directory is not None:
                (self._directory / _name(refused, REFUSED)).unlink(missing_ok=True)


def records_in(batch: LogBatch) -> Iterator[Found]:
    """The records of a batch with their positions."""
    try:
        records = decode_batch(batch.payload)
    except Corrupt:
        yield from _legible(batch)
        return
    position = batch.first
    for record in records:
        yield Found(position, record, b"")
        position += span(record)


def _legible(batch: LogBatch) -> Iterator[Found]:
    """The records of a batch of which some cannot be read. How many positions an unreadable one takes follows from the
    others; if there is a second one, it and everything behind the first are one."""
    try:
        parts = [bytes(part) for part in msgspec.msgpack.decode(batch.payload, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        yield Found(batch.first, None, batch.payload, str(error))
        return
    position = batch.first
    for index, part in enumerate(parts):
        try:
            record = decode_record(part)
        except Corrupt as error:
            try:
                behind = sum(span(decode_record(one)) for one in parts[index + 1 :])
            except Corrupt:
                yield Found(position, None, b"".join(parts[index:]), error.message)
                return
            yield Found(position, None, part, error.message)
            position = Position(batch.next - behind)
        else:
            yield Found(position, record, part)
            position += span(record)


def read_all(directory: Path | None, kind: str) -> list[Refused]:
    """The records of a kind in a quarantine, of all shards."""
    if directory is None or not directory.is_dir():
        return []
    found = []
    for path in sorted(directory.glob(f"*{kind}")):
        try:
            one = msgspec.json.decode(path.read_bytes(), type=Refused)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"{path} cannot be read: {error}", hint="restore it from a copy") from None
        if path.name != _name(one, kind):
            raise Corrupt(
                f"{path} is damaged: it is about position {one.position} of shard {one.shard}, which its name is not",
                hint="restore it from a copy",
            )
        found.append(one)
    return found


def set_aside(directory: Path, shard: int, position: Position) -> Refused:
    """Choose to go on without a record that could not be applied."""
    refused = read_all(directory, REFUSED)
    for one in refused:
        if (one.shard, one.position) == (shard, position):
            (directory / _name(one, REFUSED)).rename(directory / _name(one, SET_ASIDE))
            _sync_directory(directory)
            return one
    known = ", ".join(f"{one.position} of shard {one.shard}" for one in refused) or "none"
    raise ConfigurationError(
        f"no start has been refused because of position {position} of shard {shard}",
        hint=f"records that could not be applied: {known}; start the server to find out whether one cannot",
    )


def how_to_set_aside(refused: Refused) -> str:
    shard = f" --shard {refused.shard}" if refused.shard else ""
    return (
        "please report this, with the record's copy in the data directory, quarantine/. To go on without it, run"
        f" `millstream quarantine {refused.position}{shard}` and start again; docs/operations.md says what that means"
    )


def _name(refused: Refused, kind: str) -> str:
    return f"{refused.shard:04d}-{refused.position:020d}{kind}"


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
