"""HTTP/1.1 as the native adapter speaks it: framing, pipelining, keep-alive and refusals, over raw sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count

import pytest

from support.raw_http import RawConnection
from support.serving import Serve

ADAPTERS = ("in-process",)
TEXT = ("Content-Type", "text/plain")
CLOSE = ("Connection", "close")
CHUNKED = ("Transfer-Encoding", "chunked")
BODY_BYTES_MAX = 64 * 1024

_numbers = count()


@pytest.fixture(scope="module")
def url(serve: Serve) -> str:
    return serve("read.long_poll_timeout=500ms", f"http.body_bytes_max={BODY_BYTES_MAX}").url


@pytest.fixture
def connection(url: str) -> Iterator[RawConnection]:
    with RawConnection(url) as opened:
        yield opened


@pytest.fixture
def path(url: str) -> str:
    """A text stream of its own for each test."""
    name = f"/v1/stream/messages/{next(_numbers)}"
    with RawConnection(url) as opened:
        assert opened.exchange("PUT", name, [TEXT]).status == 201
    return name


def content(url: str, path: str) -> bytes:
    with RawConnection(url) as opened:
        answer = opened.exchange("GET", f"{path}?offset=-1")
        assert answer.status == 200
        return answer.body


# -- bodies ------------------------------------------------------------------------------------------------------


def test_chunked_body_is_stored_as_one_message(url: str, connection: RawConnection, path: str) -> None:
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + b"3\r\nabc\r\n00A\r\n0123456789\r\n0\r\n\r\n")
    assert connection.answer().status == 204
    assert content(url, path) == b"abc0123456789"


def test_chunk_extensions_are_ignored(url: str, connection: RawConnection, path: str) -> None:
    body = b'3;name=value\r\nabc\r\n2;a;b="quoted"\r\nde\r\n0;last\r\n\r\n'
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + body)
    assert connection.answer().status == 204
    assert content(url, path) == b"abcde"


def test_trailers_are_ignored_and_the_connection_goes_on(url: str, connection: RawConnection, path: str) -> None:
    body = b"3\r\nabc\r\n0\r\nX-Checksum: 1\r\nX-Other: 2\r\n\r\n"
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + body)
    assert connection.answer().status == 204
    assert connection.exchange("GET", f"{path}?offset=-1").body == b"abc"


def test_trailer_named_like_a_header_changes_nothing(url: str, connection: RawConnection, path: str) -> None:
    """RFC 9110 §6.5.1: a trailer must not be merged into the headers unless its field allows it."""
    body = b"3\r\nabc\r\n0\r\nStream-Closed: true\r\nX-Last: 1\r\n\r\n"
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + body)
    answer = connection.answer()
    assert (answer.status, answer.headers.get("stream-closed")) == (204, None)
    assert "stream-closed" not in connection.exchange("HEAD", path).headers
    assert content(url, path) == b"abc"


def test_oversized_trailers_are_refused(url: str, connection: RawConnection, path: str) -> None:
    trailers = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 1000) for number in range(100))
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + b"3\r\nabc\r\n0\r\n" + trailers + b"\r\n")
    assert connection.answer().status in (400, 431)
    assert content(url, path) == b""


def test_body_sent_in_single_bytes_arrives_whole(url: str, connection: RawConnection, path: str) -> None:
    request = connection.request("POST", path, [TEXT], b"one byte at a time")
    for at in range(len(request)):
        connection.send(request[at : at + 1])
    assert connection.answer().status == 204
    assert content(url, path) == b"one byte at a time"


def test_chunked_body_sent_in_single_bytes_arrives_whole(url: str, connection: RawConnection, path: str) -> None:
    body = b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nX-T: 1\r\n\r\n"
    request = connection.request("POST", path, [TEXT, CHUNKED]) + body
    for at in range(len(request)):
        connection.send(request[at : at + 1])
    assert connection.answer().status == 204
    assert content(url, path) == b"abcde"


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\nabc\r\n0\r\n\r\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"0x3\r\nabc\r\n",
    ],
)
def test_malformed_chunk_is_400_and_nothing_is_stored(
    url: str, connection: RawConnection, path: str, body: bytes
) -> None:
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]) + body)
    answer = connection.answer()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.error["code"] == "malformed_request"
    connection.assert_ended()
    assert content(url, path) == b""


def test_body_over_the_limit_by_content_length_is_413_before_it_is_sent(
    url: str, connection: RawConnection, path: str
) -> None:
    connection.send(connection.request("POST", path, [TEXT, ("Content-Length", str(BODY_BYTES_MAX + 1))]))
    answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
    connection.assert_ended()
    assert content(url, path) == b""


def test_body_over_the_limit_by_content_length_is_413_even_if_sent_whole(
    url: str, connection: RawConnection, path: str
) -> None:
    connection.send(connection.request("POST", path, [TEXT], b"x" * (BODY_BYTES_MAX + 1)))
    assert connection.answer().status == 413


def test_body_over_the_limit_in_chunks_is_413(url: str, connection: RawConnection, path: str) -> None:
    connection.send(connection.request("POST", path, [TEXT, CHUNKED]))
    for _ in range(BODY_BYTES_MAX // 4096 + 1):
        connection.send(b"1000\r\n" + b"x" * 4096 + b"\r\n")
    answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
    assert content(url, path) == b""


def test_body_of_exactly_the_limit_is_stored(url: str, connection: RawConnection, path: str) -> None:
    body = b"x" * BODY_BYTES_MAX
    assert connection.exchange("POST", path, [TEXT], body).status == 204
    assert content(url, path) == body


# -- Expect: 100-continue -------------------------------------------------------------------------------------------


def test_expect_100_continue_gets_100_before_the_body(url: str, connection: RawConnection, path: str) -> None:
    request = connection.request("POST", path, [TEXT, ("Expect", "100-continue")], b"abc")
    connection.send(request[:-3])
    assert connection.answer().status == 100
    connection.send(request[-3:])
    assert connection.answer().status == 204
    assert content(url, path) == b"abc"


def test_expect_100_continue_with_too_large_a_body_gets_413_instead(
    url: str, connection: RawConnection, path: str
) -> None:
    headers = [TEXT, ("Expect", "100-continue"), ("Content-Length", str(BODY_BYTES_MAX * 2))]
    connection.send(connection.request("POST", path, headers))
    assert connection.answer().status == 413
    connection.assert_ended()


def test_expect_100_continue_behind_a_pipelined_request_gets_100_in_turn(
    url: str, connection: RawConnection, path: str
) -> None:
    """The request before it is still at work when these headers arrive; the client waits for its 100 all the same."""
    first = connection.request("POST", path, [TEXT], b"abc")
    second = connection.request("POST", path, [TEXT, ("Expect", "100-continue")], b"def")
    connection.send(first + second[:-3])
    assert connection.answer().status == 204
    assert connection.answer().status == 100
    connection.send(second[-3:])
    assert connection.answer().status == 204
    assert content(url, path) == b"abcdef"


def test_unknown_expectation_is_417(connection: RawConnection, path: str) -> None:
    answer = connection.exchange("POST", path, [TEXT, ("Expect", "the-unexpected")], b"abc")
    assert (answer.status, answer.error["code"]) == (417, "expectation_failed")


# -- connections ----------------------------------------------------------------------------------------------------


def test_pipelined_put_post_get_are_answered_in_order_and_the_get_sees_the_post(connection: RawConnection) -> None:
    path = f"/v1/stream/messages/{next(_numbers)}"
    connection.send(
        connection.request("PUT", path, [TEXT])
        + connection.request("POST", path, [TEXT], b"written just now")
        + connection.request("GET", f"{path}?offset=-1")
    )
    assert connection.answer("PUT").status == 201
    assert connection.answer("POST").status == 204
    assert connection.answer("GET").body == b"written just now"


def test_two_hundred_pipelined_appends_are_answered_and_stored_in_order(
    url: str, connection: RawConnection, path: str
) -> None:
    messages = [b"<%d>" % number for number in range(200)]
    connection.send(b"".join(connection.request("POST", path, [TEXT], message) for message in messages))
    end = 0
    for message in messages:
        answer = connection.answer()
        end += len(message)
        assert (answer.status, answer.headers["stream-next-offset"]) == (204, f"{0:016d}_{end:016d}")
    assert content(url, path) == b"".join(messages)


def test_large_body_and_the_start_of_the_next_request_in_one_packet_are_both_served(
    url: str, connection: RawConnection, path: str
) -> None:
    """Only the second request's own bytes may count against its header limit."""
    body = b"x" * 60_000
    head = connection.request("GET", f"{path}?offset=now", [CLOSE])
    connection.send(connection.request("POST", path, [TEXT], body) + head[:20])
    assert connection.answer("POST").status == 204
    connection.send(head[20:])
    assert connection.answer().status == 200
    assert content(url, path) == body


