"""Fixtures that every kind of test shares, and which tests run beside each other (`make test` runs several at once)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.server import ServerProcess
from support.spark import shared_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HERE = Path(__file__).parent

_FAST_FOLDERS = frozenset(("contract", "unit"))
# Spark and clusters of three nodes want several cores each: one of these tests runs at a time.
_FOLDERS_IN_TURN = frozenset(("cluster", "pipeline", "spark"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        adapter = callspec.params.get("adapter", "") if callspec is not None else ""
        file = item.path.relative_to(_HERE)
        if file.parts[0] in _FAST_FOLDERS or adapter == "in-process":
            item.add_marker(pytest.mark.fast)
        # Tests of a group run one after the other in one process, which is where they share servers.
        is_in_turn = file.parts[0] in _FOLDERS_IN_TURN or "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("in turn" if is_in_turn else f"{file} {adapter}"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server with short timeouts."""
    with ServerProcess(tmp_path / "data", settings=("read.long_poll_timeout=500ms",)) as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """The Spark session that all tests of this process share."""
    return shared_session()
