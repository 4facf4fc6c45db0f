"""A stop ends within the configured time, whatever clients and the object store do."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess

# What it checks is how long things take.
pytestmark = pytest.mark.alone

TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/stop/s"


class DeafStore:
    """An object store that takes connections and never answers."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._taken.append(self._listening.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._listening.close()
        for one in self._taken:
            one.close()


def test_a_store_that_never_answers_does_not_keep_the_server(tmp_path: Path) -> None:
    store = DeafStore()
    settings = (
        "server.stop_timeout=3s",
        "cold.backend=s3",
        "cold.s3_bucket=b",
        f"cold.s3_endpoint=http://127.0.0.1:{store.port}",
        "cold.s3_region=x",
        "cold.s3_access_key_id=x",
        "cold.s3_secret_access_key=x",
        "cold.flush_interval=1h",
    )
    try:
        with ServerProcess(tmp_path / "data", settings=settings) as server:
            assert httpx.put(server.url + PATH, content=b"kept", headers=TEXT).status_code == 201
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < 3 + 3
            assert "given up" in server.stderr()
    finally:
        store.close()
    with ServerProcess(tmp_path / "data", settings=("cold.backend=memory",)) as server:
        assert httpx.get(server.url + PATH).content == b"kept"


def test_clients_that_never_read_or_finish_do_not_keep_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("server.stop_timeout=3s",)) as server:
        assert server.process is not None
        assert httpx.put(server.url + PATH, content=bytes(7 << 20), headers=TEXT).status_code == 201
        with RawConnection(server.url, receive_buffer_bytes=4096) as deaf, RawConnection(server.url) as slow:
            deaf.send(deaf.request("GET", f"{PATH}?offset=-1"))
            assert deaf.head()[0] == 200
            slow.send(slow.request("POST", PATH, [("Content-Type", "text/plain")], b"abcdef")[:-3])
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_for_exit(15) == 0
            assert time.monotonic() - started < 3 + 3


def test_a_stop_moves_everything_to_the_cold_tier(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("cold.flush_interval=1h",)) as server:
        assert httpx.put(server.url + PATH, content=b"moved", headers=TEXT).status_code == 201
        assert not list((tmp_path / "data" / "cold").glob("segments/**/*.parquet"))
        assert server.stop() == 0
    assert list((tmp_path / "data" / "cold").glob("segments/**/*.parquet"))


def test_new_connections_are_refused_while_requests_finish(tmp_path: Path) -> None:
    """And a request that was under way when the signal came is answered."""
    with ServerProcess(tmp_path / "data", settings=("server.stop_timeout=10s",)) as server:
        assert server.process is not None
        assert httpx.put(server.url + PATH, headers=TEXT).status_code == 201
        with RawConnection(server.url) as busy:
            busy.send(
                busy.request("POST", PATH, [("Content-Type", "text/plain"), ("Expect", "100-continue")], b"ab")[:-2]
            )
            assert busy.answer().status == 100
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while True:
                try:
                    httpx.get(server.url + "/healthz", timeout=1)
                except httpx.TransportError:
                    break
                assert time.monotonic() < deadline, "it still takes connections"
            # The request had not arrived whole, so the server may end it; it must not pretend to have stored it.
            try:
                busy.send(b"ab")
                stored = busy.answer().status == 204
            except (AssertionError, OSError):
                stored = False
        assert server.wait_for_exit(20) == 0
        server.start()
        assert httpx.get(server.url + PATH).content == (b"ab" if stored else b"")
