"""SSE: what is encoded means the same to a parser that follows the WHATWG rules."""

from __future__ import annotations

import json
import re
from base64 import b64decode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.protocol.json_messages import join_messages
from millstream.protocol.sse import HEARTBEAT, encode_control, encode_data, encode_event, is_base64
from support.sse_parser import Event, parse_events

texts = st.text(st.sampled_from("ab :\r\n\t\ufeffédatevn\0") | st.characters(codec="utf-8"), max_size=40)


def with_plain_line_ends(text: str) -> str:
    """SSE cannot carry which line ending it was: every one arrives as LF."""
    return re.sub(r"\r\n|\r", "\n", text)


@given(texts)
@example("")
@example(" leading")
@example("\n data: x")
@example("data: x\ndata: y\n\n")
@example("a\r\r\n\nb\r")
@example("\n\nevent: control\ndata: forged\n\n")
def test_a_text_payload_arrives_whole(text: str) -> None:
    assert parse_events(encode_event(b"data", text.encode(), b"7")) == [Event("data", with_plain_line_ends(text), "7")]


@given(st.lists(texts.filter(bool), min_size=1, max_size=4))
def test_a_run_of_text_messages_is_one_event(messages: list[str]) -> None:
    stream = encode_data("text/plain", [message.encode() for message in messages], "7")
    assert parse_events(stream) == [Event("data", with_plain_line_ends("".join(messages)), "7")]


@given(st.lists(st.binary(min_size=1), min_size=1, max_size=4))
def test_a_run_of_binary_messages_is_one_base64_text(messages: list[bytes]) -> None:
    (event,) = parse_events(encode_data("application/octet-stream", messages, "7"))
    assert b64decode(event.data, validate=True) == b"".join(messages)


@given(st.lists(st.recursive(st.integers() | st.text(), st.lists, max_leaves=4), min_size=1, max_size=4))
def test_a_run_of_json_messages_is_one_array(values: list[object]) -> None:
    messages = [json.dumps(value, indent=1).encode() for value in values]
    (event,) = parse_events(encode_data("application/json; charset=utf-8", messages, "7"))
    assert json.loads(event.data) == values
    assert event.data.encode() == join_messages(messages)


@given(st.lists(texts, min_size=1, max_size=5))
def test_events_and_heartbeats_in_a_row_stay_apart(payloads: list[str]) -> None:
    stream = b"".join(encode_event(b"data", payload.encode(), b"7") + HEARTBEAT for payload in payloads)
    assert [event.data for event in parse_events(stream)] == [with_plain_line_ends(text) for text in payloads]


@given(texts)
def test_an_event_cut_short_is_not_seen(text: str) -> None:
    assert parse_events(encode_event(b"data", text.encode(), b"7")[:-1]) == []


@pytest.mark.parametrize(
    ("up_to_date", "closed", "expected"),
    [
        (False, False, {"streamNextOffset": "o", "streamCursor": "7"}),
        (True, False, {"streamNextOffset": "o", "streamCursor": "7", "upToDate": True}),
        # A closed stream needs no cursor: nobody reconnects.
        (True, True, {"streamNextOffset": "o", "upToDate": True, "streamClosed": True}),
    ],
)
def test_a_control_event_says_what_the_client_needs(
    up_to_date: bool, closed: bool, expected: dict[str, object]
) -> None:
    (event,) = parse_events(encode_control("o", cursor="7", up_to_date=up_to_date, closed=closed))
    assert (event.type, event.id) == ("control", "o")
    assert json.loads(event.data) == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/plain", False),
        ("TEXT/Markdown; charset=utf-8", False),
        ("application/json", False),
        ("application/octet-stream", True),
        ("application/x-protobuf", True),
    ],
)
def test_only_text_and_json_travel_as_they_are(content_type: str, expected: bool) -> None:
    assert is_base64(content_type) is expected
