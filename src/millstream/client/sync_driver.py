"""Carries out the steps of conversations with blocking connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from millstream.client.connections import Connection, Pool
from millstream.client.conversation import Conversation, Emit, Open, Pause, Receive, Send, Step
from millstream.client.errors import ClientError
from millstream.client.live import Position
from millstream.client.messages import Response

T = TypeVar("T")


def run(conversation: Conversation[T], pool: Pool, on_sent: Callable[[], None] | None = None) -> T:
    """A call's conversation to its end; `on_sent` is called whenever a request has been written, answer or not."""
    result: Response | ClientError | None = None
    try:
        while True:
            step = conversation.send(result)
            result = None
            if isinstance(step, Send):
                try:
                    result = pool.exchange(step.origin, step.request, is_live=step.is_live, on_sent=on_sent)
                except ClientError as error:
                    result = error
            elif isinstance(step, Pause):
                if on_sent is not None:
                    on_sent()  # nothing was, and nobody need wait for it
                time.sleep(step.seconds)
            else:
                raise TypeError(f"a call does not {type(step).__name__}")
    except StopIteration as stop:
        returned: T = stop.value
        return returned


class Following(Generic[T]):
    """Everything from a position on, as it happens: iterate over it. Any thread may `close` it, which ends that.

    `offset` is where the next item will start (of a feed, its token), so it says where to resume another time.
    """

    def __init__(self, conversation: Conversation[None], pool: Pool, position: Position) -> None:
        self._conversation = conversation
        self._pool = pool
        self._position = position
        self._connection: Connection | None = None
        self._result: Any = None
        self._stopped = threading.Event()
        self._is_reading = False

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

    def __iter__(self) -> Following[T]:
        return self

    def __next__(self) -> T:
        self._is_reading = True
        try:
            while not self._stopped.is_set():
                step = self._conversation.send(self._result)
                self._result = None
                if isinstance(step, Emit):
                    item: T = step.item
                    return item
                try:
                    self._result = self._carry_out(step)
                except ClientError as error:
                    self._drop()
                    self._result = error
            raise StopIteration
        except BaseException:
            self._drop()
            raise
        finally:
            self._is_reading = False

    def _carry_out(self, step: Step) -> Response | bytes | None:
        if isinstance(step, Receive):
            assert self._connection is not None, "nothing is open"
            return self._connection.receive()
        if isinstance(step, Send):
            return self._pool.exchange(step.origin, step.request, is_live=step.is_live)
        if isinstance(step, Open):
            self._drop()
            connection, parser = self._pool.open(step.origin, step.request, is_live=step.is_live)
            self._connection = connection
            return Response(parser.status, parser.headers) if parser.status == 200 else connection.response()
        if isinstance(step, Pause):
            self._stopped.wait(step.seconds)
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)

    def close(self) -> None:
        self._stopped.set()
        connection = self._connection
        if connection is not None and self._is_reading:
            connection.interrupt()  # the thread that reads from it lets it go
        else:
            self._drop()

    def __del__(self) -> None:
        self._drop()

    def __enter__(self) -> Following[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
