"""What can be wrong at start-up ends with exit code 1 and a message that names it, never with a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest

from millstream.clock import SystemClock
from millstream.log.file_log import FileLog
from millstream.streams.records import encode_batch
from support.logs import LogDriver
from support.server import PYTHON, ServerProcess


def refused(*arguments: str, environment: dict[str, str] | None = None, cwd: Path) -> str:
    """What `millstream serve` says when it does not start."""
    run = subprocess.run(
        [PYTHON, "-m", "millstream.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
    )
    assert run.returncode == 1, run
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith("millstream: ")
    return run.stderr


def test_port_in_use_is_refused_with_the_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused("--listen", address, "--data-dir", "data", cwd=tmp_path)
    assert address in said and "another process listens there" in said and "--listen" in said


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    assert "192.0.2.1:4437" in refused("--listen", "192.0.2.1:4437", "--data-dir", "data", cwd=tmp_path)


def test_unknown_host_is_refused(tmp_path: Path) -> None:
    said = refused("--listen", "no-such-host.invalid:4437", "--data-dir", "data", cwd=tmp_path)
    assert "no-such-host.invalid" in said


def test_data_directory_in_use_is_refused_with_its_holder_and_the_holder_serves_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        assert server.process is not None
        path = f"{server.url}/v1/stream/held"
        assert httpx.put(path, content=b"kept").status_code == 201
        said = refused("--listen", "127.0.0.1:0", "--data-dir", str(server.data_dir), cwd=tmp_path)
        assert str(server.data_dir) in said
        assert f"pid {server.process.pid}" in said
        assert httpx.get(path).content == b"kept"
        assert httpx.post(path, content=b" on", headers={"content-type": "application/octet-stream"}).status_code == 204
    with ServerProcess(tmp_path / "data") as server:
        assert httpx.get(f"{server.url}/v1/stream/held").content == b"kept on"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/no-such-place"])
def test_data_directory_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    said = refused("--listen", "127.0.0.1:0", "--data-dir", place, cwd=tmp_path)
    assert place in said and "--data-dir" in said


@pytest.mark.parametrize("part", ["log", "catalog"])
def test_data_directory_with_something_in_the_way_is_refused(tmp_path: Path, part: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / part).write_text("in the way")
    assert part in refused("--listen", "127.0.0.1:0", "--data-dir", "data", cwd=tmp_path)


def test_read_only_data_directory_is_refused(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(mounted)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    try:
        said = refused("--listen", "127.0.0.1:0", "--data-dir", str(mounted), cwd=tmp_path)
        assert str(mounted) in said and "Read-only" in said
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "server.lisen=127.0.0.1:1"], ["server.lisen", "listen"]),
        (["--set", "sever.listen=127.0.0.1:1"], ["sever", "server"]),
        (["--set", "http.body_bytes_max=lots"], ["http.body_bytes_max", "lots", "8MiB"]),
        (["--set", "http.idle_timeout=75"], ["http.idle_timeout", "75", "30s"]),
        (["--set", "http.connections_max=-1"], ["http.connections_max", "-1", "whole number"]),
        (["--set", "http.connections_max"], ["http.connections_max", "section.key=value"]),
        (["--set", "server.public_url=$NO_SUCH_VARIABLE"], ["server.public_url", "NO_SUCH_VARIABLE", "not set"]),
        (["--listen", "nonsense"], ["server.listen", "nonsense", "HOST:PORT"]),
        (["--listen", "127.0.0.1:99999"], ["server.listen", "99999", "HOST:PORT"]),
        (["--config", "missing.toml"], ["missing.toml"]),
    ],
)
def test_bad_flag_is_refused_with_key_value_and_what_would_be_right(
    tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    said = refused(*arguments, cwd=tmp_path)
    assert all(part in said for part in named), said
    assert not (tmp_path / "data").exists(), "a refused start must leave nothing behind"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[server]\n", ["version"]),
        ("version = 2\n", ["version", "2"]),
        ("version = 1\n[server\n", ["TOML"]),
        ("version = 1\nlisten = 1\n", ["listen", "section"]),
        ("version = 1\n[server]\nport = 1\n", ["server.port", "listen"]),
        ("version = 1\n[nothing]\nport = 1\n", ["nothing", "server"]),
        ("version = 1\n[log]\nsegment_bytes = true\n", ["log.segment_bytes", "True", "8MiB"]),
        ('version = 1\n[server]\ndata_dir = "$NO_SUCH_VARIABLE"\n', ["server.data_dir", "NO_SUCH_VARIABLE"]),
        ("version = 1\n[server]\ndata_dir = 3\n", ["server.data_dir", "3", "path"]),
    ],
)
def test_bad_configuration_file_is_refused_with_file_key_and_value(
    tmp_path: Path, content: str, named: list[str]
) -> None:
    (tmp_path / "bad.toml").write_text(content)
    said = refused("--config", "bad.toml", cwd=tmp_path)
    assert "bad.toml" in said
    assert all(part in said for part in named), said


def test_bad_environment_variable_is_refused_by_name(tmp_path: Path) -> None:
    said = refused(environment={"MILLSTREAM_HTTP_IDLE_TIMEOUT": "soon"}, cwd=tmp_path)
    assert "MILLSTREAM_HTTP_IDLE_TIMEOUT" in said and "soon" in said


def test_a_record_that_cannot_be_applied_is_named_and_set_aside_by_choice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data, settings=("cold.flush_interval=1h",)) as server:
        assert httpx.put(f"{server.url}/v1/stream/before", content=b"kept").status_code == 201
        server.kill()
    driver = LogDriver(FileLog(data / "log", SystemClock()))
    position = driver.next
    assert driver.append(encode_batch([msgspec.msgpack.encode([99, "of a later version"])])) is None
    driver.log.close()
    arguments = ("--listen", "127.0.0.1:0", "--data-dir", str(data))
    for _ in range(2):
        said = refused(*arguments, cwd=tmp_path)
        assert f"position {position} of shard 0 (unreadable) cannot be applied" in said
        assert f"millstream quarantine {position}" in said
    assert str(position) in _millstream("doctor", "--data-dir", str(data), code=1)
    assert "no start has been refused" in _millstream("quarantine", "--data-dir", str(data), "1", code=1)
    assert "set aside" in _millstream("quarantine", "--data-dir", str(data), str(position))
    with ServerProcess(data) as server:
        assert httpx.get(f"{server.url}/v1/stream/before").content == b"kept"
        assert httpx.put(f"{server.url}/v1/stream/after", content=b"more").status_code == 201
    assert "set aside" in _millstream("quarantine", "--data-dir", str(data))
    with ServerProcess(data) as server:
        assert httpx.get(f"{server.url}/v1/stream/after").content == b"more"


def _millstream(*arguments: str, code: int = 0) -> str:
    run = subprocess.run([PYTHON, "-m", "millstream.cli.main", *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == code, run
    return run.stdout + run.stderr
