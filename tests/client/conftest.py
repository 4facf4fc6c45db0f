"""Both clients behind one face, so that one suite holds for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from millstream.client import AsyncClient, Client
from support.clients import Awaited, Connect, Loop
from support.server import ServerProcess


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
    with ServerProcess(data_dir, settings=("read.long_poll_timeout=500ms", "read.sse_lifetime=500ms")) as running:
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
