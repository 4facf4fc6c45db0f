"""A full disk and a failed sync: writes get 503 that says why, reads go on, nothing acknowledged is lost."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.server import PYTHON, ServerProcess

LAUNCHER = (PYTHON, str(Path(__file__).parent.parent / "support" / "crashing_server.py"))
PATH = "/v1/stream/disk/stream"
BINARY = {"content-type": "application/octet-stream"}


class Appender:
    """A producer that remembers what was acknowledged."""

    def __init__(self, client: httpx.Client, path: str = PATH) -> None:
        self.client = client
        self.path = path
        self.acknowledged: list[bytes] = []

    def create(self) -> None:
        assert self.client.put(self.path, headers=BINARY).status_code == 201

    def append(self, message: bytes) -> httpx.Response:
        seq = str(len(self.acknowledged))
        headers = {**BINARY, "producer-id": "p", "producer-epoch": "0", "producer-seq": seq}
        answer = self.client.post(self.path, content=message, headers=headers)
        if answer.status_code in (200, 204):
            self.acknowledged.append(message)
        return answer

    def append_until_refused(self, size: int) -> httpx.Response:
        for number in range(10_000):
            answer = self.append(b"%08d" % number + os.urandom(size))
            if answer.status_code != 200:
                return answer
        raise AssertionError("the disk never filled up")

    def assert_content(self) -> None:
        content, offset = b"", "-1"
        while True:
            answer = self.client.get(self.path, params={"offset": offset})
            assert answer.status_code == 200
            content += answer.content
            offset = answer.headers["stream-next-offset"]
            if "stream-up-to-date" in answer.headers:
                break
        assert content == b"".join(self.acknowledged)


def assert_full(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "disk_full")
    assert error["message"] and error["hint"] and int(answer.headers["retry-after"]) > 0


def assert_every_write_is_refused(client: httpx.Client) -> None:
    """Appends, creates and deletes alike, and each refusal is clean: asking twice gives the same."""
    for _ in range(2):
        assert_full(client.post(PATH, content=os.urandom(100_000), headers=BINARY))
        assert_full(client.put("/v1/stream/disk/another", content=os.urandom(100_000), headers=BINARY))
    assert client.head("/v1/stream/disk/another").status_code == 404


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(mounted)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def fill(directory: Path) -> Path:
    """A file that takes what is left of the disk."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65_536, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def test_full_disk_refuses_writes_until_there_is_room_and_loses_nothing(small_disk: Path) -> None:
    settings = ("log.segment_bytes=1MiB", "cold.flush_interval=200ms")
    server = ServerProcess(small_disk / "data", settings=settings)
    # The mount point itself holds the ballast; what the server says goes elsewhere.
    server.stderr_path = small_disk.parent / "stderr"
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        appender = Appender(client)
        appender.create()
        for number in range(20):
            assert appender.append(b"before %d;" % number).status_code == 200
        ballast = fill(small_disk)
        assert_full(appender.append_until_refused(40_000))
        assert_every_write_is_refused(client)
        appender.assert_content()
        assert client.get("/healthz").status_code == 200
        ballast.unlink()
        for number in range(20):
            assert appender.append(b"after %d;" % number).status_code == 200
        appender.assert_content()
        # Checkpoints failed meanwhile; now they work again, or this would not be clean.
        assert server.stop() == 0, server.stderr()[-2000:]
        server.start()
        appender.assert_content()
        server.kill()
        server.start()
        appender.assert_content()
        assert appender.append(b"and on").status_code == 200
        appender.assert_content()


def test_stop_on_a_full_disk_is_clean_and_loses_nothing(small_disk: Path) -> None:
    server = ServerProcess(small_disk / "data", settings=("log.segment_bytes=1MiB", "cold.flush_interval=1h"))
    server.stderr_path = small_disk.parent / "stderr"
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        appender = Appender(client)
        appender.create()
        for number in range(200):
            path = f"/v1/stream/disk/many-{number}"
            assert client.put(path, headers=BINARY).status_code == 201
        assert appender.append(b"kept").status_code == 200
        ballast = fill(small_disk)
        assert_full(appender.append_until_refused(40_000))
        assert server.stop() == 0, server.stderr()[-2000:]
        ballast.unlink()
        server.start()
        appender.assert_content()


