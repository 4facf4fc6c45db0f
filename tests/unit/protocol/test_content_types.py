"""Content types: compared by media type, kept as written."""

from __future__ import annotations

import pytest

from millstream.errors import InvalidRequest
from millstream.protocol.content_types import checked_content_type, is_json, media_type


@pytest.mark.parametrize(
    "value",
    ["text/plain", "application/json; charset=utf-8", "application/vnd.x+json;v=1", "TEXT/PLAIN", "a/b ;c", "a/b;"],
)
def test_a_content_type_is_kept_as_it_was_written(value: str) -> None:
    assert checked_content_type(value) == value


@pytest.mark.parametrize(
    "value", ["", "text", "text/", "/plain", "text /plain", "a/b c", "a/b\r\nx: y", "a/b;\n", "a/é", "a/" + "b" * 256]
)
def test_what_is_no_content_type_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_content_type(value)
    assert caught.value.code == "invalid_content_type"


def test_case_and_parameters_do_not_count_in_comparisons() -> None:
    assert media_type("Application/JSON ; charset=utf-8") == "application/json"
    assert is_json("APPLICATION/json;x=y")
    assert not is_json("application/json-seq")
    assert not is_json("application/vnd.api+json")
