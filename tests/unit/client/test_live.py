"""Followers against a model of a stream whose connections break anywhere: every message once, in order."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.errors import BadAnswer, ClientError, ConnectionFailed, NotFound, Unavailable
from millstream.client.live import Mode, Position, follow, follow_feed
from millstream.client.messages import Request, Response
from millstream.client.results import Chunk
from millstream.protocol.offsets import format_offset, parse_offset
from millstream.protocol.sse import encode_control, encode_data
from support.conversations import Answer, emitted, lost, settings

JSON, BYTES = "application/json", "application/octet-stream"
EVENTS = {"content-type": "text/event-stream"}


class Model:
    """A closed stream, or one that stays open, behind connections that break where the given numbers say."""

    def __init__(self, content_type: str, messages: list[bytes], faults: list[int], *, is_open: bool = False) -> None:
        self._ending = {"stream-up-to-date": "true"} if is_open else {"stream-closed": "true"}
        self._is_open = is_open
        self.content_type = content_type
        self.messages = messages
        self.ends = [sum(map(len, messages[: index + 1])) for index in range(len(messages))]
        self._faults = faults
        self._unsent = b""

    def _chance(self) -> int:
        return self._faults.pop() if self._faults else -1

    def answer(self, request: Request, is_open: bool) -> Answer:
        chance = self._chance()
        if chance % 7 == 0:
            return lost()
        if chance % 7 == 1:
            return Response(503, {"retry-after": "1"})
        query = parse_qs(urlsplit(request.target).query)
        offset = 0 if query["offset"] == ["-1"] else parse_offset(query["offset"][0])
        if query.get("live") == ["sse"]:
            self._unsent = self._events(offset)
            encoding = {} if self.content_type == JSON else {"stream-sse-data-encoding": "base64"}
            return Response(200, {"content-type": "text/event-stream", **encoding})
        return self._page(offset, 1 + chance % 3, is_live="live" in query)

    def _from(self, offset: int) -> int:
        return sum(end <= offset for end in self.ends)

    def _events(self, offset: int) -> bytes:
        stream = b": hello\n\n"
        for index in range(self._from(offset), len(self.messages)):
            token = format_offset(self.ends[index])
            stream += encode_data(self.content_type, [self.messages[index]], token)
            stream += encode_control(token, cursor="1", up_to_date=False, closed=False)
        last = format_offset(self.ends[-1] if self.ends else 0)
        return stream + encode_control(
            last, cursor="1" if self._is_open else None, up_to_date=True, closed=not self._is_open
        )

    def _page(self, offset: int, count: int, *, is_live: bool) -> Response:
        first = self._from(offset)
        taken = self.messages[first : first + count]
        end = first + len(taken)
        headers = {"stream-next-offset": format_offset(self.ends[end - 1] if end else 0)}
        if end == len(self.messages):
            headers |= self._ending
        if is_live and "stream-closed" not in headers:
            headers["stream-cursor"] = "1"
        if not taken and is_live:
            return Response(204, headers)
        body = b"[" + b",".join(taken) + b"]" if self.content_type == JSON else b"".join(taken)
        return Response(200, {"content-type": self.content_type, **headers}, body)

    def body(self) -> bytes | ClientError:
        chance = self._chance()
        if chance % 5 == 0:
            return lost()
        if chance % 5 == 1:
            return b""  # the connection's time is over
        size = len(self._unsent) if chance < 0 else 1 + chance
        piece, self._unsent = self._unsent[:size], self._unsent[size:]
        return piece


values = st.lists(st.text(min_size=1, max_size=8) | st.integers() | st.lists(st.integers(), max_size=2), max_size=8)


@given(values, st.lists(st.integers(0, 60), max_size=60), st.sampled_from(["sse", "long-poll", "auto"]))
def test_json_messages_arrive_once_and_in_order(found: list[object], faults: list[int], mode: Mode) -> None:
    messages = [json.dumps(value).encode() for value in found]
    model = Model(JSON, messages, faults)
    position = Position("-1")
    following = follow("/s", position, mode, None, settings(patience=1000))
    chunks = list(emitted(following, model.answer, model.body))
    assert [message for chunk in chunks for message in chunk.messages()] == messages
    assert position.closed and position.offset == format_offset(sum(map(len, messages)))


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=8), st.lists(st.integers(0, 60), max_size=60))
def test_bytes_arrive_once_and_in_order(messages: list[bytes], faults: list[int]) -> None:
    model = Model(BYTES, messages, faults)
    following = follow("/s", Position("-1"), "sse", BYTES, settings(patience=1000))
    assert b"".join(chunk.data for chunk in emitted(following, model.answer, model.body)) == b"".join(messages)


def test_a_follower_gives_up_after_its_patience() -> None:
    following = follow("/s", Position("-1"), "sse", JSON, settings(patience=3))
    asked: list[Request] = []

    def never(request: Request, is_open: bool) -> Answer:
        asked.append(request)
        return lost(was_sent=False)

    with pytest.raises(ConnectionFailed):
        list(emitted(following, never, lambda: b""))
    assert len(asked) == 4


def test_connections_that_end_without_a_word_wear_patience_out() -> None:
    for conversation in (
        follow("/s", Position("-1"), "sse", JSON, settings(patience=2)),
        follow_feed("team", Position(""), "", "sse", settings(patience=2)),
    ):
        with pytest.raises(ConnectionFailed, match="before anything was said"):
            list(emitted(conversation, lambda *_: Response(200, EVENTS), lambda: b""))


def test_nonsense_in_events_is_named() -> None:
    for stream in (b"event: control\ndata: {}\n\n", b"event: control\ndata: nonsense\n\n"):
        conversation = follow("/s", Position("-1"), "sse", JSON, settings())
        with pytest.raises(BadAnswer):
            list(emitted(conversation, lambda *_: Response(200, EVENTS), partial(bytes, stream)))


def test_base64_may_be_cut_into_lines_and_nothing_else() -> None:
    control = b'event: control\ndata: {"streamNextOffset":"7","streamClosed":true}\n\n'
    encoded = {**EVENTS, "stream-sse-data-encoding": "base64"}

    def received(data: bytes) -> list[bytes]:
        conversation = follow("/s", Position("-1"), "sse", BYTES, settings())
        stream = b"event: data\n" + data + b"\n\n" + control
        chunks = emitted(conversation, lambda *_: Response(200, encoded), partial(bytes, stream))
        return [chunk.data for chunk in chunks]

    assert received(b"data: AAEC\ndata: A\r\ndata:wQF") == [bytes(range(6))]
    assert received(b"data:") == []
    for wrong in (b"data: AAE", b"data: AA!EC", b"data: AAEC AAEC"):
        with pytest.raises(BadAnswer, match="not base64"):
            received(wrong)


def test_events_of_other_kinds_are_passed_over() -> None:
    stream = (
        b'event: news\ndata: {"streamNextOffset":"1"}\n\nevent: data\ndata:[1]\n\nevent: data\ndata:[[2]]\n\n'
        b'event: control\ndata: {"streamNextOffset":"7","streamClosed":true}\n\n'
    )
    conversation = follow("/s", Position("-1"), "sse", JSON, settings())
    (chunk,) = emitted(conversation, lambda *_: Response(200, EVENTS), partial(bytes, stream))
    assert (chunk.json(), chunk.up_to_date, chunk.closed) == ([1, [2]], True, True)


@given(values, st.lists(st.integers(0, 60), max_size=60), st.sampled_from(["sse", "long-poll", "auto"]))
def test_a_follower_may_stop_at_the_end_of_an_open_stream(found: list[object], faults: list[int], mode: Mode) -> None:
    messages = [json.dumps(value).encode() for value in found]
    model = Model(JSON, messages, faults, is_open=True)
    position = Position("-1")
    following = follow("/s", position, mode, None, settings(patience=1000), until_up_to_date=True)
    chunks = list(emitted(following, model.answer, model.body))
    assert [message for chunk in chunks for message in chunk.messages()] == messages
    assert (position.up_to_date, position.closed) == (True, False)


def test_a_live_answer_without_a_cursor_is_refused_unless_the_stream_is_closed() -> None:
    page = {"content-type": BYTES, "stream-next-offset": "7", "stream-up-to-date": "true"}

    def followed(headers: dict[str, str]) -> list[bytes]:
        following = follow("/s", Position("-1"), "long-poll", None, settings())
        return [chunk.data for chunk in emitted(following, lambda *_: Response(200, headers, b"x"), bytes)]

    assert followed({**page, "stream-closed": "true"}) == [b"x"]
    with pytest.raises(BadAnswer, match="Stream-Cursor"):
        followed(page)


def test_what_is_not_json_is_named_when_it_is_decoded() -> None:
    for data in (b"XY]", b'[{"a":1}', b"\xff"):
        chunk = Chunk(data, JSON, "1", True, False)
        for decode in (chunk.json, chunk.messages):
            with pytest.raises(BadAnswer, match="not a JSON array"):
                decode()


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_nobody_is_set_back_by_a_server_that_has_less(mode: Mode) -> None:
    """Such a server sends what it has next, from its own end on: a repeat, or something else altogether."""
    model = Model(JSON, [b"1", b"2", b"3"], [])
    position = Position(format_offset(5))
    following = follow("/s", position, mode, JSON, settings(patience=3))
    with pytest.raises(Unavailable, match="before 0000000000000000_0000000000000005, to which it was read"):
        list(emitted(following, model.answer, model.body))
    assert position.offset == format_offset(5)


def test_an_answer_that_is_no_event_stream_is_named() -> None:
    page = Response(200, {"content-type": "text/html"})
    with pytest.raises(BadAnswer, match="no event stream"):
        list(emitted(follow("/s", Position("-1"), "sse", JSON, settings()), lambda *_: page, lambda: b""))


def test_a_missing_stream_is_not_waited_for() -> None:
    with pytest.raises(NotFound):
        list(emitted(follow("/s", Position("-1"), "auto", None, settings()), lambda *_: Response(404, {}), lambda: b""))


def item(position: int, payload: bytes) -> bytes:
    described: dict[str, object] = {
        "event": "message",
        "bucket": "team",
        "stream": "s",
        "offset": "0",
        "next_offset": "1",
    }
    described |= {"position": position, "appended_at_ms": 1, "content_type": BYTES}
    described |= {"encoding": "base64", "payload": b64encode(payload).decode()}
    return json.dumps(described).encode()


@given(st.integers(1, 8), st.lists(st.integers(0, 60), max_size=40), st.booleans())
def test_a_feed_arrives_once_and_in_order(count: int, faults: list[int], is_sse: bool) -> None:
    unsent = b""

    def after(request: Request) -> int:
        return int(parse_qs(urlsplit(request.target).query).get("after", ["0.0"])[0][2:])

    def answer(request: Request, is_open: bool) -> Answer:
        nonlocal unsent
        if faults and faults.pop() % 5 == 0:
            return lost()
        start = after(request)
        if is_open:
            unsent = b"".join(
                b'id: 0.%d\nevent: message\ndata: %b\n\nevent: control\ndata: {"token":"0.%d"}\n\n'
                % (number, item(number, bytes([number])), number)
                for number in range(start + 1, count + 1)
            )
            return Response(200, EVENTS)
        last = min(start + 2, count)
        body = b"".join(item(number, bytes([number])) + b"\n" for number in range(start + 1, last + 1))
        return Response(200, {"content-type": "x", "stream-feed-token": f"0.{last}"}, body)

    def body() -> bytes | ClientError:
        nonlocal unsent
        chance = faults.pop() if faults else -1
        if chance % 5 == 0:
            return lost()
        size = len(unsent) if chance < 0 else chance
        piece, unsent = unsent[:size], unsent[size:]
        return piece

    seen: list[bytes | None] = []
    following = follow_feed("team", Position(""), "", "sse" if is_sse else "long-poll", settings(patience=1000))
    for page in emitted(following, answer, body):
        seen += [one.payload for one in page.items]
        if len(seen) >= count:
            break
    assert seen == [bytes([number]) for number in range(1, count + 1)]
