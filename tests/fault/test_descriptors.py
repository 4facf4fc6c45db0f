"""File descriptors over the life of a server: none is closed twice, and the one that listens is the server's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from millstream.cli.main import main
from millstream.server.node.data_directory import DataDirectory
from support.server import PYTHON, ServerProcess

TEXT = {"content-type": "text/plain"}
SERVE = (PYTHON, "-m", "millstream.cli.main", "serve")


def can_trace() -> bool:
    return (
        shutil.which("strace") is not None
        and subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_trace(), reason="strace is not there, or may not trace")
def test_no_descriptor_is_closed_twice_from_the_start_to_the_end(tmp_path: Path) -> None:
    """Log segments, uploads, a flush in a process of its own, a broken connection and a stop."""
    # -Z: only calls that failed; -D: the server is this process's child, as it is without a tracer.
    tracer = ("strace", "-D", "-f", "-qq", "-Z", "-e", "trace=close", "-o", str(tmp_path / "trace"))
    settings = ("log.segment_bytes=64KiB", "cold.flush_interval=200ms", "hot.keep_bytes=0B")
    for _ in range(2):
        with ServerProcess(tmp_path / "data", settings=settings, command=(*tracer, *SERVE)) as server:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                for number in range(8):
                    client.put(f"/v1/stream/b/s{number}", headers=TEXT)
                body = b"[" + b",".join([b'"x"'] * 3000) + b"]"
                client.put("/v1/stream/b/json", headers={"content-type": "application/json"})
                for _ in range(4):
                    client.post("/v1/stream/b/json", headers={"content-type": "application/json"}, content=body)
                    client.post("/v1/stream/b/s1", headers=TEXT, content=bytes(40_000))
                client.put("/b/s2/snapshot/0000000000000000_0000000000000000", content=b"state")
                with socket.create_connection(server.url.removeprefix("http://").split(":"), 10) as broken:  # type: ignore[arg-type]
                    broken.sendall(b"PUT /b/s3/snapshot/0 HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
                time.sleep(1.0)
            assert server.stop(60) == 0
    failed = [line for line in (tmp_path / "trace").read_text().splitlines() if "EBADF" in line]
    assert failed == []


def test_a_server_whose_address_another_takes_meanwhile_says_so_and_lets_go_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sockets may be bound to one address; the first that listens has it, and the other must not go on without."""
    threads = threading.active_count()
    rival = socket.socket()
    rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    rival.bind(("127.0.0.1", 0))
    port = rival.getsockname()[1]
    acquire = DataDirectory.__init__

    def listens_first(self: DataDirectory, path: Path) -> None:
        rival.listen()  # after the server has bound its socket, before it listens
        acquire(self, path)

    monkeypatch.setattr(DataDirectory, "__init__", listens_first)
    with rival:
        code = main(["serve", "--listen", f"127.0.0.1:{port}", "--data-dir", str(tmp_path / "data")])
    said = capsys.readouterr().err
    assert code != 0
    assert f"cannot listen on 127.0.0.1:{port}: another process listens there" in said
    assert threading.active_count() < threads + 20
    acquire(directory := DataDirectory.__new__(DataDirectory), tmp_path / "data")
    directory.release()
    directory.release()
