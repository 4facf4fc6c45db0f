"""The state of an idempotent producer, without I/O: what is gathered, in flight and acknowledged (§5.2.1).

Messages are gathered into batches; each batch is one append with the next sequence number. Up to `in_flight` batches
are sent at once over separate connections, so they may arrive out of order: the server refuses an early one as a gap,
and it is sent again. After a refusal, and before the first acknowledgement of an epoch, batches are sent one at a time:
the lowest unacknowledged one is always accepted, so there is always progress.

Not thread-safe: the driver must make one call at a time. Times are seconds on the driver's own clock.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Final

from millstream.client import calls
from millstream.client.conversation import Conversation, Settings, converse
from millstream.client.errors import (
    BadRequest,
    ClientError,
    Conflict,
    PayloadTooLarge,
    ProducerFenced,
    SequenceGap,
)
from millstream.client.results import Appended, Producer
from millstream.client.retries import Attempts
from millstream.protocol.content_types import is_json
from millstream.protocol.producers import INTEGER_MAX


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """`concatenate` lets messages of a byte stream share an append, which makes one message of them."""

    id: str
    epoch: int = 0
    linger: float = 0.005
    batch_bytes: int = 256 << 10
    in_flight: int = 4
    buffer_bytes: int = 32 << 20
    concatenate: bool = False
    claim: bool = False
    batch_messages: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_bytes", "in_flight", "buffer_bytes", "batch_messages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequest(f"{name}={value} is too small", hint="1 or more")
        if not self.id:
            raise BadRequest("a producer's id is empty")
        if not 0 <= self.epoch <= INTEGER_MAX:
            raise BadRequest(f"epoch={self.epoch} is not one", hint=f"0 to {INTEGER_MAX}")
        if self.linger < 0:
            raise BadRequest(f"linger={self.linger} is too small", hint="0 or more")


@dataclass(slots=True, order=True)
class Batch:
    seq: int
    body: bytes = field(compare=False)
    count: int = field(compare=False)
    size: int = field(compare=False)
    close: bool = field(default=False, compare=False)
    # Whether everything before it was acknowledged when it was sent; then a gap is not caused by reordering.
    was_next: bool = field(default=False, compare=False)
    # Whether it may have been written although no answer came.
    may_be_written: bool = field(default=False, compare=False)


class ProducerState:
    def __init__(self, options: ProducerOptions, content_type: str | None) -> None:
        self.options = options
        self.epoch = options.epoch
        self._content_type = content_type  # unknown until `prepare` has requested it
        self.accepted = 0
        self.acknowledged = 0
        self.duplicates = 0
        self.acknowledged_seq: int | None = None
        self.buffered_bytes = 0
        self.next_offset: str | None = None
        self.failure: ClientError | None = None
        self._gathering: list[bytes] = []
        self._gathering_bytes = 0
        self._gathering_since = 0.0
        self._waiting: list[Batch] = []  # complete but not in flight, by sequence
        self._flying: dict[int, Batch] = {}
        self._next_seq = 0
        self._window = 1
        self._claims = 0
        self._is_sealed_for_good = False

    @property
    def content_type(self) -> str:
        assert self._content_type is not None, "the producer is not prepared"
        return self._content_type

    # -- what comes in -----------------------------------------------------------------------------------------

    def encode(self, message: object) -> bytes:
        return calls.encode_body(message, self.content_type)

    def add(self, message: bytes, now: float) -> bool:
        """Add one message; returns whether there is something new to send or to wait for."""
        if self._is_sealed_for_good:
            raise BadRequest("the producer is closed")
        if not message:
            raise BadRequest("an empty message cannot be appended")
        is_first = not self._gathering
        if is_first:
            self._gathering_since = now
        self._gathering.append(message)
        self._gathering_bytes += len(message) + 1
        self.buffered_bytes += len(message) + 1
        self.accepted += 1
        if self._is_batch_full:
            self.seal()
            return True
        return is_first

    @property
    def _is_batch_full(self) -> bool:
        options = self.options
        if not (options.concatenate or is_json(self.content_type)):
            return True
        if options.batch_messages is not None and len(self._gathering) >= options.batch_messages:
            return True
        return self._gathering_bytes >= options.batch_bytes

    @property
    def is_full(self) -> bool:
        return self.buffered_bytes >= self.options.buffer_bytes

    def seal(self) -> None:
        """Complete the batch that is being gathered."""
        if self._gathering:
            body = self._body(self._gathering)
            batch = Batch(self._next_seq, body, len(self._gathering), self._gathering_bytes)
            self._gathering, self._gathering_bytes = [], 0
            self._waiting.append(batch)
            self._next_seq += 1

    def seal_and_close(self, final: bytes | None = None) -> None:
        """Close the stream after what is gathered, with a last message if there is one."""
        self.seal()
        if final is None:
            batch = Batch(self._next_seq, b"", 0, 0, close=True)
        else:
            size = len(final) + 1
            batch = Batch(self._next_seq, self._body([final]), 1, size, close=True)
            self.accepted += 1
            self.buffered_bytes += size
        self._waiting.append(batch)
        self._next_seq += 1
        self._is_sealed_for_good = True

    def _body(self, messages: list[bytes]) -> bytes:
        # Always an array, even of one element: a message may itself be an array.
        return b"[" + b",".join(messages) + b"]" if is_json(self.content_type) else b"".join(messages)

    # -- what goes out -----------------------------------------------------------------------------------------

    def take(self, now: float) -> Batch | None:
        """The batch to send now, if there is one."""
        if self.failure is not None or len(self._flying) >= self._window:
            return None
        if not self._waiting:
            if not self._gathering or self.due_in(now) != 0.0:
                return None
            self.seal()
        if self._waiting[0].close and self._flying:
            return None  # after the stream is closed, a repeat of an earlier append would be refused
        batch = self._waiting.pop(0)
        batch.was_next = not self._flying
        self._flying[batch.seq] = batch
        return batch

    def due_in(self, now: float) -> float | None:
        """How long the current batch may still be gathered; None if there is none, or nothing may be sent now."""
        if not self._gathering or len(self._flying) >= self._window:
            return None
        return max(0.0, self._gathering_since + self.options.linger - now)

    @property
    def is_idle(self) -> bool:
        return not (self._gathering or self._waiting or self._flying)

    def claim_of(self, batch: Batch) -> Producer:
        return Producer(self.options.id, self.epoch, batch.seq)

    # -- what came of it ---------------------------------------------------------------------------------------

    def succeeded(self, batch: Batch, appended: Appended) -> None:
        del self._flying[batch.seq]
        self.acknowledged += batch.count
        self.duplicates += batch.count if appended.duplicate else 0
        self.acknowledged_seq = max(batch.seq, self.acknowledged_seq or 0)
        self.buffered_bytes -= batch.size
        if self.next_offset is None or appended.next_offset > self.next_offset:
            self.next_offset = appended.next_offset
        self._window = self.options.in_flight

    def failed(self, batch: Batch, error: ClientError) -> None:
        """Handle a refusal: a gap is sent again in order, and a claimed epoch that was taken meanwhile is replaced by
        the next one. Any other error ends the producer."""
        del self._flying[batch.seq]
        insort(self._waiting, batch)
        self._window = 1
        if isinstance(error, SequenceGap) and not batch.was_next:
            return
        if isinstance(error, ProducerFenced) and self._may_claim(batch):
            self._claims += 1
            self.epoch = error.current_epoch + 1
        elif self.failure is None:
            self.failure = error

    def _may_claim(self, batch: Batch) -> bool:
        """Only before anything is acknowledged: later a higher epoch means that another producer has taken over."""
        is_first = self.options.claim and batch.seq == 0 and not batch.may_be_written
        return is_first and self._claims < CLAIMS_MAX


PROBE_SEQ: Final = INTEGER_MAX
CLAIMS_MAX: Final = 16


def prepare(path: str, state: ProducerState, settings: Settings) -> Conversation[None]:
    """Request what must be known before the first message."""
    if state._content_type is None:
        info = yield from converse(calls.head(path), settings, Attempts(settings.patient_policy, settings.clock))
        state._content_type = info.content_type
    if state.options.claim:
        yield from _claim_epoch(path, state, settings)


def _claim_epoch(path: str, state: ProducerState, settings: Settings) -> Conversation[None]:
    """Take an epoch that this producer has not used: the configured one, or the one after the last.

    The request is an append that the server always refuses, because it leaves a gap in any sequence.
    """
    probe = Producer(state.options.id, state.epoch, PROBE_SEQ)
    body = b"[0]" if is_json(state.content_type) else b"0"
    call = calls.append(path, body, state.content_type, producer=probe)
    try:
        yield from converse(call, settings, Attempts(settings.patient_policy, settings.clock))
    except ProducerFenced as error:
        state.epoch = error.current_epoch + 1
    except SequenceGap as error:
        if error.expected > 0:
            state.epoch += 1
    except PayloadTooLarge:
        raise
    except BadRequest:
        pass  # a new epoch starts at 0: the server has an older epoch, so ours is new


def send_batch(path: str, batch: Batch, state: ProducerState, settings: Settings) -> Conversation[Appended]:
    call = calls.append(
        path,
        batch.body,
        state.content_type if batch.body else None,
        producer=state.claim_of(batch),
        close=batch.close,
    )
    attempts = Attempts(settings.patient_policy, settings.clock)
    try:
        appended = yield from converse(call, settings, attempts)
    finally:
        batch.may_be_written = batch.may_be_written or attempts.may_be_done
    if state.options.claim and appended.duplicate and not batch.may_be_written:
        raise Conflict(
            f"another producer {state.options.id!r} has taken epoch {state.epoch} at the same moment",
            code="producer_epoch_taken",
            hint="give every running producer an id of its own",
        )
    return appended
