"""Fixtures that every kind of test shares, and which tests run beside each other (`make test` runs several at once)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.server import ServerProcess
from support.serving import ADAPTERS, Serve, Server, server_behind
from support.spark import shared_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HERE = Path(__file__).parent

_FAST_FOLDERS = frozenset(("contract", "unit"))
# Spark and clusters of three nodes want several cores each: one of these tests runs at a time.
_FOLDERS_IN_TURN = frozenset(("cluster", "pipeline", "spark"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What asks for `serve` runs over every HTTP adapter, or over those that its module names in `ADAPTERS`."""
    if "adapter" in metafunc.fixturenames:
        metafunc.parametrize("adapter", getattr(metafunc.module, "ADAPTERS", ADAPTERS), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _group(items)
    others = [item for item in items if _needs_process(item) and _adapter(item) not in ("", "native")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _adapter(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("adapter", "")) if callspec is not None else ""


def _needs_process(item: pytest.Item) -> bool:
    return "process" in getattr(item, "fixturenames", ())


def _group(items: list[pytest.Item]) -> None:
    for item in items:
        adapter = _adapter(item)
        file = item.path.relative_to(_HERE)
        if file.parts[0] in _FAST_FOLDERS or adapter == "in-process":
            item.add_marker(pytest.mark.fast)
        # Tests of a group run one after the other in one process, which is where they share servers.
        is_in_turn = file.parts[0] in _FOLDERS_IN_TURN or "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("in turn" if is_in_turn else f"{file} {adapter}"))


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def serve(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers behind an adapter. They end with the module, and have logged no stack trace by then."""
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server with short timeouts."""
    with ServerProcess(tmp_path / "data", settings=("read.long_poll_timeout=500ms",)) as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """The Spark session that all tests of this process share."""
    return shared_session()
