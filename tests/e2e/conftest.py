"""Servers of the suites that hold over every HTTP adapter: in this process, in one of its own, and below ASGI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.server import ServerProcess
from support.serving import ADAPTERS, Serve, Server, server_behind


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def serve(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers that end with the module, and have logged no stack trace by then."""
    with ExitStack() as stack:

        def start(*settings: str) -> Server:
            server = server_behind(adapter, tmp_path_factory.mktemp("served") / "data", *settings)
            started.append(stack.enter_context(server))
            return server

        started: list[Server] = []
        yield start
        for server in started:
            assert "Traceback" not in server.stderr()


@pytest.fixture
def process(running: Server) -> ServerProcess:
    """The module's server, to be killed and started again: what asks for it runs on a process of its own only."""
    assert isinstance(running, ServerProcess)
    return running


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        needs_process = "process" in getattr(item, "fixturenames", ())
        (others if needs_process and parameters.get("adapter", "native") != "native" else chosen).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
