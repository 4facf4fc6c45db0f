"""HTTP/1.1 from the client's side: answers in pieces of any size, requests that a server's parser understands."""

from __future__ import annotations

import itertools

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.errors import BadAnswer, BadRequest
from millstream.client.http1 import HEAD_BYTES_MAX, LINE_BYTES_MAX, AnswerParser, encode_head
from millstream.client.messages import Origin, Request

ORIGIN = Origin("http", "example.com", 4437)
bodies = st.binary(max_size=300) | st.sampled_from([b"\r\n", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])


def feed(parser: AnswerParser, stream: bytes, cuts: list[int]) -> bytes:
    """Feed a stream in pieces, taking the body now and then; returns all of it."""
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    taken = b""
    for start, end in itertools.pairwise(edges):
        parser.feed(stream[start:end])
        if end % 2:
            taken += parser.take()
    return taken + parser.take()


def chunked(body: bytes, sizes: list[int]) -> bytes:
    stream, at = b"", 0
    for size in sizes:
        piece = body[at : at + size]
        if piece:
            stream += b"%x;ext=1\r\n%b\r\n" % (len(piece), piece)
        at += size
    if body[at:]:
        stream += b"%X\r\n%b\r\n" % (len(body) - at, body[at:])
    return stream + b"0\r\nTrailer: x\r\n\r\n"


@given(bodies, st.lists(st.integers(0, 10_000)), st.lists(st.integers(1, 50)), st.booleans())
def test_a_body_arrives_whole_however_it_is_cut(
    body: bytes, cuts: list[int], sizes: list[int], is_chunked: bool
) -> None:
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a:\t 2 \r\n%b\r\n\r\n" % framing
    parser = AnswerParser("GET")
    assert feed(parser, head + (chunked(body, sizes) if is_chunked else body), cuts) == body
    assert parser.is_complete and parser.can_reuse
    assert (parser.status, parser.headers["x-a"]) == (200, "1, 2")


@given(bodies, st.lists(st.integers(0, 10_000)))
def test_a_body_without_a_length_ends_with_the_connection(body: bytes, cuts: list[int]) -> None:
    parser = AnswerParser("GET")
    assert feed(parser, b"HTTP/1.1 200 OK\r\n\r\n" + body, cuts) == body
    assert not parser.is_complete
    parser.end()
    assert parser.is_complete and not parser.can_reuse


@given(bodies.filter(bool), st.lists(st.integers(1, 50)), st.integers(1, 20), st.booleans())
def test_an_answer_cut_short_is_never_complete(body: bytes, sizes: list[int], missing: int, is_chunked: bool) -> None:
    framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
    stream = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing + (chunked(body, sizes) if is_chunked else body)
    parser = AnswerParser("GET")
    parser.feed(stream[: -min(missing, len(body))])
    parser.end()
    assert not parser.is_complete


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("HEAD", 404)], ids=lambda value: str(value)
)
def test_some_answers_have_no_body_whatever_they_announce(method: str, status: int) -> None:
    parser = AnswerParser(method)
    parser.feed(b"HTTP/1.1 %d X\r\ncontent-length: 10\r\n\r\n" % status)
    assert parser.is_complete and parser.can_reuse


def test_interim_answers_are_passed_over() -> None:
    parser = AnswerParser("POST")
    stream = (
        b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\nHTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    )
    assert feed(parser, stream, [3, 30, 60]) == b"ok"
    assert (parser.status, dict(parser.headers)) == (200, {"content-length": "2"})


@pytest.mark.parametrize(
    ("head", "can_reuse"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 204 No Content\r\n\r\n", False),
        (b"HTTP/1.0 204 No Content\r\nconnection: keep-alive\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n", True),
    ],
)
def test_which_connections_serve_again(head: bytes, can_reuse: bool) -> None:
    parser = AnswerParser("GET")
    parser.feed(head)
    assert parser.is_complete and parser.can_reuse is can_reuse


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * (LINE_BYTES_MAX + 1),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * HEAD_BYTES_MAX,
    ],
)
def test_what_is_not_http_is_refused(stream: bytes) -> None:
    with pytest.raises(BadAnswer):
        AnswerParser("GET").feed(stream)


class Judge:
    """What a server's parser makes of a request."""

    def __init__(self, stream: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.is_complete = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(stream)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    st.dictionaries(
        st.sampled_from(["producer-id", "stream-seq", "if-match"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=255), min_size=1, max_size=30),
    ),
    bodies,
)
def test_a_request_is_understood_or_refused(method: str, headers: dict[str, str], body: bytes) -> None:
    request = Request(method, "/v1/stream/a%20b?offset=-1", headers, body if method in ("PUT", "POST") else b"")
    try:
        head = encode_head(ORIGIN, request)
    except BadRequest:
        assert "\x7f" in "".join(headers.values())
        return
    judge = Judge(head + request.body)
    assert judge.is_complete and judge.url == request.target.encode() and judge.body == request.body
    found = {name.decode(): value.decode("latin-1") for name, value in judge.headers}
    assert found.pop("host") == "example.com:4437"
    found.pop("content-length", None)
    assert {name: value.strip() for name, value in found.items()} == {
        name: value.strip() for name, value in headers.items()
    }


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "a\0", "ł", "\x7f"])
def test_a_header_that_would_break_out_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match=r"producer-id .* cannot be sent in a header"):
        encode_head(ORIGIN, Request("POST", "/x", {"producer-id": value}))
