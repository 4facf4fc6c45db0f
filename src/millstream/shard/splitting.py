"""Splitting large JSON bodies into messages, on a thread: a body of 8 MiB takes the loop longer than requests may wait.

One thread, because splitting holds the interpreter most of the time: two would take it from the loop twice as often. A
body that waits for it counts as memory in use.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from millstream.errors import InvalidRequest
from millstream.pending import Pending
from millstream.protocol.content_types import JSON, media_type
from millstream.protocol.json_messages import split_messages
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

    @staticmethod
    def needs_thread(command: AppendMessages | CreateStream) -> bool:
        """Whether a command's body is to be split before it can be judged, and is too large for the loop.

        A fork that names no content type has its source's, which may be JSON.
        """
        return (
            len(command.body) >= SPLIT_ON_LOOP_BYTES
            and command.split is None
            and (command.content_type is None or media_type(command.content_type) == JSON)
        )

    def split(self, command: Command) -> Pending[Command]:
        """The command with its body split, or with what is wrong with the body."""
        if not self._shard.budget.has_room(len(command.body)):
            return Pending.settled(self._shard.backpressure())
        return self._shard.background.run(self._split(command))

    async def _split(self, command: Command) -> Command:
        size = len(command.body)
        self._shard.budget.splitting_bytes += size
        try:
            split = await asyncio.get_running_loop().run_in_executor(
                self._thread, _messages, command.body, self._shard.namespace.limits.append_messages_max
            )
        finally:
            self._shard.budget.splitting_bytes -= size
        if isinstance(command, AppendMessages):
            return msgspec.structs.replace(command, split=split)
        return command._replace(split=split)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _messages(body: bytes, messages_max: int) -> Split:
    """The messages, or what is wrong with the body: that is judged with the rest of the command, in its order."""
    try:
        return split_messages(body, messages_max)
    except InvalidRequest as error:
        return error