def test_start_on_a_full_disk_serves_reads_and_then_writes_when_there_is_room(small_disk: Path) -> None:
    server = ServerProcess(small_disk / "data", settings=("log.segment_bytes=1MiB",))
    server.stderr_path = small_disk.parent / "stderr"
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        appender = Appender(client)
        appender.create()
        ballast = fill(small_disk)
        assert_full(appender.append_until_refused(40_000))
        server.kill()
        fill(small_disk / "data")
        server.start()
        appender.assert_content()
        assert_every_write_is_refused(client)
        ballast.unlink()
        (small_disk / "data" / "ballast").unlink()
        deadline = time.monotonic() + 20  # it looks for room every second, for its note must come before any append
        while appender.append(b"and on").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        appender.assert_content()


def test_file_size_limit_refuses_writes_until_it_is_raised_and_loses_nothing(tmp_path: Path) -> None:
    """The same through EFBIG, for machines on which a test may not mount."""
    server = ServerProcess(tmp_path / "data", command=LAUNCHER, environment={"FSIZE_LIMIT": str(6 << 20)})
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        appender = Appender(client)
        appender.create()
        assert_full(appender.append_until_refused(100_000))
        assert appender.acknowledged, "nothing fitted"
        assert_every_write_is_refused(client)
        appender.assert_content()
        assert server.process is not None
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        for number in range(20):
            assert appender.append(b"after %d;" % number).status_code == 200
        appender.assert_content()
        server.kill()
        server.start()
        appender.assert_content()


def test_failed_sync_stops_writes_but_not_reads_and_restart_recovers_everything_acknowledged(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    environment = {"SYNC_FAILS": "1", "CRASH_FILE": str(armed)}
    settings = ("read.long_poll_timeout=300ms", "cold.flush_interval=200ms")
    server = ServerProcess(tmp_path / "data", command=LAUNCHER, settings=settings, environment=environment)
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        appender = Appender(client)
        appender.create()
        ttl = client.put("/v1/stream/disk/ttl", headers={**BINARY, "stream-ttl": "1"})
        assert ttl.status_code == 201
        for number in range(20):
            assert appender.append(b"before %d;" % number).status_code == 200
        armed.touch()
        uncertain = b"may or may not be stored;"
        refused = [appender.append(uncertain) for _ in range(3)]
        refused += [
            client.post(PATH, content=b"plain", headers=BINARY),
            client.put("/v1/stream/disk/another", headers=BINARY),
            client.delete(PATH),
        ]
        for answer in refused:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "log_stopped")
            assert error["message"] and error["hint"]
        # It does not heal by itself: the kernel reports a lost page only once.
        armed.unlink()
        assert appender.append(uncertain).status_code == 503
        # Reads of every kind go on, and show only what was acknowledged; so does the answer to a repeat.
        appender.assert_content()
        tail = client.head(PATH).headers["stream-next-offset"]
        assert client.get(PATH, params={"offset": tail, "live": "long-poll"}).status_code == 204
        headers = {**BINARY, "producer-id": "p", "producer-epoch": "0", "producer-seq": "19"}
        assert client.post(PATH, content=b"repeat", headers=headers).status_code == 204
        wait_past_expiry(client, "/v1/stream/disk/ttl")
        assert server.stop() == 0
        assert "Traceback" not in server.stderr()
        server.start()
        found = client.get(PATH).content
        assert found in (b"".join(appender.acknowledged), b"".join([*appender.acknowledged, uncertain]))
        was_stored = found.endswith(uncertain)
        assert appender.append(uncertain).status_code == (204 if was_stored else 200)
        appender.assert_content()


def wait_past_expiry(client: httpx.Client, path: str) -> None:
    """Until a stream's time is up: HEAD does not extend it."""
    deadline = time.monotonic() + 10
    while client.head(path).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
