"""The contract every log keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from millstream.errors import MillstreamError

BATCH_BYTES_MAX: Final = 8 << 20


class LogBatch(NamedTuple):
    """What is made durable as one unit: positions `first` up to but not including `next`."""

    first: int
    next: int
    payload: bytes


Done = Callable[[MillstreamError | None], None]


class Log(Protocol):
    """An append-only sequence of batches.

    `read` runs once, before the first append, and yields every durable batch from the oldest kept; whatever it
    found torn at the end is cut and reported in `notices`. `append` calls `done` on the caller's loop, later, in the
    order of the appends, with None once the batch is durable, or with an error. It does not block, unless the caller
    says by `may_block` that it has nothing else to do and the storage has been quick lately; then `done` may have been
    called when `append` returns. After `Unavailable` nothing of the batch is in the log and later appends may succeed;
    after `OutcomeUnknown` the log accepts nothing more, and after `NotLeader` nothing until it is started again. `trim`
    forgets batches that end at or before a position; calling it twice is harmless. A batch should hold no more than
    `batch_bytes_max`, unless a single record does. No record may be larger than `record_bytes_max`, which is at least
    as much: whoever appends sees to it. An error that would come again with every attempt is answered, not tried again.
    """

    window: int
    batch_bytes_max: int
    notices: list[str]

    @property
    def record_bytes_max(self) -> int:
        """The largest encoded record that the log takes at present."""
        ...

    @property
    def exists(self) -> bool:
        """Whether there is a log at all, if only an empty one."""
        ...

    def read(self) -> Iterator[LogBatch]: ...

    def start(self, first_position: int, deliver: Callable[..., object]) -> None:
        """Accept appends from this position on; `deliver(callback, *args)` runs callbacks on the caller's loop."""
        ...

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None: ...

    def trim(self, position: int) -> None: ...

    def close(self) -> None: ...

    @property
    def failure(self) -> str | None:
        """Why the log accepts nothing more, or None while it works."""
        ...
