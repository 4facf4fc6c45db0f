"""The asynchronous producer: one task for each append in flight, over one shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType

from millstream.client.async_connections import AsyncPool
from millstream.client.async_driver import run
from millstream.client.conversation import Settings
from millstream.client.errors import BadRequest, ClientError
from millstream.client.producing import Batch, ProducerState, prepare, send_batch
from millstream.tasks import end


class AsyncIdempotentProducer:
    """Appends in the background, each message exactly once and in order, across disconnects and restarts.

    `append` returns at once unless the buffer is full; `flush` waits until everything is durable. An error that
    repeating cannot heal (the stream is closed, a newer epoch has taken over, …) ends the producer: every later call
    raises it.
    """

    def __init__(self, path: str, state: ProducerState, settings: Settings, pool: AsyncPool) -> None:
        self._path = path
        self._state = state
        self._settings = settings
        self._pool = pool
        self._changed = asyncio.Condition()
        self._lanes: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._is_prepared = False

    async def _prepare(self) -> None:
        if not self._is_prepared:
            await run(prepare(self._path, self._state, self._settings), self._pool)
            self._is_prepared = True

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

    async def append(self, message: object) -> None:
        """Append one message: bytes as they are, or on a JSON stream any value that can be encoded."""
        await self.append_many((message,))

    async def append_many(self, messages: Iterable[object]) -> None:
        await self._prepare()
        state = self._state
        encoded = [state.encode(message) for message in messages]
        async with self._changed:
            for data in encoded:
                self._check()
                while state.is_full:
                    await self._changed.wait()
                    self._check()
                if state.add(data, self._now()):
                    self._start_lanes()
                    self._changed.notify()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything appended so far is durable."""
        async with asyncio.timeout(timeout), self._changed:
            self._state.seal()
            await self._finish()

    async def detach(self) -> None:
        """Flush and stop; the stream stays open."""
        await self.close()

    async def close(self, *, close_stream: bool = False, final: object = None) -> None:
        """Flush and stop. `close_stream` closes the stream after the last message; a `final` message is appended
        together with the close."""
        if self._is_stopped:
            return
        try:
            if close_stream or final is not None:
                await self._prepare()
            last = None if final is None else self._state.encode(final)
            async with self._changed:
                self._check()
                if close_stream or last is not None:
                    self._state.seal_and_close(last)
                else:
                    self._state.seal()
                await self._finish()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Stop without waiting; unacknowledged messages may or may not be written."""
        self._is_stopped = True
        lanes, self._lanes = self._lanes, []
        await end(*lanes)

    async def _finish(self) -> None:
        self._check()
        if not self._state.is_idle:
            self._start_lanes()
            self._changed.notify_all()
        await self._changed.wait_for(lambda: self._state.is_idle or self._state.failure is not None)
        self._check()

    def _check(self) -> None:
        if self._state.failure is not None:
            raise self._state.failure
        if self._is_stopped:
            raise BadRequest("the producer is closed")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _start_lanes(self) -> None:
        if not self._lanes:
            self._lanes = [asyncio.create_task(self._work()) for _ in range(self._state.options.in_flight)]

    async def _work(self) -> None:
        state = self._state
        while True:
            batch = await self._next_batch()
            try:
                appended = await run(send_batch(self._path, batch, state, self._settings), self._pool)
            except ClientError as error:
                state.failed(batch, error)
            else:
                state.succeeded(batch, appended)
            async with self._changed:
                self._changed.notify_all()

    async def _next_batch(self) -> Batch:
        async with self._changed:
            while True:
                batch = self._state.take(self._now())
                if batch is not None:
                    return batch
                try:
                    async with asyncio.timeout(self._state.due_in(self._now())):
                        await self._changed.wait()
                except TimeoutError:
                    pass  # the gathered batch is due

    async def __aenter__(self) -> AsyncIdempotentProducer:
        await self._prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self.abort()
