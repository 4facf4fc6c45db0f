"""The editor in the browser: two real Chromium pages, both typed into, both showing both texts and both carets."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from support.server import PYTHON, ServerProcess

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SERVE = (PYTHON, "-m", "millstream.cli.main", "serve", "--examples", str(EXAMPLES))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """`make test` builds the examples; whoever runs this test alone must have done so too."""
    assert (EXAMPLES / "editor" / "dist" / "index.html").exists(), "the editor is not built: run `make examples`"


def test_two_people_see_both_texts_and_both_carets(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    assert chromium is not None, "Chromium is missing: run `make examples`, or install it"
    with ServerProcess(tmp_path / "data", command=SERVE) as server:
        run = subprocess.run(
            ["node", "editor.js", f"{server.url}/examples/editor/", chromium, str(tmp_path)],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert run.returncode == 0, run.stderr
    shown = json.loads(run.stdout)
    text = ["# The plan, as Ada sees it", "", "Grace writes: one stream for every document."]
    assert shown["ada"]["text"] == shown["grace"]["text"] == text
    assert (shown["ada"]["carets"], shown["grace"]["carets"]) == (["Grace"], ["Ada"])
    assert shown["ada"]["people"] == ["Ada (you)", "Grace"]
    assert shown["grace"]["people"] == ["Ada", "Grace (you)"]
    assert shown["ada"]["problems"] == shown["grace"]["problems"] == []


def test_examples_are_served_only_when_asked_for(tmp_path: Path, server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/examples/editor/").status_code == 400
    with ServerProcess(tmp_path / "other", command=SERVE) as serving:
        page = httpx.get(f"{serving.url}/examples/editor/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html")
        assert page.content == (EXAMPLES / "editor" / "dist" / "index.html").read_bytes()
        for path in ("editor/../../README.md", "editor/%2e%2e/package.json", "nothing/"):
            assert httpx.get(f"{serving.url}/examples/{path}").status_code in (400, 404)


def test_a_folder_without_built_examples_is_refused(tmp_path: Path) -> None:
    command = [*SERVE[:-1], str(tmp_path), "--data-dir", str(tmp_path / "data")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1
    assert str(tmp_path) in run.stderr and "make examples" in run.stderr
