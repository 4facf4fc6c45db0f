"""Which document a path names, and which streams that document has."""

from __future__ import annotations

import pytest

from millstream.errors import InvalidRequest
from millstream.protocol.keys import KEY_BYTES_MAX, StreamKey
from millstream.yjs.names import Document, parse_document


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (b"/v1/yjs/notes/docs/plan", Document("notes", "plan")),
        (b"/v1/yjs/notes/docs/project/chapter-1", Document("notes", "project/chapter-1")),
        (b"/v1/yjs/notes/docs//project///chapter-1/", Document("notes", "project/chapter-1")),
        (b"/v1/yjs/notes/docs/project%2Fchapter-1", Document("notes", "project/chapter-1")),
        (b"/v1/yjs/My.Service/docs/caf%C3%A9", Document("My.Service", "café")),
        (b"/v1/yjs/notes/docs/docs", Document("notes", "docs")),
    ],
)
def test_a_path_names_a_document(path: bytes, document: Document) -> None:
    assert parse_document(path) == document


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/yjs/notes/docs/..",
        b"/v1/yjs/notes/docs/a/../b",
        b"/v1/yjs/notes/docs/./a",
        b"/v1/yjs/notes/docs/a/%2e%2e/b",
        b"/v1/yjs/notes/docs/%2E",
        b"/v1/yjs/notes/docs/a%2F..%2Fb",
        b"/v1/yjs/../docs/a",
        b"/v1/yjs/notes/docs/",
        b"/v1/yjs/notes/docs",
        b"/v1/yjs/notes/other/a",
        b"/v1/yjs/notes",
        b"/v1/yjs/",
        b"/v1/yjs/__ds/docs/a",
        b"/v1/yjs/_default/docs/a",
        b"/v1/yjs/notes/docs/a%00b",
        b"/v1/yjs/notes/docs/a%zz",
        b"/v1/yjs/notes/docs/%ff",
        b"/v1/yjs/notes/docs/" + b"a" * 99,
    ],
)
def test_a_path_that_names_none_is_refused(path: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_document(path)


def test_the_longest_path_leaves_room_for_awareness() -> None:
    room = KEY_BYTES_MAX - len("notes/awareness//default")
    document = parse_document(b"/v1/yjs/notes/docs/" + b"a" * room)
    assert len(str(document.awareness_key("default"))) == KEY_BYTES_MAX
    with pytest.raises(InvalidRequest) as refusal:
        parse_document(b"/v1/yjs/notes/docs/" + b"a" * (room + 1))
    assert refusal.value.hint is not None and str(room) in refusal.value.hint


def test_streams_of_a_document_and_of_one_below_it_are_told_apart() -> None:
    document, below = Document("notes", "a"), Document("notes", "a/b")
    assert document.key == StreamKey("notes", "docs/a")
    assert document.awareness_key("admin") == StreamKey("notes", "awareness/a/admin")
    assert document.owns_awareness(document.awareness_key("default"))
    assert not document.owns_awareness(below.awareness_key("default"))
    assert not below.owns_awareness(document.awareness_key("b"))
    assert not document.owns_awareness(document.key)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\0", "n" * 120])
def test_an_awareness_stream_has_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Document("notes", "a").awareness_key(name)
