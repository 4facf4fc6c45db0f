"""Thousands of mutated requests against a running server: each is answered below 500, and nothing else is harmed."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from support.raw_http import Answer, ConnectionEnded, RawConnection
from support.server import ServerProcess
from support.serving import Serve

# What it checks is how long things take.
pytestmark = pytest.mark.alone

# The server is killed and started again.
ADAPTERS = ("native",)
CONTROL = "/v1/stream/fuzz-control/kept"
CONTROL_CONTENT = b"not one byte of this may change"
BATCH = 500
HEADER_SECONDS = 0.5
TEXT = b"Content-Type: text/plain\r\n"
JSON = b"Content-Type: application/json\r\n"

METHODS = [b"GET", b"PUT", b"POST", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"get", b""]
SEGMENTS = [b"a", b"b", b"..", b".", b"", b"%00", b"%2e%2e", b"%", b"%zz", b"%ff", b"x" * 130, b"__ds", b"%C3%A9", b"*"]
TARGETS = [
    b"/v1/stream/fuzz/text",
    b"/v1/stream/fuzz/json",
    b"/v1/stream/fuzz/closed",
    b"/v1/stream/fuzz/new",
    b"/v1/stream/__ds/subscriptions/s1",
    b"/v1/stream/__ds/subscriptions",
    b"/v1/stream/__ds",
    b"/fuzz-bucket",
    b"/fuzz-bucket/stream",
    b"/fuzz-bucket/stream/snapshot",
    b"/healthz",
    b"/",
    b"*",
    b"http://127.0.0.1/v1/stream/fuzz/text",
]
QUERIES = [
    b"",
    b"?offset=-1",
    b"?offset=now",
    b"?offset=now&live=long-poll",
    b"?offset=-1&live=long-poll&cursor=1",
    b"?offset=0000000000000000_0000000000000003",
    b"?offset=%00",
    b"?offset=",
    b"?offset=-1&offset=-1",
    b"?live=sse",
    b"?live=%ff&offset=1",
    b"?&&==&",
    b"?offset=" + b"9" * 400,
]
VALUES = [
    b"",
    b"0",
    b"1",
    b"-1",
    b"true",
    b"TRUE",
    b"abc",
    b"9007199254740992",
    b"9" * 400,
    b"\xff\xfe",
    b"\xb2",
    b"text/plain",
    b"application/json",
    b"application/json; charset=x",
    b"2030-01-01T00:00:00Z",
    b"2030-99-01T00:00:00Z",
    b"/v1/stream/fuzz/text",
    b"http://[::1/v1/stream/fuzz/text",
    b"0000000000000000_0000000000000002",
    b"*",
    b'"1:-1:0000000000000000_0000000000000000"',
    b"Bearer x.y",
    b"a, b",
    b"chunked",
    b"gzip",
    b"100-continue",
    b"close",
    b"Upgrade",
    b"h2c",
    b"%00",
    b"\t x \t",
    b"x" * 3000,
]
NAMES = [
    b"Content-Type",
    b"Stream-TTL",
    b"Stream-Expires-At",
    b"Stream-Closed",
    b"Stream-Seq",
    b"Stream-Forked-From",
    b"Stream-Fork-Offset",
    b"Stream-Fork-Sub-Offset",
    b"Producer-Id",
    b"Producer-Epoch",
    b"Producer-Seq",
    b"If-Match",
    b"If-None-Match",
    b"Authorization",
    b"Host",
    b"Connection",
    b"Upgrade",
    b"Accept",
    b"Origin",
    b"Content-Encoding",
    b"X-Forwarded-Host",
    b"Cookie",
]
BODIES = [
    b"",
    b"x",
    b"abc",
    b"1",
    b"[1,2]",
    b"[]",
    b"{",
    b'{"a":1}',
    b"\xff\x00",
    b"[" * 5000,
    b'"\\ud800"',
    b"NaN",
    b"x" * 20_000,
    b'{"pattern":"fuzz/*","type":"pull-wake","wake_stream":"fuzz/wake"}',
    b'{"pattern":"/**","type":"webhook","webhook":{"url":"http://[::1"}}',
    b'{"pattern":1,"type":null,"streams":[[]]}',
]


class Generator:
    """Requests that are nearly right: made of known parts, then mutated at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> bytes:
        pick = self.random.choice
        target = pick(TARGETS)
        if self.random.random() < 0.3:
            target = b"/v1/stream/" + b"/".join(pick(SEGMENTS) for _ in range(self.random.randint(1, 4)))
        target += pick(QUERIES) if self.random.random() < 0.5 else b""
        head = b"%b %b HTTP/1.%b\r\n" % (pick(METHODS[:6] * 4 + METHODS), target, pick([b"1"] * 8 + [b"0", b"9", b""]))
        if self.random.random() < 0.97:
            head += b"Host: 127.0.0.1\r\n"
        if self.random.random() < 0.6:
            head += pick([TEXT, JSON])
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 5))):
            head += b"%b: %b\r\n" % (pick(NAMES), pick(VALUES))
        data = head + self._framed(pick(BODIES))
        return self._mutated(data) if self.random.random() < 0.35 else data

    def _framed(self, body: bytes) -> bytes:
        chance = self.random.random()
        if chance < 0.6:
            return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        if chance < 0.75:
            middle = self.random.randint(0, len(body))
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:middle], body[middle:]) if part)
            trailer = self.random.choice((b"", b"X-T: 1\r\n", b"Stream-Closed: true\r\n"))
            return b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (chunks, trailer)
        if chance < 0.8:
            return b"Content-Length: %b\r\n\r\n%b" % (self.random.choice(VALUES), body)
        if chance < 0.85:
            return b"Transfer-Encoding: %b\r\n\r\n%b" % (self.random.choice(VALUES), body)
        return b"\r\n"

    def _mutated(self, data: bytes) -> bytes:
        mutable = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            at = self.random.randrange(len(mutable)) if mutable else 0
            kind = self.random.randrange(5)
            if kind == 0 and mutable:
                mutable[at] = self.random.randrange(256)
            elif kind == 1:
                mutable[at:at] = self.random.choice((b"\r\n", b"\n", b"\x00", b" ", b":", b"%", b"\xff", b"," * 50))
            elif kind == 2:
                del mutable[at : at + self.random.randint(1, 8)]
            elif kind == 3:
                mutable[at:at] = mutable[at : at + self.random.randint(1, 60)]
            else:
                mutable = mutable[:at] or mutable
        # The control stream must not be hit by a request that happens to be a valid one for it.
        return bytes(mutable).replace(b"fuzz-control", b"fuzz-x")


