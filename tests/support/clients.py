"""The async client as if it blocked, so that one suite holds for both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Loop:
    """An event loop on a thread of its own, to which the suite hands what it would otherwise await."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def wait(self, awaitable: Any) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Awaited:
    """An async object as if it blocked: coroutines are waited for, async iterators become iterators."""

    def __init__(self, inner: Any, loop: Loop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            arguments = tuple(one._inner if isinstance(one, Awaited) else one for one in arguments)
            options = {key: value._inner if isinstance(value, Awaited) else value for key, value in options.items()}
            return self._wrapped(found(*arguments, **options))

        return call

    def _wrapped(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            result = self._loop.wait(result)
        is_ours = type(result).__module__.startswith("millstream.client.async_")
        return Awaited(result, self._loop) if is_ours or hasattr(result, "__aiter__") else result

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.wait(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Awaited:
        self._loop.wait(self._inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.wait(self._inner.__aexit__(*error))


Connect = Callable[..., Any]
