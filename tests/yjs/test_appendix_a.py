"""The conformance table of the Yjs protocol, appendix A: a test for every row, under the row's name."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from pycrdt import Doc, Text

from millstream.errors import Unauthorized
from millstream.protocol.lib0 import frame_update, split_frames
from millstream.server.api.front import Front
from millstream.server.http.error_map import error_response, yjs_error
from support.application import Answer, ask, front_over
from support.fake_time import FakeClock, run, turns
from support.server import ServerProcess
from support.shards import started
from support.sse_parser import Event, parse_events
from support.yjs import OCTETS, DocumentClient, NodeClients, Typist, wait_for

ROWS: dict[str, Callable[..., None]] = {}
START = "0000000000000000_0000000000000000"
THRESHOLD_BYTES = 4096


def row(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(check: Callable[..., None]) -> Callable[..., None]:
        ROWS[name] = check
        return check

    return add


class Given:
    """What a row's check may use."""

    def __init__(self, document: DocumentClient, node: NodeClients, base_url: str, new_path: Any, folder: Path) -> None:
        self.document = document
        self.node = node
        self.base_url = base_url
        self.new_path = new_path
        self.folder = folder
        self.opened: list[DocumentClient] = []

    def open(self, path: str, base_url: str | None = None) -> DocumentClient:
        self.opened.append(DocumentClient(base_url or self.base_url, path))
        return self.opened[-1]

    def compacted(self) -> tuple[Typist, str]:
        """The document, with so many updates that it has a snapshot."""
        typist = Typist()
        write_until_beyond(self.document, typist, THRESHOLD_BYTES)
        return typist, self.document.wait_for_snapshot()


def write_until_beyond(document: DocumentClient, typist: Typist, size: int) -> None:
    written = 0
    while written < size:
        update = typist.type("some words ")
        document.write(update)
        written += len(frame_update(update))


def offset_after(token: str, count: int = 1) -> str:
    epoch, position = token.removesuffix("_snapshot").split("_")
    return f"{epoch}_{int(position) + count:016d}"


# -- A.1.1 snapshot discovery ---------------------------------------------------------------------------------


@row("snapshot.discovery-new-doc")
def _(given: Given) -> None:
    answer = given.document.get(offset="snapshot")
    assert answer.status_code == 307
    assert httpx.URL(answer.headers["location"]) == httpx.URL(f"{given.document.url}?offset=-1")
    followed = given.document.http.get(answer.headers["location"])
    assert (followed.status_code, followed.content) == (200, b"")
    assert followed.headers["stream-next-offset"] == START
    given.document.http.put(given.document.url)
    assert given.document.discover() == "-1"


@row("snapshot.discovery-with-snapshot")
def _(given: Given) -> None:
    _, token = given.compacted()
    answer = given.document.get(offset="snapshot")
    assert answer.status_code == 307
    assert httpx.URL(answer.headers["location"]) == httpx.URL(f"{given.document.url}?offset={token}")
    position = token.removesuffix("_snapshot")
    assert token.endswith("_snapshot") and START < position <= tail(given.document)


@row("snapshot.discovery-cached")
def _(given: Given) -> None:
    assert given.document.get(offset="snapshot").headers["cache-control"] == "private, max-age=5"
    given.compacted()
    assert given.document.get(offset="snapshot").headers["cache-control"] == "private, max-age=5"


@row("snapshot.read")
def _(given: Given) -> None:
    typist, token = given.compacted()
    answer = given.document.get(offset=token)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert "stream-next-offset" in answer.headers
    doc = Doc({"text": Text()})
    doc.apply_update(answer.content)
    assert typist.text.startswith(str(doc["text"])) and len(str(doc["text"])) > 100


@row("snapshot.not-found")
def _(given: Given) -> None:
    given.document.write(Typist().type("a"))
    refused(given.document.get(offset="0000000000000000_0000000000000007_snapshot"), 404, "SNAPSHOT_NOT_FOUND")
    refused(given.document.get(offset="nonsense_snapshot"), 404, "SNAPSHOT_NOT_FOUND")


@row("snapshot.deleted-retry")
def _(given: Given) -> None:
    typist, old = given.compacted()
    write_until_beyond(given.document, typist, THRESHOLD_BYTES)
    new = given.document.wait_for_snapshot(other_than=old)
    refused(given.document.get(offset=old), 404, "SNAPSHOT_NOT_FOUND")
    assert given.document.get(offset=given.document.discover()).status_code == 200
    assert new > old
    given.document.http.delete(given.document.url)
    refused(given.document.get(offset=new), 404, "SNAPSHOT_NOT_FOUND")
    assert given.document.discover() == "-1"


