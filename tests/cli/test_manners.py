"""How commands behave towards people and shells: errors, exit codes, colours, pipes, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from millstream.client import Client
from support.access import make_certificate
from support.commands import command_line, environment, json_of, millstream, output_of
from support.ports import free_port
from support.server import ServerProcess


def test_errors_say_what_to_do_and_exit_codes_say_what_kind(url: str, bucket: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    cases = [
        (("streams", "read", f"{bucket}/none"), url, 3, b"does not exist"),
        (("streams", "tail", f"{bucket}/none"), url, 3, b"does not exist"),
        (("streams", "head", f"{bucket}/none"), url, 3, b"/none does not exist"),
        (("streams", "append", f"{bucket}/none", "x"), url, 3, b"hint: create it first: millstream streams create"),
        (("streams", "append", f"{bucket}/none"), url, 1, b"hint: give DATA, --file FILE, or - for standard input"),
        (("streams", "read", "x", "--offset", "zzz"), url, 1, b"hint: use a Stream-Next-Offset value"),
        (("streams", "append", "x", "--file", "/no/such/file"), url, 1, b"/no/such/file cannot be read"),
        (("snapshot", "ls", f"{bucket}/none"), url, 3, b"/none does not exist"),
        (("status", "--token", "s3cret\n"), url, 1, b"the token cannot be sent in a header"),
        (("cold", "ls", "--set", "cold.backend=memory"), url, 3, b"in the server's memory"),
        (("quarantine", "--data-dir", "/no/such"), url, 3, b"there is no data directory /no/such"),
        (("status",), nowhere, 5, b"hint: is the server running"),
        (("status",), "ftp://x", 1, b"hint: write it as http://127.0.0.1:4437"),
        (("status", "--timeout", "-3"), url, 2, b"'-3' is not a duration such as 90s or 1h, above 0"),
        (("streams", "frobnicate"), url, 2, b"there is no command 'millstream streams frobnicate'"),
        (("streams", "tial", "x"), url, 2, b"hint: did you mean 'tail'? see millstream streams --help"),
        (("stats",), url, 2, b"did you mean 'status'?"),
        (("streams", "ls", "--prefx", "x"), url, 2, b"did you mean '--prefix'? see millstream streams ls --help"),
        (("streams", "tail", "x", "--mode", "see"), url, 2, b"did you mean 'sse'?"),
        (("streams", "create", "x", "--ttl", "1 hour"), url, 2, b"'1 hour' is not a duration such as 90s or 1h"),
        (("status", "--cacert", "/no/such.pem"), url, 1, b"/no/such.pem cannot be used"),
    ]
    output_of("streams", "create", "x", url=url)
    for arguments, address, code, expected in cases:
        done = millstream(*arguments, url=address)
        assert done.returncode == code and expected in done.stderr, (arguments, done)
        assert done.stdout == b"" and b"Traceback" not in done.stderr


def test_errors_are_json_for_those_who_ask_for_json(url: str, bucket: str) -> None:
    done = millstream("streams", "read", f"{bucket}/none", "--json", url=url)
    assert json.loads(done.stderr)["error"]["code"] == "bucket_not_found" and done.stdout == b""


def test_usage_errors_are_json_too(url: str) -> None:
    done = millstream("streams", "ls", "--json", "--prefx", "x", url=url)
    assert done.returncode == 2 and json.loads(done.stderr)["error"]["code"] == "usage"


@pytest.mark.parametrize("group", [(), ("streams",), ("cluster",), ("pipeline",)])
def test_a_command_that_is_not_finished_prints_its_help(group: tuple[str, ...]) -> None:
    done = millstream(*group)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: millstream") and done.stderr == b""


def test_a_server_may_be_named_by_host_and_port(url: str) -> None:
    assert json_of("status", "--url", url.removeprefix("http://"))["url"] == url
    assert json_of("status", url=url.removeprefix("http://"))["url"] == url


@pytest.mark.parametrize(("written", "seconds"), [("90", 90), ("90s", 90), ("1h", 3600), ("1.5h", 5400)])
def test_a_time_to_live_may_have_a_unit(url: str, bucket: str, written: str, seconds: int) -> None:
    output_of("streams", "create", f"{bucket}/{seconds}", "--ttl", written, url=url)
    assert json_of("streams", "head", f"{bucket}/{seconds}", url=url)["ttl_seconds"] == seconds


def test_a_certificate_of_ones_own_is_trusted_when_it_is_named(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with ServerProcess(tmp_path / "data", settings=(f"tls.cert={cert}", f"tls.key={key}")) as server:
        refused = millstream("status", url=server.url)
        assert refused.returncode == 5 and b"--cacert" in refused.stderr, refused
        assert json_of("status", "--cacert", str(cert), url=server.url)["is_well"]
        bare = server.url.removeprefix("https://")
        assert json_of("buckets", "ls", "--cacert", str(cert), "--url", bare) == []
        assert millstream("streams", "ls", url=server.url, MILLSTREAM_CACERT=str(cert)).returncode == 3


def test_restore_without_a_store_says_where_it_looked_and_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = millstream("restore", "--data-dir", "fresh")
    assert done.returncode == 3 and b"there is no object store in fresh/cold" in done.stderr
    assert b"--set cold.path=FOLDER" in done.stderr
    (tmp_path / "data" / "cold").mkdir(parents=True)
    assert (
        b"there is one in data/cold: add --set cold.path=data/cold" in millstream("restore", "--data-dir", "x").stderr
    )


def test_the_flag_wins_over_the_environment(url: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert json_of("status", "--url", url, url=nowhere)["url"] == url


def test_the_token_is_sent_from_flag_or_environment(url: str) -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    seen.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        first = millstream("status", "--token", "abc", url=address)
        second = millstream("status", url=address, MILLSTREAM_TOKEN="def")
        thread.join(10)
    assert first.returncode == second.returncode == 4
    assert b"the token is missing, wrong or expired" in first.stderr and b"abc" not in first.stderr
    assert [b"\r\nauthorization: Bearer abc\r\n" in seen[0], b"\r\nauthorization: Bearer def\r\n" in seen[1]] == [
        True
    ] * 2


def on_a_terminal(*arguments: str, **more: str) -> str:
    """What a command writes when both outputs are a terminal."""
    main, other = pty.openpty()
    done = subprocess.Popen(
        command_line(*arguments), stdin=other, stdout=other, stderr=other, env=environment(TERM="xterm", **more)
    )
    os.close(other)
    shown = b""
    try:
        while piece := os.read(main, 65536):
            shown += piece
    except OSError:
        pass  # a terminal nobody holds any more cannot be read
    os.close(main)
    done.wait(30)
    return shown.decode()


def test_colours_are_for_terminals_that_want_them(url: str) -> None:
    assert "\033[32mok\033[0m" in on_a_terminal("status", "--url", url)
    assert "\033[" not in on_a_terminal("status", "--url", url, NO_COLOR="1")
    assert "\033[31m" in on_a_terminal("status", "--url", f"http://127.0.0.1:{free_port()}")


def test_progress_is_shown_on_a_terminal(url: str, bucket: str, tmp_path: Path) -> None:
    name = f"{bucket}/long"
    output_of("streams", "create", name, "--data", "-", url=url, stdin=bytes(3 << 20))
    shown = on_a_terminal("streams", "read", name, "-o", str(tmp_path / "copy"), "--url", url)
    assert "reading" in shown and "3.0 MiB/3.0 MiB (100%)" in shown
    (tmp_path / "lines").write_text("x\n" * 1000)
    shown = on_a_terminal("streams", "append", name, "--lines", "--file", str(tmp_path / "lines"), "--url", url)
    assert "appending" in shown and "appended 1,000 messages" in shown


@pytest.mark.parametrize("as_json", [False, True])
def test_tail_shows_each_message_at_once_and_ends_with_ctrl_c(url: str, bucket: str, as_json: bool) -> None:
    with Client(url) as client:
        stream = client.stream(f"{bucket}/live")
        stream.create(content_type="application/json", body=["old"])
        arguments = ("streams", "tail", f"{bucket}/live", "--offset", "-1", *(("--json",) if as_json else ()))
        tail = subprocess.Popen(
            command_line(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(url),
            # Whoever started the tests in the background made them, and what they start, deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        guard = threading.Timer(30, tail.kill)
        guard.start()
        assert tail.stdout is not None
        shown = []
        for value in ("old", "new", "newer"):
            line = tail.stdout.readline().decode()
            shown.append(json.loads(line)["messages"] if as_json else [json.loads(line)])
            assert shown[-1] == [value]
            if value != "newer":
                stream.append(["new" if value == "old" else "newer"])
        tail.send_signal(signal.SIGINT)
        _, errors = tail.communicate(timeout=30)
        guard.cancel()
        assert (tail.returncode, errors) == (130, b"")


def test_tail_ends_when_the_stream_is_closed(url: str, bucket: str) -> None:
    name = f"{bucket}/ended"
    output_of(
        "streams", "create", name, "--content-type", "text/plain", "--data", "-", "--closed", url=url, stdin=b"a\r\n"
    )
    assert millstream("streams", "tail", name, "--offset", "-1", url=url).stdout == b"a\r\n"


def test_a_reader_that_goes_away_is_no_accident(url: str, bucket: str) -> None:
    name = f"{bucket}/much"
    output_of("streams", "create", name, "--json-messages", url=url)
    with Client(url) as client:
        client.stream(name).append([f"{number:0200d}" for number in range(20_000)])
    reading = subprocess.Popen(
        command_line("streams", "read", name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(url)
    )
    assert reading.stdout is not None and reading.stderr is not None
    assert reading.stdout.readline() == f'"{0:0200d}"\n'.encode()
    reading.stdout.close()
    assert (reading.wait(30), reading.stderr.read()) == (141, b"")
    reading.stderr.close()


def test_light_commands_do_not_load_the_server() -> None:
    script = (
        "import sys; from millstream.cli.main import build_parser;"
        " build_parser(['streams', 'buckets', 'snapshot', 'status']);"
        " print(sorted({'pyarrow', 'obstore', 'lmdb', 'uvloop', 'millstream.server', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([command_line()[0], "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_job_says_that_there_is_no_server_before_it_starts_spark() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for job in (("compact",), ("audit",), ("usage",)):
            # A master that cannot be: had Spark been started, it would be the one to complain.
            done = millstream("pipeline", *job, "--master", "nowhere", url=url)
            assert done.returncode == 5
            assert f"no server answers at {url}" in done.stderr.decode()
