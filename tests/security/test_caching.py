"""Answers that needed a token are for its holder alone: on every route, under both adapters."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from millstream.server.api.front import Front
from millstream.server.http.caching import private
from support.access import make_token
from support.application import front_over
from support.caching import check_every_route
from support.fake_time import FakeClock, run
from support.serving import Serve
from support.shards import started

ADAPTERS = ("in-process", "asgi")


@pytest.fixture
def app(tmp_path: Path) -> Front:
    """An application of which the routes are asked."""
    apps: list[Front] = []

    async def main() -> None:
        async with started(tmp_path / "routes", FakeClock()) as driver:
            apps.append(front_over(driver.shard))

    run(main(), FakeClock())
    return apps[0]


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A server that asks for tokens, and one for everything."""
    tokens = tmp_path_factory.mktemp("caching") / "tokens.json"
    token = make_token(tokens, "admin:*")
    settings = ("auth.enabled=true", f"auth.tokens_file={tokens}")
    return serve(*settings, "read.long_poll_timeout=200ms", "yjs.long_poll_timeout=200ms").url, token


def test_every_answer_that_needed_a_token_is_private_on_every_route(guarded: tuple[str, str], app: Front) -> None:
    url, token = guarded
    assert check_every_route(url, app, token) > 50


def test_a_refusal_for_want_of_a_token_is_not_kept_by_anybody(guarded: tuple[str, str]) -> None:
    answer = httpx.get(f"{guarded[0]}/team-a/s")
    assert (answer.status_code, answer.headers["cache-control"]) == (401, "private, no-store")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"", b"cache-control: private\r\nvary: authorization\r\n"),
        (b"cache-control: public, no-cache\r\n", b"cache-control: private, no-cache\r\nvary: authorization\r\n"),
        (b"cache-control: public\r\n", b"cache-control: private\r\nvary: authorization\r\n"),
        (
            b"etag: 1\r\ncache-control: no-store\r\nallow: GET\r\n",
            b"etag: 1\r\ncache-control: private, no-store\r\nvary: authorization\r\nallow: GET\r\n",
        ),
        (
            # A content type that somebody chose so that it looks like the field.
            b"content-type: x; cache-control: a\r\ncache-control: public, max-age=60\r\n",
            b"content-type: x; cache-control: a\r\ncache-control: private, max-age=60\r\nvary: authorization\r\n",
        ),
        (
            b"content-type: x; vary: authorization\r\ncache-control: public\r\n",
            b"content-type: x; vary: authorization\r\ncache-control: private\r\nvary: authorization\r\n",
        ),
    ],
)
def test_fields_become_private_whatever_else_they_say(fields: bytes, expected: bytes) -> None:
    assert private(fields) == expected
    assert private(expected) == expected