# -- A.1.2 document operations --------------------------------------------------------------------------------


@row("write.creates-document")
def _(given: Given) -> None:
    refused(given.document.http.head(given.document.url), 404)
    given.document.write(Typist().type("hello"))
    assert given.document.http.head(given.document.url).status_code == 200
    assert given.document.load() == "hello"


@row("write.returns-offset")
def _(given: Given) -> None:
    update = frame_update(Typist().type("hello"))
    answer = given.document.post(update)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["stream-next-offset"] == offset_after(START, len(update))


@row("write.appends-to-stream")
def _(given: Given) -> None:
    typist = Typist()
    offsets = [given.document.write(typist.type(letter)) for letter in "abc"]
    assert offsets == sorted(set(offsets))
    assert given.document.load() == "abc"


@row("write.rapid-batched-updates")
def _(given: Given) -> None:
    path = given.new_path()
    client = given.node.join(given.base_url, path)
    for number in range(50):
        client.insert(f"{number},")
    client.ask("flush")
    document = given.open(path)
    body = document.get(offset="-1").content
    doc = Doc({"text": Text()})
    for update in split_frames(body):
        doc.apply_update(update)
    assert str(doc["text"]) == client.text == "".join(f"{number}," for number in range(50))
    client.ask("close")


@row("write.multiple-rapid-bursts")
def _(given: Given) -> None:
    path = given.new_path()
    writer, reader = given.node.join(given.base_url, path), given.node.join(given.base_url, path)
    expected = ""
    for burst in range(5):
        for number in range(20):
            writer.insert(f"{burst}.{number} ")
            expected += f"{burst}.{number} "
        reader.wait_for_text(expected)
    assert given.open(path).load() == expected
    for client in (writer, reader):
        client.ask("close")


@row("updates.read-from-offset")
def _(given: Given) -> None:
    typist = Typist()
    first, second = typist.type("one "), typist.type("two ")
    offset = given.document.write(first)
    given.document.write(second)
    answer = given.document.get(offset=offset)
    assert split_frames(answer.content) == [second]
    assert answer.headers["stream-up-to-date"] == "true"


@row("updates.read-from-beginning")
def _(given: Given) -> None:
    typist, _ = given.compacted()
    answer = given.document.get(offset="-1")
    assert split_frames(answer.content) == typist.updates
    assert split_frames(given.document.http.get(given.document.url).content) == typist.updates


@row("updates.live-polling")
def _(given: Given) -> None:
    typist = Typist()
    offset = given.document.write(typist.type("before "))
    for live in ("true", "long-poll"):
        update = typist.type("after ")
        later = threading.Timer(0.2, given.document.write, [update])
        later.start()
        started_at = time.monotonic()
        answer = httpx.get(given.document.url, params={"offset": offset, "live": live}, timeout=10)
        assert (answer.status_code, split_frames(answer.content)) == (200, [update])
        assert time.monotonic() - started_at > 0.1
        offset = answer.headers["stream-next-offset"]
        later.join()


@row("updates.live-timeout")
def _(given: Given) -> None:
    def check(answer: Answer) -> None:
        assert answer.status == 204
        assert answer.headers["stream-up-to-date"] == "true"
        assert answer.headers["stream-next-offset"] == offset_after(START, 5)

    async def scenario(app: Front, clock: FakeClock) -> None:
        url = "/v1/yjs/notes/docs/plan"
        assert (await ask(app, "POST", url, frame_update(b"\0\0\0\0"))).status == 204
        waiting = ask(app, "GET", f"{url}?offset={offset_after(START, 5)}&live=true")
        clock.advance(59_000)
        await turns()
        assert not waiting.done()
        clock.advance(1_001)
        check(await waiting)

    in_process(given.folder, scenario)


@row("doc.path-with-slashes")
def _(given: Given) -> None:
    document = given.open(f"{given.new_path()}/chapter-1/page-2")
    beside = given.open(document.url.split("/docs/")[1].rsplit("/", 1)[0])
    document.write(Typist().type("deep"))
    assert document.load() == "deep"
    assert beside.load() == ""
    doubled = document.url.replace("/chapter-1/", "//chapter-1///")
    assert httpx.get(doubled, params={"offset": "-1"}).content == document.get(offset="-1").content


