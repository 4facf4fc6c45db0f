"""Answers that have to wait for the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from millstream.errors import MillstreamError
from millstream.server.http.error_map import defect_response, error_response
from millstream.server.http.messages import Request, Response

T = TypeVar("T")

# The loop keeps only weak references to tasks.
_running: set[asyncio.Task[None]] = set()


def reply_later(request: Request, work: Coroutine[Any, Any, T], render: Callable[[T], Response]) -> None:
    """Answer with what the work yields, or with its error; give it up if the client goes away."""

    async def run() -> None:
        try:
            response = render(await work)
        except MillstreamError as error:
            response = error_response(error)
        except Exception:  # a defect; unanswered, its client would wait for ever
            response = defect_response(request)
        request.on_disconnect = None
        request.reply(response)

    task = asyncio.get_running_loop().create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    task.add_done_callback(lambda _: work.close())  # one that was cancelled early never began it
    request.on_disconnect = lambda: _cancel(task)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
