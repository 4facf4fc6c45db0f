"""Fixtures that every kind of test shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.server import ServerProcess
from support.spark import shared_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server with short timeouts."""
    with ServerProcess(tmp_path / "data", settings=("read.long_poll_timeout=500ms",)) as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """The Spark session that all tests of this process share."""
    return shared_session()
