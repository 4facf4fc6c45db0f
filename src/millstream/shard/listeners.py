"""Live readers: who listens to which stream or bucket, and waking them when something has changed there.

A stream's followers, if they are few, are told at once. Otherwise writers have their answers first, and readers are
woken some at a time, so that thousands of them hold nobody up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from millstream.clock import monotonic_seconds
from millstream.measures import ShardMeasures
from millstream.streams.state import Stream
from millstream.units import Incarnation

logger = logging.getLogger("millstream.shard")

WAKE_SLICE: Final = 64
# Live readers of one stream that hear of an append before its writer does; more of them hear after it.
WAKE_FIRST_MAX: Final = 8

Topic = int | tuple[str, str]
"""What can be listened to: a stream by its incarnation, or a bucket by `bucket_topic`."""


def bucket_topic(bucket: str) -> Topic:
    return ("bucket", bucket)


class Listener(Protocol):
    def wake(self) -> None:
        """The stream has new messages, was closed or deleted; or something happened in the bucket."""
        ...


class Listeners:
    def __init__(self, measures: ShardMeasures) -> None:
        self._measures = measures
        self._listeners: dict[Topic, set[Listener]] = {}
        # Streams that have changed and live readers that are still to hear of it.
        self._changed: dict[Incarnation, Stream] = {}
        self._woken: deque[tuple[Topic, Listener, float]] = deque()
        self._changed_at = 0.0
        self._is_waking = False
        self.on_committed: Callable[[list[Stream]], None] = lambda streams: None

    def __contains__(self, topic: object) -> bool:
        return topic in self._listeners

    def listen(self, topic: Topic, listener: Listener) -> None:
        self._listeners.setdefault(topic, set()).add(listener)

    def unlisten(self, topic: Topic, listener: Listener) -> None:
        listeners = self._listeners.get(topic)
        if listeners is not None:
            listeners.discard(listener)
            if not listeners:
                del self._listeners[topic]

    def count(self, topic: Topic) -> int:
        return len(self._listeners.get(topic, ()))

    def changed(self, streams: dict[Incarnation, Stream]) -> None:
        """Something happened to these streams: those who listen will hear of it soon."""
        if len(streams) == 1 and self._listeners:
            self._wake_few(next(iter(streams)))
        if not self._changed:
            self._changed_at = monotonic_seconds()
        self._changed |= streams
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def tell_committed(self) -> None:
        """Tell `on_committed` now what it would hear soon: a writer that has its answer may ask before that."""
        if self._changed:
            self.on_committed(list(self._changed.values()))

    def _wake_few(self, incarnation: Incarnation) -> None:
        """Followers of one busy stream, if they are few, need not wait for the writer's answer.

        They are woken again with everybody else, and then have nothing left to send.
        """
        listeners = self._listeners.get(incarnation, ())
        if len(listeners) <= WAKE_FIRST_MAX:
            for listener in tuple(listeners):
                self._wake_one(listener)

    @staticmethod
    def _wake_one(listener: Listener) -> None:
        try:
            listener.wake()
        except Exception:
            # One reader's failure is not another's, nor the writer's.
            logger.exception("a live reader failed")

    def _wake(self) -> None:
        """Tell live readers what has changed: after the writers have their answers, and not all readers at once."""
        changed, self._changed = self._changed, {}
        if self._listeners:
            for topic in [*changed, *{bucket_topic(stream.key.bucket) for stream in changed.values()}]:
                self._woken.extend((topic, listener, self._changed_at) for listener in self._listeners.get(topic, ()))
        self.on_committed(list(changed.values()))
        self._wake_slice()

    def _wake_slice(self) -> None:
        for _ in range(min(WAKE_SLICE, len(self._woken))):
            topic, listener, since = self._woken.popleft()
            if listener in self._listeners.get(topic, ()):  # otherwise it has had its answer meanwhile
                self._wake_one(listener)
                self._measures.wake_seconds.observe(monotonic_seconds() - since)
        if self._woken or self._changed:
            asyncio.get_running_loop().call_soon(self._wake if self._changed else self._wake_slice)
        else:
            self._is_waking = False
