"""Both clients behind one face, so that one suite holds for both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from millstream.client import AsyncClient, Client
from support.server import ServerProcess


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


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of either kind, which are closed in the end."""
    clients: list[Any] = []
    loop = Loop() if request.param == "async" else None

    def make(url: str, **options: Any) -> Any:
        client = Client(url, **options) if loop is None else Awaited(AsyncClient(url, **options), loop)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    if loop is not None:
        loop.stop()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it is; each has streams of its own."""
    data_dir = tmp_path_factory.mktemp("client") / "data"
    with ServerProcess(data_dir, settings=("read.long_poll_timeout=500ms", "read.sse_lifetime=1s")) as running:
        yield running


@pytest.fixture
def client(connect: Connect, shared_server: ServerProcess) -> Any:
    return connect(shared_server.url)


@pytest.fixture
def bucket_name() -> str:
    """A bucket that no other test has."""
    return f"bucket-{uuid4().hex[:12]}"


@pytest.fixture
def bucket(client: Any, bucket_name: str) -> Any:
    created = client.bucket(bucket_name)
    created.create()
    return created
