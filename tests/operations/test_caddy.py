"""The proxy example as it stands: HTTP/2 in front, live reads unbuffered, catch-up reads cached, private ones not."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.access import bearer, make_token
from support.ports import free_port
from support.server import ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "caddy"
TEXT = {"content-type": "text/plain"}
CADDY = Path(sys.executable).with_name("caddy")
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
CHUNK = 16 << 10


class Site(NamedTuple):
    """millstream behind the two proxies; `authority` is the file that vouches for Caddy's certificate."""

    url: str
    authority: Path
    server: ServerProcess

    def curl(self, *arguments: str) -> list[str]:
        return ["curl", "-sS", "--http2", "--max-time", "20", "--cacert", str(self.authority), *arguments]

    def client(self) -> httpx.Client:
        trust = ssl.create_default_context(cafile=str(self.authority))
        return httpx.Client(base_url=self.url, verify=trust, timeout=20)

    def reads_at_origin(self) -> int:
        """How many reads have reached millstream itself."""
        for line in httpx.get(f"{self.server.url}/metrics").text.splitlines():
            if line.startswith('millstream_requests_total{method="GET",route="stream",status="200"}'):
                return int(line.rpartition(" ")[2])
        return 0


def start_proxies(directory: Path, server: ServerProcess, site_port: int) -> Iterator[Site]:
    assert NGINX is not None, "nginx is missing; make test installs it"
    upstream = server.url.removeprefix("http://")
    cache = f"127.0.0.1:{free_port()}"
    config = (EXAMPLE / "nginx.conf").read_text().replace("127.0.0.1:4437", upstream).replace("127.0.0.1:4438", cache)
    (directory / "nginx").mkdir()
    (directory / "nginx" / "nginx.conf").write_text(config)
    user = "user root;" if os.getuid() == 0 else ""
    url = f"https://localhost:{site_port}"
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory),
        "MILLSTREAM_SITE": url,
        "MILLSTREAM_UPSTREAM": upstream,
        "MILLSTREAM_CACHE": cache,
        "MILLSTREAM_HTTP_PORT": str(free_port()),
        "MILLSTREAM_HTTPS_PORT": str(site_port),
    }
    commands = (
        [NGINX, "-p", str(directory / "nginx"), "-c", "nginx.conf", "-g", f"daemon off; {user}"],
        [str(CADDY), "run", "--config", str(EXAMPLE / "Caddyfile"), "--adapter", "caddyfile"],
    )
    log = (directory / "proxies.log").open("w")
    processes = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for command in commands]
    try:
        authority = directory / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        wait_until_up(url, authority, directory / "proxies.log")
        yield Site(url, authority, server)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)
        log.close()


