"""Group commit: records gather while a batch is being made durable, then go out as the next batch.

Every answer a writer gets passes through here, refusals included when they depend on records in flight, so nobody
is told anything that a crash could take back. If a batch cannot be stored, everything that was checked on top of it
is refused with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError, NotLeader, OutcomeUnknown, PayloadTooLarge
from millstream.log.interface import Log, LogBatch
from millstream.measures import ShardMeasures
from millstream.pending import Pending
from millstream.streams.records import AnyRecord, encode_batch, encode_record, span
from millstream.tiers.hot import MESSAGE_COST_BYTES
from millstream.units import Position

logger = logging.getLogger("millstream.shard")

T = TypeVar("T")

Entry = tuple[AnyRecord | None, Position, Pending[Any] | None]
"""A record or none, its position, and who waits for it."""

# Of an answer that waits for what is before it, and has no record.
NOWHERE: Final = Position(0)
# A lone record this small may be stored on the loop itself, if the loop has little else to do.
BLOCKING_BYTES_MAX = 64 << 10
# A batch is applied, and its writers are answered, in one turn of the loop.
BATCH_RECORDS_MAX = 2048
# A batch goes out beside others only if it is about as large as they are.
COMPANY_SHARE = 0.75


class Batch:
    """Records on their way to the log, and who waits for them."""

    __slots__ = ("bytes", "dispatched_at", "encoded", "entries", "first", "next")

    def __init__(self, first: Position) -> None:
        self.first = first
        self.next = first
        self.bytes = 0
        self.dispatched_at = 0.0
        self.encoded: list[bytes] = []
        self.entries: list[Entry] = []


class Committer:
    """`apply_batch` makes a durable batch true; `undo_batch` forgets what was planned on one that failed.

    `is_quiet` is asked once for each batch: has the loop had little else to do since the last one?
    """

    def __init__(
        self,
        log: Log,
        next_position: Position,
        apply_batch: Callable[[Batch], None],
        undo_batch: Callable[[Batch], None],
        is_quiet: Callable[[], bool] = lambda: False,
        measures: ShardMeasures | None = None,
    ) -> None:
        self._log = log
        self._is_quiet = is_quiet
        self._measures = measures or ShardMeasures()
        self._apply_batch = apply_batch
        self._undo_batch = undo_batch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathering: deque[Batch] = deque([Batch(next_position)])
        self._in_flight: deque[Batch] = deque()
        self._is_scheduled = False
        self._seen = 0
        self._last_size = 0
        self._enough = 0
        self.pending_bytes = 0
        # Why nothing is accepted: the log has stopped, or another node leads.
        self.failure: MillstreamError | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.failure = None
        self._log.start(self._gathering[-1].next, loop.call_soon_threadsafe)

    def refuse(self, reason: MillstreamError) -> None:
        """Accept nothing more; what was accepted is still answered when its outcome is known."""
        self.failure = reason

    def accept(self) -> None:
        """Accept records again, after `refuse`."""
        self.failure = None

    def go_on_behind(self, position: Position) -> None:
        """Everything before a position has been applied: another node wrote it."""
        assert self.is_idle and self.failure is not None
        self._gathering = deque([Batch(position)])

    @property
    def applied_position(self) -> Position:
        """The position before which everything is durable and applied."""
        return self._in_flight[0].first if self._in_flight else self._gathering[0].first

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self._gathering[0].entries

    @property
    def stuck_seconds(self) -> float:
        """How long the oldest batch has been on its way to the log; 0 if none is."""
        return monotonic_seconds() - self._in_flight[0].dispatched_at if self._in_flight else 0.0

    @property
    def record_bytes_max(self) -> int:
        """What the log takes as one record; whoever makes records that grow cuts them before."""
        return self._log.record_bytes_max

    def submit(self, record: AnyRecord, pending: Pending[Any] | None = None) -> Position:
        """Send a record to the log; `pending` is settled once it is durable and applied. Returns the position."""
        if self.failure is not None:
            raise self.failure
        encoded = encode_record(record)
        size = len(encoded)
        batch = self._gathering[-1]
        if batch.bytes + size > self._log.batch_bytes_max or len(batch.encoded) >= BATCH_RECORDS_MAX:
            self._check_size(size)
            if batch.encoded:
                batch = Batch(batch.next)
                self._gathering.append(batch)
        position = batch.next
        batch.next = position + span(record)
        batch.bytes += size
        batch.encoded.append(encoded)
        batch.entries.append((record, position, pending))
        self.pending_bytes += size + (batch.next - position) * MESSAGE_COST_BYTES
        self._schedule()
        return position

    def _check_size(self, size: int) -> None:
        """Refuse a record that the log could never store: nothing that is accepted may be too large."""
        limit = self._log.record_bytes_max
        if size > limit:
            raise PayloadTooLarge(
                f"this takes {size} bytes in the log, which stores {limit} at once",
                code="record_too_large",
                hint="send it in several parts; many small messages take more room than their bytes",
            )

    def after_durable(self, outcome: T | MillstreamError) -> Pending[T]:
        """An outcome that is told once everything submitted so far is durable; at once if nothing is in flight."""
        if self.is_idle:
            return Pending.settled(outcome)
        pending = Pending(outcome)
        self._gathering[-1].entries.append((None, NOWHERE, pending))
        self._schedule()
        return pending

    def _schedule(self) -> None:
        if not self._is_scheduled and self._may_dispatch() and self._loop is not None:
            self._is_scheduled = True
            self._seen = 0
            self._loop.call_soon(self._gather)

    def _may_dispatch(self) -> bool:
        """Whether the log takes another batch. Beside others a small one waits for company, or for one of them to be
        stored: without that, batches fall apart into as many as the log takes at a time, and each costs as much as
        a large one."""
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self._log.window:
            return False
        return len(self._gathering) > 1 or len(self._gathering[0].entries) >= self._enough

    def _weigh(self) -> None:
        if self._in_flight:
            size = sum(len(batch.entries) for batch in self._in_flight) / len(self._in_flight)
            self._enough = int(size * COMPANY_SHARE)

    def _gather(self) -> None:
        """Wait for company while it keeps coming: fewer, larger batches cost less than an idle disk.

        A turn of the loop that brings nothing new, or a batch as large as the last one, ends the wait; so a lone
        writer does not wait at all.
        """
        assert self._loop is not None
        size = len(self._gathering[0].entries)
        if self._seen < size < self._last_size:
            self._seen = size
            self._loop.call_soon(self._gather)
        else:
            self._dispatch()

    def _dispatch(self) -> None:
        self._is_scheduled = False
        while len(self._in_flight) < self._log.window and self._gathering[0].entries:
            batch = self._gathering.popleft()
            if not self._gathering:
                self._gathering.append(Batch(batch.next))
            if batch.encoded:
                self._last_size = len(batch.entries)
                self._in_flight.append(batch)
                batch.dispatched_at = monotonic_seconds()
                is_quiet = self._is_quiet()
                may_block = is_quiet and len(batch.entries) == 1 and batch.bytes <= BLOCKING_BYTES_MAX
                log_batch = LogBatch(batch.first, batch.next, encode_batch(batch.encoded))
                self._log.append(log_batch, self._stored, may_block=may_block)
                if self._is_scheduled:
                    break  # it was stored at once, and its answer brought more: that waits for its turn of the loop
            elif self._in_flight:
                self._in_flight[-1].entries.extend(batch.entries)
            else:
                self._finish(batch)
        self._weigh()

    def _measure(self, batch: Batch, seconds: float) -> None:
        self._measures.batch_records.observe(len(batch.encoded))
        self._measures.batch_bytes.observe(batch.bytes)
        self._measures.commit_seconds.observe(seconds)

    def _stored(self, error: MillstreamError | None) -> None:
        if not self._in_flight:
            return  # an answer for a batch that was given up together with one before it
        batch = self._in_flight[0]
        if error is not None:
            self._give_up(error)
            return
        self._in_flight.popleft()
        seconds = monotonic_seconds() - batch.dispatched_at
        self._weigh()
        self.pending_bytes -= batch.bytes + (batch.next - batch.first) * MESSAGE_COST_BYTES
        self._finish(batch)
        if self._gathering[0].entries:
            self._schedule()
        self._measure(batch, seconds)

    def _finish(self, batch: Batch) -> None:
        try:
            self._apply_batch(batch)
        except Exception as error:
            # State and log disagree: a defect. Nothing more may be built on it; a restart replays the log.
            logger.critical("a durable batch could not be applied; no more writes are accepted", exc_info=True)
            self._in_flight.appendleft(batch)
            reason = error.message if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
            failure = OutcomeUnknown(
                f"the server stored something and failed to apply it: {reason}",
                code="apply_failed",
                hint="reads go on; a restart replays the log and says what to do if it fails again",
            )
            self._give_up(failure)
            return
        for _, _, pending in batch.entries:
            if pending is not None:
                try:
                    pending.settle()
                except Exception:
                    # The record is durable whatever becomes of its answer, and the others still wait for theirs.
                    logger.exception("an answer could not be given")

    def _give_up(self, error: MillstreamError) -> None:
        """Refuse a failed batch and all that was checked on top of it."""
        batches = [*self._in_flight, *self._gathering]
        first = batches[0].first
        self._in_flight.clear()
        self._gathering = deque([Batch(first)])
        self.pending_bytes = 0
        if isinstance(error, OutcomeUnknown | NotLeader):
            self.failure = error
        for batch in batches:
            self._undo_batch(batch)
        for batch in batches:
            for _, _, pending in batch.entries:
                if pending is not None:
                    try:
                        pending.settle(error)
                    except Exception:
                        # As above: a consumer that fails must not keep the others from their refusals.
                        logger.exception("a refusal could not be given")
        if self.failure is not None:
            self.on_failure()

    def commit(self, record: AnyRecord) -> Pending[None]:
        """Send a record to the log; settled once it is durable and applied, or refused."""
        pending: Pending[None] = Pending(None)
        try:
            self.submit(record, pending)
        except MillstreamError as error:
            pending.settle(error)
        return pending

    async def drain(self) -> None:
        """Wait until nothing is in flight, or what was has failed."""
        settled = asyncio.Event()
        self.after_durable(None).when_settled(lambda _: settled.set())
        await settled.wait()
