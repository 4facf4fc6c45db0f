"""Completion of buckets and streams, asked by the shells of a server that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.client import Client
from support.commands import output_of
from support.shells import SHELLS, complete


@pytest.fixture(scope="module")
def filled(url: str) -> str:
    with Client(url) as client:
        for name in ("shelved/run-1", "shelved/run-2", "shelved/other", "shelf-in-default"):
            client.stream(name).create(content_type="text/plain")
        client.bucket("shelved-too").create()
    return url


@pytest.mark.parametrize("shell", SHELLS)
def test_buckets_and_streams_come_from_the_server(shell: str, filled: str, tmp_path: Path) -> None:
    def offered(*words: str) -> list[str]:
        return sorted(complete(shell, tmp_path, "millstream", *words, url=filled))

    assert offered("buckets", "show", "shel") == ["shelved", "shelved-too"]
    assert offered("streams", "tail", "shel") == ["shelf-in-default", "shelved-too/", "shelved/"]
    assert offered("streams", "tail", "shelved/ru") == ["shelved/run-1", "shelved/run-2"]
    assert offered("streams", "tail", "--offs") == ["--offset"]
    assert offered("token", "create", "--bucket", "shelved-") == ["shelved-too"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_server_that_is_named_is_asked(shell: str, filled: str, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    words = ("millstream", "streams", "head", "--url", filled, "shelved/o")
    assert complete(shell, tmp_path, *words, url=nowhere) == ["shelved/other"]
    assert complete(shell, tmp_path, "millstream", "streams", "head", "shelved/o", url=nowhere) == []


def test_a_server_that_does_not_answer_is_no_error() -> None:
    assert output_of("completion", "--streams", "x", url="http://127.0.0.1:9") == ""
