"""Following the replicated log: the committed batches of any writer, in order, for nodes that do not write."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from nats.aio.msg import Msg

from millstream.log.broker_link import BrokerLink, Stored
from millstream.log.chain import StoredBatch, decode_batch
from millstream.log.jetstream_log import JetStreamLog

IDLE_FETCH_SECONDS: Final = 0.5
TAIL_BYTES_MAX: Final = 32 << 20


class LogTail:
    """The batches committed to a log, in order: pushed by the broker, and fetched where a push was lost."""

    def __init__(self, link: BrokerLink, log: JetStreamLog) -> None:
        self._link = link
        self._log = log
        self._subscription: Any = None
        self._pushed: deque[StoredBatch] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._is_woken = False

    async def next(self, after: int, wait_seconds: float = IDLE_FETCH_SECONDS) -> list[StoredBatch]:
        """The batches after a sequence, as many as are available; empty if none arrives within the time."""
        if self._subscription is None:
            self._subscription = await self._link.subscribe(self._log.names.tail_subject, self._push)
            return await self._log.fetch(after + 1)
        found = self._take(after)
        if not found:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), wait_seconds)
            except TimeoutError:
                return await self._log.fetch(after + 1)
            if self._is_woken:
                self._is_woken = False
                return []
            found = self._take(after)
        return found or await self._log.fetch(after + 1)

    def wake(self) -> None:
        """Make `next` return, empty if there is nothing. On the link's loop."""
        self._is_woken = True
        self._arrived.set()

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None
        self._pushed.clear()
        self._bytes = 0

    async def _push(self, message: Msg) -> None:
        headers = message.headers or {}
        self._pushed.append(decode_batch(Stored(int(headers["Nats-Sequence"]), headers, message.data)))
        self._bytes += len(message.data)
        if self._bytes > TAIL_BYTES_MAX:
            # The consumer is behind. These batches are in the log and will be fetched from there.
            self._pushed.clear()
            self._bytes = 0
        self._arrived.set()

    def _take(self, after: int) -> list[StoredBatch]:
        found: list[StoredBatch] = []
        while self._pushed and self._pushed[0].sequence <= after + 1:
            stored = self._pushed.popleft()
            self._bytes -= len(stored.batch.payload)
            if stored.sequence == after + 1:
                found.append(stored)
                after += 1
        return found
