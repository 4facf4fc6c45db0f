"""The console's files over every adapter: who gets them, with which policy, and that they are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from support.serving import Serve, Server

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    return serve("console.enabled=true", "auth.enabled=true")


@pytest.fixture
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


def test_a_browser_at_the_root_is_led_to_the_console_and_nobody_else_is(client: httpx.Client) -> None:
    answer = client.get("/", headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (302, "console/")
    assert answer.headers["vary"] == "accept"
    assert client.get("/console").headers["location"] == "console/"
    answer = client.get("/", headers={"accept": "*/*"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_every_file_comes_without_a_token_and_with_the_policy(client: httpx.Client) -> None:
    names = [file.name for file in files("millstream").joinpath("console").iterdir()]
    assert {"index.html", "main.js", "console.css"} <= set(names)
    for name in ["", *names]:
        answer = client.get(f"/console/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "private" not in answer.headers["cache-control"]
        again = client.get(f"/console/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.head("/console/").headers["content-type"] == "text/html; charset=utf-8"


def test_what_the_console_does_not_have_is_404_and_its_name_stays_reserved(client: httpx.Client) -> None:
    for path in ("/console/nothing.js", "/console/../console/x", "/console/%2e%2e/main.py", "/console//"):
        assert client.get(path).status_code in (400, 404), path
    for path in ("/console", "/console/main.js"):
        assert client.put(path).json()["error"]["code"] == "invalid_bucket"
    assert client.get("/metrics").status_code == 401, "data needs a token as ever"


def test_no_file_names_another_host_or_has_inline_code() -> None:
    for file in files("millstream").joinpath("console").iterdir():
        text = file.read_text()
        hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not hosts, (file.name, hosts)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file.name
        )
        if file.name.endswith(".html"):
            assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*src=)", text)


def test_the_console_can_be_switched_off_and_a_mounted_one_must_be_switched_on(serve: Serve, adapter: str) -> None:
    for setting, status in (("false", 404), ("auto", 404 if adapter == "asgi" else 200)):
        url = serve(f"console.enabled={setting}").url
        assert httpx.get(f"{url}/console/", headers=BROWSER).status_code == status
        assert httpx.get(url, headers=BROWSER).status_code == (302 if status == 200 else 404)
