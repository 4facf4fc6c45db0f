"""Calls: what is repeated, what is not, where redirects lead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream.client import calls
from millstream.client.conversation import LEADERS_MAX, LeaderCache, converse, parse_url
from millstream.client.errors import (
    BadAnswer,
    BadRequest,
    ConnectionFailed,
    NotFound,
    OutcomeUnknown,
    ServerError,
    TooManyRequests,
    Unavailable,
)
from millstream.client.messages import Origin, Response
from millstream.client.results import Appended, Chunk, Producer
from millstream.client.retries import RetryPolicy
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


def test_a_server_error_is_repeated_where_that_cannot_double() -> None:
    broken = Response(500, {"retry-after": "3"})
    for call in (produced, calls.append(PATH, b"", None, close=True)):
        script = Script(broken, broken, PRODUCED)
        assert script.run(converse(call, settings())).next_offset == OFFSET
        assert script.pauses == [3.0, 3.0]
    with pytest.raises(ServerError):
        Script(broken).run(converse(plain, settings()))
    with pytest.raises(ServerError):
        Script(Response(501, {})).run(converse(produced, settings()))
    Script(broken, Response(404, {})).run(converse(calls.delete(PATH), settings()))


def test_a_pause_may_be_asked_for_as_a_date() -> None:
    later, earlier = "Thu, 01 Jan 1970 00:00:07 GMT", "Wed, 31 Dec 1969 23:00:00 GMT"
    script = Script(*(Response(503, {"retry-after": date}) for date in (later, earlier, "never GMT")), PRODUCED)
    script.run(converse(produced, settings()))
    assert script.pauses == [7.0, 0.2, 0.4]


def test_a_policy_says_how_pauses_grow() -> None:
    policy = RetryPolicy(retries=3, first_pause_seconds=1.0, pause_seconds_max=8.0, multiplier=3.0)
    script = Script(*[BUSY] * 3, PRODUCED)
    shared = replace(settings(), policy=policy)
    script.run(converse(produced, shared))
    assert script.pauses == [2.0, 3.0, 8.0]  # the server asks for 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("retries", -1), ("first_pause_seconds", 0.0), ("pause_seconds_max", 0.01), ("multiplier", 0.5)],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(BadRequest, match=name):
        RetryPolicy(**{name: value})  # type: ignore[arg-type]


def test_headers_and_parameters_are_asked_for_anew_for_each_request() -> None:
    numbers = iter("123456")
    shared = settings(token="secret").adding({"X-Fixed": "a", "X-Number": lambda: next(numbers)}, {"tenant": "t&1"})
    script = Script(BUSY, PRODUCED)
    script.run(converse(produced, shared.adding({"x-fixed": "b"}, {"number": lambda: next(numbers)})))
    assert [request.target for _, request in script.asked] == [
        f"{PATH}?number=2&tenant=t%261",
        f"{PATH}?number=4&tenant=t%261",
    ]
    for (_, request), number in zip(script.asked, "13", strict=True):
        assert (request.headers["x-fixed"], request.headers["x-number"]) == ("b", number)
        assert request.headers["authorization"] == "Bearer secret"


def test_what_the_protocol_says_is_not_overwritten() -> None:
    shared = settings(token="secret").adding({"producer-id": "mine", "Authorization": "Basic x"}, {"offset": "7"})
    script = Script(PRODUCED, Response(200, {"stream-next-offset": OFFSET}))
    script.run(converse(produced, shared))
    script.run(converse(calls.read(PATH, "-1"), shared))
    (_, append), (_, read) = script.asked
    assert (append.headers["producer-id"], append.headers["authorization"]) == ("p", "Basic x")
    assert read.target == f"{PATH}?offset=-1"


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "a b", "a\r\nb", ""])
def test_a_header_that_would_break_the_request_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="may set"):
        settings().adding({name: "1"}, None)


def test_a_token_may_be_a_function() -> None:
    tokens = iter(("one", "two"))
    script = Script(BUSY, PRODUCED)
    script.run(converse(produced, replace(settings(), token=lambda: next(tokens))))
    assert [request.headers["authorization"] for _, request in script.asked] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize(
    ("url", "read_from"),
    [
        ("http://first:4437", "http://first:4437/?offset=-1"),
        ("http://first:4437/any/path", "http://first:4437/any/path?offset=-1"),
        ("http://other:1/a b/\xe9%2Fc?key=v", "http://other:1/a%20b/%C3%A9%2Fc?key=v&offset=-1"),
    ],
)
def test_a_stream_may_be_at_any_url(url: str, read_from: str) -> None:
    script = Script(Response(200, {"stream-next-offset": OFFSET}))
    script.run(converse(calls.read(calls.url_address(url).path, "-1"), settings("http://first:4437/base")))
    assert script.targets == [read_from]


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://u:p@host/x", "http://host/x#y", "http://host:x/"])
def test_what_is_no_url_of_a_stream_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        calls.url_address(url)


def test_other_servers_may_say_less() -> None:
    """A repeat without its offset, as the reference server answers it, and a read without a content type."""
    assert Script(Response(204, {})).run(converse(produced, settings())) == Appended("", True, False)
    chunk = Script(Response(200, {"stream-next-offset": "7", "stream-closed": "true"}, b"x")).run(
        converse(calls.read(PATH, "-1"), settings())
    )
    assert chunk == Chunk(b"x", "application/octet-stream", "7", True, True)
    with pytest.raises(BadAnswer):
        Script(Response(200, {}, b"x")).run(converse(calls.read(PATH, "-1"), settings()))


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
    leaders = LeaderCache()
    for number in range(LEADERS_MAX + 1):
        leaders.moved(f"/{number}", Origin("http", "h", 1))
    assert leaders.find("/0") is None and leaders.find("/1") is not None


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
