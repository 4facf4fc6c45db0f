"""Server-sent events in pieces of any size, against a parser that follows the WHATWG rules on the whole."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from millstream.client.events import EventParser
from support.sse_parser import parse_events

FIELDS = [b"data:", b"data: ", b"data", b"event: x", b"event:control", b"id: 7", b"id:\0", b":", b"datax: y"]
ENDINGS = [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\r\r"]
OTHERS = [b"a", b"\xc3\xa9", b"\xef\xbb\xbf", b" "]
streams = st.lists(st.sampled_from(FIELDS + ENDINGS + OTHERS), max_size=40).map(b"".join)


@given(streams, st.lists(st.integers(0, 1000)))
@example(b"\xef\xbb\xbfdata: x\n\n", [])
@example(b"data:a\r\ndata:b\r\n\r\n", [7, 8, 16])
@example(b"data\n\n", [])
def test_any_cut_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    parser = EventParser()
    found = [event for start, end in itertools.pairwise(edges) for event in parser.feed(stream[start:end])]
    expected = parse_events(stream)
    assert [(event.type, event.data.decode(), event.id) for event in found] == [
        (event.type, event.data, event.id) for event in expected
    ]
