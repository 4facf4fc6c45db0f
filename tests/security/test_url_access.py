"""Tokens in URLs, over HTTP: they read one stream for a while, and are good for nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from millstream.access.token_file import read_tokens, revoke_token
from support.access import bearer, make_token
from support.commands import millstream
from support.raw_http import RawConnection
from support.server import ServerProcess

TEXT = {"content-type": "text/plain"}
SETTINGS = ("auth.enabled=true", "auth.reload_interval=100ms", "logging.access=true", "logging.level=debug")


class Guarded:
    def __init__(self, server: ServerProcess, tokens: Path) -> None:
        self.server = server
        self.tokens = tokens
        self.admin = make_token(tokens, "admin:*", name="root")
        self.reader = make_token(tokens, "read:team-a/chat", name="reader")
        self.brief = make_token(tokens, "read:team-a", seconds=3600)
        self.made: list[str] = []

    def client(self, token: str | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers=bearer(token) if token else {}, timeout=20)

    def ask(self, token: str | None, **wish: object) -> httpx.Response:
        with self.client(token) as client:
            return client.post("/v1/tokens", json=wish)

    def url_token(self, stream: str = "/team-a/chat", token: str | None = None, **wish: object) -> str:
        answer = self.ask(token or self.reader, stream=stream, **wish)
        assert answer.status_code == 201, answer.text
        self.made.append(answer.json()["token"])
        return self.made[-1]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    data_dir = tmp_path_factory.mktemp("urls") / "data"
    tokens = data_dir / "tokens.json"
    make_token(tokens, "read:nothing")
    with ServerProcess(data_dir, settings=SETTINGS) as server:
        one = Guarded(server, tokens)
        deadline = time.monotonic() + 20
        with one.client(one.admin) as client:
            while client.put("/team-a").status_code == 401:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for name in ("chat", "chat2", "other"):
                assert client.put(f"/team-a/{name}", headers=TEXT, content=b"hello").status_code == 201
        yield one
        assert "Traceback" not in server.stderr()


def test_a_token_in_the_url_reads_its_stream_and_nobody_keeps_the_answer(guarded: Guarded) -> None:
    token = guarded.url_token()
    with guarded.client() as client:
        for target in ("/team-a/chat", "/v1/stream/team-a/chat", "/v1/stream/team-a%2Fchat"):
            for query in ("offset=-1&", "offset=-1&max_bytes=1&", "offset=-1&live=long-poll&", "%74oken=x&"):
                answer = client.get(f"{target}?{query}token={token}")
                if query.startswith("%74"):
                    assert answer.status_code in (400, 401)  # two of them
                else:
                    assert (answer.status_code, answer.content) == (200, b"hello")
                    assert answer.headers["cache-control"] == "private, no-store"
            assert client.head(f"{target}?token={token}").status_code == 200


def test_it_follows_with_sse_until_it_expires(guarded: Guarded) -> None:
    token = guarded.url_token(seconds=2)
    started = time.monotonic()
    with RawConnection(guarded.server.url, seconds=20) as follower:
        follower.send(follower.request("GET", f"/team-a/chat?offset=-1&live=sse&token={token}"))
        status, headers = follower.head()[:2]
        assert (status, headers["cache-control"]) == (200, "private, no-store")
        received = b""
        while (chunk := follower.chunk()) is not None:
            received += chunk
        assert b"data:hello" in received
        assert time.monotonic() - started < 15
        answer = follower.exchange("GET", f"/team-a/chat?offset=-1&live=sse&token={token}")
        assert (answer.status, answer.error["code"]) == (401, "invalid_token")
        assert token not in answer.body.decode()


def test_it_is_for_one_stream_and_not_for_others_with_such_a_name(guarded: Guarded) -> None:
    token = guarded.url_token()
    with guarded.client() as client:
        for target in ("/team-a/chat2", "/team-a/other", "/team-b/chat", "/v1/stream/chat", "/v1/stream/team-a/chat/1"):
            assert client.get(f"{target}?token={token}").status_code == 403, target
        for target in (
            "/team-a",
            "/team-a/streams?prefix=chat",
            "/team-a/streams/feed?prefix=chat",
            "/team-a/streams/cold",
            "/team-a/chat/bootstrap",
            "/team-a/chat/snapshot",
            "/v1/yjs/team-a/docs/chat",
            "/metrics",
            "/v1/stream/__ds/subscriptions/x",
        ):
            separator = "&" if "?" in target else "?"
            assert client.get(f"{target}{separator}token={token}").status_code == 401, target


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_it_never_writes(guarded: Guarded, method: str) -> None:
    token = guarded.url_token(token=guarded.admin)
    with guarded.client() as client:
        answer = client.request(method, f"/team-a/chat?token={token}", headers=TEXT, content=b"x")
        assert answer.status_code == 401
        assert client.get(f"/team-a/chat?token={token}").content == b"hello"
        # Nor does it make others, nor is it good as a header.
        assert client.post(f"/v1/tokens?token={token}", json={"stream": "/team-a/chat"}).status_code == 401
        assert client.get("/team-a/chat", headers=bearer(token)).status_code == 401


def test_a_token_that_was_changed_is_401(guarded: Guarded) -> None:
    token = guarded.url_token()
    mistakes = [token[:-1], token[:-2] + "AA", token.replace("msu_", "mst_"), "x", "", token + "x", "." + token]
    with guarded.client() as client:
        for mistake in mistakes:
            answer = client.get(f"/team-a/chat?token={quote(mistake)}")
            assert answer.status_code == 401, mistake
            assert len(mistake) < 2 or mistake not in answer.text


def test_only_those_who_may_read_the_stream_get_one(guarded: Guarded) -> None:
    assert guarded.ask(None, stream="/team-a/chat").status_code == 401
    assert guarded.ask(guarded.reader, stream="/team-a/other").status_code == 403
    assert guarded.ask(guarded.reader, stream="/v1/stream/team-b/chat").status_code == 403
    assert guarded.ask(guarded.reader, stream="/v1/stream/team-a/chat/deep").status_code == 201


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"stream": 1},
        {"stream": "/team-a/chat", "seconds": 0},
        {"stream": "/team-a/chat", "seconds": -5},
        {"stream": "/team-a/chat", "seconds": 3601},
        {"stream": "/team-a/chat", "minutes": 5},
        {"stream": "/nothing"},
    ],
)
def test_a_malformed_wish_is_400(guarded: Guarded, wish: dict[str, object]) -> None:
    assert guarded.ask(guarded.admin, **wish).status_code == 400


def test_it_does_not_outlive_the_token_that_made_it(guarded: Guarded) -> None:
    maker = make_token(guarded.tokens, "read:team-a", seconds=1000)
    deadline = time.monotonic() + 20
    while (answer := guarded.ask(maker, stream="/team-a/chat", seconds=3600)).status_code == 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer.json()["expires_at_ms"] < (time.time() + 1001) * 1000
    token = answer.json()["token"]
    with guarded.client() as client, RawConnection(guarded.server.url, seconds=20) as follower:
        assert client.get(f"/team-a/chat?token={token}").status_code == 200
        follower.send(follower.request("GET", f"/team-a/chat?offset=-1&live=sse&token={token}"))
        assert follower.head()[0] == 200
        principal = read_tokens(guarded.tokens).find(maker)
        assert principal is not None
        revoke_token(guarded.tokens, principal.key.removeprefix("token:"))
        while follower.chunk() is not None:
            pass
        assert client.get(f"/team-a/chat?token={token}").status_code == 401


def test_it_is_good_after_a_restart_and_logged_nowhere(guarded: Guarded) -> None:
    token = guarded.url_token(seconds=600)
    guarded.server.kill()
    guarded.server.start()
    with guarded.client() as client:
        assert client.get(f"/team-a/chat?offset=-1&token={token}").content == b"hello"
        # Of requests that go wrong in one way or another, too.
        for target in ("/team-a/%zz", "/team-a/chat?live=x", "/nowhere/none", "/cluster/none", "/team-a/chat?offset=x"):
            client.get(f"{target}{'&' if '?' in target else '?'}token={token}")
        with guarded.client(guarded.admin) as admin:
            metrics = admin.get("/metrics").text
    log = guarded.server.stderr()
    assert "a URL of token:" in log, "the access log says whose it was"
    for secret in {*guarded.made, *(one.partition(".")[2] for one in guarded.made)}:
        assert secret not in log
        assert secret not in metrics


def test_the_command_prints_a_url_that_reads_its_stream_until_it_expires(guarded: Guarded) -> None:
    def run(*arguments: str, token: str = guarded.reader) -> tuple[int, str, str]:
        done = millstream("token", "url", *arguments, url=guarded.server.url, MILLSTREAM_TOKEN=token)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    code, url, note = run("team-a/chat", "--expires", "10m")
    assert code == 0 and url.endswith("\n") and "team-a/chat" in note
    assert httpx.get(url.strip()).content == b"hello"
    assert guarded.reader not in url
    before_ms = time.time() * 1000
    code, described, note = run("team-a/chat", "--expires", "90s", "--json")
    made = json.loads(described)
    assert (code, note) == (0, "")
    assert before_ms + 80_000 < made["expires_at_ms"] < before_ms + 150_000
    assert made["url"] == f"{guarded.server.url}/v1/stream/team-a/chat?token={made['token']}"
    guarded.made += [made["token"], url.strip().partition("token=")[2]]
    code, _, refusal = run("team-a/other")
    assert code != 0 and "scope" in refusal
    code, _, refusal = run("team-a/chat", "--expires", "9d")
    assert code != 0 and "may last" in refusal
    assert run("team-a/chat", "--expires", "soon")[0] == 2
