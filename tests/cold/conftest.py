"""The stores that the cold tier's tests run on: a folder, and a real S3 server shared by the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cold import ColdStore, FolderStore, S3Prefix
from support.s3 import S3Server, shared_s3_server


@pytest.fixture(scope="session")
def s3_server() -> S3Server:
    return shared_s3_server()


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "cold")


@pytest.fixture(params=["fs", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ColdStore:
    if request.param == "s3":
        return S3Prefix(request.getfixturevalue("s3_server"))
    return FolderStore(tmp_path / "cold")
