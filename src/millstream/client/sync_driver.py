"""Carries out the steps of conversations with blocking connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from millstream.client.connections import Connection, Pool
from millstream.client.conversation import Conversation, Emit, Evaluate, Open, Pause, Receive, Send, Step
from millstream.client.errors import ClientError
from millstream.client.live import Position
from millstream.client.messages import Response

T = TypeVar("T")


def run(conversation: Conversation[T], pool: Pool, on_sent: Callable[[], None] | None = None) -> T:
    """Run a call's conversation to its end; `on_sent` is called whenever a request has been written, answered or
    not."""
    result: Response | ClientError | str | None = None
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
                    on_sent()  # nothing was sent, so nobody need wait for it
                time.sleep(step.seconds)
            elif isinstance(step, Evaluate):
                result = _value(step)
            else:
                raise TypeError(f"a call does not {type(step).__name__}")
    except StopIteration as stop:
        returned: T = stop.value
        return returned


def _value(step: Evaluate) -> str:
    found = step.function()
    if not isinstance(found, str):
        raise TypeError(f"a header or a parameter must be text, and this function gives a {type(found).__name__}")
    return found


class Following(Generic[T]):
    """Everything from a position on, as it happens: iterate over it. Any thread may `close` it, which ends that; so
    does `timeout`, so many seconds after the first item was asked for.

    `offset` is where the next item will start (of a feed, its token), so it says where to resume another time.
    """

    def __init__(
        self, conversation: Conversation[None], pool: Pool, position: Position, timeout: float | None = None
    ) -> None:
        self._conversation = conversation
        self._pool = pool
        self._position = position
        self._connection: Connection | None = None
        self._result: Any = None
        self._stopped = threading.Event()
        self._guard = threading.Lock()  # guards which thread releases the connection
        self._is_reading = False
        self._timeout = timeout
        self._timer: threading.Timer | None = None

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

    def __iter__(self) -> Following[T]:
        return self

    def __next__(self) -> T:
        self._begin()
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
            self._end()
            raise
        finally:
            with self._guard:
                self._is_reading = False

    def _begin(self) -> None:
        with self._guard:
            self._is_reading = True
        if self._timeout is not None and self._timer is None:
            self._timer = threading.Timer(self._timeout, self.close)
            self._timer.daemon = True
            self._timer.start()

    def _carry_out(self, step: Step) -> Response | bytes | str | None:
        if isinstance(step, Receive):
            assert self._connection is not None, "nothing is open"
            return self._connection.receive()
        if isinstance(step, Send | Open):
            self._drop()
            connection, parser = self._pool.open(
                step.origin, step.request, is_live=step.is_live, on_connected=self._connected
            )
            if isinstance(step, Open) and parser.status == 200:
                return Response(parser.status, parser.headers)
            response = connection.response()
            self._drop()
            return response
        if isinstance(step, Pause):
            self._stopped.wait(step.seconds)
        if isinstance(step, Evaluate):
            return _value(step)
        return None

    def _connected(self, connection: Connection) -> None:
        with self._guard:
            self._connection = connection
            if self._stopped.is_set():
                connection.interrupt()

    def _drop(self) -> None:
        with self._guard:
            connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)

    def _end(self) -> None:
        self._drop()
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        self._stopped.set()
        with self._guard:
            connection = self._connection
            if connection is not None and self._is_reading:
                connection.interrupt()  # the reading thread releases it
                return
        self._end()

    def __del__(self) -> None:
        self._end()

    def __enter__(self) -> Following[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
