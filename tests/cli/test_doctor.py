"""`millstream doctor`: finds what is wrong, says what to do, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import lmdb
import pytest

from millstream import config as configuration
from millstream.cli.checks import run_checks
from millstream.cli.cluster_checks import cluster
from millstream.cli.findings import Finding
from millstream.clock import SystemClock
from support.access import Issuer, make_certificate, make_token
from support.broker import Broker
from support.commands import command_line, environment, millstream
from support.server import ServerProcess


def findings(*assignments: str) -> dict[str, Finding]:
    config = configuration.load(None, {}, assignments)
    return {finding.check: finding for finding in run_checks(config, SystemClock())}


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_sound_machine_is_well(tmp_path: Path) -> None:
    before = contents(tmp_path)
    found = findings(
        f"server.data_dir={tmp_path / 'new' / 'data'}", "server.listen=127.0.0.1:0", "http.connections_max=10"
    )
    assert [finding.check for finding in found.values() if finding.level == "problem"] == []
    assert "does not exist yet and can be made" in found["data directory"].message
    assert set(found) == {
        "data directory",
        "disk",
        "durability",
        "object store",
        "clock",
        "open files",
        "memory",
        "exposure",
        "certificate",
        "access",
        "port",
    }
    assert contents(tmp_path) == before


def test_a_data_directory_of_another_version_is_a_problem(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=1) as database:
        meta = database.open_db(b"meta")
        with database.begin(write=True, db=meta) as transaction:
            transaction.put(b"format", b"99")
    found = findings(f"server.data_dir={tmp_path}")["data directory"]
    assert found.level == "problem" and "another version" in found.message and "format 99" in found.message


def test_a_running_server_is_recognised_and_not_disturbed(tmp_path: Path) -> None:
    # Without a scrub, which writes how far it has come.
    with ServerProcess(tmp_path / "data", settings=("cold.scrub_bytes_per_second=0B",)) as server:
        assert server.process is not None
        before = contents(tmp_path / "data")
        listen = server.url.removeprefix("http://")
        done = millstream("doctor", "--data-dir", str(tmp_path / "data"), "--listen", listen, "--json")
        report: dict[str, Any] = json.loads(done.stdout)
        said = {finding["check"]: finding["message"] for finding in report["findings"]}
        assert done.returncode == 0 and report["is_well"], report
        assert f"in use by process {server.process.pid}" in said["data directory"]
        assert said["port"].startswith("a millstream server (")
        assert "an object was written, read and deleted" in said["object store"]
        assert contents(tmp_path / "data") == before
        assert server.stop() == 0


def test_the_owner_of_the_store_is_named_and_whether_this_data_directory_may_start(tmp_path: Path) -> None:
    store = f"cold.path={tmp_path / 'cold'}"
    ours, others = tmp_path / "ours", tmp_path / "others"
    with ServerProcess(ours, settings=(store, "cold.flush_interval=100ms")) as server:
        assert httpx.put(f"{server.url}/v1/stream/one", content=b"one").status_code == 201
        running = findings(f"server.data_dir={ours}", store)["store owner"]
        assert running.level == "ok"
        assert "(epoch 1, since" in running.message
        assert "a server is running on this data directory" in running.message
        assert server.stop() == 0  # with a last flush
    before = {path: path.read_bytes() for path in contents(ours) if path.is_file() and path.name != "lock.mdb"}
    assert "may start on this data directory" in findings(f"server.data_dir={ours}", store)["store owner"].message
    shutil.copytree(ours, others)
    with ServerProcess(others, settings=(store,)) as server:
        assert server.stop() == 0
    refused = findings(f"server.data_dir={ours}", store)["store owner"]
    assert refused.level == "problem"
    assert "cannot start on this data directory" in refused.message
    assert "has owned the object store since" in refused.message
    assert refused.hint is not None
    assert "millstream restore" in refused.hint
    assert "does not know of that" in findings(f"server.data_dir={tmp_path / 'empty'}", store)["store owner"].message
    assert {path: path.read_bytes() for path in contents(ours) if path.is_file() and path.name != "lock.mdb"} == before


def test_a_wrong_setting_is_the_first_thing_found(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("version = 1\n[server]\nlisten = 7\n")
    done = millstream("doctor", "--config", str(tmp_path / "bad.toml"))
    assert done.returncode == 1
    assert "✗ configuration:" in done.stdout.decode() and "HOST:PORT" in done.stdout.decode()


@pytest.mark.parametrize(
    ("check", "assignments", "message", "hint"),
    [
        ("data directory", ("server.data_dir=/proc/nowhere",), "/proc cannot be written", "give the server's user"),
        ("data directory", ("server.data_dir=/etc/hostname/data",), "is not a directory", "--data-dir"),
        ("durability", ("server.data_dir=/dev/shm/millstream",), "is on tmpfs, which is memory", "on a disk"),
        ("object store", ("cold.backend=memory",), "kept in memory", "cold.backend"),
        ("object store", ("cold.backend=s3",), "cold.s3_bucket is not set", "cold.*"),
        (
            "object store",
            (
                "cold.backend=s3",
                "cold.s3_bucket=b",
                "cold.s3_endpoint=http://127.0.0.1:9",
                "cold.s3_access_key_id=a",
                "cold.s3_secret_access_key=b",
            ),
            "s3 cannot be used",
            "credentials",
        ),
        ("object store", ("cold.path=/proc/nowhere",), "/proc cannot be written", "cold.path"),
        ("port", ("server.listen=192.0.2.1:80",), "cannot listen on 192.0.2.1:80", "--listen"),
    ],
)
def test_a_problem_comes_with_its_remedy(
    tmp_path: Path, check: str, assignments: tuple[str, ...], message: str, hint: str
) -> None:
    found = findings(f"server.data_dir={tmp_path}", "server.listen=127.0.0.1:0", *assignments)[check]
    assert found.level == "problem" and message in found.message and hint in (found.hint or ""), found


def test_another_program_on_the_port_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = findings(f"server.data_dir={tmp_path}", f"server.listen=127.0.0.1:{port}")["port"]
    assert found.level == "problem" and f"another program listens on 127.0.0.1:{port}" in found.message


IN_A_CLUSTER = ("cluster.name=c", "cluster.secret=s", "cold.backend=s3", "server.listen=127.0.0.1:0")


def in_cluster(tmp_path: Path, *assignments: str) -> list[Finding]:
    config = configuration.load(None, {}, (f"server.data_dir={tmp_path}", *IN_A_CLUSTER, *assignments))
    return list(cluster(config, SystemClock()))


@pytest.mark.parametrize(
    ("assignments", "message", "hint"),
    [
        (("cold.backend=fs",), "which the nodes of a cluster cannot share", "s3, gcs or azure"),
        (("cluster.replicas=5",), "cluster.replicas is 5", "cluster.routes"),
        (
            ("server.listen=127.0.0.1:4437", "cluster.routes=10.0.0.2:4437,10.0.0.3:4437"),
            "4437 is the port for HTTP",
            "cluster.listen",
        ),
    ],
)
def test_what_serve_refuses_of_a_cluster_is_a_problem(
    tmp_path: Path, assignments: tuple[str, ...], message: str, hint: str
) -> None:
    (found,) = in_cluster(tmp_path, "cluster.routes=127.0.0.1:1,127.0.0.1:2", *assignments)
    assert found.level == "problem" and message in found.message and hint in (found.hint or ""), found


def test_a_data_directory_of_another_node_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"cluster": "c", "node_id": 7}')
    (found,) = in_cluster(tmp_path, "cluster.replicas=1")
    assert found.level == "problem" and "belongs to node 7" in found.message


def test_brokers_and_what_is_none_are_told_apart(tmp_path: Path, url: str) -> None:
    broker = Broker(tmp_path).start()
    try:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            there, silent = f"127.0.0.1:{broker.port}", f"127.0.0.1:{nobody.getsockname()[1]}"
            routes = f"cluster.routes={there},{url.removeprefix('http://')},{silent}"
            found = in_cluster(tmp_path / "data", routes, f"cluster.listen={there}")
    finally:
        broker.stop()
    assert [(one.check, one.level) for one in found] == [
        ("cluster", "ok"),
        ("broker's port", "ok"),
        ("other broker", "ok"),
        ("other broker", "problem"),
        ("other broker", "warning"),
    ]
    assert "a broker listens on" in found[1].message
    assert "not the addresses of their HTTP" in (found[3].hint or "")
    assert "nobody answers at" in found[4].message
    (_, held, *_) = in_cluster(tmp_path / "data", "cluster.replicas=1", f"cluster.listen={url.removeprefix('http://')}")
    assert held.level == "problem" and "another program listens" in held.message


def test_a_variable_that_looks_like_a_setting_is_a_warning_and_does_not_stop_the_start(tmp_path: Path) -> None:
    variable = {"MILLSTREAM_SERVER_PORT": "tcp://10.96.0.12:4437"}
    done = millstream("doctor", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--json", **variable)
    found = [one for one in json.loads(done.stdout)["findings"] if "MILLSTREAM_SERVER_PORT" in one["message"]]
    assert done.returncode == 0 and [one["level"] for one in found] == ["warning"]
    serving = subprocess.Popen(
        command_line("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variable),
    )
    assert serving.stdout is not None
    assert "millstream listens on" in serving.stdout.readline()
    serving.terminate()
    _, logged = serving.communicate(timeout=60)
    assert "MILLSTREAM_SERVER_PORT is ignored" in logged and serving.returncode == 0


def test_few_open_files_are_a_warning(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))

    done = subprocess.run(
        command_line("doctor", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0"),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        preexec_fn=limit,
    )
    assert done.returncode == 0
    assert (
        "! open files:     500 open files are allowed" in done.stdout
        and "fix: raise the limit to 20,256" in done.stdout
    )
    assert done.stdout.splitlines()[-1].endswith("warning")


def test_an_unset_clock_is_a_problem(tmp_path: Path) -> None:
    class Unset(SystemClock):
        def now_ms(self) -> int:
            return 1_000_000

    config = configuration.load(None, {}, (f"server.data_dir={tmp_path}", "server.listen=127.0.0.1:0"))
    found = {finding.check: finding for finding in run_checks(config, Unset())}["clock"]
    assert found.level == "problem" and "1970-01-01" in found.message


def guarded(tmp_path: Path, *assignments: str) -> list[Finding]:
    """What is found about access, for a server with tokens and a certificate that listens to other machines."""
    cert, key = make_certificate(tmp_path)
    key.chmod(0o600)
    make_token(tmp_path / "tokens.json", "read:*")
    config = configuration.load(
        None,
        {},
        (
            f"server.data_dir={tmp_path}",
            "server.listen=0.0.0.0:0",
            "auth.enabled=true",
            f"tls.cert={cert}",
            f"tls.key={key}",
            *assignments,
        ),
    )
    return [one for one in run_checks(config, SystemClock()) if one.check in ("exposure", "certificate", "access")]


def test_a_guarded_server_is_well_and_its_certificate_and_tokens_are_told(tmp_path: Path) -> None:
    exposure, certificate, access = guarded(tmp_path)
    assert {exposure.level, certificate.level, access.level} == {"ok"}
    assert "with [auth] and [tls]" in exposure.message
    assert "is for localhost, 127.0.0.1, fits its key" in certificate.message and "(29 days)" in certificate.message
    assert access.message == f"1 token in {tmp_path / 'tokens.json'}"


@pytest.mark.parametrize(
    ("assignments", "check", "level", "message", "hint"),
    [
        (("tls.cert=", "tls.key="), "exposure", "problem", "the server would not start", "--insecure"),
        (("tls.cert=", "tls.key=", "server.insecure=true"), "exposure", "warning", "without [tls]", "tls.cert"),
        (("tls.key=",), "certificate", "problem", "tls.key is not set", "both tls.cert and tls.key"),
        (("tls.key={tmp}/tokens.json",), "certificate", "problem", "no certificate and its key", "PEM"),
        (("tls.key={tmp}/other.key",), "certificate", "problem", "KEY_VALUES_MISMATCH", "PEM"),
        (("tls.cert={tmp}/absent.pem",), "certificate", "problem", "cannot be read", "read access"),
        (("auth.tokens_file={tmp}/empty",), "access", "warning", "nobody may do anything", "token create"),
        (("auth.tokens_file={tmp}/server.pem",), "access", "problem", "is not one", "security.md"),
        (("auth.jwks_file={tmp}/absent",), "access", "problem", "cannot be read", "[auth]"),
        (("auth.jwks_file={tmp}/server.pem",), "access", "problem", "is not a JWK set", '"keys"'),
        (
            ("auth.enabled=false", "server.insecure=true", "auth.jwks_file={tmp}/keys"),
            "access",
            "warning",
            "auth.enabled is not",
            "auth.enabled=true",
        ),
    ],
)
def test_what_is_wrong_about_access_comes_with_its_remedy(
    tmp_path: Path, assignments: tuple[str, ...], check: str, level: str, message: str, hint: str
) -> None:
    make_certificate(tmp_path, "other")
    found = guarded(tmp_path, *(one.format(tmp=tmp_path) for one in assignments))
    (finding,) = [one for one in found if one.check == check]
    assert finding.level == level and message in finding.message and hint in (finding.hint or ""), finding


def test_secrets_that_others_may_read_are_a_warning(tmp_path: Path) -> None:
    guarded(tmp_path)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(Issuer().jwks()))
    for path in (tmp_path / "tokens.json", tmp_path / "server.key", keys):
        path.chmod(0o644)
    config = configuration.load(
        None,
        {},
        (
            f"server.data_dir={tmp_path}",
            "auth.enabled=true",
            f"auth.jwks_file={keys}",
            f"tls.cert={tmp_path / 'server.pem'}",
            f"tls.key={tmp_path / 'server.key'}",
        ),
    )
    warnings = [one for one in run_checks(config, SystemClock()) if "by others (mode 0644)" in one.message]
    assert [one.hint for one in warnings] == [
        f"chmod 600 {tmp_path / 'server.key'}",
        f"chmod 600 {tmp_path / 'tokens.json'}",
        f"chmod 600 {keys}",
    ]


@pytest.mark.parametrize(
    ("days", "level", "message"),
    [(-2, "problem", "not valid before"), (15, "warning", "(14 days)"), (31, "problem", "and expired on")],
)
def test_a_certificate_that_is_not_valid_or_not_for_long(tmp_path: Path, days: int, level: str, message: str) -> None:
    class Later(SystemClock):
        def now_ms(self) -> int:
            return super().now_ms() + days * 86_400_000

    cert, key = make_certificate(tmp_path)
    key.chmod(0o600)
    config = configuration.load(None, {}, (f"server.data_dir={tmp_path}", f"tls.cert={cert}", f"tls.key={key}"))
    (found,) = [one for one in run_checks(config, Later()) if one.check == "certificate"]
    assert found.level == level and message in found.message, found


def test_a_running_server_with_tls_is_recognised(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    settings = (f"tls.cert={cert}", f"tls.key={key}")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        listen = server.url.removeprefix("https://")
        found = findings(f"server.data_dir={tmp_path / 'data'}", f"server.listen={listen}", *settings)
        assert found["port"].message.startswith("a millstream server (")
        assert server.stop() == 0
