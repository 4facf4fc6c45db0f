"""The ASGI adapter below a prefix of somebody else's application, in a real uvicorn."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.asgi import MillstreamApp
from millstream.client import Client
from millstream.errors import ConfigurationError
from support.ports import free_port
from support.raw_http import RawConnection
from support.server import wait_until_healthy

APP = """
from millstream.asgi import MillstreamApp

settings = dict(read__long_poll_timeout={long_poll_timeout!r}, read__live_readers_per_stream_max="2")
inner = MillstreamApp({data_dir!r}, **settings)

async def app(scope, receive, send):
    if scope["type"] == "http" and scope["path"].startswith("/streams/"):
        await inner({{**scope, "root_path": scope.get("root_path", "") + "/streams"}}, receive, send)
    elif scope["type"] == "http":
        await send({{"type": "http.response.start", "status": 404, "headers": []}})
        await send({{"type": "http.response.body", "body": b"the host application"}})
    elif {passes_lifespan} and scope["type"] == "lifespan":
        await inner(scope, receive, send)
"""
TEXT = {"content-type": "text/plain"}


class Mounted:
    def __init__(self, directory: Path, passes_lifespan: bool, long_poll_timeout: str = "200ms") -> None:
        data_dir = str(directory / "data")
        (directory / "mounted_app.py").write_text(
            APP.format(data_dir=data_dir, passes_lifespan=passes_lifespan, long_poll_timeout=long_poll_timeout)
        )
        port = free_port()
        self.origin = f"http://127.0.0.1:{port}"
        self.url = f"{self.origin}/streams"
        command = [sys.executable, "-m", "uvicorn", "mounted_app:app", "--port", str(port), "--log-level", "warning"]
        self.stderr_path = directory / "stderr"
        with self.stderr_path.open("a") as stderr:
            self.process = subprocess.Popen([*command, "--app-dir", str(directory)], cwd=directory, stderr=stderr)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="module", params=[True, False], ids=["with lifespan", "without lifespan"])
def mounted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    running = Mounted(tmp_path_factory.mktemp("asgi"), request.param)
    try:
        wait_until_healthy(running.url)
        yield running
    finally:
        running.stop()
    assert "Traceback" not in running.stderr_path.read_text()


@pytest.fixture
def client(mounted: Mounted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=mounted.url, timeout=10) as opened:
        yield opened


def test_stream_below_a_mount_is_created_appended_and_read(mounted: Mounted, client: httpx.Client) -> None:
    created = client.put("/v1/stream/mounted/a", headers=TEXT)
    assert (created.status_code, created.headers["location"]) == (201, f"{mounted.url}/v1/stream/mounted/a")
    assert client.post("/v1/stream/mounted/a", content=b"one ", headers=TEXT).status_code == 204
    assert client.post("/v1/stream/mounted/a", content=b"two", headers=TEXT).status_code == 204
    read = client.get("/v1/stream/mounted/a")
    assert (read.status_code, read.content, read.headers["content-type"]) == (200, b"one two", "text/plain")
    assert client.head("/v1/stream/mounted/a").headers["stream-next-offset"] == f"{0:016d}_{7:016d}"
    assert client.get(created.headers["location"]).content == b"one two"
    assert client.delete("/v1/stream/mounted/a").status_code == 204
    assert client.get("/v1/stream/mounted/a").status_code == 404


def test_the_host_application_keeps_its_own_paths(mounted: Mounted) -> None:
    assert httpx.get(f"{mounted.origin}/v1/stream/mounted/a").content == b"the host application"


def test_percent_encoded_name_below_a_mount_is_decoded_once(client: httpx.Client) -> None:
    path = "/v1/stream/mounted/a%20b%252e%C3%A9"
    assert client.put(path, headers=TEXT, content=b"named").status_code == 201
    assert client.get(path).content == b"named"


def test_bad_input_below_a_mount_is_refused_as_everywhere(client: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/v1/stream/a%00b", 400),
        ("GET", "/v1/stream/a%zz", 400),
        ("PATCH", "/v1/stream/mounted/x", 405),
        ("GET", "/v1/stream/mounted/none", 404),
    ):
        answer = client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"]


def test_sse_below_a_mount_delivers_data_then_control(mounted: Mounted, client: httpx.Client) -> None:
    path = "/v1/stream/mounted/sse"
    assert client.put(path, headers=TEXT, content=b"first").status_code == 201
    with client.stream("GET", path, params={"offset": "-1", "live": "sse"}) as live:
        assert (live.status_code, live.headers["content-type"]) == (200, "text/event-stream")
        lines = live.iter_lines()
        place = f"id: {0:016d}_"
        expected = [f"{place}{5:016d}", "event: data", "data:first", "", f"{place}{5:016d}", "event: control"]
        assert [next(lines) for _ in range(6)] == expected
        assert json.loads(next(lines).removeprefix("data:"))["upToDate"] is True
        with httpx.Client(base_url=mounted.url) as writer:
            assert writer.post(path, content=b"second", headers=TEXT).status_code == 204
            assert next(lines) == ""
            assert [next(lines) for _ in range(3)] == [f"{place}{11:016d}", "event: data", "data:second"]
            assert writer.post(path, headers={"stream-closed": "true"}).status_code == 204
        rest = list(lines)
    assert json.loads(rest[-2].removeprefix("data:"))["streamClosed"] is True


def test_long_poll_below_a_mount_answers_or_times_out(mounted: Mounted, client: httpx.Client) -> None:
    path = "/v1/stream/mounted/poll"
    assert client.put(path, headers=TEXT).status_code == 201
    assert client.get(path, params={"offset": "-1", "live": "long-poll"}).status_code == 204
    with RawConnection(mounted.url) as reader:
        reader.send(reader.request("GET", f"/streams{path}?offset=-1&live=long-poll"))
        assert client.post(path, content=b"news", headers=TEXT).status_code == 204
        reader._until(b"news", time.monotonic() + 5)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_reader_that_disconnects_frees_its_place(mounted: Mounted, client: httpx.Client, live: str) -> None:
    """Two readers fill the stream's allowance; when they have gone, others can come, again and again."""
    path = f"/v1/stream/mounted/leaving-{live}"
    assert client.put(path, headers=TEXT).status_code == 201
    target = f"/streams{path}?offset=now&live={live}"
    for _ in range(2):
        readers = [RawConnection(mounted.url) for _ in range(2)]
        try:
            for reader in readers:
                reader.send(reader.request("GET", target))
            if live == "sse":
                for reader in readers:
                    reader._until(b"event: control", time.monotonic() + 5)
        finally:
            for reader in readers:
                reader.socket.close()
        deadline = time.monotonic() + 10
        # A third is refused while they are there, and admitted once they are known to be gone.
        while (status := client.get(path, params={"offset": "-1", "live": "long-poll"}).status_code) != 204:
            assert status == 503
            assert time.monotonic() < deadline, "the readers that left still hold their places"
            time.sleep(0.02)


