"""Folds: the same state however the messages are cut into calls."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.pipeline import folds

PATCHES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def test_merge_patch_follows_the_examples_of_rfc_7396() -> None:
    for target, patch, result in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "foo"}, "bar", "bar"),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        folded = folds.merge_patch(json.dumps(target).encode(), [json.dumps(patch).encode()])
        assert json.loads(folded) == result


@given(st.lists(PATCHES, min_size=1, max_size=8), st.integers(0, 8))
def test_merge_patch_may_be_cut_anywhere(patches: list[Any], at: int) -> None:
    messages = [json.dumps(patch).encode() for patch in patches]
    whole = folds.merge_patch(None, messages)
    first = folds.merge_patch(None, messages[:at]) if messages[:at] else None
    assert folds.merge_patch(first, messages[at:]) == whole


def test_last_by_key_keeps_the_last_and_removes_what_was_deleted() -> None:
    fold = partial(folds.last_by_key, key="id")
    messages = [{"id": 1, "v": 1}, {"id": "x", "v": 2}, {"id": 1, "v": 3}, {"id": "x", "deleted": True}, {"id": 2}]
    state = fold(None, [json.dumps(message).encode() for message in messages])
    assert json.loads(state) == {"1": {"id": 1, "v": 3}, "2": {"id": 2}}
    with pytest.raises(InvalidRequest, match="no field 'id'"):
        fold(state, [b'{"other": 1}'])


@pytest.mark.parametrize("message", [b"\x05abc", b"\x80", b"\xff" * 12])
def test_what_is_not_framed_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequest):
        folds.yjs(None, [message])


def test_a_fold_that_cannot_be_loaded_is_named() -> None:
    for name, problem in (("nothing", "there is no fold"), ("no_such_module:fold", "cannot be loaded")):
        with pytest.raises(InvalidRequest, match=problem):
            folds.find(name, None, None)
    assert folds.find("math:sqrt", None, "text/plain").content_type == "text/plain"