# -- A.1.3 awareness ------------------------------------------------------------------------------------------


@row("awareness.lazy-creation")
def _(given: Given) -> None:
    plain = awareness_stream(given.document.create())
    assert httpx.head(plain("default")).status_code == 200
    assert httpx.head(plain("seen")).status_code == 404
    assert given.document.get(awareness="seen", offset="now").status_code == 200
    assert httpx.head(plain("seen")).status_code == 200
    assert given.document.post(b"written", awareness="other").status_code == 204
    assert httpx.get(plain("other")).content == b"written"


@row("awareness.offset-now")
def _(given: Given) -> None:
    given.document.create().post(b"old", awareness="default")
    with subscribed(given.document, "default") as events:
        given.document.post(b"new", awareness="default")
        assert events.next_data() == b"new"


@row("awareness.write")
def _(given: Given) -> None:
    answer = given.document.create().post(b"cursor at 3", awareness="default")
    assert (answer.status_code, answer.headers["stream-next-offset"]) == (204, offset_after(START, 11))
    answer = given.document.post(b"cursor at 4", awareness="default")
    assert answer.headers["stream-next-offset"] == offset_after(START, 22)
    assert given.document.get(awareness="default", offset="-1").content == b"cursor at 3cursor at 4"


@row("awareness.broadcast")
def _(given: Given) -> None:
    given.document.create()
    with subscribed(given.document, "default") as first, subscribed(given.document, "default") as second:
        for number in range(3):
            given.document.post(b"state %d" % number, awareness="default")
            assert first.next_data() == second.next_data() == b"state %d" % number


@row("awareness.ttl")
def _(given: Given) -> None:
    async def scenario(app: Front, clock: FakeClock) -> None:
        url, hour_ms = "/v1/yjs/notes/docs/plan?awareness=default", 3_600_000
        assert (await ask(app, "PUT", "/v1/yjs/notes/docs/plan")).status == 201
        assert (await ask(app, "POST", url, b"here")).status == 204
        clock.advance(hour_ms - 1_000)
        assert (await ask(app, "GET", f"{url}&offset=now")).status == 200  # whoever reads keeps it
        clock.advance(hour_ms - 1_000)
        assert (await ask(app, "HEAD", url)).headers["stream-ttl"] == "3600"
        clock.advance(1_000)
        assert (await ask(app, "HEAD", url)).status == 404
        assert (await ask(app, "HEAD", "/v1/stream/notes/awareness/plan/default")).status == 404
        answer = await ask(app, "POST", url, b"back")
        assert (answer.status, answer.headers["stream-next-offset"]) == (204, offset_after(START, 4))

    in_process(given.folder, scenario)


@row("awareness.named-streams")
def _(given: Given) -> None:
    given.document.create().post(b"for all", awareness="default")
    given.document.post(b"for admins", awareness="admin")
    assert given.document.get(awareness="default", offset="-1").content == b"for all"
    assert given.document.get(awareness="admin", offset="-1").content == b"for admins"
    elsewhere = given.open(given.new_path()).create()
    assert elsewhere.get(awareness="admin", offset="-1").content == b""


@row("awareness.default-stream")
def _(given: Given) -> None:
    path = given.new_path()
    with subscribed(given.open(path).create(), "default") as events:
        client = given.node.join(given.base_url, path)  # the published provider, which names no other
        client.ask("presence", state="ada")
        wait_for(events.next_data, lambda data: b"ada" in data)
        client.ask("close")


@row("awareness.sse-control-events")
def _(given: Given) -> None:
    with subscribed(given.document.create(), "default") as events:
        first = events.next_control()
        assert first["streamNextOffset"] == START and int(first["streamCursor"]) > 0
        given.document.post(b"12345", awareness="default")
        events.next_data()
        assert events.next_control()["streamNextOffset"] == offset_after(START, 5)


# -- A.1.4 compaction -----------------------------------------------------------------------------------------


@row("compaction.triggers-at-threshold")
def _(given: Given) -> None:
    typist = Typist()
    write_until_beyond(given.document, typist, THRESHOLD_BYTES - 200)
    time.sleep(0.3)
    assert given.document.discover() == "-1"
    write_until_beyond(given.document, typist, 200)
    given.document.wait_for_snapshot()


