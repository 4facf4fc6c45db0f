"""The client through the adapter, line by line, against the protocol's reference server, faults included."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from support.ports import free_port

FOLDER = Path(__file__).parent
TEXT, JSON, BYTES = "text/plain", "application/json", "application/octet-stream"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "node_modules" / "@durable-streams" / "server").exists(),
    reason="the reference server is not installed: npm install in tests/conformance",
)


@pytest.fixture(scope="module")
def reference_url() -> Iterator[str]:
    with subprocess.Popen(
        ["node", "reference_server.js"], cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(20)


class Driver:
    """One adapter process: a command in, an answer out, on one stream of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self._url = url
        self.path = ""

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"type": kind, **fields}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def do(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A command about the stream, which must succeed."""
        answer = self.ask(kind, path=self.path, **fields)
        assert answer["success"] and answer["type"] == kind, answer
        return answer

    def fail(self, kind: str, **fields: Any) -> dict[str, Any]:
        answer = self.ask(kind, path=self.path, **fields)
        assert (answer["type"], answer["success"], answer["commandType"]) == ("error", False, kind), answer
        return answer

    def data(self, **fields: Any) -> str:
        return "".join(chunk["data"] for chunk in self.do("read", **fields)["chunks"])

    def fault(self, **fault: Any) -> None:
        httpx.post(f"{self._url}/_test/inject-error", json={"path": self.path, "count": 1, **fault}).raise_for_status()

    def post(self, data: str, content_type: str = TEXT, **headers: str) -> httpx.Response:
        """An append of somebody else."""
        return httpx.post(f"{self._url}{self.path}", content=data, headers={"content-type": content_type, **headers})


@pytest.fixture(scope="module", params=["sync", "async"])
def driver(request: pytest.FixtureRequest, reference_url: str) -> Iterator[Driver]:
    arguments = [sys.executable, str(FOLDER / "client_adapter.py")] + ["--async"] * (request.param == "async")
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        driver = Driver(process, reference_url)
        begun = driver.ask("init", serverUrl=reference_url, timeoutMs=20_000)
        assert begun["success"] and begun["clientName"].startswith("millstream") and begun["features"]["sse"]
        yield driver
        assert driver.ask("shutdown") == {"type": "shutdown", "success": True}
        assert process.wait(20) == 0


@pytest.fixture
def stream(driver: Driver) -> Driver:
    """The adapter with a new text stream."""
    return fresh(driver, TEXT)


def fresh(driver: Driver, content_type: str, **options: Any) -> Driver:
    driver.path = f"/test-stream-{uuid4()}"
    assert driver.do("create", contentType=content_type, **options)["status"] == 201
    return driver


# -- the life of a stream ------------------------------------------------------------------------------------------


def test_a_stream_is_created_once_and_found(stream: Driver) -> None:
    again = stream.do("create", contentType=TEXT)
    assert again["status"] == 200
    assert stream.do("connect")["offset"] == again["offset"]
    head = stream.do("head")
    assert (head["status"], head["contentType"], head["streamClosed"]) == (200, TEXT, False)
    conflict = stream.fail("create", contentType=JSON)
    assert (conflict["status"], conflict["errorCode"]) == (409, "CONFLICT")


def test_a_stream_has_a_lifetime_and_content_from_the_start(driver: Driver) -> None:
    fresh(driver, TEXT, ttlSeconds=60, data="whole", closed=True)
    head = driver.do("head")
    assert (head["ttlSeconds"], head["streamClosed"]) == (60, True)
    read = driver.do("read", live=False)
    assert ([chunk["data"] for chunk in read["chunks"]], read["upToDate"], read["streamClosed"]) == (
        ["whole"],
        True,
        True,
    )


def test_a_deleted_stream_is_not_found(stream: Driver) -> None:
    assert stream.do("delete")["status"] == 200
    for command in ("delete", "head", "connect", "read", "append", "close", "idempotent-append"):
        fields = {"data": "x", "producerId": "p"} if "append" in command else {}
        missing = stream.fail(command, **fields)
        assert (missing["status"], missing["errorCode"]) == (404, "NOT_FOUND")
    for live in ("long-poll", "sse", True):
        assert stream.fail("read", live=live)["errorCode"] == "NOT_FOUND"


def test_what_is_appended_is_read_from_any_place(stream: Driver) -> None:
    first = stream.do("append", data="héllo ")
    assert first["status"] == 200
    last = stream.do("append", data="world")
    assert stream.data() == "héllo world"
    assert stream.data(offset=first["offset"]) == "world"
    end = stream.do("read", offset=last["offset"])
    assert (end["chunks"], end["upToDate"], end["streamClosed"]) == ([], True, False)
    wrong = stream.fail("read", offset="not-an-offset")
    assert (wrong["status"], wrong["errorCode"]) == (400, "INVALID_OFFSET")


def test_bytes_travel_in_base64(driver: Driver) -> None:
    fresh(driver, BYTES)
    body = bytes(range(256))
    driver.do("append", data=b64encode(body).decode(), binary=True)
    for live in (False, "long-poll", "sse", True):
        (chunk,) = driver.do("read", live=live, waitForUpToDate=True)["chunks"]
        assert chunk["binary"] and b64decode(chunk["data"]) == body


def test_json_is_compared_without_spaces(driver: Driver) -> None:
    fresh(driver, "application/json; charset=utf-8")
    driver.do("append", data='[{"a": "ü"}, [1, 2]]')
    for live in (False, "long-poll", "sse", True):
        assert driver.data(live=live, waitForUpToDate=True) == '[{"a":"ü"},[1,2]]'


def test_writers_are_kept_in_order_by_their_sequence(stream: Driver) -> None:
    for seq in (1, 2):
        stream.do("append", data=str(seq), seq=seq)
    for seq in (2, 1):
        late = stream.fail("append", data="late", seq=seq)
        assert (late["status"], late["errorCode"]) == (409, "SEQUENCE_CONFLICT")
    assert stream.data() == "12"


def test_closing_ends_a_stream_with_or_without_a_last_message(stream: Driver) -> None:
    stream.do("append", data="a")
    closed = stream.do("close", data="b")
    assert closed["status"] == 200 and closed["finalOffset"] == stream.do("head")["offset"]
    assert stream.do("close")["finalOffset"] == closed["finalOffset"]
    for command in ("append", "close"):
        refused = stream.fail(command, data="c")
        assert (refused["status"], refused["errorCode"]) == (409, "STREAM_CLOSED")
    for live in (False, "long-poll", "sse", True):
        read = stream.do("read", live=live, timeoutMs=10_000)
        assert ("".join(chunk["data"] for chunk in read["chunks"]), read["streamClosed"]) == ("ab", True)
        at_end = stream.do("read", live=live, offset=closed["finalOffset"], timeoutMs=10_000)
        assert (at_end["chunks"], at_end["upToDate"], at_end["streamClosed"]) == ([], True, True)


# -- live reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", ["long-poll", "sse", True])
def test_a_live_read_waits_for_what_others_append(stream: Driver, live: str | bool) -> None:
    offset = stream.do("append", data="old")["offset"]
    writer = threading.Timer(0.7, lambda: stream.post("new"))  # after an answer 204
    writer.start()
    read = stream.do("read", live=live, offset=offset, maxChunks=1, timeoutMs=15_000)
    writer.join()
    assert [chunk["data"] for chunk in read["chunks"]] == ["new"]
    assert read["cursor"]


@pytest.mark.parametrize("live", ["long-poll", "sse", True])
def test_a_live_read_of_an_empty_stream_ends_in_time(stream: Driver, live: str | bool) -> None:
    begun = time.monotonic()
    read = stream.do("read", live=live, timeoutMs=800)
    assert (read["chunks"], read["upToDate"], read["streamClosed"]) == ([], True, False)
    assert 0.7 < time.monotonic() - begun < 10


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, "long-poll", "sse", True])
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "count": 2},
        {"status": 502},
        {"status": 503},
        {"status": 504},
        {"status": 429, "retryAfter": 1},
        {"dropConnection": True, "count": 2},
        {"delayMs": 300, "jitterMs": 100},
        {"delayMs": 100, "status": 503},
    ],
    ids=str,
)
def test_a_read_comes_through_faults(stream: Driver, fault: dict[str, Any], live: str | bool) -> None:
    stream.do("append", data="there")
    stream.fault(**fault)
    begun = time.monotonic()
    assert stream.data(live=live, waitForUpToDate=True, timeoutMs=20_000) == "there"
    assert time.monotonic() - begun >= fault.get("retryAfter", 0)


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"status": 503}, {"status": 429, "retryAfter": 1}, {"dropConnection": True, "count": 2}]
)
def test_a_write_comes_through_faults_once(stream: Driver, fault: dict[str, Any]) -> None:
    stream.fault(method="POST", **fault)
    stream.do("append", data="a")
    stream.fault(method="POST", **fault)
    stream.do("idempotent-append", data="b", producerId="p", epoch=0)
    stream.fault(**fault)
    assert stream.do("head")["status"] == 200
    stream.fault(method="POST", **fault)
    stream.do("close", data="c")
    assert stream.data() == "abc"


def test_refusals_are_not_repeated(stream: Driver) -> None:
    for status in (400, 401, 403, 418):
        stream.fault(status=status)
        assert stream.fail("read")["status"] == status
        assert stream.data() == ""


def test_corrupt_and_truncated_json_is_named(driver: Driver) -> None:
    fresh(driver, JSON)
    driver.do("append", data='[{"a": 1}, {"b": 2}]')
    for fault in ({"corruptBody": True}, {"truncateBodyBytes": 5}):
        for live in (False, "long-poll"):
            driver.fault(**fault)
            assert driver.fail("read", live=live, waitForUpToDate=True)["errorCode"] == "PARSE_ERROR"
    assert driver.data() == '[{"a":1},{"b":2}]'


def test_an_unknown_event_is_passed_over_and_a_malformed_control_event_is_named(stream: Driver) -> None:
    stream.do("append", data="data")
    stream.fault(injectSseEvent={"eventType": "future", "data": '{"x": 1}'})
    assert stream.data(live="sse", maxChunks=1) == "data"
    for data in ("{not json", "", "[]", '{"streamNextOffset": 7}'):
        stream.fault(injectSseEvent={"eventType": "control", "data": data})
        assert stream.fail("read", live="sse", maxChunks=1)["errorCode"] == "PARSE_ERROR"


def test_base64_that_is_none_is_named(driver: Driver) -> None:
    fresh(driver, BYTES)
    driver.do("append", data="data")
    driver.fault(injectSseEvent={"eventType": "data", "data": "!!!"})
    assert driver.fail("read", live="sse", maxChunks=1)["errorCode"] == "PARSE_ERROR"


@pytest.mark.parametrize("kind", [[], ["--async"]], ids=["sync", "async"])
def test_a_server_that_is_not_there_or_too_slow_is_named(stream: Driver, reference_url: str, kind: list[str]) -> None:
    stream.fault(delayMs=2000)
    commands = [
        {"type": "init", "serverUrl": reference_url, "timeoutMs": 200},
        {"type": "head", "path": stream.path},
        {"type": "init", "serverUrl": f"http://127.0.0.1:{free_port()}"},
        {"type": "head", "path": "/nowhere"},
        {"type": "nonsense"},
        {"type": "shutdown"},
    ]
    run = subprocess.run(
        [sys.executable, str(FOLDER / "client_adapter.py"), "--retries=0", *kind],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    codes = [answer.get("errorCode") for answer in answers]
    assert codes == [None, "TIMEOUT", None, "NETWORK_ERROR", "NOT_SUPPORTED", None]


# -- producers -----------------------------------------------------------------------------------------------------


def test_producers_headers_are_told_back(stream: Driver) -> None:
    claim = {"producerId": "p", "producerEpoch": 1}
    first = stream.do("append", data="a", producerSeq=0, **claim)
    assert (first["status"], first["duplicate"], first["producerEpoch"], first["producerSeq"]) == (200, False, 1, 0)
    repeat = stream.do("append", data="a", producerSeq=0, **claim)
    assert (repeat["status"], repeat["duplicate"], repeat["producerSeq"]) == (204, True, 0)
    gap = stream.fail("append", data="c", producerSeq=2, **claim)
    assert (gap["status"], gap["producerExpectedSeq"], gap["producerReceivedSeq"]) == (409, 1, 2)
    stale = stream.fail("append", data="z", producerId="p", producerEpoch=0, producerSeq=0)
    assert (stale["status"], stale["producerEpoch"]) == (403, 1)
    assert stream.data() == "a"


def test_a_producer_goes_on_from_command_to_command(stream: Driver) -> None:
    for seq, data in enumerate("abc"):
        appended = stream.do("idempotent-append", data=data, producerId="p", epoch=0)
        assert (appended["producerSeq"], appended["duplicate"]) == (seq, False)
    assert stream.data() == "abc"
    closed = stream.do("idempotent-close", producerId="p", data="d")
    assert closed["finalOffset"] == stream.do("head")["offset"]
    assert stream.do("idempotent-close", producerId="p")["status"] == 200
    other = stream.fail("idempotent-close", producerId="q")
    assert (other["status"], other["errorCode"]) == (409, "STREAM_CLOSED")
    assert stream.data() == "abcd"


def test_a_detached_producer_leaves_the_stream_open(stream: Driver) -> None:
    stream.do("idempotent-append", data="a", producerId="p")
    stream.do("idempotent-detach", producerId="p")
    assert stream.do("head")["streamClosed"] is False
    stream.do("append", data="b")
    assert stream.data() == "ab"


@pytest.mark.parametrize("in_flight", [1, 5])
@pytest.mark.parametrize("claims", [False, True])
def test_batches_arrive_whole_and_in_order(driver: Driver, in_flight: int, claims: bool) -> None:
    fresh(driver, JSON)
    items = [json.dumps({"id": number}) for number in range(30)] + ["[1, 2]", '"text"', "null"]
    driver.do("idempotent-append-batch", items=items, producerId="p", autoClaim=claims, maxInFlight=in_flight)
    assert json.loads(driver.data()) == [json.loads(item) for item in items]
    fresh(driver, TEXT)
    driver.do("idempotent-append-batch", items=list("hello"), producerId="p", autoClaim=claims, maxInFlight=in_flight)
    assert driver.data() == "hello"


def test_batches_arrive_once_whatever_happens_on_the_way(stream: Driver) -> None:
    for fault in ({"dropConnection": True, "count": 3}, {"status": 500, "count": 2}, {"status": 503}):
        stream.fault(method="POST", **fault)
        stream.do("idempotent-append-batch", items=list("abcdefgh"), producerId="p", maxInFlight=4)
    assert stream.data() == "abcdefgh" * 3


def test_an_epoch_is_claimed_only_if_that_is_wanted(stream: Driver) -> None:
    stream.post("x", **{"producer-id": "p", "producer-epoch": "5", "producer-seq": "0"})
    fenced = stream.fail("idempotent-append", data="a", producerId="p", epoch=0, autoClaim=False)
    assert (fenced["status"], fenced["producerEpoch"]) == (403, 5)
    stream.do("idempotent-append", data="a", producerId="p", epoch=0, autoClaim=True)
    assert stream.post("z", **{"producer-id": "p", "producer-epoch": "5", "producer-seq": "1"}).status_code == 403
    stream.post("y", **{"producer-id": "p", "producer-epoch": "9", "producer-seq": "0"})
    stream.do("idempotent-append", data="b", producerId="p", epoch=0, autoClaim=True)
    assert stream.data() == "xayb"
    assert stream.post("z", **{"producer-id": "p", "producer-epoch": "9", "producer-seq": "1"}).status_code == 403


# -- headers, parameters, arguments --------------------------------------------------------------------------------


def test_dynamic_values_are_made_for_each_request(stream: Driver) -> None:
    stream.ask("set-dynamic-header", name="X-Count", valueType="counter")
    stream.ask("set-dynamic-header", name="Authorization", valueType="token", initialValue="Bearer t")
    stream.ask("set-dynamic-param", name="stamp", valueType="timestamp")
    for number in ("1", "2"):
        sent = stream.do("append", data="x", headers={"X-Fixed": "f"})
        assert sent["headersSent"] == {"X-Count": number, "Authorization": "Bearer t"}
        assert int(sent["paramsSent"]["stamp"]) > 1_600_000_000_000
    assert stream.do("read")["headersSent"]["X-Count"] == "3"
    stream.fault(status=503)
    assert stream.do("read")["headersSent"]["X-Count"] == "4"
    assert stream.do("read")["headersSent"]["X-Count"] == "6"  # the repeat had one of its own
    assert stream.ask("clear-dynamic") == {"type": "clear-dynamic", "success": True}
    assert "headersSent" not in stream.do("read")


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        ({"maxRetries": 3, "initialDelayMs": 100, "maxDelayMs": 5000, "multiplier": 2.0}, None),
        ({"maxRetries": 0}, None),
        ({"maxRetries": -1}, "maxRetries"),
        ({"initialDelayMs": 0}, "initialDelayMs"),
        ({"initialDelayMs": -100}, "initialDelayMs"),
        ({"initialDelayMs": 1000, "maxDelayMs": 500}, "maxDelayMs"),
        ({"multiplier": 0.5}, "multiplier"),
    ],
)
def test_retry_options_are_judged(driver: Driver, target: dict[str, Any], wrong: str | None) -> None:
    judged(driver, {"target": "retry-options", **target}, wrong)


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        ({"epoch": 0, "maxBatchBytes": 1 << 20}, None),
        ({"maxBatchItems": 1}, None),
        ({"producerId": ""}, "producerId"),
        ({"epoch": -1}, "epoch"),
        ({"maxBatchBytes": 0}, "maxBatchBytes"),
        ({"maxBatchBytes": -1}, "maxBatchBytes"),
        ({"maxBatchItems": 0}, "maxBatchItems"),
    ],
)
def test_producer_options_are_judged(driver: Driver, target: dict[str, Any], wrong: str | None) -> None:
    judged(driver, {"target": "idempotent-producer", "producerId": "p", **target}, wrong)


def judged(driver: Driver, target: dict[str, Any], wrong: str | None) -> None:
    answer = driver.ask("validate", target=target)
    if wrong is None:
        assert answer == {"type": "validate", "success": True}
    else:
        assert answer["errorCode"] == "INVALID_ARGUMENT" and wrong in answer["message"], answer


def test_operations_are_timed(driver: Driver) -> None:
    fresh(driver, JSON)
    path = driver.path
    operations: list[dict[str, Any]] = [
        {"op": "create", "path": f"{path}-created"},
        {"op": "append", "path": f"{path}-created", "size": 100},
        {"op": "read", "path": f"{path}-created"},
        {"op": "roundtrip", "path": f"{path}-lp", "size": 100, "live": "long-poll"},
        {"op": "roundtrip", "path": f"{path}-sse", "size": 100, "live": "sse", "contentType": JSON},
        {"op": "throughput_append", "path": path, "count": 300, "size": 100, "concurrency": 4},
        {"op": "throughput_read", "path": path},
    ]
    for operation in operations:
        answer = driver.ask("benchmark", iterationId="i", operation=operation)
        assert answer["success"] and answer["iterationId"] == "i" and int(answer["durationNs"]) > 0, answer
    assert answer["metrics"]["messagesProcessed"] == 300