def wait_until_up(url: str, authority: Path, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        if authority.exists():
            try:
                trust = ssl.create_default_context(cafile=str(authority))
                if httpx.get(f"{url}/v1/stream/none/none", verify=trust).status_code in (401, 404):
                    return
            except (httpx.TransportError, ssl.SSLError):
                pass  # not up yet, or the file half written
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def served(directory: Path, *settings: str) -> Iterator[Site]:
    port = free_port()
    basic = (
        f"server.public_url=https://localhost:{port}",
        "server.trusted_proxies=127.0.0.1",
        f"read.chunk_bytes_max={CHUNK}",
    )
    with ServerProcess(directory / "data", settings=(*basic, *settings)) as server:
        yield from start_proxies(directory, server, port)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from served(tmp_path_factory.mktemp("caddy"))


def test_http2_is_spoken_and_urls_are_the_sites(site: Site) -> None:
    path = f"{site.url}/v1/stream/caddy/http2"
    shown = subprocess.run(
        site.curl("-X", "PUT", "-H", "Content-Type: text/plain", "-D", "-", "-w", "%{http_version}", path),
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    assert shown.endswith("2")
    assert shown.startswith("HTTP/2 201")
    assert f"location: {path}" in shown


def test_events_come_through_as_they_happen(site: Site) -> None:
    path = "/v1/stream/caddy/live"
    with site.client() as client:
        assert client.put(path, headers=TEXT).status_code == 201
        tail = site.curl("-N", f"{site.url}{path}?offset=-1&live=sse")
        follower = subprocess.Popen(tail, stdout=subprocess.PIPE, text=True)
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline().startswith("id: ")
            assert follower.stdout.readline() == "event: control\n"
            for number in range(5):
                started = time.monotonic()
                assert client.post(path, content=b"%d" % number, headers=TEXT).status_code == 204
                for line in iter(follower.stdout.readline, ""):
                    if line == f"data:{number}\n":
                        break
                # Far less than the minute after which the connection ends and any buffer is emptied.
                assert time.monotonic() - started < 3
            assert follower.poll() is None
        finally:
            follower.kill()
            follower.communicate()


def test_a_long_poll_is_answered_through_the_proxy(site: Site) -> None:
    path = "/v1/stream/caddy/poll"
    with site.client() as client:
        assert client.put(path, headers=TEXT).status_code == 201
        poll = site.curl("-N", f"{site.url}{path}?offset=now&live=long-poll")
        waiting = subprocess.Popen(poll, stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        assert client.post(path, content=b"at last", headers=TEXT).status_code == 204
        assert waiting.communicate(timeout=20)[0] == "at last"


def test_complete_chunks_are_served_from_the_cache_and_the_tail_is_not(site: Site) -> None:
    path = "/v1/stream/caddy/history"
    messages = [os.urandom(CHUNK // 2) for _ in range(6)]
    with site.client() as client:
        assert client.put(path, headers=TEXT).status_code == 201
        for message in messages:
            assert client.post(path, content=message, headers=TEXT).status_code == 204
        first, cold = read_all(client, path)
        before = site.reads_at_origin()
        second, warm = read_all(client, path)
        assert first == second == b"".join(messages)
        assert cold[0] == "MISS" and set(warm[:-1]) == {"HIT"}, (cold, warm)
        assert site.reads_at_origin() - before == 1  # the tail, which must be fresh
        assert client.post(path, content=b"and more", headers=TEXT).status_code == 204
        assert read_all(client, path)[0] == b"".join(messages) + b"and more"


def read_all(client: httpx.Client, path: str) -> tuple[bytes, list[str]]:
    """A stream's content, and what the cache said to each read."""
    content, said, offset = b"", [], "-1"
    while True:
        answer = client.get(path, params={"offset": offset})
        assert answer.status_code == 200
        content, offset = content + answer.content, answer.headers["stream-next-offset"]
        said.append(answer.headers["x-cache"])
        if answer.headers.get("stream-up-to-date") == "true":
            return content, said


def test_a_conditional_read_through_the_cache_is_304(site: Site) -> None:
    path = "/v1/stream/caddy/history-304"
    with site.client() as client:
        assert client.put(path, content=bytes(CHUNK), headers=TEXT).status_code == 201
        assert client.post(path, content=b"x", headers=TEXT).status_code == 204
        first = client.get(path, params={"offset": "-1"})
        again = client.get(path, params={"offset": "-1"}, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_what_needs_a_token_is_never_served_from_the_cache(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    token = make_token(tokens, "read:caddy", "write:caddy")
    for site in served(tmp_path, "auth.enabled=true", f"auth.tokens_file={tokens}", "auth.open_metrics=true"):
        path = "/v1/stream/caddy/private"
        with site.client() as client:
            mine = bearer(token)
            assert client.put(path, content=bytes(CHUNK), headers={**TEXT, **mine}).status_code == 201
            assert client.post(path, content=b"x", headers={**TEXT, **mine}).status_code == 204
            for _ in range(2):
                answer = client.get(path, params={"offset": "-1"}, headers=mine)
                assert (answer.status_code, answer.headers["x-cache"]) == (200, "MISS")
            assert client.get(path, params={"offset": "-1"}).status_code == 401
            document = "/v1/yjs/caddy/docs/plan"
            assert client.post(document, content=b"\x02\x00\x00", headers=mine).status_code in (200, 204)
            for _ in range(2):
                answer = client.get(document, params={"offset": "-1"}, headers=mine)
                assert (answer.status_code, answer.headers["x-cache"]) == (200, "MISS")
            assert client.get(document, params={"offset": "-1"}).status_code == 401
            made = client.post("/v1/tokens", json={"stream": path}, headers=mine).json()["token"]
            for _ in range(2):
                answer = client.get(path, params={"offset": "-1", "token": made})
                assert (answer.status_code, "x-cache" in answer.headers) == (200, False)
            assert client.get(path, params={"offset": "-1", "token": made + "x"}).status_code == 401