def test_data_written_below_a_mount_is_there_after_a_restart(tmp_path: Path) -> None:
    for number in range(2):
        running = Mounted(tmp_path, True)
        try:
            wait_until_healthy(running.url)
            path = f"{running.url}/v1/stream/mounted/kept"
            assert httpx.put(path, headers=TEXT).status_code == (200 if number else 201)
            assert httpx.post(path, content=b"%d;" % number, headers=TEXT).status_code == 204
            content = httpx.get(path).content
        finally:
            running.stop()
    assert content == b"0;1;"
    assert "Traceback" not in running.stderr_path.read_text()


def test_the_python_client_works_below_a_mount(mounted: Mounted) -> None:
    with Client(mounted.url) as client:
        client.bucket("team").create()
        stream = client.stream(bucket="team", name="notes")
        stream.create(content_type="application/json")
        with client.producer(stream, "p") as producer:
            producer.append_many(range(2000))
        stream.publish_snapshot(b"state", stream.head().next_offset)
        assert stream.snapshot().data == b"state"  # by way of a redirect below the mount
        fork = client.stream("team/fork")
        fork.create(fork_from=stream)
        fork.append(["own"], close=True)
        following = fork.follow(stream.head().next_offset)
        assert [value for chunk in following for value in chunk.json()] == ["own"]


@pytest.mark.parametrize("passes_lifespan", [True, False], ids=["with lifespan", "without lifespan"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_live_reads_end_when_the_server_is_told_to_stop(
    tmp_path: Path, passes_lifespan: bool, number: signal.Signals
) -> None:
    """uvicorn waits for its connections before it tells applications to shut down."""
    running = Mounted(tmp_path, passes_lifespan, long_poll_timeout="60s")
    try:
        wait_until_healthy(running.url)
        path = "/v1/stream/mounted/live"
        assert httpx.put(f"{running.url}{path}", headers=TEXT).status_code == 201
        with RawConnection(running.url, seconds=20) as sse, RawConnection(running.url, seconds=20) as poll:
            sse.send(sse.request("GET", f"/streams{path}?offset=-1&live=sse"))
            sse._until(b"event: control", time.monotonic() + 10)
            poll.send(poll.request("GET", f"/streams{path}?offset=-1&live=long-poll"))
            time.sleep(0.2)  # until it waits
            running.process.send_signal(number)
            assert sse.rest().endswith(b"0\r\n\r\n")  # the end of a whole answer, not of a broken connection
            assert poll.rest().startswith(b"HTTP/1.1 204 ")
            running.process.wait(15)  # far less than what either read would have lasted
    finally:
        running.stop()
    assert "Traceback" not in running.stderr_path.read_text()


def test_a_framework_opens_and_closes_a_mounted_app_by_its_lifespan(tmp_path: Path) -> None:
    async def run() -> None:
        streams = MillstreamApp(tmp_path / "data")
        async with streams.lifespan(None):
            with pytest.raises(ConfigurationError, match="in use by another process"):
                await MillstreamApp(tmp_path / "data").open()
        again = MillstreamApp(tmp_path / "data")
        await again.open()
        await again.close()

    asyncio.run(run())
