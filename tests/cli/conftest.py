"""One server for all commands; each test has a bucket of its own."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from support.server import ServerProcess


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data_dir = tmp_path_factory.mktemp("cli") / "data"
    with ServerProcess(data_dir, settings=("read.long_poll_timeout=500ms",)) as running:
        yield running.url


@pytest.fixture
def bucket() -> str:
    return f"cli-{uuid4().hex[:12]}"
