"""Logs: JSON where nobody watches, human on a terminal, with request ids, and never a payload."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import httpx
import pytest

from millstream.config import LoggingSection
from millstream.server.node.logs import HumanFormatter, JsonFormatter, configure_logging
from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server

ADAPTERS = ("in-process",)
TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/logs/s"


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    """For tests that leave nothing behind in it."""
    return serve()


def lines(server: ServerProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in server.stderr().splitlines()]


def test_every_line_is_json_when_it_does_not_go_to_a_terminal(server: ServerProcess) -> None:
    assert httpx.put(server.url + PATH, headers=TEXT).status_code == 201
    assert server.stop() == 0
    seen = lines(server)
    assert seen
    assert "access_log" not in server.stderr()  # which is there only if it is asked for
    for line in seen:
        assert line.keys() >= {"time", "level", "logger", "message"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line["time"]))


def test_the_access_log_says_who_asked_for_what_and_how_it_ended_and_no_payload(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("logging.access=true",)) as server:
        payload = b"a-payload-nobody-should-see"
        with httpx.Client(base_url=server.url, headers={"x-request-id": "trace-7"}) as client:
            assert client.put(PATH, content=payload, headers=TEXT).status_code == 201
            assert client.post(PATH, content=payload, headers=TEXT).status_code == 204
            assert payload in client.get(PATH, params={"offset": "-1", "secret": "in-the-query"}).content
            assert client.post(f"{PATH}-none", content=payload, headers=TEXT).status_code == 404
        assert server.stop() == 0
        access = [line for line in lines(server) if line["logger"] == "millstream.access_log"]
        assert [(line["message"], line["status"], line["request_id"]) for line in access] == [
            (f"PUT {PATH} 201", 201, "trace-7"),
            (f"POST {PATH} 204", 204, "trace-7"),
            (f"GET {PATH} 200", 200, "trace-7"),
            (f"POST {PATH}-none 404", 404, "trace-7"),
        ]
        assert all(isinstance(line["milliseconds"], float) and line["address"] == "127.0.0.1" for line in access)
        assert payload.decode() not in server.stderr()
        assert "in-the-query" not in server.stderr()


def test_a_request_keeps_the_id_it_came_with_and_gets_one_otherwise(running: Server) -> None:
    with httpx.Client(base_url=running.url) as client:
        assert client.get("/healthz", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
        made = {client.get("/healthz").headers["x-request-id"] for _ in range(5)}
        assert len(made) == 5
        assert client.get("/v1/stream/%zz").headers["x-request-id"] not in made


@pytest.mark.parametrize("given", ["has space", "x" * 129, 'quote"', "<script>", "é", "tab\there"])
def test_an_id_that_could_not_stand_in_a_log_is_replaced(running: Server, given: str) -> None:
    with RawConnection(running.url) as connection:
        answer = connection.exchange("GET", "/healthz", [("X-Request-Id", given.encode())])
        assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+-[0-9a-f]+", answer.headers["x-request-id"])


def test_refusals_of_malformed_requests_have_an_id_too(running: Server) -> None:
    with RawConnection(running.url) as connection:
        connection.send(b"NOT HTTP\r\n\r\n")
        assert connection.answer().headers["x-request-id"]


def record(level: int = logging.WARNING, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "millstream.x", "levelno": level, "levelname": logging.getLevelName(level)})
    made.msg, made.args = "flush %s failed", ("7",)
    made.__dict__.update(extra)
    return made


def test_a_person_gets_one_readable_line_coloured_only_on_a_terminal() -> None:
    plain = HumanFormatter(False).format(record(request_id="r-1"))
    assert re.fullmatch(r"\S+Z WARNING  millstream\.x: flush 7 failed  \[request_id=r-1\]", plain)
    assert HumanFormatter(True).format(record()).startswith("\033[33m")
    assert "\033" not in HumanFormatter(True).format(record(logging.INFO))


def test_an_exception_stays_within_its_line() -> None:
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        import sys

        line = JsonFormatter().format(record(exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "broken" in json.loads(line)["exception"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("section", "stream", "is_json"),
    [
        (LoggingSection(), io.StringIO(), True),
        (LoggingSection(), Terminal(), False),
        (LoggingSection(format="json"), Terminal(), True),
        (LoggingSection(format="human"), io.StringIO(), False),
    ],
)
def test_the_format_follows_the_stream_unless_it_is_set(
    section: LoggingSection, stream: io.StringIO, is_json: bool
) -> None:
    root = logging.getLogger()
    former, level = root.handlers[:], root.level
    try:
        configure_logging(section, stream)
        logging.getLogger("millstream.test").info("hello")
        logging.getLogger("millstream.test").debug("unseen")
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in former:
            root.addHandler(handler)
        root.setLevel(level)
    assert stream.getvalue().startswith("{") == is_json
    assert "hello" in stream.getvalue() and "unseen" not in stream.getvalue()