@row("compaction.creates-snapshot-url")
def _(given: Given) -> None:
    typist, token = given.compacted()
    doc = Doc({"text": Text()})
    doc.apply_update(given.document.get(offset=token).content)
    covered = split_frames(given.document.get(offset="-1").content)
    again = Doc({"text": Text()})
    size = 0
    for update in covered:
        size += len(frame_update(update))
        again.apply_update(update)
        if offset_after(START, size) == token.removesuffix("_snapshot"):
            break
    else:
        raise AssertionError(f"{token} is not where an update ends")
    assert str(doc["text"]) == str(again["text"])
    assert typist.text.startswith(str(doc["text"]))


@row("compaction.updates-redirect")
def _(given: Given) -> None:
    typist, first = given.compacted()
    write_until_beyond(given.document, typist, THRESHOLD_BYTES)
    second = given.document.wait_for_snapshot(other_than=first)
    assert second > first
    assert given.document.load() == typist.text


@row("compaction.stream-next-offset")
def _(given: Given) -> None:
    typist, token = given.compacted()
    after = given.document.get(offset=token).headers["stream-next-offset"]
    assert after == offset_after(token)
    update = typist.type("and one more")
    given.document.write(update)
    assert split_frames(given.document.get(offset=after).content)[-1] == update
    # One more than the snapshot's offset, and still every message after it, whole.
    assert (
        given.document.get(offset=after).content == given.document.get(offset=token.removesuffix("_snapshot")).content
    )
    assert given.document.load() == typist.text


@row("compaction.deletes-old-snapshot")
def _(given: Given) -> None:
    typist, old = given.compacted()
    write_until_beyond(given.document, typist, THRESHOLD_BYTES)
    given.document.wait_for_snapshot(other_than=old)
    refused(given.document.get(offset=old), 404, "SNAPSHOT_NOT_FOUND")


@row("compaction.client-transparent")
def _(given: Given) -> None:
    path = given.new_path()
    document = given.open(path)
    writer, reader = given.node.join(given.base_url, path), given.node.join(given.base_url, path)
    expected = ""
    for number in range(300):
        writer.insert(f"word {number} ")
        expected += f"word {number} "
        if number % 30 == 0:
            writer.ask("flush")
    reader.wait_for_text(expected)
    document.wait_for_snapshot()
    late = given.node.join(given.base_url, path)
    late.wait_for_text(expected)
    late.insert("!")
    for client in (writer, reader):
        client.wait_for_text(expected + "!")
    for client in (writer, reader, late):
        assert client.ask("errors") == []
        client.ask("close")


@row("compaction.configurable-threshold")
def _(given: Given) -> None:
    with ServerProcess(given.folder / "small", settings=("yjs.compaction_threshold=1KiB",)) as server:
        document = given.open("plan", f"{server.url}/v1/yjs/notes")
        typist = Typist()
        write_until_beyond(document, typist, 900)
        time.sleep(0.3)
        assert document.discover() == "-1"
        write_until_beyond(document, typist, 124)
        token = document.wait_for_snapshot()
        assert 1024 <= int(token.split("_")[1]) < 1300


@row("compaction.single-writer")
def _(given: Given) -> None:
    """Writes that each ask for a compaction, many at once: every one that runs covers more than the one before."""
    document, typists = given.document, [Typist() for _ in range(8)]

    def write(typist: Typist) -> None:
        with httpx.Client() as http:
            for _ in range(60):
                body = frame_update(typist.type("many words at once "))
                assert http.post(document.url, content=body, headers=OCTETS).status_code == 204

    threads = [threading.Thread(target=write, args=[typist]) for typist in typists]
    for thread in threads:
        thread.start()
    tokens = []
    while any(thread.is_alive() for thread in threads):
        tokens.append(document.discover())
        time.sleep(0.005)
    document.wait_for_snapshot()
    seen = [token for token in tokens if token != "-1"]
    assert seen == sorted(seen)
    assert document.load() == document.load_from_beginning()
    assert document.load().count("many words at once") == 8 * 60


# -- A.1.5 errors ---------------------------------------------------------------------------------------------


@row("error.invalid-request")
def _(given: Given) -> None:
    document = given.document
    document.write(Typist().type("a"))
    refused(document.get(offset="not-an-offset"), 400, "INVALID_REQUEST")
    refused(document.get(offset="-1", live="maybe"), 400, "INVALID_REQUEST")
    refused(document.post(b"\x05abc"), 400, "INVALID_REQUEST")
    refused(document.post(b""), 400, "INVALID_REQUEST")
    for path in ("a/%2e%2e/b", "%2E", "a/..%2Fb"):
        refused(httpx.get(f"{given.base_url}/docs/{path}?offset=-1"), 400, "INVALID_REQUEST")
    refused(httpx.get(f"{given.base_url}/other/a"), 400, "INVALID_REQUEST")
    refused(httpx.patch(document.url), 405, "INVALID_REQUEST")


