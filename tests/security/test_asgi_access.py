"""The same gate under the ASGI adapter, in a real uvicorn."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from support.access import Issuer, bearer, make_token
from support.raw_http import RawConnection
from support.serving import Serve

ADAPTERS = ("asgi",)
TEXT = {"content-type": "text/plain"}
ISSUER = Issuer()
PATH = "/v1/stream/team-a/s"


@pytest.fixture(scope="module")
def mounted(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """A server that asks for tokens, one for a bucket, and where its data is."""
    directory = tmp_path_factory.mktemp("asgi-access")
    tokens, keys = directory / "tokens.json", directory / "keys.json"
    token = make_token(tokens, "admin:team-a")
    keys.write_text(json.dumps(ISSUER.jwks()))
    files = (f"auth.tokens_file={tokens}", f"auth.jwks_file={keys}")
    server = serve("auth.enabled=true", *files, "auth.jwt_leeway=0s")
    assert httpx.put(server.url + PATH, headers={**TEXT, **bearer(token)}, content=b"1").status_code == 201
    return server.url, token, server.data_dir


def test_a_token_is_asked_for_and_judged(mounted: tuple[str, str, Path]) -> None:
    url, token, _ = mounted
    missing = httpx.get(url + PATH)
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, 'Bearer realm="millstream"')
    assert httpx.get(url + PATH, headers=bearer(token)).content == b"1"
    assert httpx.get(f"{url}/v1/stream/team-b/s", headers=bearer(token)).status_code == 403
    assert httpx.get(url + "/healthz").headers["x-request-id"]


def test_sse_ends_when_its_token_expires(mounted: tuple[str, str, Path]) -> None:
    url, _, _ = mounted
    token = ISSUER.sign({"sub": "ada", "exp": time.time() + 2, "scope": "read:team-a"})
    query = {"offset": "-1", "live": "sse"}
    started = time.monotonic()
    with httpx.stream("GET", url + PATH, params=query, headers=bearer(token), timeout=20) as follower:
        assert follower.status_code == 200
        assert "data:1" in "\n".join(follower.iter_lines())  # to the end of the body
    assert time.monotonic() - started < 10


def test_a_body_nobody_allowed_is_not_taken_in(mounted: tuple[str, str, Path]) -> None:
    url, _, data_dir = mounted
    snapshot = f"{url}/team-a/s/snapshot/0000000000000000_0000000000000001"
    assert httpx.put(snapshot, content=bytes(4 << 20)).status_code == 401
    assert not any((data_dir / "uploads").iterdir())


@pytest.mark.parametrize(("shows_token", "status"), [(True, 413), (False, 401)])
def test_who_is_refused_while_still_sending_gets_the_answer(
    mounted: tuple[str, str, Path], shows_token: bool, status: int
) -> None:
    url, token, _ = mounted
    body = bytes(10 << 20)
    fields = [("connection", "close"), ("content-type", "text/plain"), ("content-length", str(len(body)))]
    fields += list(bearer(token).items()) if shows_token else []
    for _ in range(5):
        with RawConnection(url, seconds=20) as sender:
            sender.send(sender.request("POST", PATH, fields) + body)  # all of it, before anything is read
            assert sender.answer().status == status


def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_without_it(mounted: tuple[str, str, Path]) -> None:
    url, _, _ = mounted
    with RawConnection(url, seconds=20) as sender:
        fields = [("expect", "100-continue"), ("content-type", "text/plain"), ("content-length", "1000000")]
        sender.send(sender.request("POST", PATH, fields))
        assert sender.answer().status == 401
