"""EventSource in a real Chromium, with the code of docs/browsers.md: reconnects, restarts and reloads lose nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from support.access import bearer, make_token
from support.server import ServerProcess

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "browsers.md"
JSON = {"content-type": "application/json"}
STREAM = "/v1/stream/team-a/chat"


class Page:
    """A page in which the stream is followed; `wait_for` waits until so many messages were seen."""

    def __init__(self, url: str, token: str) -> None:
        chromium = shutil.which("chromium")
        assert chromium is not None, "Chromium is missing: run `make examples`, or install it"
        self.process = subprocess.Popen(
            ["node", "event_source.js", url, STREAM, token, chromium, str(DOCUMENT)],
            cwd=FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def wait_for(self, count: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if int(line.split()[1]) >= count:
                return
        raise AssertionError("the page has ended")

    def result(self) -> dict[str, object]:
        assert self.process.stdout is not None
        self.tell("finish")
        lines = self.process.stdout.read().splitlines()
        assert self.process.wait(30) == 0
        return dict(json.loads(lines[-1]))


@pytest.mark.timeout(300)
def test_an_event_source_loses_and_repeats_nothing_and_stops_at_the_end(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    token = make_token(data_dir / "tokens.json", "admin:team-a")
    settings = ("auth.enabled=true", "read.sse_lifetime=2s")
    written = 0
    with (
        ServerProcess(data_dir, settings=settings) as server,
        httpx.Client(headers=bearer(token), timeout=60) as client,
    ):

        def write(batches: int) -> None:
            nonlocal written
            for _ in range(batches):
                body = json.dumps([written, written + 1])
                assert client.post(server.url + STREAM, headers=JSON, content=body).status_code == 204
                written += 2

        assert client.put(server.url + STREAM, headers=JSON).status_code == 201
        write(5)
        made = client.post(f"{server.url}/v1/tokens", json={"stream": STREAM, "seconds": 600}).json()["token"]
        with Page(server.url, made) as page:
            page.wait_for(written)
            time.sleep(2.5)  # the connection's time is over: what is written now waits for the browser to reconnect
            write(5)
            page.wait_for(written)
            server.kill()
            server.start()
            write(5)
            page.wait_for(written)
            page.tell("reload")
            write(5)
            page.wait_for(written)
            write(1)
            assert client.post(server.url + STREAM, headers={"stream-closed": "true"}).status_code == 204
            result = page.result()
        assert made not in server.stderr()
    assert result["seen"] == list(range(written))
    assert result["state"] == 2, "the browser has stopped"
    assert result["problems"] == []
    opened = result["opened"]
    assert isinstance(opened, int) and opened >= 4