@row("error.unauthorized")
def _(given: Given) -> None:
    response = yjs_error(error_response(Unauthorized("the token is missing")))
    assert response.status == 401
    assert isinstance(response.body, bytes)
    assert json.loads(response.body)["error"]["code"] == "UNAUTHORIZED"
    assert b"www-authenticate: Bearer" in response.fields


@row("error.snapshot-deleted")
def _(given: Given) -> None:
    _, token = given.compacted()
    assert given.document.http.delete(given.document.url).status_code == 204
    refused(given.document.get(offset=token), 404, "SNAPSHOT_NOT_FOUND")


@row("error.offset-expired")
def _(given: Given) -> None:
    settings = ("yjs.compaction_threshold=1KiB", "yjs.retention=0s")
    with ServerProcess(given.folder / "short", settings=settings) as server:
        document = given.open("plan", f"{server.url}/v1/yjs/notes")
        typist = Typist()
        write_until_beyond(document, typist, 1024)
        document.wait_for_snapshot()
        answer = wait_for(lambda: document.get(offset="-1"), lambda answer: answer.status_code != 200)
        refused(answer, 410, "OFFSET_EXPIRED")
        refused(document.get(offset="-1", live="sse"), 410, "OFFSET_EXPIRED")
        assert document.load() == typist.text


# -- what the rows use ----------------------------------------------------------------------------------------


def tail(document: DocumentClient) -> str:
    return document.http.head(document.url).headers["stream-next-offset"]


def refused(answer: httpx.Response, status: int, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    if code is not None:
        error = answer.json()["error"]
        assert error["code"] == code and error["message"]
        assert answer.headers["content-type"] == "application/json"


def awareness_stream(document: DocumentClient) -> Callable[[str], str]:
    root, path = document.url.split("/v1/yjs/notes/docs/")
    return lambda name: f"{root}/v1/stream/notes/awareness/{path}/{name}"


class subscribed:
    """The events of an awareness stream, from now on."""

    def __init__(self, document: DocumentClient, name: str) -> None:
        self._url = httpx.URL(document.url, params={"awareness": name, "offset": "now", "live": "true"})
        self._events: list[Event] = []

    def __enter__(self) -> subscribed:
        self._http = httpx.Client(timeout=10)
        self._stream = self._http.stream("GET", self._url)
        response = self._stream.__enter__()
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
        assert response.headers["stream-sse-data-encoding"] == "base64"
        self._chunks = response.iter_raw()
        self._fill()  # the first event tells that it has begun
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(None, None, None)
        self._http.close()

    def _fill(self) -> None:
        received = b""
        while not received.endswith(b"\n\n"):
            received += next(self._chunks)
        self._events += parse_events(received)

    def _next(self, kind: str) -> str:
        while True:
            while self._events:
                event = self._events.pop(0)
                if event.type == kind:
                    return event.data
            self._fill()

    def next_data(self) -> bytes:
        return base64.b64decode(self._next("data"))

    def next_control(self) -> dict[str, str]:
        return json.loads(self._next("control"))


def in_process(folder: Path, scenario: Callable[[Front, FakeClock], Coroutine[Any, Any, None]]) -> None:
    """Run against an application whose time the scenario moves."""
    clock = FakeClock()

    async def main() -> None:
        async with started(folder / "fake-time", clock) as driver:
            await scenario(front_over(driver.shard), clock)

    run(main(), clock)


# -- the table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_row(
    name: str, document: DocumentClient, node: NodeClients, base_url: str, new_path: Callable[[], str], tmp_path: Path
) -> None:
    given = Given(document, node, base_url, new_path, tmp_path)
    try:
        ROWS[name](given)
    finally:
        for opened in given.opened:
            opened.http.close()


def test_every_row_of_the_table_is_here() -> None:
    categories = [name.partition(".")[0] for name in ROWS]
    counts = {category: categories.count(category) for category in categories}
    assert counts == {
        "snapshot": 6, "write": 5, "updates": 4, "doc": 1, "awareness": 8, "compaction": 8, "error": 4
    }  # fmt: skip
    assert len(ROWS) == 36
