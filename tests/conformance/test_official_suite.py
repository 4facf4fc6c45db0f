"""The official Durable Streams suite, over both adapters: every test of it passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ports import free_port
from support.server import ServerProcess, wait_until_healthy

FOLDER = Path(__file__).parent
TESTS_IN_SUITE = 338

ASGI_APP = """
from millstream.asgi import MillstreamApp
app = MillstreamApp({data_dir!r}, read__long_poll_timeout="500ms")
"""


@pytest.fixture(params=["native", "asgi"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "native":
        with ServerProcess(tmp_path / "data", settings=("read.long_poll_timeout=500ms",)) as running:
            yield running.url
        return
    (tmp_path / "suite_app.py").write_text(ASGI_APP.format(data_dir=str(tmp_path / "data")))
    port = free_port()
    uvicorn = [sys.executable, "-m", "uvicorn", "suite_app:app", "--port", str(port), "--log-level", "warning"]
    # uvicorn's own 5 s are just when Node.js stops using idle connections: on a busy machine a request meets the end.
    uvicorn += ["--timeout-keep-alive", "75"]
    process = subprocess.Popen([*uvicorn, "--app-dir", str(tmp_path)], cwd=tmp_path)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


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
