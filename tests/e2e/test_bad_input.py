"""Bad input of every kind gets the 4xx the protocol names, with a JSON body that says what was wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from support.raw_http import Answer, RawConnection
from support.serving import Serve, Server

# Below ASGI it is uvicorn that refuses what is not HTTP, in its own words.
ADAPTERS = ("in-process",)
ROOT = "/v1/stream/"
OPEN, CLOSED, JSON_STREAM = "bad/open", "bad/closed", "bad/json"
KEPT = b"untouched"

Header = tuple[str, str | bytes]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    running = serve("read.long_poll_timeout=200ms")
    with RawConnection(running.url) as connection:
        text, closed = ("Content-Type", "text/plain"), ("Stream-Closed", "true")
        assert connection.exchange("PUT", ROOT + OPEN, [text], KEPT).status == 201
        assert connection.exchange("PUT", ROOT + CLOSED, [text, closed], KEPT).status == 201
        json_type = ("Content-Type", "application/json")
        assert connection.exchange("PUT", ROOT + JSON_STREAM, [json_type], b'["untouched"]').status == 201
    yield running
    with RawConnection(running.url) as connection:
        assert connection.exchange("GET", ROOT + OPEN).body == KEPT
        assert connection.exchange("GET", ROOT + CLOSED).body == KEPT
        assert connection.exchange("GET", ROOT + JSON_STREAM).body == b'["untouched"]'
        assert connection.exchange("GET", "/healthz").status == 200


class Case(NamedTuple):
    """A request and the refusal it must get."""

    method: str
    target: str | bytes
    headers: list[Header]
    body: bytes | None
    status: int
    code: str | None = None


def get(target: str | bytes, status: int, code: str | None = None, *headers: Header) -> Case:
    return Case("GET", target, list(headers), None, status, code)


def put(target: str | bytes, status: int, code: str | None, *headers: Header, body: bytes | None = None) -> Case:
    return Case("PUT", target, list(headers), body, status, code)


def post(target: str, status: int, code: str | None, *headers: Header, body: bytes = b"x") -> Case:
    kind: Header = ("Content-Type", "text/plain")
    return Case("POST", target, [kind, *headers], body, status, code)


def producer(id: str | bytes | None, epoch: str | bytes | None, seq: str | bytes | None) -> list[Header]:
    named = (("Producer-Id", id), ("Producer-Epoch", epoch), ("Producer-Seq", seq))
    return [(name, value) for name, value in named if value is not None]


PATHS = [
    get(ROOT, 400, "invalid_path"),
    get("/v1/stream", 400, "invalid_path"),
    get(ROOT + "..", 400, "invalid_path"),
    get(ROOT + "a/../b", 400, "invalid_path"),
    get(ROOT + "../../etc/passwd", 400, "invalid_path"),
    get(ROOT + "a/%2e%2e/b", 400, "invalid_path"),
    get(ROOT + "a/%2E./b", 400, "invalid_path"),
    get(ROOT + "a..b", 400, "invalid_path"),
    get(ROOT + "%00", 400, "invalid_path"),
    get(ROOT + "a%00b", 400, "invalid_path"),
    get(ROOT + "a%", 400, "invalid_path"),
    get(ROOT + "a%2", 400, "invalid_path"),
    get(ROOT + "a%zz", 400, "invalid_path"),
    get(ROOT + "%ff", 400, "invalid_path"),
    get(ROOT + "%c3%28", 400, "invalid_path"),
    get(ROOT + "%ed%a0%80", 400, "invalid_path"),
    get(ROOT + "%c0%af", 400, "invalid_path"),
    get(ROOT + "/", 400, "invalid_path"),
    get(ROOT + "/a", 400, "invalid_path"),
    get(ROOT + "a/", 400, "invalid_path"),
    get(ROOT + "x" * 200, 400, "invalid_path"),
    get(ROOT + "x" * 20_000, 400, "invalid_path"),
    get(ROOT + "%C3%A9" * 100, 400, "invalid_path"),
    put(ROOT + "x" * 200, 400, "invalid_path"),
    put(ROOT + "a%00b", 400, "invalid_path"),
    put(ROOT + "a/../b", 400, "invalid_path"),
    Case("DELETE", ROOT + "a/../b", [], None, 400, "invalid_path"),
    Case("HEAD", ROOT + "a/../b", [], None, 400),
    Case("OPTIONS", ROOT + "a%zz", [], None, 400, "invalid_path"),
    get(ROOT + "bad/no-such-stream", 404, "stream_not_found"),
    post(ROOT + "bad/no-such-stream", 404, "stream_not_found"),
    Case("DELETE", ROOT + "bad/no-such-stream", [], None, 404, "stream_not_found"),
    get("/", 404),
    get("/v1", 400, "invalid_path"),
    get("/v2/stream/a", 400, "invalid_path"),
]

READS = [
    *(
        get(f"{ROOT}{OPEN}?offset={offset}", 400, "invalid_offset")
        for offset in (
            "",
            "-2",
            "+1",
            "abc",
            "NOW",
            "-1%20",
            "%20-1",
            "0,0",
            "0/0",
            "%00",
            "0000000000000000_",
            "_0000000000000000",
            "0000000000000001_0000000000000000",
            "0000000000000000_00000000000000000",
            "0000000000000000_000000000000000x",
            "0000000000000000-0000000000000000",
            "99999999999999999999",
            "%EF%BC%91" * 20,
            "1e3",
            "9" * 5000,
            "..",
        )
    ),
    get(f"{ROOT}{OPEN}?offset=-1&offset=-1", 400, "invalid_query"),
    get(f"{ROOT}{OPEN}?offset=-1&off%73et=now", 400, "invalid_query"),
    get(f"{ROOT}{OPEN}?offset=%zz", 400, "invalid_query"),
    get(f"{ROOT}{OPEN}?offset=%ff", 400, "invalid_query"),
    get(f"{ROOT}{OPEN}?%=1", 400, "invalid_query"),
    get(f"{ROOT}{OPEN}?offset", 400, "invalid_offset"),
    get(f"{ROOT}{OPEN}?live=sse", 400, "missing_offset"),
    get(f"{ROOT}{OPEN}?live=long-poll", 400, "missing_offset"),
    get(f"{ROOT}{OPEN}?offset=-1&live=", 400, "invalid_live"),
    get(f"{ROOT}{OPEN}?offset=-1&live=true", 400, "invalid_live"),
    get(f"{ROOT}{OPEN}?offset=-1&live=SSE", 400, "invalid_live"),
    get(f"{ROOT}{OPEN}?offset=-1&live=websocket", 400, "invalid_live"),
    get(f"{ROOT}{OPEN}?offset=bogus&live=sse", 400, "invalid_offset"),
    get(f"{ROOT}{OPEN}?offset=bogus&live=long-poll", 400, "invalid_offset"),
]

CREATES = [
    *(
        put(ROOT + "bad/ttl", 400, "invalid_ttl", ("Stream-TTL", ttl))
        for ttl in ("", "-1", "+1", "1.5", "1e3", "01", "abc", "1 2", "9" * 30, b"\xb2", "0x10", "Infinity", "1,2")
    ),
    put(ROOT + "bad/ttl", 400, "invalid_ttl", ("Stream-TTL", "1"), ("Stream-TTL", "2")),
    *(
        put(ROOT + "bad/expires", 400, "invalid_expires_at", ("Stream-Expires-At", when))
        for when in (
            "",
            "tomorrow",
            "1735689600",
            "2030-01-01",
            "2030-01-01T00:00:00",
            "2030-13-01T00:00:00Z",
            "2030-02-30T00:00:00Z",
            "2030-01-01T25:00:00Z",
            "2030-01-01T00:00:00+99:00",
            "0000-01-01T00:00:00Z",
            "Tue, 01 Jan 2030 00:00:00 GMT",
            b"2030-01-01T00:00:0\xb2Z",
        )
    ),
    put(ROOT + "bad/both", 400, "invalid_expiry", ("Stream-TTL", "5"), ("Stream-Expires-At", "2030-01-01T00:00:00Z")),
    *(
        put(ROOT + "bad/type", 400, "invalid_content_type", ("Content-Type", kind))
        for kind in (
            "text",
            "/",
            "text/",
            "/plain",
            "a b/c",
            "text/plain, text/html",
            "text/pl\u00e4in",
            "x/" + "y" * 300,
        )
    ),
    put(ROOT + "bad/json-body", 400, "invalid_json", ("Content-Type", "application/json"), body=b"{"),
    put(ROOT + OPEN, 409, "stream_exists", ("Content-Type", "application/json")),
    put(ROOT + OPEN, 409, "stream_exists", ("Content-Type", "text/plain"), ("Stream-TTL", "60")),
    put(ROOT + OPEN, 409, "stream_exists", ("Content-Type", "text/plain"), ("Stream-Closed", "true")),
    put(ROOT + "bad/match", 412, "precondition_failed", ("If-Match", '"nothing"')),
    put(ROOT + "bad/seq", 400, "invalid_stream_seq", ("Stream-Seq", "x" * 1000)),
]

FORKS = [
    *(
        put(ROOT + "bad/fork", 400, None, ("Stream-Forked-From", source))
        for source in (
            "",
            "open",
            "bad/open",
            "/",
            "/v1/stream/",
            "/v1/stream/..",
            "/v1/stream/a%00",
            "/v1/stream/%zz",
            "/v1/stream/" + "x" * 300,
            "http://[",
            "http://[::1/v1/stream/bad/open",
            b"\xff\xfe",
            "javascript:alert(1)",
        )
    ),
    put(ROOT + "bad/fork", 404, "fork_source_not_found", ("Stream-Forked-From", ROOT + "bad/none")),
    put(ROOT + "bad/fork", 400, "invalid_fork", ("Stream-Fork-Offset", "0000000000000000_0000000000000000")),
    put(ROOT + "bad/fork", 400, "invalid_fork", ("Stream-Fork-Sub-Offset", "0")),
    *(
        put(ROOT + "bad/fork", 400, None, ("Stream-Forked-From", ROOT + OPEN), ("Stream-Fork-Offset", offset))
        for offset in ("", "abc", "now", "-1", "0000000000000000_0000000000009999", "9" * 5000, b"\xb2")
    ),
    *(
        put(ROOT + "bad/fork", 400, None, ("Stream-Forked-From", ROOT + OPEN), ("Stream-Fork-Sub-Offset", sub))
        for sub in ("", "-1", "+1", "1.5", "01", "abc", "9999", "9" * 5000, b"\xb2")
    ),
    put(
        ROOT + "bad/fork",
        409,
        "content_type_mismatch",
        ("Stream-Forked-From", ROOT + OPEN),
        ("Content-Type", "application/json"),
    ),
]

INTEGERS = ("", "-1", "+1", "1.0", "1e1", "abc", " ", "0x1", "9007199254740992", "9" * 5000, b"\xb2", "1,1")
APPENDS = [
    *(post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p", epoch, "0")) for epoch in INTEGERS),
    *(post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p", "0", seq)) for seq in INTEGERS),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("", "0", "0")),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p" * 1000, "0", "0")),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p", None, None)),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer(None, "0", None)),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer(None, None, "0")),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p", "0", None)),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer("p", None, "0")),
    post(ROOT + OPEN, 400, "invalid_producer_headers", *producer(None, "0", "0")),
    post(ROOT + OPEN, 409, "producer_sequence_gap", *producer("new", "0", "1")),
    post(ROOT + OPEN, 400, "invalid_stream_seq", ("Stream-Seq", "x" * 1000)),
    post(ROOT + OPEN, 412, "precondition_failed", ("If-Match", b'\xff"')),
    post(ROOT + OPEN, 412, "precondition_failed", ("If-Match", "")),
    post(ROOT + OPEN, 400, "empty_body", body=b""),
    post(ROOT + OPEN, 400, "empty_body", ("Stream-Closed", "yes"), body=b""),
    Case("POST", ROOT + OPEN, [], b"x", 400, "missing_content_type"),
    Case("POST", ROOT + OPEN, [("Content-Type", "")], b"x", 400, "missing_content_type"),
    Case("POST", ROOT + OPEN, [("Content-Type", "application/json")], b"1", 409, "content_type_mismatch"),
    Case("POST", ROOT + OPEN, [("Content-Type", b"\xff\xfe")], b"1", 409, "content_type_mismatch"),
    post(ROOT + CLOSED, 409, "stream_closed"),
    post(ROOT + CLOSED, 409, "stream_closed", ("Stream-Closed", "true")),
    *(
        Case("POST", ROOT + JSON_STREAM, [("Content-Type", "application/json")], body, 400, None)
        for body in (
            b"{",
            b"}",
            b"[",
            b"]",
            b"[]",
            b" [ ] ",
            b"[1,]",
            b"[,1]",
            b"[1 2]",
            b'{"a":}',
            b'{"a":1,}',
            b"{'a':1}",
            b"{a:1}",
            b"{1:2}",
            b"nul",
            b"True",
            b"NaN",
            b"Infinity",
            b"-",
            b"01",
            b"1.",
            b".5",
            b"1e",
            b"+1",
            b"0x10",
            b'"unterminated',
            b'"\x01"',
            b'"a\nb"',
            b'"\\x"',
            b'"\\u12"',
            b'"\\ud800"',
            b'"\xff"',
            b'["\xc3\x28"]',
            b'"\xed\xa0\x80"',
            b"1 2",
            b"[1] [2]",
            b"1]",
            b"// comment\n1",
            b"\xef\xbb\xbf1",
            b"\x00",
            b"1\x00",
            b" ",
            b"[" * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        )
    ),
]

METHODS = [
    Case(method, target, [], None, 405, "method_not_allowed")
    for method in ("PATCH", "TRACE", "PROPFIND", "LOCK", "SEARCH", "PURGE")
    for target in (ROOT + OPEN, "/healthz")
] + [
    Case("PUT", "/healthz", [], None, 400, "invalid_bucket"),
    Case("POST", "/healthz", [], None, 405, "method_not_allowed"),
    Case("DELETE", "/healthz", [], None, 405, "method_not_allowed"),
]

GROUPS = {"path": PATHS, "read": READS, "create": CREATES, "fork": FORKS, "append": APPENDS, "method": METHODS}
CASES = [
    pytest.param(case, id=f"{group} {number}") for group, cases in GROUPS.items() for number, case in enumerate(cases)
]


def name_of(case: Case) -> str:
    """What was sent, short enough to read."""
    text = f"{case.method} {case.target!r} {case.headers!r} {case.body!r}" if case.body else str(case[:3])
    return ascii(text)[:100]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_the_right_status_and_a_json_error(server: Server, case: Case) -> None:
    with RawConnection(server.url, seconds=5) as connection:
        answer = connection.exchange(case.method, case.target, case.headers, case.body)
        assert answer.status == case.status, (name_of(case), answer)
        if case.method != "HEAD":
            assert_error(answer, case.code)
        if answer.headers.get("connection") != "close":
            # A refusal of this kind is no reason to hang up, nor to lose count of requests.
            assert connection.exchange("GET", "/healthz").status == 200
    if case.method == "PUT" and case.target != "/healthz" and answer.status != 409:
        with RawConnection(server.url) as connection:
            assert connection.exchange("HEAD", case.target).status in (400, 404), "a refused PUT created its stream"


def assert_error(answer: Answer, code: str | None) -> None:
    error = answer.error
    assert code is None or error["code"] == code, error
    assert set(json.loads(answer.body)) == {"error"}


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("parameters", [("Content-Type", "text/plain; charset=utf-8")]),
        ("case", [("Content-Type", "TEXT/PLAIN")]),
        ("header", [("Content-Type", "text/plain"), ("X-Unknown", b"\xff\xfe")]),
        ("closed-false", [("Content-Type", "text/plain"), ("Stream-Closed", "false")]),
        ("closed-1", [("Content-Type", "text/plain"), ("Stream-Closed", "1")]),
    ],
)
def test_unusual_but_valid_append_is_stored(server: Server, name: str, headers: list[Header]) -> None:
    path, body = f"{ROOT}bad/unusual-{name}", b"stored"
    with RawConnection(server.url) as connection:
        assert connection.exchange("PUT", path, [("Content-Type", "text/plain")]).status == 201
        assert connection.exchange("POST", path, headers, body).status == 204
        assert connection.exchange("GET", path).body == body


@pytest.mark.parametrize(
    "name",
    ["%C3%A9t%C3%A9", "a%20b", "a%2Fb", "a%252e%252e", "a+b", "a:b;c=d,e", "%F0%9F%8C%8A", "x" * 113, "~!$&'()*"],
)
def test_unusual_but_valid_name_is_a_stream_of_its_own(server: Server, name: str) -> None:
    with RawConnection(server.url) as connection:
        created = connection.exchange("PUT", ROOT + name, [("Content-Type", "text/plain")], name.encode())
        assert created.status == 201
        assert created.headers["location"] == f"{server.url}{ROOT}{name}"
        assert connection.exchange("GET", ROOT + name).body == name.encode()
        assert connection.exchange("DELETE", ROOT + name).status == 204


@pytest.mark.parametrize("cursor", ["", "abc", "-1", "9" * 20, "9" * 5000, "%C2%B2", "1.5", "%00"])
@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_any_cursor_is_tolerated(server: Server, cursor: str, live: str) -> None:
    """A cursor is an opaque echo; one that makes no sense counts as none."""
    with RawConnection(server.url, seconds=5) as connection:
        connection.send(connection.request("GET", f"{ROOT}{OPEN}?offset=-1&live={live}&cursor={cursor}"))
        assert connection.head()[0] == 200