def test_garbage_behind_a_pipelined_request_is_refused_after_its_answer(connection: RawConnection, path: str) -> None:
    connection.send(connection.request("POST", path, [TEXT], b"abc") + b"\x00\x01 garbage\r\n\r\n")
    assert connection.answer().status == 204
    answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (400, "malformed_request")
    connection.assert_ended()


def test_connection_stays_open_for_the_next_request(connection: RawConnection, path: str) -> None:
    for _ in range(3):
        answer = connection.exchange("GET", f"{path}?offset=-1")
        assert (answer.status, answer.headers.get("connection")) == (200, None)


def test_connection_close_is_honoured_and_said(connection: RawConnection, path: str) -> None:
    answer = connection.exchange("GET", f"{path}?offset=-1", [CLOSE])
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    connection.assert_ended()


def test_requests_behind_a_connection_close_are_not_handled(url: str, connection: RawConnection, path: str) -> None:
    connection.send(
        connection.request("POST", path, [TEXT, CLOSE], b"first") + connection.request("POST", path, [TEXT], b"second")
    )
    assert connection.answer().status == 204
    connection.assert_ended()
    assert content(url, path) == b"first"


@pytest.mark.parametrize("more", [b"X", b"\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bytes_behind_a_connection_close_do_not_spoil_the_answer(
    connection: RawConnection, path: str, method: str, more: bytes
) -> None:
    """Whether the answer is given at once (GET) or after the log (POST)."""
    connection.send(connection.request(method, path, [TEXT, CLOSE], b"abc") + more)
    answer = connection.answer(method)
    assert (answer.status, answer.headers["connection"]) == (200 if method == "GET" else 204, "close")
    connection.assert_ended()


def test_http_1_0_is_answered_and_closed(connection: RawConnection, path: str) -> None:
    connection.send(connection.request("GET", f"{path}?offset=-1", version="1.0", host=False))
    answer = connection.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    connection.assert_ended()


def test_http_1_0_with_keep_alive_stays_open(connection: RawConnection, path: str) -> None:
    request = connection.request("GET", f"{path}?offset=-1", [("Connection", "keep-alive")], version="1.0")
    for _ in range(2):
        connection.send(request)
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")


def test_http_1_0_sse_is_not_chunked_and_ends_with_the_connection(url: str, path: str) -> None:
    with RawConnection(url) as writer:
        assert writer.exchange("POST", path, [TEXT, ("Stream-Closed", "true")], b"all there is").status == 204
    with RawConnection(url) as reader:
        reader.send(reader.request("GET", f"{path}?offset=-1&live=sse", version="1.0"))
        status, headers = reader.head()
        assert (status, headers.get("transfer-encoding")) == (200, None)
        events = reader.rest()
    assert b"\nevent: data\ndata:all there is\n\n" in events and b'"streamClosed":true' in events


def test_head_has_headers_and_no_body(connection: RawConnection, path: str) -> None:
    connection.exchange("POST", path, [TEXT], b"abc")
    connection.send(connection.request("HEAD", path) + connection.request("HEAD", "/v1/stream/messages/none"))
    answer = connection.answer("HEAD")
    assert (answer.status, answer.headers["stream-next-offset"]) == (200, f"{0:016d}_{3:016d}")
    assert connection.answer("HEAD").status == 404
    assert connection.exchange("GET", f"{path}?offset=-1").body == b"abc"


def test_absolute_form_of_the_target_is_understood(connection: RawConnection, path: str) -> None:
    answer = connection.exchange("PUT", f"http://{connection.host}{path}", [TEXT])
    assert answer.status == 200
    assert connection.exchange("GET", f"http://{connection.host}/healthz").status == 200


def test_options_asterisk_is_answered(connection: RawConnection) -> None:
    assert connection.exchange("OPTIONS", "*").status in (200, 204)


def test_client_that_half_closes_after_its_request_gets_its_answer(
    url: str, connection: RawConnection, path: str
) -> None:
    connection.send(connection.request("POST", path, [TEXT], b"abc"))
    connection.finish_sending()
    assert connection.answer().status == 204
    connection.assert_ended()
    assert content(url, path) == b"abc"


def test_client_that_half_closes_after_pipelined_requests_gets_every_answer(
    url: str, connection: RawConnection, path: str
) -> None:
    requests = [connection.request("POST", path, [TEXT], b"%d;" % number) for number in range(5)]
    connection.send(b"".join([*requests, connection.request("GET", f"{path}?offset=-1")]))
    connection.finish_sending()
    assert [connection.answer().status for _ in requests] == [204] * 5
    assert connection.answer().body == b"0;1;2;3;4;"
    connection.assert_ended()


def test_client_that_half_closes_inside_a_request_is_let_go_and_nothing_is_stored(
    url: str, connection: RawConnection, path: str
) -> None:
    connection.send(connection.request("POST", path, [TEXT], b"abcdef")[:-3])
    connection.finish_sending()
    rest = connection.rest()
    assert rest == b"" or rest.startswith(b"HTTP/1.1 400")
    assert content(url, path) == b""


# -- an upgrade we do not offer is ignored (RFC 9110 §7.8) -------------------------------------------------------------

H2C = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")]


def test_h2c_upgrade_request_gets_exactly_one_answer(connection: RawConnection, path: str) -> None:
    connection.send(connection.request("GET", f"{path}?offset=-1", H2C))
    answer = connection.answer()
    if answer.headers.get("connection") == "close":
        connection.assert_ended()
    else:
        assert connection.exchange("GET", "/healthz").status == 200, "a second answer came"
    assert answer.status in (200, 501)


def test_h2c_upgrade_request_with_a_body_is_stored_whole_or_refused_whole(
    url: str, connection: RawConnection, path: str
) -> None:
    connection.send(connection.request("POST", path, [TEXT, *H2C], b"abc"))
    answer = connection.answer()
    assert answer.status in (204, 501)
    assert content(url, path) == (b"abc" if answer.status == 204 else b"")
    if answer.headers.get("connection") == "close":
        connection.assert_ended()


def test_connect_gets_exactly_one_answer(connection: RawConnection) -> None:
    connection.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
    assert 400 <= connection.answer().status < 502
    connection.assert_ended()


# -- requests that could be read in two ways ---------------------------------------------------------------------------

SMUGGLED = b"POST /v1/stream/messages/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3\r\nContent-Length: 3\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: -3\r\n",
        b"Content-Length: 0x3\r\n",
        b"Content-Length: 3 3\r\n",
        b"Content-Length: \r\n",
        b"Content-Length: 99999999999999999999999999\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Content-Length : 3\r\n",
        b"Content-Length: 3\r\n folded\r\n",
        b"X: y\nTransfer-Encoding: chunked\r\n",
        b"X: \x00\r\n",
        b"X\x00: y\r\n",
        b": y\r\n",
        b"no colon here\r\n",
    ],
)
def test_ambiguous_framing_is_400_and_the_connection_ends(connection: RawConnection, framing: bytes) -> None:
    head = b"POST /v1/stream/messages/ambiguous HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    connection.send(head + framing + b"\r\n3\r\nabc\r\n0\r\n\r\n" + SMUGGLED)
    answer = connection.answer()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.error["code"] == "malformed_request"
    connection.assert_ended()


