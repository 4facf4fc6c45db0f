"""Servers for the data source's tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from support.server import ServerProcess
from support.spark_source import Streams, server_at

_numbers = count()


@pytest.fixture(scope="session")
def source_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that do not stop it; each has a bucket of its own."""
    with server_at(tmp_path_factory.mktemp("source") / "data") as running:
        yield running
        assert "Traceback" not in running.stderr()


@pytest.fixture
def streams(source_server: ServerProcess) -> Iterator[Streams]:
    with Streams(source_server, f"runs-{next(_numbers)}") as opened:
        yield opened


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may stop and start."""
    with server_at(tmp_path / "data") as running:
        yield running
