"""Who may do what, over HTTP: every route with no token, a bad one, one for something else, and the right one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.access.token_file import read_tokens, revoke_token
from support.access import Issuer, bearer, make_token
from support.raw_http import RawConnection
from support.server import ServerProcess

TEXT = {"content-type": "text/plain"}
ISSUER = Issuer()
SUBSCRIPTIONS = "/v1/stream/__ds/subscriptions"
PULL = {"type": "pull-wake", "streams": ["team-a/s"], "wake_stream": "team-a/wakes"}


class Guarded:
    """A server that asks for tokens, with one of each kind."""

    def __init__(self, server: ServerProcess, tokens: Path) -> None:
        self.server = server
        self.url = server.url
        self.tokens = tokens
        self.admin = make_token(tokens, "admin:*", name="root")
        self.team_a = make_token(tokens, "read:team-a", "write:team-a", name="team-a")
        self.reader = make_token(tokens, "read:team-a", name="reader")
        self.team_b = make_token(tokens, "read:team-b", "write:team-b", name="team-b")
        self.prefixed = make_token(tokens, "read:team-a/chat/", "write:team-a/chat/", name="prefixed")

    def request(self, method: str, path: str, token: str | None, **options: object) -> httpx.Response:
        headers = {**dict(options.pop("headers", {}) or {}), **(bearer(token) if token else {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=20, **options)


def start(directory: Path, *settings: str) -> Iterator[Guarded]:
    tokens = directory / "tokens.json"
    keys = directory / "keys.json"
    keys.write_text(json.dumps(ISSUER.jwks()))
    all_settings = (
        "auth.enabled=true",
        f"auth.tokens_file={tokens}",
        f"auth.jwks_file={keys}",
        "auth.jwt_audience=millstream",
        "auth.jwt_leeway=0s",
        "auth.reload_interval=100ms",
        "logging.access=true",
        "logging.level=debug",
        *settings,
    )
    make_token(tokens, "read:nothing")  # so that the file is there
    with ServerProcess(directory / "data", settings=all_settings) as server:
        guarded = Guarded(server, tokens)
        wait_until_known(guarded, guarded.prefixed)
        for bucket in ("team-a", "team-b"):
            assert guarded.request("PUT", f"/{bucket}", guarded.admin).status_code == 201
            assert guarded.request("PUT", f"/{bucket}/s", guarded.admin, content=b"1", headers=TEXT).status_code == 201
            headers = {"content-type": "application/json"}
            assert guarded.request("PUT", f"/{bucket}/wakes", guarded.admin, headers=headers).status_code == 201
        yield guarded
        log = server.stderr()
        assert "Traceback" not in log
        assert not re.search(r"mst_[0-9a-f]+_", log), "a token is in the log"


def wait_until_known(guarded: Guarded, token: str) -> None:
    deadline = time.monotonic() + 20
    while guarded.request("GET", "/nothing/at-all", token).status_code == 401:
        assert time.monotonic() < deadline, "the server does not see its token file"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    yield from start(tmp_path_factory.mktemp("access"))


ROUTES = [
    ("PUT", "/v1/stream/team-a/new"),
    ("POST", "/v1/stream/team-a/s"),
    ("GET", "/v1/stream/team-a/s"),
    ("GET", "/v1/stream/team-a/s?offset=-1&live=sse"),
    ("GET", "/v1/stream/team-a/s?offset=now&live=long-poll"),
    ("HEAD", "/v1/stream/team-a/s"),
    ("DELETE", "/v1/stream/team-a/s"),
    ("GET", "/team-a/s"),
    ("POST", "/team-a/s"),
    ("GET", "/team-a"),
    ("PUT", "/team-a"),
    ("DELETE", "/team-a"),
    ("GET", "/team-a/streams"),
    ("GET", "/team-a/streams/feed"),
    ("GET", "/team-a/streams/cold"),
    ("POST", "/team-a/streams/cold"),
    ("PUT", "/team-a/s/snapshot/0000000000000000_0000000000000001"),
    ("GET", "/team-a/s/snapshot"),
    ("GET", "/team-a/s/snapshot/0000000000000000_0000000000000001"),
    ("DELETE", "/team-a/s/snapshot/0000000000000000_0000000000000001"),
    ("GET", "/team-a/s/bootstrap"),
    ("GET", "/metrics"),
    ("GET", "/cluster/hot-cold-stats"),
]


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("PUT", SUBSCRIPTIONS + "/x"), ("GET", SUBSCRIPTIONS + "/x")])
def test_without_a_token_every_route_is_401_with_a_challenge(guarded: Guarded, method: str, path: str) -> None:
    answer = guarded.request(method, path, None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="millstream"'


@pytest.mark.parametrize(
    "header",
    [
        "Bearer mst_000000000000_" + "A" * 43,
        "Bearer",
        "Bearer x",
        "Basic dXNlcjpwYXNz",
        "bearer a.b.c",
        "Bearer " + "x" * 20_000,
    ],
)
def test_a_bad_token_is_401_invalid_token_and_is_not_repeated(guarded: Guarded, header: str) -> None:
    answer = httpx.get(f"{guarded.url}/team-a/s", headers={"authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="millstream", error="invalid_token"'
    secret = header.partition(" ")[2]
    assert len(secret) < 2 or secret not in answer.text


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_token_of_another_bucket_is_403(guarded: Guarded, method: str, path: str) -> None:
    answer = guarded.request(method, path, guarded.team_b)
    assert answer.status_code == 403
    assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_403_is_the_same_whether_the_stream_exists_or_not(guarded: Guarded, method: str) -> None:
    """Bytes and fields, apart from what differs between any two answers."""
    answers = [guarded.request(method, path, guarded.team_b) for path in ("/team-a/s", "/team-a/t", "/team-z/s")]
    changing = ("date", "x-request-id")
    seen = {
        (one.status_code, one.content, tuple((k, v) for k, v in one.headers.items() if k not in changing))
        for one in answers
    }
    assert len(seen) == 1
    assert answers[0].status_code == 403


def test_a_reader_reads_and_does_not_write(guarded: Guarded) -> None:
    before = guarded.request("GET", "/team-a/s", guarded.reader).content
    assert before.startswith(b"1")
    assert guarded.request("GET", "/team-a/streams", guarded.reader).status_code == 200
    for method in ("POST", "PUT", "DELETE"):
        assert guarded.request(method, "/team-a/s", guarded.reader, content=b"2", headers=TEXT).status_code == 403
    assert guarded.request("GET", "/team-a/s", guarded.reader).content == before


def test_a_writer_writes_but_does_not_make_or_delete_buckets(guarded: Guarded) -> None:
    assert guarded.request("PUT", "/team-a/w", guarded.team_a, headers=TEXT).status_code == 201
    assert guarded.request("POST", "/team-a/w", guarded.team_a, content=b"x", headers=TEXT).status_code == 204
    assert guarded.request("PUT", "/team-a", guarded.team_a).status_code == 403
    assert guarded.request("DELETE", "/team-a", guarded.team_a).status_code == 403


def test_a_prefix_is_all_that_its_token_sees(guarded: Guarded) -> None:
    ask = guarded.request
    assert ask("PUT", "/v1/stream/team-a/chat/1", guarded.prefixed, headers=TEXT).status_code == 201
    assert ask("GET", "/v1/stream/team-a/chat/1", guarded.prefixed).status_code == 200
    assert ask("GET", "/team-a/s", guarded.prefixed).status_code == 403
    assert ask("GET", "/v1/stream/team-a/chat", guarded.prefixed).status_code == 403
    for route in ("/team-a/streams", "/team-a/streams/feed"):
        assert ask("GET", route, guarded.prefixed).status_code == 403
        assert ask("GET", f"{route}?prefix=chat", guarded.prefixed).status_code == 403
        assert ask("GET", f"{route}?prefix=chat/", guarded.prefixed).status_code == 200


@pytest.mark.parametrize(
    "query",
    ["prefix=chat/&prefix=", "prefix=&prefix=chat/", "prefix=chat/../", "prefix=chat/%00", "prefix=chat/;prefix="],
)
@pytest.mark.parametrize("route", ["/team-a/streams", "/team-a/streams/feed", "/team-a/streams/cold"])
def test_no_spelling_of_a_prefix_shows_more_than_its_token_may_see(guarded: Guarded, route: str, query: str) -> None:
    ask = guarded.request
    assert ask("PUT", "/v1/stream/team-a/hidden", guarded.admin, headers=TEXT).status_code in (200, 201)
    answer = ask("GET", f"{route}?{query}", guarded.prefixed)
    assert answer.status_code in (200, 400, 403)
    assert "hidden" not in answer.text


def test_where_history_lies_is_told_to_those_who_may_read_the_whole_bucket(guarded: Guarded) -> None:
    """A segment has streams of the whole bucket in it: naming a prefix does not make it less."""
    ask, question = guarded.request, {"incarnations": [1]}
    for path in ("/team-a/streams/cold", "/team-a/streams/cold?prefix=chat/"):
        assert ask("GET", path, guarded.prefixed).status_code == 403
        assert ask("POST", path, guarded.prefixed, json=question).status_code == 403
        assert ask("GET", path, guarded.reader).status_code == 200
        assert ask("POST", path, guarded.reader, json=question).status_code == 200


@pytest.mark.parametrize("path", ["/v1/stream/team-a%2Fs", "/team%2Da/s", "/v1/stream/team%2Da/s", "/team-a/%73"])
def test_another_spelling_of_a_path_does_not_get_around_it(guarded: Guarded, path: str) -> None:
    assert guarded.request("GET", path, guarded.team_b).status_code == 403
    assert guarded.request("GET", path, guarded.reader).status_code == 200


def test_a_fork_needs_read_on_its_source(guarded: Guarded) -> None:
    headers = {"stream-forked-from": "/v1/stream/team-a/s"}
    for source in ("/v1/stream/team-a/s", "/v1/stream/team-a/none", "/team-a/s"):
        headers = {"stream-forked-from": source}
        answer = guarded.request("PUT", "/v1/stream/team-b/stolen", guarded.team_b, headers=headers)
        assert answer.status_code == 403
    assert guarded.request("GET", "/v1/stream/team-b/stolen", guarded.team_b).status_code == 404
    both = make_token(guarded.tokens, "read:team-a", "write:team-b")
    wait_until_known(guarded, both)
    assert guarded.request("PUT", "/v1/stream/team-b/fork", both, headers=headers).status_code == 201


def test_a_subscription_needs_read_on_all_it_covers_and_write_on_its_wake_stream(guarded: Guarded) -> None:
    ask = guarded.request
    for body in (
        PULL,
        {**PULL, "streams": ["team-b/s"]},
        {**PULL, "streams": [], "pattern": "team-b/*", "wake_stream": "team-a/wakes"},
        {**PULL, "streams": [], "pattern": "**", "wake_stream": "team-b/wakes"},
        {**PULL, "streams": [], "pattern": "*/s", "wake_stream": "team-b/wakes"},
        {**PULL, "streams": [], "pattern": "team-b/**", "wake_stream": "team-b/wakes"},
    ):
        assert ask("PUT", f"{SUBSCRIPTIONS}/refused", guarded.team_b, json=body).status_code == 403
    own = {"type": "pull-wake", "pattern": "team-b/*/**", "wake_stream": "team-b/wakes"}
    assert ask("PUT", f"{SUBSCRIPTIONS}/own", guarded.team_b, json=own).status_code == 201
    link = {"streams": ["team-a/s"]}
    assert ask("POST", f"{SUBSCRIPTIONS}/own/streams", guarded.team_b, json=link).status_code == 403


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://localhost:1/", "https://127.0.0.1/", "http://10.0.0.1/"]
)
def test_a_webhook_to_this_machine_is_refused_where_tokens_are_needed(guarded: Guarded, url: str) -> None:
    body = {"type": "webhook", "pattern": "team-a/*", "webhook": {"url": url}}
    answer = guarded.request("PUT", f"{SUBSCRIPTIONS}/inner", guarded.admin, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "WEBHOOK_URL_REJECTED")


def test_a_subscription_of_others_is_not_there(guarded: Guarded) -> None:
    ask = guarded.request
    assert ask("PUT", f"{SUBSCRIPTIONS}/theirs", guarded.team_a, json=PULL).status_code == 201
    for method, action in (("GET", ""), ("DELETE", ""), ("POST", "/claim"), ("POST", "/streams")):
        body = {"worker": "w"} if action == "/claim" else {"streams": ["team-b/s"]}
        options = {"json": body} if method == "POST" else {}
        theirs = ask(method, f"{SUBSCRIPTIONS}/theirs{action}", guarded.team_b, **options)
        absent = ask(method, f"{SUBSCRIPTIONS}/absent{action}", guarded.team_b, **options)
        assert (theirs.status_code, absent.status_code) == (404, 404)
        assert theirs.text.replace("theirs", "absent") == absent.text
    assert ask("GET", f"{SUBSCRIPTIONS}/theirs", guarded.team_a).status_code == 200


def test_a_worker_proves_itself_with_the_token_of_its_wake(guarded: Guarded) -> None:
    ask = guarded.request
    assert ask("PUT", f"{SUBSCRIPTIONS}/work", guarded.team_a, json=PULL).status_code == 201
    assert ask("POST", "/team-a/s", guarded.team_a, content=b"work", headers=TEXT).status_code == 204
    claimed = ask("POST", f"{SUBSCRIPTIONS}/work/claim", guarded.team_a, json={"worker": "w"}).json()
    done = {"wake_id": claimed["wake_id"], "generation": claimed["generation"], "done": True}
    assert ask("POST", f"{SUBSCRIPTIONS}/work/ack", guarded.team_a, json=done).status_code == 401
    assert ask("POST", f"{SUBSCRIPTIONS}/work/ack", claimed["token"], json=done).status_code == 200


def test_only_a_server_admin_sees_metrics_and_the_cluster(guarded: Guarded) -> None:
    for path in ("/metrics", "/cluster/hot-cold-stats"):
        assert guarded.request("GET", path, guarded.team_a).status_code == 403
        assert guarded.request("GET", path, guarded.admin).status_code == 200


def test_health_preflights_and_public_keys_need_no_token(guarded: Guarded) -> None:
    for path in ("/healthz", "/readyz/local", "/readyz/cluster", "/v1/stream/__ds/jwks.json"):
        assert guarded.request("GET", path, None).status_code == 200
    assert guarded.request("OPTIONS", "/team-a/s", None).status_code == 204


def test_metrics_can_be_opened_by_configuration(tmp_path: Path) -> None:
    settings = ("auth.enabled=true", "auth.open_metrics=true")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/cluster/hot-cold-stats").status_code == 401


# -- JWTs over HTTP ------------------------------------------------------------------------------------------


def claims(seconds: float, scope: str = "read:team-a") -> dict[str, object]:
    return {"sub": "ada", "aud": "millstream", "exp": time.time() + seconds, "scope": scope}


@pytest.mark.parametrize("algorithm", ["HS256", "RS256", "EdDSA"])
def test_a_jwt_is_good_for_its_scopes_and_no_more(guarded: Guarded, algorithm: str) -> None:
    token = ISSUER.sign(claims(60), algorithm)
    assert guarded.request("GET", "/team-a/s", token).status_code == 200
    assert guarded.request("POST", "/team-a/s", token, content=b"2", headers=TEXT).status_code == 403
    assert guarded.request("GET", "/team-b/s", token).status_code == 403


def test_an_expired_jwt_is_401_even_if_it_was_good_before(guarded: Guarded) -> None:
    token = ISSUER.sign(claims(1.5))
    assert guarded.request("GET", "/team-a/s", token).status_code == 200
    time.sleep(1.6)
    assert guarded.request("GET", "/team-a/s", token).status_code == 401


# -- live reads end with their token -------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["offset=now&live=sse", "%6Cive=s%73e&offset=now"])
def test_sse_ends_as_a_whole_body_when_its_token_expires(guarded: Guarded, query: str) -> None:
    token = ISSUER.sign(claims(1.5))
    with RawConnection(guarded.url) as follower:
        started = time.monotonic()
        follower.send(follower.request("GET", f"/team-a/s?{query}", list(bearer(token).items())))
        assert follower.head()[0] == 200
        while follower.chunk() is not None:
            pass
        assert 0.5 < time.monotonic() - started < 6
        # The connection is as good as before; the token is not.
        answer = follower.exchange("GET", "/team-a/s", list(bearer(token).items()))
        assert answer.status == 401


def test_a_long_poll_is_answered_401_when_its_token_expires(guarded: Guarded) -> None:
    token = ISSUER.sign(claims(1.5))
    with RawConnection(guarded.url) as poller:
        answer = poller.exchange("GET", "/team-a/s?offset=now&live=long-poll", list(bearer(token).items()))
        assert (answer.status, answer.error["code"]) == (401, "invalid_token")
        assert poller.exchange("GET", "/healthz").status == 200


def test_live_reads_end_when_their_token_is_revoked(guarded: Guarded) -> None:
    token = make_token(guarded.tokens, "read:team-a")
    wait_until_known(guarded, token)
    principal = read_tokens(guarded.tokens).find(token)
    assert principal is not None
    with (
        RawConnection(guarded.url) as follower,
        RawConnection(guarded.url) as poller,
        RawConnection(guarded.url) as other,
    ):
        for one, mode in ((follower, "sse"), (poller, "long-poll")):
            one.send(one.request("GET", f"/team-a/s?offset=now&live={mode}", list(bearer(token).items())))
        other.send(other.request("GET", "/team-a/s?offset=now&live=sse", list(bearer(guarded.reader).items())))
        assert follower.head()[0] == other.head()[0] == 200
        revoke_token(guarded.tokens, principal.key.removeprefix("token:"))
        assert poller.answer().status == 401
        while follower.chunk() is not None:
            pass
        assert guarded.request("POST", "/team-a/s", guarded.team_a, content=b"x", headers=TEXT).status_code == 204
        received = b""
        while b"data:x" not in received:
            received += other.chunk() or b""


# -- what else must not leak ---------------------------------------------------------------------------------


def test_a_large_body_is_refused_before_it_is_taken_in(guarded: Guarded) -> None:
    for path in ("/team-a/s", "/team-a/s/snapshot/0000000000000000_0000000000000001"):
        for fields in ([], list(bearer(guarded.team_b).items())):
            with RawConnection(guarded.url) as connection:
                method = "PUT" if "snapshot" in path else "POST"
                head = connection.request(method, path, [("Content-Type", "text/plain"), *fields], bytes(1 << 20))
                connection.send(head[: -(1 << 20)])
                assert connection.answer().status == (403 if fields else 401)
    uploads = guarded.server.data_dir / "uploads"
    assert not any(uploads.iterdir())


def test_an_expectation_is_refused_before_it_is_encouraged(guarded: Guarded) -> None:
    with RawConnection(guarded.url) as connection:
        fields = [("Content-Type", "text/plain"), ("Expect", "100-continue")]
        connection.send(connection.request("POST", "/team-a/s", fields, b"body")[:-4])
        assert connection.answer().status == 401


def test_tokens_are_not_in_logs_metrics_or_errors(guarded: Guarded) -> None:
    """The log is searched again when the module is done."""
    secret = guarded.team_a.split("_", 2)[2]
    jwt = ISSUER.sign(claims(60))
    for token in (guarded.team_a, jwt, guarded.team_a[:-1], jwt[:-1]):
        for path in ("/team-a/s", "/team-b/s", "/team-a/%zz", "/cluster/none"):
            assert token not in guarded.request("GET", path, token).text
    metrics = guarded.request("GET", "/metrics", guarded.admin).text
    log = guarded.server.stderr()
    for text in (metrics, log):
        assert secret not in text
        assert jwt not in text
    assert "team-a" in log, "the access log says who it was"


def test_a_broken_token_file_leaves_the_former_tokens_in_use(guarded: Guarded) -> None:
    content = guarded.tokens.read_bytes()
    guarded.tokens.write_bytes(b"{")
    try:
        deadline = time.monotonic() + 10
        while "cannot be used" not in guarded.server.stderr():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert guarded.request("GET", "/team-a/s", guarded.reader).status_code == 200
    finally:
        guarded.tokens.write_bytes(content)
