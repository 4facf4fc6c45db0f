"""Fixtures that every kind of test shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server with short timeouts."""
    with ServerProcess(tmp_path / "data", settings=("read.long_poll_timeout=500ms",)) as running:
        yield running
