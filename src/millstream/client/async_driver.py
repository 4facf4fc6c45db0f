"""Carries out the steps of conversations on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Generic, TypeVar

from millstream.client.async_connections import AsyncConnection, AsyncPool
from millstream.client.conversation import Conversation, Emit, Open, Pause, Receive, Send, Step
from millstream.client.errors import ClientError
from millstream.client.live import Position
from millstream.client.messages import Response

T = TypeVar("T")


async def run(conversation: Conversation[T], pool: AsyncPool) -> T:
    """A call's conversation to its end."""
    result: Response | ClientError | None = None
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
            else:
                raise TypeError(f"a call does not {type(step).__name__}")
    except StopIteration as stop:
        returned: T = stop.value
        return returned


class AsyncFollowing(Generic[T]):
    """Everything from a position on, as it happens: iterate over it with `async for`, in one task at a time.

    `offset` is where the next item will start (of a feed, its token), so it says where to resume another time. Leaving
    an `async with` block, `close` and cancellation give the connection back.
    """

    def __init__(self, conversation: Conversation[None], pool: AsyncPool, position: Position) -> None:
        self._conversation = conversation
        self._pool = pool
        self._position = position
        self._connection: AsyncConnection | None = None
        self._result: Any = None

    @property
    def offset(self) -> str:
        return self._position.offset

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
        try:
            while True:
                step = self._conversation.send(self._result)
                self._result = None
                if isinstance(step, Emit):
                    item: T = step.item
                    return item
                try:
                    self._result = await self._carry_out(step)
                except ClientError as error:
                    self._drop()
                    self._result = error
        except StopIteration:
            self._drop()
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise

    async def _carry_out(self, step: Step) -> Response | bytes | None:
        if isinstance(step, Receive):
            assert self._connection is not None, "nothing is open"
            return await self._connection.receive()
        if isinstance(step, Send):
            return await self._pool.exchange(step.origin, step.request, is_live=step.is_live)
        if isinstance(step, Open):
            self._drop()
            connection, parser = await self._pool.open(step.origin, step.request, is_live=step.is_live)
            self._connection = connection
            return Response(parser.status, parser.headers) if parser.status == 200 else await connection.response()
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)

    def close(self) -> None:
        self._conversation.close()
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
