"""SIGHUP: what can be reloaded is, for every route; the rest is named until the restart it needs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.protocol.lib0 import frame_update
from support.raw_http import RawConnection
from support.server import ServerProcess

TEXT = {"content-type": "text/plain"}
OCTETS = {"content-type": "application/octet-stream"}
PATH = "/v1/stream/logs/s"
DOCUMENT = "/v1/yjs/notes/docs/plan"


class Configured:
    """A server with a configuration file that can be changed under it."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "millstream.toml"
        self._file.write_text("version = 1\n")
        command = (*ServerProcess(directory)._command, "--config", str(self._file))
        self.server = ServerProcess(directory / "data", command=command)

    def reload(self, content: str, *, says: str = "SIGHUP: reloaded") -> str:
        """Change the file, send the signal, and return what the server has to say about it."""
        assert self.server.process is not None
        before = len(self.server.stderr())
        self._file.write_text(f"version = 1\n{content}")
        self.server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while says not in (said := self.server.stderr()[before:]):
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return said


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Configured]:
    one = Configured(tmp_path)
    with one.server as server:
        yield one
        assert server.stop() == 0


def test_logging_and_limits_take_effect_at_once(configured: Configured) -> None:
    server = configured.server
    configured.reload("[logging]\naccess = true\nlevel = 'debug'\n", says="level debug")
    assert httpx.get(server.url + "/healthz").status_code == 200
    assert "GET /healthz 200" in server.stderr()
    configured.reload("[http]\nbody_bytes_max = '1KiB'\n", says="level info")
    assert httpx.post(server.url + PATH, content=bytes(2000), headers=TEXT).status_code == 413
    configured.reload("[limits]\nexempt_loopback = false\naddress_requests_per_second = 1\nburst = '1s'\n")
    with RawConnection(server.url) as connection:
        connection.send(connection.request("GET", "/v1/stream/a/b") * 20)
        assert 429 in {connection.answer().status for _ in range(20)}
    configured.reload("")
    with RawConnection(server.url) as connection:
        connection.send(connection.request("GET", "/v1/stream/a/b") * 20)
        assert {connection.answer().status for _ in range(20)} == {404}


def test_limits_of_reads_hold_for_documents_and_snapshots_too(configured: Configured) -> None:
    with httpx.Client(base_url=configured.server.url, headers=OCTETS, timeout=20) as client:
        update = frame_update(bytes(600))
        for _ in range(2):
            assert client.post(DOCUMENT, content=update).status_code == 204
        assert client.put("/team").status_code == 201
        assert client.put("/team/s", content=b"message").status_code == 201
        assert client.get(DOCUMENT, params={"offset": "-1"}).content == update * 2
        configured.reload("[read]\nchunk_bytes_max = '700B'\nsnapshot_bytes_max = '1KiB'\nlive_readers_max = 1\n")
        assert client.get(DOCUMENT, params={"offset": "-1"}).content == update
        tail = client.head("/team/s").headers["stream-next-offset"]
        assert client.put(f"/team/s/snapshot/{tail}", content=bytes(2000)).status_code == 413
        with client.stream("GET", DOCUMENT, params={"offset": "now", "live": "sse"}) as follower:
            assert follower.status_code == 200
            refused = client.get(DOCUMENT, params={"offset": "now", "live": "long-poll"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "TOO_MANY_LIVE_READERS"


def test_what_needs_a_restart_is_named_each_time_until_there_was_one(configured: Configured) -> None:
    changed = "[log]\nsegment_bytes = '1MiB'\n"
    for content, pending in (
        (changed, "log.segment_bytes"),
        (changed, "log.segment_bytes"),
        ("[tls]\ncert = 'cert.pem'\nkey = 'key.pem'\n", "tls"),
    ):
        assert f"need a restart: {pending}" in configured.reload(content, says="need a restart")
    assert "need a restart" not in configured.reload("[logging]\nlevel = 'debug'\n", says="level debug")


def test_a_configuration_that_cannot_be_used_leaves_the_former_one(configured: Configured) -> None:
    configured.reload("[http]\nbody_bytes_max = '1KiB'\n")
    assert "nonsense" in configured.reload("[nonsense]\nkey = 1\n", says="the former one stays")
    assert httpx.post(configured.server.url + PATH, content=bytes(2000), headers=TEXT).status_code == 413
