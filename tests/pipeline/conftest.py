"""Servers whose history becomes cold within a moment, and the one Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.spark.options import Connection
from support.cold import FolderStore, server_on
from support.pipeline import FLUSHING, Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A running server on a folder, empty."""
    store = FolderStore(tmp_path / "cold")
    with (
        server_on(tmp_path / "data", store, *FLUSHING) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield Scene(server, client, store, Connection(server.url, None, 30.0))
