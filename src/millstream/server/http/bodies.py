"""Bodies of answers, produced at the pace at which the client reads; and bodies of requests, parsed as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from millstream.errors import InvalidRequest
from millstream.server.http.messages import Request, Sink

logger = logging.getLogger("millstream.server")


class GeneratedBody:
    """Sends what an async iterator yields; asks for the next piece only when the client has read the last one."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._may_write = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, sink: Sink) -> None:
        self._may_write.set()
        self._task = asyncio.get_running_loop().create_task(self._run(sink))

    async def _run(self, sink: Sink) -> None:
        try:
            async for piece in self._pieces:
                if not sink.write(piece):
                    self._may_write.clear()
                await self._may_write.wait()
        except asyncio.CancelledError:
            raise
        except Exception:  # part of the answer is sent already, so only a broken connection can tell the client
            logger.exception("a response could not be completed")
            sink.abort()
        else:
            sink.finish()

    def resume(self) -> None:
        self._may_write.set()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body; an empty body is an empty object."""
    try:
        body = msgspec.json.decode(request.body) if request.body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return body
