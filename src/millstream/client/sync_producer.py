"""The blocking producer: one thread for each append in flight, over one shared state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import TracebackType

from millstream.client.connections import Pool
from millstream.client.conversation import Settings
from millstream.client.errors import BadRequest, ClientError
from millstream.client.producing import Batch, ProducerState, prepare, send_batch
from millstream.client.sync_driver import run


class _Turn:
    """A lane's right to write next. Passing it on a second time has no effect."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._is_held = False

    def take(self) -> None:
        self._lock.acquire()
        self._is_held = True

    def pass_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self._lock.release()


class IdempotentProducer:
    """Appends in the background, each message exactly once and in order, across disconnects and restarts.

    `append` returns at once unless the buffer is full; `flush` waits until everything is durable. An error that
    repeating cannot heal (the stream is closed, a newer epoch has taken over, …) ends the producer: every later call
    raises it.
    """

    def __init__(self, path: str, state: ProducerState, settings: Settings, pool: Pool) -> None:
        self._path = path
        self._state = state
        self._settings = settings
        self._pool = pool
        self._changed = threading.Condition(threading.Lock())
        self._turn = threading.Lock()
        self._lanes: list[threading.Thread] = []
        self._is_stopped = False
        run(prepare(path, state, settings), pool)

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def accepted(self) -> int:
        """How many messages have been passed to `append`."""
        return self._state.accepted

    @property
    def acknowledged(self) -> int:
        """How many of them are durable."""
        return self._state.acknowledged

    @property
    def duplicates(self) -> int:
        """How many of these the server already had, from an earlier run or from an attempt whose answer was lost."""
        return self._state.duplicates

    @property
    def acknowledged_seq(self) -> int | None:
        """The highest sequence number of a batch that is durable."""
        return self._state.acknowledged_seq

    @property
    def next_offset(self) -> str | None:
        """Where the stream ended after the last acknowledged batch."""
        return self._state.next_offset

    def append(self, message: object) -> None:
        """Append one message: bytes as they are, or on a JSON stream any value that can be encoded."""
        data = self._state.encode(message)
        with self._changed:
            self._add(data)

    def append_many(self, messages: Iterable[object]) -> None:
        encode = self._state.encode
        encoded = [encode(message) for message in messages]
        with self._changed:
            for data in encoded:
                self._add(data)

    def _add(self, data: bytes) -> None:
        state = self._state
        self._check()
        while state.is_full:
            self._changed.wait()
            self._check()
        if state.add(data, time.monotonic()):
            self._start_lanes()
            self._changed.notify()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything appended so far is durable."""
        with self._changed:
            self._state.seal()
            self._finish(timeout)

    def detach(self) -> None:
        """Flush and stop; the stream stays open."""
        self.close()

    def close(self, *, close_stream: bool = False, final: object = None) -> None:
        """Flush and stop. `close_stream` closes the stream after the last message; a `final` message is appended
        together with the close."""
        last = None if final is None else self._state.encode(final)
        with self._changed:
            if self._is_stopped:
                return
            try:
                self._check()
                if close_stream or last is not None:
                    self._state.seal_and_close(last)
                else:
                    self._state.seal()
                self._finish(None)
            finally:
                self._stop()

    def abort(self) -> None:
        """Stop without waiting; unacknowledged messages may or may not be written."""
        with self._changed:
            self._stop()

    def _finish(self, timeout: float | None) -> None:
        self._check()
        if not self._state.is_idle:
            self._start_lanes()
            self._changed.notify_all()
        is_over = self._changed.wait_for(lambda: self._state.is_idle or self._state.failure is not None, timeout)
        self._check()
        if not is_over:
            raise TimeoutError(f"not everything was acknowledged within {timeout:g} s")

    def _check(self) -> None:
        if self._state.failure is not None:
            raise self._state.failure
        if self._is_stopped:
            raise BadRequest("the producer is closed")

    def _start_lanes(self) -> None:
        if not self._lanes:
            for number in range(self._state.options.in_flight):
                lane = threading.Thread(target=self._work, name=f"millstream-producer-{number}", daemon=True)
                self._lanes.append(lane)
                lane.start()

    def _stop(self) -> None:
        self._is_stopped = True
        self._changed.notify_all()

    def _work(self) -> None:
        """One lane. Lanes write their batches one after the other, so that batches arrive in order; they wait for the
        answers in parallel."""
        state, turn = self._state, _Turn(self._turn)
        while True:
            turn.take()
            batch = self._next_batch()
            if batch is None:
                turn.pass_on()
                return
            try:
                appended = run(send_batch(self._path, batch, state, self._settings), self._pool, turn.pass_on)
            except ClientError as error:
                with self._changed:
                    state.failed(batch, error)
                    self._changed.notify_all()
            else:
                with self._changed:
                    state.succeeded(batch, appended)
                    self._changed.notify_all()
            finally:
                turn.pass_on()

    def _next_batch(self) -> Batch | None:
        with self._changed:
            while not self._is_stopped:
                now = time.monotonic()
                batch = self._state.take(now)
                if batch is not None:
                    return batch
                self._changed.wait(self._state.due_in(now))
        return None

    def __enter__(self) -> IdempotentProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()
