"""The snippets of docs/client.md, run in their order, and its lists, compared with the package."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

from millstream import client as package
from support.server import ServerProcess

DOCUMENT = (Path(__file__).parents[2] / "docs" / "client.md").read_text()


def test_the_snippets_do_what_the_page_says(server: ServerProcess) -> None:
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENT.replace("http://127.0.0.1:4437", server.url), re.DOTALL)
    shown = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "snippets"}
    with contextlib.redirect_stdout(shown):
        for snippet in snippets:
            exec(compile(snippet, "docs/client.md", "exec"), namespace)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "[{'step': 1, 'state': 'thinking'}, {'step': 2}, {'step': 3}]"
    assert lines[1].startswith("996 ")
    assert lines[2].startswith("BucketInfo(name='agents', streams=3, ")
    assert lines[-2].startswith("stream agents/notes is closed") and lines[-1] == "[{'step': 1}]"


def test_every_error_is_listed() -> None:
    errors = {
        name
        for name in package.__all__
        if inspect.isclass(kind := getattr(package, name)) and issubclass(kind, Exception)
    }
    table = DOCUMENT.partition("## Errors")[2].partition("## asyncio")[0]
    assert errors == set(re.findall(r"`([A-Z]\w+)`", table)) & errors and len(errors) == 19


@pytest.mark.parametrize("kind", [package.Stream, package.Bucket])
def test_every_method_is_mentioned(kind: type) -> None:
    for name, _ in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert re.search(rf"\b{name}\b", DOCUMENT), f"docs/client.md does not mention {kind.__name__}.{name}"


def test_defaults_are_as_the_page_says() -> None:
    parameters = inspect.signature(package.Client).parameters
    said = re.search(r"`Client\((url.*?)\)`", DOCUMENT)
    assert said is not None
    for name, value in re.findall(r"(\w+)=(\w+)", said[1]):
        default = parameters[name].default
        assert str(default if default is None else int(default)) == value, name
