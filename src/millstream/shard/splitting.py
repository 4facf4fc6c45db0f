"""Splitting large JSON bodies into messages, on a thread: a body of 8 MiB takes the loop longer than requests may wait.

One thread, because splitting holds the interpreter most of the time: two would take it from the loop twice as often. A
body that waits for it counts as memory in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from millstream.errors import InvalidRequest, MillstreamError
from millstream.protocol.content_types import JSON, media_type
from millstream.protocol.json_messages import split_messages
from millstream.shard.committer import Reply
from millstream.streams.commands import AppendMessages, CreateStream, Split

if TYPE_CHECKING:
    from millstream.shard.shard import Shard

# Smaller bodies are split where they are: at most 32,768 messages of two bytes each, a few milliseconds.
SPLIT_ON_LOOP_BYTES: Final = 64 << 10

Command = TypeVar("Command", AppendMessages, CreateStream)


class Splitting:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._thread = ThreadPoolExecutor(1, "millstream-split")

    def takes(self, command: Command, then: Callable[[Command, Reply], None], reply: Reply) -> bool:
        """Whether a command must wait until its body is split; then it is passed on with its messages."""
        if command.split is not None or not _may_be_json(command):
            return False
        if not self._shard.budget.has_room(len(command.body)):
            reply(self._shard.backpressure())
            return True

        def failed(error: MillstreamError | None) -> None:
            if error is not None:
                reply(error)

        self._shard.errand(self._split(command, then, reply), failed)
        return True

    async def _split(self, command: Command, then: Callable[[Command, Reply], None], reply: Reply) -> None:
        size = len(command.body)
        self._shard.budget.splitting_bytes += size
        try:
            split = await asyncio.get_running_loop().run_in_executor(
                self._thread, _messages, command.body, self._shard.namespace.limits.append_messages_max
            )
        finally:
            self._shard.budget.splitting_bytes -= size
        then(_with(command, split), reply)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _may_be_json(command: AppendMessages | CreateStream) -> bool:
    """A fork that names no content type has its source's, which may be anything."""
    return command.content_type is None or media_type(command.content_type) == JSON


def _messages(body: bytes, messages_max: int) -> Split:
    """The messages, or what is wrong with the body: that is judged with the rest of the command, in its order."""
    try:
        return split_messages(body, messages_max)
    except InvalidRequest as error:
        return error


def _with(command: Command, split: Split) -> Command:
    if isinstance(command, AppendMessages):
        return msgspec.structs.replace(command, split=split)
    return command._replace(split=split)
