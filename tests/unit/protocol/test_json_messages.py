"""JSON mode: bodies split into byte-exact messages, and exactly what is JSON is accepted."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest, PayloadTooLarge
from millstream.protocol import json_messages
from millstream.protocol.json_messages import join_messages, split_messages

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
spaces = st.text(" \t\r\n", max_size=3)


def encoded(value: Any, ascii_only: bool) -> bytes:
    return json.dumps(value, ensure_ascii=ascii_only).encode()


@given(st.lists(values, max_size=6), st.booleans(), spaces, spaces)
def test_elements_come_back_byte_for_byte(elements: list[Any], ascii_only: bool, before: str, after: str) -> None:
    raw = [encoded(element, ascii_only) for element in elements]
    separator = f"{after},{before}".encode()
    body = f"{before}[{before}".encode() + separator.join(raw) + f"{after}]{after}".encode()
    assert split_messages(body) == raw


@given(values.filter(lambda value: not isinstance(value, list)), spaces, spaces)
def test_a_single_value_is_one_message_without_the_space_around_it(value: Any, before: str, after: str) -> None:
    raw = encoded(value, False)
    assert split_messages(before.encode() + raw + after.encode()) == [raw]


@given(st.lists(values, max_size=6))
def test_joined_messages_split_into_the_same_messages(elements: list[Any]) -> None:
    raw = [encoded(element, False) for element in elements]
    assert split_messages(join_messages(raw)) == raw


@pytest.mark.parametrize(
    "element",
    [
        b"1.00",
        b"-0",
        b"-0.0e+10",
        b"123456789012345678901234567890",
        b"0.1000000000000000055511151231257827",
        b"1e999",
        b'{"b":1, "a" :2,\n"b":3}',
        b'"\\u00e9 \\/ \\n"',
        '"é — 日本語 😀"'.encode(),
        b'"\\ud83d\\ude00"',
        b"[[],[[]],[1,[2,[3]]]]",
        b"null",
        b'""',
    ],
)
def test_spelling_is_kept_as_it_was_sent(element: bytes) -> None:
    assert split_messages(b"[" + element + b"]") == [element]
    if not element.startswith(b"["):
        assert split_messages(element) == [element]


def test_only_the_outer_array_is_split() -> None:
    assert split_messages(b"[[1,2],[3]]") == [b"[1,2]", b"[3]"]


def test_an_empty_array_has_no_messages() -> None:
    assert split_messages(b"[]") == split_messages(b" [ \n] ") == []


def is_json(body: bytes) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        # str.encode refuses lone surrogates, which no UTF-8 text can hold.
        json.dumps(json.loads(body.decode(), parse_constant=refuse), ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


fragments = st.sampled_from(
    [
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b'"',
        b"\\",
        b"1",
        b"0",
        b"-",
        b".",
        b"e",
        b"null",
        b"true",
        b'"a"',
        b" ",
        b"\n",
        b"\x00",
        b"\x1f",
        b"\xff",
        b"\xc3\xa9",
        b"\xed\xa0\x80",
        b"\\u00e9",
        b"\\x",
        b"NaN",
        b"/",
        b"+",
    ]
)


@given(st.lists(fragments, max_size=8).map(b"".join))
@example(b'["\xed\xa0\x80"]')
@example(b"\xef\xbb\xbf[1]")
@example(b"[1]\x00")
def test_exactly_what_a_reference_parser_accepts_is_accepted(body: bytes) -> None:
    if is_json(body):
        assert json.loads(join_messages(split_messages(body))) == (
            json.loads(body) if body.lstrip()[:1] == b"[" else [json.loads(body)]
        )
    else:
        with pytest.raises(InvalidRequest) as caught:
            split_messages(body)
        assert caught.value.code == "invalid_json"


@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_a_body_cut_short_is_refused(elements: list[Any], data: Any) -> None:
    body = encoded(elements, False)
    with pytest.raises(InvalidRequest):
        split_messages(body[: data.draw(st.integers(0, len(body) - 1))])


@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_a_flipped_byte_is_refused_or_kept_as_it_is(elements: list[Any], data: Any) -> None:
    body = bytearray(encoded(elements, False))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        messages = split_messages(bytes(body))
    except InvalidRequest:
        return
    assert json.loads(join_messages(messages)) is not None
    assert all(message in body for message in messages)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":['])
def test_a_body_nested_too_deeply_is_refused_not_a_crash(opening: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_messages(opening * 100_000)
    assert caught.value.code == "invalid_json"


def test_a_body_that_is_not_utf8_is_refused_with_the_place() -> None:
    with pytest.raises(InvalidRequest, match="byte 2"):
        split_messages(b'["\xff"]')


@given(st.lists(values, max_size=12), st.booleans(), spaces, st.integers(1, 7), st.integers(0, 13))
@example([{"a": 'x",]"', "b\\": ["\\\\", ","]}, [[], [1, [2, 3]]], '\\"', {}], True, "", 3, 4)
def test_an_array_is_refused_exactly_if_it_has_more_elements_than_allowed(
    elements: list[Any], ascii_only: bool, space: str, slice_bytes: int, limit: int
) -> None:
    """Counted in slices of a few bytes, so that every kind of token lies across the edge of one."""
    body = b"[" + f"{space},{space}".encode().join(encoded(element, ascii_only) for element in elements) + b"]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_messages, "_COUNTED_SLICE", slice_bytes)
        if len(elements) > max(limit, 1):
            with pytest.raises(PayloadTooLarge) as refusal:
                split_messages(body, max(limit, 1))
            assert refusal.value.code == "too_many_messages"
        else:
            assert len(split_messages(body, max(limit, 1))) == len(elements)


@given(st.text('[]{},"\\\\1 ', max_size=60), st.integers(1, 7), st.integers(1, 5))
def test_what_is_no_json_is_refused_before_more_elements_are_made_than_allowed(
    text: str, slice_bytes: int, limit: int
) -> None:
    body = b"[" + text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_messages, "_COUNTED_SLICE", slice_bytes)
        with suppress(InvalidRequest):
            assert len(split_messages(body, limit)) <= limit
        # As much of it as is valid, closed: if that has more elements, the whole was refused for their number.
        for end in range(len(body), 0, -1):
            if body[end - 1 : end] == b",":
                try:
                    count = len(split_messages(body[: end - 1] + b"]"))
                except InvalidRequest:
                    continue
                assert json_messages._has_more(body, limit) or count <= limit
                break