def test_missing_host_is_400(connection: RawConnection) -> None:
    connection.send(connection.request("GET", "/healthz", host=False))
    answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (400, "missing_host")
    connection.assert_ended()


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("hosts", [["bad host!"], ["a", "b"], ["a/b"], ["user@host"], ["x:123456"]])
def test_invalid_or_repeated_host_is_400_and_nothing_is_created(url: str, method: str, hosts: list[str]) -> None:
    """RFC 9112 §3.2. A PUT must not create the stream first and then fail to say where."""
    path = f"/v1/stream/messages/{next(_numbers)}"
    with RawConnection(url, seconds=3) as connection:
        connection.send(connection.request(method, path, [("Host", host) for host in hosts], host=False))
        answer = connection.answer()
        assert answer.status == 400
        assert answer.error["code"] in ("invalid_host", "malformed_request")
    with RawConnection(url) as connection:
        assert connection.exchange("HEAD", path).status == 404


@pytest.mark.parametrize(
    "head",
    [
        b"FROBNICATE /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"get /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1 extra\r\nHost: x\r\n\r\n",
        b"GET /heal thz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz FTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n\x00\x00\x00",
    ],
)
def test_what_is_not_a_request_is_refused_with_an_answer(connection: RawConnection, head: bytes) -> None:
    connection.send(head)
    answer = connection.answer()
    assert answer.status in (400, 405, 501, 505)
    assert answer.error["code"]
    connection.assert_ended()


