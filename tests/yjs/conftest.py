"""A server whose documents are compacted early, and real clients; shared by the tests of a module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from support.server import ServerProcess
from support.yjs import DocumentClient, NodeClients

THRESHOLD_BYTES = 4096

_paths = itertools.count(1)


@pytest.fixture(scope="module")
def yjs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = (f"yjs.compaction_threshold={THRESHOLD_BYTES}", "yjs.long_poll_timeout=1s")
    with ServerProcess(tmp_path_factory.mktemp("yjs") / "data", settings=settings) as running:
        yield running


@pytest.fixture
def base_url(yjs_server: ServerProcess) -> str:
    return f"{yjs_server.url}/v1/yjs/notes"


@pytest.fixture
def new_path() -> Callable[[], str]:
    """Names of documents that no other test uses."""
    return lambda: f"document-{next(_paths)}"


@pytest.fixture
def document(base_url: str, new_path: Callable[[], str]) -> Iterator[DocumentClient]:
    client = DocumentClient(base_url, new_path())
    with client.http:
        yield client


@pytest.fixture(scope="module")
def node() -> Iterator[NodeClients]:
    clients = NodeClients()
    yield clients
    clients.stop()
