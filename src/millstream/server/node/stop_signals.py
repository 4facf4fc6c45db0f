"""Detects that the process is asked to stop, when another program's ASGI server runs it.

An ASGI server tells its applications to shut down only when every connection has ended, and a live read does not end by
itself for a minute. So this module also handles the signals that stop the server, and then calls the earlier handlers.
If there was no handler, or outside the main thread, nothing is changed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

Handler = Callable[[int, FrameType | None], object]

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    def __init__(self, on_stop: Callable[[], None]) -> None:
        """`on_stop` is called on the running loop."""
        self._on_stop = on_stop
        self._loop = asyncio.get_running_loop()
        self._replaced: dict[int, tuple[Handler, Handler]] = {}

    def listen(self) -> None:
        for number in NUMBERS:
            before = signal.getsignal(number)
            if not callable(before):
                continue  # the signal's default action ends the process, or it is ignored
            handler = self._beside(before)
            try:
                signal.signal(number, handler)
            except ValueError:
                return  # only the main thread may set handlers
            self._replaced[number] = (handler, before)

    def _beside(self, before: Handler) -> Handler:
        def handle(number: int, frame: FrameType | None) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_stop)
            before(number, frame)

        return handle

    def close(self) -> None:
        for number, (handler, before) in self._replaced.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)
        self._replaced.clear()
