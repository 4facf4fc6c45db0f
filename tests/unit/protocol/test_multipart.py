"""multipart/mixed: what is encoded, Python's `email` parser reads back byte for byte."""

from __future__ import annotations

import re
from email.parser import BytesParser
from email.policy import HTTP

from hypothesis import example, given
from hypothesis import strategies as st

from millstream.protocol.multipart import boundary_from, closing, encode_parts, part_head

Part = tuple[str, bytes]

BOUNDARY = boundary_from(bytes(range(16)))
# Bytes out of which line breaks and boundary look-alikes are soon made.
awkward = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"-", b"--", b"\0", b"--millstream-", b"a", b": ", b"\xff", b" "]),
    max_size=12,
).map(b"".join)
payloads = awkward | st.binary(max_size=60)
content_types = st.sampled_from(["application/octet-stream", "text/plain", "application/json", 'text/x; a="b; c"'])


def encoded(first: Part, content_type: str, rest: list[bytes], boundary: str = BOUNDARY) -> bytes:
    head = part_head(boundary, first[0], is_first=True)
    return head + first[1] + encode_parts(boundary, content_type, rest) + closing(boundary)


def decoded(body: bytes, boundary: str = BOUNDARY) -> list[Part]:
    document = b"Content-Type: multipart/mixed; boundary=%b\r\n\r\n%b" % (boundary.encode(), body)
    message = BytesParser(policy=HTTP).parsebytes(document)
    assert message.defects == []
    parts: list[Part] = []
    for part in message.iter_parts():
        ((name, content_type),) = part.raw_items()
        assert name == "Content-Type"
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)
        parts.append((content_type, payload))
    return parts


@given(content_types, payloads, content_types, st.lists(payloads, max_size=5))
@example("text/plain", b"", "text/plain", [])
@example("text/plain", b"\r\n", "text/plain", [b"\r", b"\n", b"", b"\r\n--", b"--"])
def test_parts_read_back_exactly(first_type: str, first: bytes, content_type: str, rest: list[bytes]) -> None:
    expected = [(first_type, first), *((content_type, payload) for payload in rest)]
    assert decoded(encoded((first_type, first), content_type, rest)) == expected


@given(st.binary(min_size=16, max_size=16), payloads)
def test_payload_that_holds_another_boundary_reads_back_exactly(random: bytes, payload: bytes) -> None:
    other = boundary_from(random).encode()
    if other == BOUNDARY.encode():
        return
    forged = b"\r\n--" + other + b"\r\n" + payload + b"\r\n--" + other + b"--\r\n" + payload
    assert decoded(encoded(("a/b", forged), "c/d", [forged]))[1] == ("c/d", forged)


def test_body_is_laid_out_as_rfc_2046_says() -> None:
    assert encoded(("text/html", b"state"), "text/plain", [b"one", b""], "edge") == (
        b"--edge\r\nContent-Type: text/html\r\n\r\nstate"
        b"\r\n--edge\r\nContent-Type: text/plain\r\n\r\none"
        b"\r\n--edge\r\nContent-Type: text/plain\r\n\r\n"
        b"\r\n--edge--"
    )


@given(st.lists(payloads, max_size=6), st.integers(0, 6))
def test_parts_encoded_in_pieces_are_the_same_bytes(rest: list[bytes], cut: int) -> None:
    pieces = encode_parts(BOUNDARY, "a/b", rest[:cut]) + encode_parts(BOUNDARY, "a/b", rest[cut:])
    assert pieces == encode_parts(BOUNDARY, "a/b", rest)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_boundary_is_legal_without_quotes_and_as_unique_as_its_chance(one: bytes, other: bytes) -> None:
    boundary = boundary_from(one)
    assert re.fullmatch(r"[0-9A-Za-z'+_.-]{1,70}", boundary)  # RFC 2046 bchars that need no quotes (RFC 2045 tokens)
    assert (boundary == boundary_from(other)) == (one == other)
