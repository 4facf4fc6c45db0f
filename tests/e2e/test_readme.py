"""The README's own commands and snippets, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from support.server import ServerProcess

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:4437"


def blocks(language: str, server: ServerProcess) -> list[str]:
    text = (ROOT / "README.md").read_text().replace(ADDRESS, server.url)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_curl_tour_creates_appends_reads_and_tails(server: ServerProcess) -> None:
    tour = next(block for block in blocks("sh", server) if "curl -X PUT" in block)
    shown = subprocess.run(
        ["bash", "-ec", tour.replace("curl", "curl -sf")], capture_output=True, text=True, timeout=30
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == '[{"from":"ada","text":"hello"}]'
    tail = next(block for block in blocks("sh", server) if "live=sse" in block).strip()
    follower = subprocess.Popen(["bash", "-c", f"exec {tail} -s"], stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(30, follower.kill)
    guard.start()
    try:
        assert follower.stdout is not None
        event = [follower.stdout.readline() for _ in range(3)]
        assert 'data:[{"from":"ada","text":"hello"}]\n' in event
        appended = {"from": "grace", "text": "hi"}
        httpx.post(f"{server.url}/v1/stream/chat", json=appended).raise_for_status()
        assert any("grace" in line for line in iter(follower.stdout.readline, ""))
    finally:
        guard.cancel()
        follower.kill()
        follower.communicate()


def test_the_python_snippet_follows_a_stream(server: ServerProcess) -> None:
    snippet = next(block for block in blocks("python", server) if "stream.follow()" in block)
    process = subprocess.Popen([sys.executable, "-u", "-c", snippet], stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(30, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "[{'step': 2, 'state': 'done'}]\n"
        httpx.post(f"{server.url}/v1/stream/run-42", json={"step": 3}).raise_for_status()
        assert process.stdout.readline() == "[{'step': 3}]\n"
    finally:
        guard.cancel()
        process.kill()
        process.communicate()


def test_the_javascript_snippet_appends_and_subscribes(server: ServerProcess, tmp_path: Path) -> None:
    snippet = blocks("js", server)[0]
    script = ROOT / "tests" / "conformance" / f".readme-{tmp_path.name}.mjs"  # where the client is installed
    script.write_text(snippet)
    try:
        process = subprocess.Popen(["node", str(script)], stdout=subprocess.PIPE, text=True)
        guard = threading.Timer(30, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "[ { step: 1, state: 'thinking' } ]\n"
        finally:
            guard.cancel()
            process.kill()
            process.communicate()
    finally:
        script.unlink()
