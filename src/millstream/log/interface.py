"""The contract of every log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from millstream.errors import MillstreamError
from millstream.units import Position

BATCH_BYTES_MAX: Final = 8 << 20


class LogBatch(NamedTuple):
    """The unit of durability: the records at positions `first` up to but not including `next`."""

    first: Position
    next: Position
    payload: bytes


Done = Callable[[MillstreamError | None], None]


class Log(Protocol):
    """An append-only sequence of batches.

    `read` runs once, before the first append, and yields every durable batch from the oldest kept. It truncates a torn
    end and reports that in `notices`. `append` calls `done` on the caller's loop, later, in the order of the appends,
    with None once the batch is durable, or with an error. It blocks only if the caller allows it by `may_block`, having
    nothing else to do, and the storage has been fast lately; then `done` may have been called when `append` returns.
    After `Unavailable` nothing of the batch is in the log and later appends may succeed; after `OutcomeUnknown` the log
    accepts nothing more, and after `NotLeader` nothing until it is started again. `trim` deletes batches that end at or
    before a position and is idempotent. A batch should hold no more than `batch_bytes_max`, unless a single record
    does. The caller must not append a record larger than `record_bytes_max`, which is never less than
    `batch_bytes_max`. An error that every retry would repeat is returned, not retried.
    """

    window: int
    batch_bytes_max: int
    notices: list[str]

    @property
    def record_bytes_max(self) -> int:
        """The largest encoded record that the log accepts at present."""
        ...

    @property
    def exists(self) -> bool:
        """Whether the log exists, even if it is empty."""
        ...

    def read(self) -> Iterator[LogBatch]: ...

    def start(self, first_position: Position, deliver: Callable[..., object]) -> None:
        """Accept appends from this position on; `deliver(callback, *args)` runs callbacks on the caller's loop."""
        ...

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None: ...

    def trim(self, position: Position) -> None: ...

    def close(self) -> None: ...

    @property
    def failure(self) -> str | None:
        """Why the log accepts nothing more, or None while it works."""
        ...
