"""Calls: what is repeated, what is not, where redirects lead."""

from __future__ import annotations

import pytest

from millstream.client import calls
from millstream.client.conversation import HOMES_MAX, Homes, converse, parse_url
from millstream.client.errors import (
    BadAnswer,
    BadRequest,
    ConnectionFailed,
    NotFound,
    OutcomeUnknown,
    TooManyRequests,
    Unavailable,
)
from millstream.client.messages import Origin, Response
from millstream.client.results import Producer
from support.conversations import Script, lost, settings

OFFSET = "0000000000000000_0000000000000001"
APPENDED = Response(204, {"stream-next-offset": OFFSET})
PRODUCED = Response(200, {"stream-next-offset": OFFSET})
BUSY = Response(503, {"retry-after": "2"}, b'{"error":{"code":"backpressure","message":"full","hint":"wait"}}')
UNKNOWN = Response(503, {"retry-after": "1"}, b'{"error":{"code":"outcome_unknown","message":"who knows"}}')
PATH = "/v1/stream/a"

plain = calls.append(PATH, b"x", "text/plain")
produced = calls.append(PATH, b"x", "text/plain", producer=Producer("p", 0, 0))


def test_pauses_double_up_to_their_limit_and_attempts_end() -> None:
    script = Script(*[lost(was_sent=False)] * 9)
    with pytest.raises(ConnectionFailed):
        script.run(converse(plain, settings(retries=8)))
    assert script.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_server_may_ask_for_longer_pauses_within_reason() -> None:
    script = Script(BUSY, Response(429, {"retry-after": "100000"}), Response(503, {"retry-after": "soon"}), APPENDED)
    assert script.run(converse(plain, settings())).next_offset == OFFSET
    assert script.pauses == [2.0, 60.0, 0.4]


@pytest.mark.parametrize("failure", [lost(), UNKNOWN, Response(502, {}), Response(504, {})], ids=str)
def test_an_append_that_may_have_been_written_is_repeated_only_for_producers(failure: Response) -> None:
    script = Script(failure)
    with pytest.raises(OutcomeUnknown):
        script.run(converse(plain, settings()))
    script = Script(failure, Response(204, {"stream-next-offset": OFFSET}))
    assert script.run(converse(produced, settings())).duplicate
    script = Script(failure, APPENDED)
    assert script.run(converse(calls.append(PATH, b"", None, close=True), settings())).next_offset == OFFSET


@pytest.mark.parametrize("failure", [lost(was_sent=False), BUSY, Response(429, {})], ids=str)
def test_an_append_that_was_surely_not_written_is_repeated(failure: Response) -> None:
    assert Script(failure, APPENDED).run(converse(plain, settings())).next_offset == OFFSET


def test_conditional_appends_are_not_repeated_once_they_may_be_done() -> None:
    for call in (calls.append(PATH, b"x", "a/b", if_match='"1"'), calls.append(PATH, b"x", "a/b", seq="1")):
        with pytest.raises(OutcomeUnknown):
            Script(lost()).run(converse(call, settings()))


def test_a_connection_the_server_let_go_is_replaced_at_once() -> None:
    script = Script(ConnectionFailed("stale", was_sent=True, was_reused=True), PRODUCED)
    script.run(converse(produced, settings()))
    assert script.pauses == [0.0]


def test_a_repeated_deletion_finds_nothing_and_that_is_fine() -> None:
    gone = Response(404, {}, b"")
    Script(lost(), gone).run(converse(calls.delete(PATH), settings()))
    with pytest.raises(NotFound):
        Script(gone).run(converse(calls.delete(PATH), settings()))
    with pytest.raises(NotFound):
        Script(lost(was_sent=False), gone).run(converse(calls.delete(PATH), settings()))
    Script(lost(), Response(409, {})).run(converse(calls.create_bucket("team"), settings()))


def test_refusals_are_not_repeated() -> None:
    for status in (400, 401, 403, 404, 409, 410, 412, 413, 431, 500, 501):
        script = Script(Response(status, {}))
        with pytest.raises(Exception) as refused:
            script.run(converse(plain, settings()))
        assert getattr(refused.value, "status", None) == status and not script.pauses


def test_when_attempts_end_the_last_answer_is_the_error() -> None:
    with pytest.raises(Unavailable, match="full") as busy:
        Script(*[BUSY] * 3).run(converse(plain, settings(retries=2)))
    assert (busy.value.code, busy.value.hint) == ("backpressure", "wait")
    with pytest.raises(TooManyRequests):
        Script(Response(429, {})).run(converse(plain, settings(retries=0)))