# -- sizes of headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"q" * 40_000),
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n" % (b"v" * 40_000),
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n%b: v\r\n\r\n" % (b"n" * 40_000),
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n%b\r\n" % b"".join(b"x-%d: v\r\n" % number for number in range(5000)),
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"x: v\r\n" * 20_000),
    ],
    ids=["long target", "long value", "long name", "many headers", "one header repeated"],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_headers_over_the_limit_are_431(connection: RawConnection, head: bytes, at_once: bool) -> None:
    if at_once:
        connection.send(head)
    else:
        try:
            for at in range(0, len(head), 4096):
                connection.send(head[at : at + 4096])
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was all sent
    answer = connection.answer()
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    connection.assert_ended()


def test_endless_header_line_is_431_without_waiting_for_its_end(connection: RawConnection) -> None:
    connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Endless: ")
    for _ in range(20):
        connection.send(b"v" * 4096)
    assert connection.answer().status == 431


# -- live reads on a raw connection ----------------------------------------------------------------------------------


def test_sse_is_chunked_without_content_length_and_delivers_an_append_at_once(url: str, path: str) -> None:
    with RawConnection(url) as reader, RawConnection(url) as writer:
        reader.send(reader.request("GET", f"{path}?offset=-1&live=sse"))
        status, headers = reader.head()
        assert (status, headers["content-type"], headers["transfer-encoding"]) == (200, "text/event-stream", "chunked")
        assert "content-length" not in headers
        first = reader.chunk()
        assert first is not None and b"\nevent: control\n" in first
        assert writer.exchange("POST", path, [TEXT], b"hello").status == 204
        event = reader.chunk()
    assert event is not None and b"\nevent: data\ndata:hello\n\nid: " in event
    control = json.loads(event.partition(b"event: control\ndata:")[2])
    assert (control["streamNextOffset"], control["upToDate"]) == (f"{0:016d}_{5:016d}", True)


def test_long_poll_answers_when_an_append_arrives(url: str, path: str) -> None:
    with RawConnection(url) as reader, RawConnection(url) as writer:
        reader.send(reader.request("GET", f"{path}?offset=-1&live=long-poll"))
        assert writer.exchange("POST", path, [TEXT], b"hello").status == 204
        answer = reader.answer()
        assert (answer.status, answer.body) == (200, b"hello")


def test_long_poll_times_out_with_204_and_keeps_the_connection(connection: RawConnection, path: str) -> None:
    started = time.monotonic()
    assert connection.exchange("GET", f"{path}?offset=now&live=long-poll").status == 204
    assert time.monotonic() - started >= 0.4
    assert connection.exchange("GET", "/healthz").status == 200
