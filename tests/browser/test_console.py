"""The console in a real Chromium: every view, hostile payloads, a token with few rights, a restart while following."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.access import bearer, make_token
from support.server import ServerProcess

FOLDER = Path(__file__).parent
JSON = {"content-type": "application/json"}
STREAM = "/v1/stream/team-a/chat"

pytestmark = pytest.mark.timeout(600)


def play(
    server: ServerProcess, scenario: str, token: str = "", deeds: Mapping[str, Callable[[], None]] | None = None
) -> dict[str, Any]:
    """Run a scenario of console.js, do what it asks for, and return what it found."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "Chromium is missing: run `make examples`, or install it"
    command = ["node", "console.js", server.url, scenario, chromium, token]
    with subprocess.Popen(command, cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    result = dict(json.loads(line))
                    break
                (deeds or {})[line.strip()]()
                process.stdin.write("done\n")
                process.stdin.flush()
            else:
                raise AssertionError("the browser ended without a result")
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert result["problems"] == [], result
    assert result["hosts"] == [urlsplit(server.url).netloc], "no other host is asked for anything"
    return result


def test_every_view_and_every_action_works(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        play(server, "everything")


def test_payloads_and_names_that_try_to_be_code_are_shown_as_text(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        result = play(server, "hostile")
    assert result["pwned"] is None
    assert result["images"] == 0
    assert result["rows"] >= 7


def test_a_token_with_few_rights_sees_what_it_may_and_is_kept_nowhere(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    admin = make_token(data_dir / "tokens.json", "admin:team-a")
    token = make_token(data_dir / "tokens.json", "read:team-a")
    with ServerProcess(data_dir, settings=("auth.enabled=true",)) as server:
        httpx.put(server.url + STREAM, headers={**JSON, **bearer(admin)}, content='["hello"]').raise_for_status()
        result = play(server, "token", token)
        assert token not in server.stderr()
    assert token not in result["kept"]
    assert token not in result["curl"]
    assert "Bearer $TOKEN" in result["curl"]


def test_following_through_a_restart_loses_and_doubles_nothing_and_stays_bounded(tmp_path: Path) -> None:
    written = 0
    with (
        ServerProcess(tmp_path / "data", settings=("read.sse_lifetime=3s",)) as server,
        httpx.Client(timeout=60, transport=httpx.HTTPTransport(retries=3)) as client,
    ):

        def write(batches: int = 20, size: int = 1) -> None:
            nonlocal written
            for _ in range(batches):
                body = json.dumps(list(range(written, written + size)))
                assert client.post(server.url + STREAM, headers=JSON, content=body).status_code == 204
                written += size

        def restart() -> None:
            write(10)
            server.kill()
            server.start()
            write(10)

        def close() -> None:
            assert client.post(server.url + STREAM, headers={"stream-closed": "true"}).status_code == 204

        assert client.put(server.url + STREAM, headers=JSON).status_code == 201
        deeds = {"write": write, "restart": restart, "flood": lambda: write(60, 200), "close": close}
        result = play(server, "follow", deeds=deeds)
    assert result["seen"] == list(range(80))
    assert result["rows"] < 300, "only rows in sight exist"
