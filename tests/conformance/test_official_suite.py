"""The official Durable Streams suite, over both adapters: every test of it passes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.serving import Serve

ADAPTERS = ("native", "asgi")
FOLDER = Path(__file__).parent
TESTS_IN_SUITE = 338


@pytest.fixture(scope="module")
def url(serve: Serve) -> str:
    return serve("read.long_poll_timeout=500ms").url


@pytest.mark.timeout(600)
def test_official_suite_passes_whole(url: str) -> None:
    run = subprocess.run(
        ["npx", "vitest", "run", "--reporter=dot"],
        cwd=FOLDER,
        env={**os.environ, "MILLSTREAM_URL": url, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-8000:]
    passed = re.search(r"Tests\s+(\d+) passed \((\d+)\)", output)
    assert passed is not None, output[-2000:]
    assert int(passed[1]) == int(passed[2]) >= TESTS_IN_SUITE
