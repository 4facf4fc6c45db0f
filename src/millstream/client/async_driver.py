"""Carries out the steps of conversations on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Generic, TypeVar

from millstream.client.async_connections import AsyncConnection, AsyncPool
from millstream.client.conversation import Conversation, Emit, Evaluate, Open, Pause, Receive, Send, Step
from millstream.client.errors import ClientError
from millstream.client.live import Position
from millstream.client.messages import Response

T = TypeVar("T")


async def run(conversation: Conversation[T], pool: AsyncPool) -> T:
    """Run a call's conversation to its end."""
    result: Response | ClientError | str | None = None
    try:
        while True:
            step = conversation.send(result)
            result = None
            if isinstance(step, Send):
                try:
                    result = await pool.exchange(step.origin, step.request, is_live=step.is_live)
                except ClientError as error:
                    result = error
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, Evaluate):
                result = await _value(step)
            else:
                raise TypeError(f"a call does not {type(step).__name__}")
    except StopIteration as stop:
        returned: T = stop.value
        return returned


async def _value(step: Evaluate) -> str:
    found = step.function()
    if not isinstance(found, str):
        found = await found
    if not isinstance(found, str):
        raise TypeError(f"a header or a parameter must be text, and this function gives a {type(found).__name__}")
    return found


class AsyncFollowing(Generic[T]):
    """Everything from a position on, as it happens: iterate over it with `async for`, in one task at a time. Any task
    may `close` it, which ends that; so does `timeout`, so many seconds after the first item was asked for.

    `offset` is where the next item will start (of a feed, its token), so it says where to resume another time. Leaving
    an `async with` block, `close` and cancellation give the connection back.
    """

    def __init__(
        self, conversation: Conversation[None], pool: AsyncPool, position: Position, timeout: float | None = None
    ) -> None:
        self._conversation = conversation
        self._pool = pool
        self._position = position
        self._connection: AsyncConnection | None = None
        self._result: Any = None
        self._stopped = asyncio.Event()
        self._timeout = timeout
        self._deadline: float | None = None

    @property
    def offset(self) -> str:
        return self._position.offset

    @property
    def cursor(self) -> str | None:
        return self._position.cursor

    @property
    def up_to_date(self) -> bool:
        return self._position.up_to_date

    @property
    def closed(self) -> bool:
        """Whether the stream has been closed and read to its end."""
        return self._position.closed

    def __aiter__(self) -> AsyncFollowing[T]:
        return self

    async def __anext__(self) -> T:
        if self._timeout is not None and self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(self._deadline) as until:
                return await self._next()
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and until.expired():
                raise StopAsyncIteration from None
            raise

    async def _next(self) -> T:
        while not self._stopped.is_set():
            try:
                step = self._conversation.send(self._result)
            except StopIteration:
                break
            self._result = None
            if isinstance(step, Emit):
                item: T = step.item
                return item
            try:
                self._result = await self._carry_out(step)
            except ClientError as error:
                self._drop()
                self._result = error
        self.close()
        raise StopAsyncIteration

    async def _carry_out(self, step: Step) -> Response | bytes | str | None:
        if isinstance(step, Receive):
            assert self._connection is not None, "nothing is open"
            return await self._connection.receive()
        if isinstance(step, Send | Open):
            self._drop()
            connection, parser = await self._pool.open(
                step.origin, step.request, is_live=step.is_live, on_connected=self._connected
            )
            if isinstance(step, Open) and parser.status == 200:
                return Response(parser.status, parser.headers)
            response = await connection.response()
            self._drop()
            return response
        if isinstance(step, Pause):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), step.seconds)
        if isinstance(step, Evaluate):
            return await _value(step)
        return None

    def _connected(self, connection: AsyncConnection) -> None:
        self._connection = connection
        if self._stopped.is_set():
            connection.close()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)

    def close(self) -> None:
        self._stopped.set()
        self._drop()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            self._drop()

    async def __aenter__(self) -> AsyncFollowing[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