def moved(location: str) -> Response:
    return Response(307, {"location": location})


def test_a_redirect_is_followed_with_method_body_and_token_and_remembered() -> None:
    shared = settings("http://first:4437/base", token="secret")
    script = Script(moved(f"http://second:99/base{PATH}"), PRODUCED, PRODUCED, lost(), PRODUCED)
    for _ in range(3):
        script.run(converse(produced, shared))
    first, second = f"http://first:4437/base{PATH}", f"http://second:99/base{PATH}"
    assert script.targets == [first, second, second, second, first]
    for _, request in script.asked:
        assert (request.method, request.body, request.headers["authorization"]) == ("POST", b"x", "Bearer secret")


def test_a_redirect_to_another_path_is_not_remembered() -> None:
    shared = settings()
    script = Script(
        moved("/team/page/snapshot/7"),
        Response(200, {"content-type": "a/b", "stream-snapshot-offset": "7"}, b"x"),
        moved("8"),
        Response(200, {"content-type": "a/b", "stream-snapshot-offset": "8"}, b"y"),
    )
    address = calls.address_of(bucket="team", name="page")
    assert [script.run(converse(calls.snapshot(address, None), shared)).offset for _ in range(2)] == ["7", "8"]
    assert [target.rpartition("/")[2] for target in script.targets] == ["snapshot", "7", "snapshot", "8"]


def test_redirects_have_an_end_and_keep_to_https() -> None:
    with pytest.raises(BadAnswer, match="redirected more than 5 times"):
        Script(*[moved("/x")] * 6).run(converse(plain, settings()))
    with pytest.raises(BadAnswer, match="from https to"):
        Script(moved("http://second/")).run(converse(plain, settings("https://first")))
    for location in ("", "ftp://x/", "http://[::1", "http://u:p@host/"):
        with pytest.raises(BadAnswer, match="no address"):
            Script(moved(location)).run(converse(plain, settings()))


def test_when_a_server_fails_the_next_is_asked() -> None:
    shared = settings("http://one:1, http://two:2/base")
    script = Script(lost(), PRODUCED, PRODUCED, BUSY, moved("http://three:3" + PATH), lost(), PRODUCED)
    for _ in range(3):
        script.run(converse(produced, shared))
    assert [target.removesuffix(PATH) for target in script.targets] == [
        "http://one:1",
        "http://two:2/base",
        "http://two:2/base",
        "http://two:2/base",
        "http://one:1",
        "http://three:3",
        "http://one:1",
    ]


def test_homes_are_forgotten_when_there_are_too_many() -> None:
    homes = Homes()
    for number in range(HOMES_MAX + 1):
        homes.moved(f"/{number}", Origin("http", "h", 1))
    assert homes.find("/0") is None and homes.find("/1") is not None


@pytest.mark.parametrize(
    ("url", "origin", "root"),
    [
        ("http://localhost", Origin("http", "localhost", 80), ""),
        ("https://streams.example.com/", Origin("https", "streams.example.com", 443), ""),
        ("http://[::1]:4437/streams/", Origin("http", "::1", 4437), "/streams"),
    ],
)
def test_urls(url: str, origin: Origin, root: str) -> None:
    assert parse_url(url) == (origin, root)


@pytest.mark.parametrize(
    "url", ["", "localhost:4437", "ftp://x", "http://", "http://x:port", "http://x?a=b", "http://u@x"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="is not the URL of a server"):
        parse_url(url)


def test_an_answer_of_some_other_server_is_named_as_such() -> None:
    for answer in (Response(200, {}, b"<html>"), Response(200, {"content-type": "text/html"}, b"")):
        with pytest.raises(BadAnswer, match="not one of a durable streams server"):
            Script(answer).run(converse(calls.read(PATH, "-1"), settings()))
    with pytest.raises(BadAnswer):
        Script(Response(200, {}, b"[]")).run(converse(calls.document("/healthz"), settings()))


@pytest.mark.parametrize("body", [b"", b"oops", b'{"error":"x"}', b'{"error":{}}', b"[1]", b'{"error":{"message":1}}'])
def test_an_error_body_of_any_kind_becomes_an_error(body: bytes) -> None:
    with pytest.raises(NotFound) as missing:
        Script(Response(404, {}, body)).run(converse(calls.head(PATH), settings()))
    assert missing.value.message
