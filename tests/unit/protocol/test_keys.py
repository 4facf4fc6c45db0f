"""Names: paths become keys and keys paths, and what names no stream is refused."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.protocol.keys import (
    DEFAULT_BUCKET,
    KEY_BYTES_MAX,
    RESERVED_BUCKETS,
    StreamKey,
    decode_segment,
    parse_bucket,
    parse_bucketed,
    parse_v1_path,
    stream_key_of,
)

# Four of them fit a key, however many bytes their characters take.
segment = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=7).filter(
    lambda text: ".." not in text
)
paths = st.lists(segment, min_size=1, max_size=4).map("/".join)


@given(paths)
def test_a_path_survives_the_round_trip_through_its_key(path: str) -> None:
    if path.startswith((f"{DEFAULT_BUCKET}/", "__ds/")) or path == "__ds":
        return
    assert parse_v1_path(path).v1_path == path


@given(paths)
def test_a_path_survives_percent_encoding(path: str) -> None:
    assert decode_segment(quote(path, safe="").encode()) == path
    assert decode_segment(quote(path).encode()) == path


def test_a_path_without_a_slash_lives_in_the_default_bucket() -> None:
    assert parse_v1_path("solo") == StreamKey(DEFAULT_BUCKET, "solo")
    assert parse_v1_path("a/b/c") == StreamKey("a", "b/c")


@pytest.mark.parametrize("path", ["", "/", "/a", "a/", "a/..", "../a", "a/b..c", "__ds/x", "__ds/"])
def test_a_path_that_names_no_stream_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_v1_path(path)
    assert caught.value.code == "invalid_path"


@pytest.mark.parametrize("raw", [b"%", b"a%2", b"%zz", b"%ff", b"\xff", b"%ed%a0%80", b"a%00b", b"a\0b", b"%c0%af"])
def test_bytes_that_are_no_text_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_segment(raw)
    assert caught.value.code == "invalid_path"


@given(st.binary(max_size=30))
def test_whatever_the_bytes_the_answer_is_text_or_a_refusal(raw: bytes) -> None:
    try:
        text = decode_segment(raw)
    except InvalidRequest:
        return
    assert "\0" not in text


def test_the_length_limit_counts_bytes_and_the_slash() -> None:
    longest = KEY_BYTES_MAX - len("bucket/")
    assert parse_v1_path("bucket/" + "x" * longest)
    with pytest.raises(InvalidRequest, match="123 bytes") as caught:
        parse_v1_path("bucket/" + "x" * (longest + 1))
    assert caught.value.hint is not None
    assert str(KEY_BYTES_MAX) in caught.value.hint
    with pytest.raises(InvalidRequest):
        parse_v1_path("bucket/" + "é" * (longest // 2 + 1))


@pytest.mark.parametrize("name", ["logs", "a_b-c", "0" * 64, "_default"])
def test_a_bucket_name_of_the_allowed_letters_is_accepted(name: str) -> None:
    assert parse_bucket(name) == name


@pytest.mark.parametrize(
    "name", ["", "abc", "x" * 65, "Logs", "lo gs", "lögs", "lo.gs", "logs\n", *sorted(RESERVED_BUCKETS)]
)
def test_any_other_bucket_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_bucket(name)
    assert caught.value.code == "invalid_bucket"


@pytest.mark.parametrize("stream", ["", "a/b", "..", "a..b", "streams", "x" * 118])
def test_a_stream_name_outside_the_rules_of_buckets_is_refused(stream: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_bucketed("logs", stream)


def test_both_url_forms_name_the_same_stream() -> None:
    assert parse_bucketed("logs", "today") == parse_v1_path("logs/today")


pieces = st.one_of(
    st.sampled_from(
        ["__ds", "_default", "a", "..", "", "/", ".", "%2F", "%41", "é", "\n", "x" * 59, "x" * 60, "x" * 61]
    ),
    st.text("abZ09_-./%", max_size=4),
)


@given(st.lists(pieces, max_size=5).map("".join))
def test_a_plain_path_is_read_as_any_other(path: str) -> None:
    def outcome(read: Callable[[], StreamKey]) -> object:
        try:
            return read()
        except InvalidRequest as refusal:
            return refusal.code, refusal.message

    raw = path.encode()
    # Whether or not a path of the same bucket was read before.
    before, slash, _ = raw.rpartition(b"/")
    outcome(lambda: stream_key_of(b"/v1/stream/" + before + slash + b"a"))
    found = outcome(lambda: stream_key_of(b"/v1/stream/" + raw))
    assert found == outcome(lambda: parse_v1_path(decode_segment(raw)))
    assert not isinstance(found, StreamKey) or type(found.bucket) is type(found.stream) is str