@pytest.fixture(scope="module")
def server(serve: Serve) -> ServerProcess:
    running = serve(
        # A request cut short is not the server's to wait for; a client that said all it had half-closes besides.
        f"http.header_timeout={HEADER_SECONDS}s",
        "http.body_timeout=500ms",
        "read.long_poll_timeout=50ms",
        "read.sse_lifetime=100ms",
        "cold.flush_interval=500ms",
    )
    assert isinstance(running, ServerProcess)
    with RawConnection(running.url) as connection:
        text = [("Content-Type", "text/plain")]
        assert connection.exchange("PUT", CONTROL, text, CONTROL_CONTENT).status == 201
    return running


def prepare(url: str) -> None:
    """Streams for the requests to hit, put back now and then since some of them delete or close."""
    for name, kind in (("text", "text/plain"), ("json", "application/json"), ("closed", "text/plain")):
        with RawConnection(url) as connection:
            path = f"/v1/stream/fuzz/{name}"
            connection.exchange("DELETE", path)
            headers = [("Content-Type", kind)] + ([("Stream-Closed", "true")] if name == "closed" else [])
            connection.exchange("PUT", path, headers, b"1")


def fuzz(server: ServerProcess, seed: int, requests: int) -> None:
    print(f"seed {seed}")
    generator = Generator(seed)
    statuses: dict[int, int] = {}
    # Many at a time: what is cut short waits for the server's timeout.
    with ThreadPoolExecutor(32) as clients:
        for _ in range(requests // BATCH):
            prepare(server.url)
            batch = [generator.request() for _ in range(BATCH)]
            for data, answers in zip(batch, clients.map(partial(send, server.url), batch), strict=True):
                for answer in answers:
                    assert answer.status < 500 or answer.status in (501, 505), (data, answer)
                    statuses[answer.status] = statuses.get(answer.status, 0) + 1
    assert server.process is not None and server.process.poll() is None
    with RawConnection(server.url) as connection:
        assert connection.exchange("GET", "/healthz").status == 200
        control = connection.exchange("GET", CONTROL)
        assert (control.status, control.body) == (200, CONTROL_CONTENT)
    assert "Traceback" not in server.stderr(), server.stderr()[-3000:]
    # The generator is not so wild that everything is refused at the door.
    assert {200, 204, 400, 404, 405} <= statuses.keys(), statuses
    server.kill()
    server.start()
    with RawConnection(server.url) as connection:
        assert connection.exchange("GET", CONTROL).body == CONTROL_CONTENT


def send(url: str, data: bytes) -> list[Answer]:
    """Every answer to these bytes. None at all is a fault, unless they do not even hold the end of a request line."""
    method = data.split(b" ", 1)[0].decode("latin-1")
    began = time.monotonic()
    with RawConnection(url, seconds=5) as connection:
        connection.send(data)
        is_prompt = time.monotonic() - began < HEADER_SECONDS / 2
        answers = []
        started = time.monotonic()
        while True:
            try:
                answer = connection.answer("HEAD" if method == "HEAD" else "GET")
            except ConnectionEnded:
                break
            except TimeoutError:
                raise AssertionError(f"no answer to {data!r}") from None
            answers.append(answer)
            if answer.status >= 200 and not connection.buffer:
                break  # one answer is what is asked; a mutation may have made two requests of one, which is fine
            assert time.monotonic() - started < 5, data
    if not answers and not is_prompt:
        return send(url, data)  # this machine kept us from speaking in time, and the server did right to hang up
    assert answers or not data.strip(b"\r\n"), (data, "the connection ended without an answer")
    return answers


def test_thousands_of_mutated_requests_are_answered_below_500_and_harm_nothing(server: ServerProcess) -> None:
    fuzz(server, random.randrange(2**32), 3000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_a_hundred_thousand_mutated_requests_are_answered_below_500(server: ServerProcess, seed: int) -> None:
    fuzz(server, seed, 5000)
