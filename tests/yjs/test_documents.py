"""Documents over plain HTTP, beyond the conformance table: creation rules, names, producers, awareness, no pycrdt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.asgi import MillstreamApp
from millstream.protocol.lib0 import frame_update, split_frames
from support.server import PYTHON, ServerProcess
from support.yjs import OCTETS, DocumentClient, Typist, wait_for

START = "0000000000000000_0000000000000000"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.fixture(scope="module")
def strict_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service in which documents must be created."""
    folder = tmp_path_factory.mktemp("strict") / "data"
    with ServerProcess(folder, settings=("yjs.implicit_create=false",)) as server:
        yield f"{server.url}/v1/yjs/notes"


def test_without_implicit_creation_everything_is_404_before_put(strict_url: str) -> None:
    document = DocumentClient(strict_url, "plan")
    update = frame_update(Typist().type("hello"))
    missing = (404, "DOCUMENT_NOT_FOUND")
    assert code(document.post(update)) == missing
    assert code(document.post(b"x", awareness="default")) == (404, "STREAM_NOT_FOUND")
    assert code(document.get(offset="snapshot")) == missing
    assert code(document.get(offset="-1")) == missing
    assert code(document.get(offset="-1", live="true")) == missing
    assert code(document.get(awareness="default", offset="now", live="true")) == (404, "STREAM_NOT_FOUND")
    assert document.http.head(document.url).status_code == 404
    assert code(document.http.delete(document.url)) == missing
    assert document.http.put(document.url, headers=OCTETS).status_code == 201
    assert document.http.put(document.url, headers=OCTETS).status_code == 200
    assert document.post(update).status_code == 204
    assert document.post(b"x", awareness="default").status_code == 204
    assert document.load() == "hello"
    document.http.close()


def test_a_long_poll_on_a_document_nobody_wrote_to_gets_its_first_update(document: DocumentClient) -> None:
    update = Typist().type("first")
    later = threading.Timer(0.2, lambda: httpx.post(document.url, content=frame_update(update), headers=OCTETS))
    later.start()
    answer = document.get(offset="-1", live="true")
    assert (answer.status_code, split_frames(answer.content)) == (200, [update])
    later.join()


def test_a_long_poll_on_a_document_nobody_writes_to_ends(document: DocumentClient) -> None:
    answer = document.get(offset="-1", live="true")
    assert (answer.status_code, answer.headers["stream-next-offset"]) == (204, START)
    assert answer.headers["stream-up-to-date"] == "true" and "stream-cursor" in answer.headers
    assert document.http.head(document.url).status_code == 404
    assert code(document.get(offset="-1", live="sse")) == (404, "DOCUMENT_NOT_FOUND")


def test_now_is_the_tail(document: DocumentClient) -> None:
    offset = document.write(Typist().type("hello"))
    answer = document.get(offset="now")
    assert (answer.status_code, answer.content, answer.headers["stream-next-offset"]) == (200, b"", offset)


def test_a_document_is_a_stream_in_the_bucket_of_its_service(
    document: DocumentClient, yjs_server: ServerProcess
) -> None:
    typist = Typist()
    document.write(typist.type("hello"))
    document.post(b"here", awareness="default")
    path = document.url.split("/docs/")[1]
    listed = httpx.get(f"{yjs_server.url}/notes/streams", params={"prefix": f"docs/{path}"}).json()["streams"]
    assert f"docs/{path}" in [stream["stream_id"] for stream in listed]
    plain = httpx.get(f"{yjs_server.url}/v1/stream/notes/docs/{path}")
    assert split_frames(plain.content) == typist.updates
    feed = httpx.get(f"{yjs_server.url}/notes/streams/feed", params={"prefix": f"awareness/{path}/"})
    assert f"awareness/{path}/default" in feed.text


def test_creating_a_document_makes_its_default_awareness_stream(
    document: DocumentClient, yjs_server: ServerProcess
) -> None:
    missing = document.http.delete(document.url, params={"awareness": "default"})
    assert code(missing) == (404, "STREAM_NOT_FOUND")
    document.create()
    awareness = f"{yjs_server.url}/v1/stream/notes/awareness/{document.url.split('/docs/')[1]}"
    assert httpx.head(f"{awareness}/default").headers["stream-ttl"] == "3600"
    for method in ("HEAD", "DELETE"):
        assert document.http.request(method, document.url, params={"awareness": "other"}).status_code == 404
    assert httpx.head(f"{awareness}/other").status_code == 404
    assert document.http.put(document.url, headers=OCTETS).status_code == 200


@pytest.mark.parametrize(
    "token", ["_snapshot", "x_snapshot", "-1_snapshot", "now_snapshot", "1_2_3_snapshot", f"{'9' * 40}_snapshot"]
)
def test_a_snapshot_that_cannot_be_is_not_found(document: DocumentClient, token: str) -> None:
    assert code(document.get(offset=token)) == (404, "SNAPSHOT_NOT_FOUND")
    document.write(Typist().type("hello"))
    assert code(document.get(offset=token)) == (404, "SNAPSHOT_NOT_FOUND")
    assert code(document.get(offset=f"{START}_snapshot")) == (404, "SNAPSHOT_NOT_FOUND")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 409),
        ({"if-match": '"1:0"'}, 412),
        ({"producer-id": "p", "producer-epoch": "0", "producer-seq": "3"}, 409),
        ({"producer-id": "p", "producer-epoch": "0"}, 400),
        ({"stream-seq": "x" * 300}, 400),
    ],
)
def test_a_refused_write_makes_no_document_no_awareness_and_no_bucket(
    yjs_server: ServerProcess, headers: dict[str, str], status: int
) -> None:
    service = f"refused-{status}-{len(str(headers))}"
    document = DocumentClient(f"{yjs_server.url}/v1/yjs/{service}", "plan")
    body = frame_update(Typist().type("hello"))
    with document.http:
        answer = document.http.post(document.url, content=body, headers={**OCTETS, **headers})
        assert answer.status_code == status, answer.text
        assert document.http.post(document.url, content=b"", headers=OCTETS).status_code == 400
        assert document.post(b"here", awareness="default").status_code == 404
        assert document.http.get(f"{yjs_server.url}/{service}/streams").status_code == 404
        document.create()
        at = {"awareness": "cursors"}
        answer = document.http.post(document.url, params=at, content=body, headers={**OCTETS, **headers})
        assert answer.status_code == status
        assert document.http.head(document.url, params=at).status_code == 404


def test_an_update_that_kills_its_reader_does_not_keep_a_document_from_its_snapshot(
    document: DocumentClient,
) -> None:
    typist = Typist()
    document.write(typist.type("before "))
    deep = bytes([117, 1]) * 200_000 + bytes([126])
    document.write(bytes([1, 1, 77, 0, 8, 1, 1]) + b"x" + bytes([1]) + deep + bytes([0]))
    document.wait_for_snapshot()
    document.write(typist.type("after"))
    assert document.load() == "before after"


def test_deleting_a_document_takes_its_awareness_along_and_nobody_elses(
    document: DocumentClient, yjs_server: ServerProcess
) -> None:
    below = f"{document.url}/below"
    document.write(Typist().type("hello"))
    for name in ("default", "admin"):
        document.post(b"here", awareness=name)
    httpx.put(below, headers=OCTETS)
    assert document.http.delete(document.url).status_code == 204
    # At once, all of them, and nobody brings them back.
    for name in ("default", "admin", "never used"):
        at = {"awareness": name}
        answers = [document.get(**at), document.get(**at, offset="now", live="true"), document.post(b"here", **at)]
        for answer in (*answers, document.http.delete(document.url, params=at)):
            assert code(answer) == (404, "STREAM_NOT_FOUND")
        assert document.http.head(document.url, params=at).status_code == 404
    path = document.url.split("/docs/")[1]
    plain = f"{yjs_server.url}/v1/stream/notes/awareness/{path}/admin"
    wait_for(lambda: httpx.head(plain).status_code, lambda status: status == 404)
    assert httpx.head(below, params={"awareness": "default"}).status_code == 200
    assert document.http.head(document.url).status_code == 404
    document.write(Typist().type("anew"))
    assert document.load() == "anew"


def test_a_producer_that_starts_over_claims_a_new_epoch(document: DocumentClient) -> None:
    typist = Typist()

    def post(epoch: int, seq: int) -> httpx.Response:
        headers = {**OCTETS, "producer-id": "ada", "producer-epoch": str(epoch), "producer-seq": str(seq)}
        return document.http.post(document.url, content=frame_update(typist.type("x")), headers=headers)

    assert [post(0, seq).status_code for seq in range(3)] == [200, 200, 200]
    assert post(0, 2).status_code == 204  # a repetition, as ever
    answer = post(0, 0)
    assert (*code(answer), answer.headers["producer-epoch"]) == (403, "PRODUCER_FENCED", "0")
    assert [post(1, seq).status_code for seq in range(2)] == [200, 200]
    assert post(0, 3).status_code == 403


def test_nobody_closes_a_document(document: DocumentClient) -> None:
    typist = Typist()
    offset = document.write(typist.type("a"))
    goodbye = document.http.post(document.url, headers={**OCTETS, "stream-closed": "true"})
    assert (goodbye.status_code, goodbye.headers["stream-next-offset"]) == (204, offset)
    closing = {**OCTETS, "stream-closed": "true"}
    assert document.http.post(document.url, content=frame_update(typist.type("b")), headers=closing).status_code == 204
    document.write(typist.type("c"))
    assert document.load() == "abc"
    assert "stream-closed" not in document.http.head(document.url).headers


@pytest.mark.parametrize("body", [b"\x05abc", b"\x80", b"\x02\x00\x00\x00", b"plain text"])
def test_a_body_that_is_not_framed_is_refused_and_nothing_of_it_stored(document: DocumentClient, body: bytes) -> None:
    offset = document.write(Typist().type("a"))
    answer = document.post(body)
    assert code(answer) == (400, "INVALID_REQUEST")
    assert "lib0" in answer.json()["error"]["message"]
    assert document.get(offset="now").headers["stream-next-offset"] == offset
    assert code(document.http.put(document.url + "-new", content=body, headers=OCTETS)) == (400, "INVALID_REQUEST")


def test_an_awareness_stream_does_not_grow_without_end(document: DocumentClient) -> None:
    document.create()
    piece = b"p" * (128 << 10)
    for _ in range(20):
        assert document.post(piece, awareness="default").status_code == 204
    kept = wait_for(
        lambda: document.http.head(document.url, params={"awareness": "default"}).headers,
        lambda headers: "stream-earliest-offset" in headers,
    )
    held = int(kept["stream-next-offset"].split("_")[1]) - int(kept["stream-earliest-offset"].split("_")[1])
    assert 0 < held < 1 << 20
    answer = document.get(awareness="default", offset="-1")
    assert answer.status_code == 200 and set(answer.content) == {ord("p")}


def test_without_pycrdt_documents_are_served_and_not_compacted(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['pycrdt'] = None; from millstream.cli.main import entry; entry()"
    settings = ("yjs.compaction_threshold=1KiB",)
    with ServerProcess(tmp_path / "data", settings=settings, command=(PYTHON, "-c", hidden, "serve")) as server:
        assert "pip install 'millstream[yjs]'" in server.stderr()
        document = DocumentClient(f"{server.url}/v1/yjs/notes", "plan")
        typist = Typist()
        for _ in range(100):
            document.write(typist.type("many words "))
        time.sleep(0.3)
        assert document.discover() == "-1"
        assert document.load() == typist.text
        document.http.close()


def test_the_asgi_application_has_documents_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = MillstreamApp(tmp_path / "data", yjs__compaction_threshold="1KiB")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            typist, url = Typist(), "/v1/yjs/notes/docs/plan"
            for _ in range(60):
                body = frame_update(typist.type("many words "))
                assert (await http.post(url, content=body, headers=OCTETS)).status_code == 204
            for _ in range(500):
                answer = await http.get(url, params={"offset": "snapshot"})
                if "_snapshot" in answer.headers["location"]:
                    break
                await asyncio.sleep(0.02)
            snapshot = await http.get(answer.headers["location"])
            assert snapshot.status_code == 200 and len(snapshot.content) > 100
            refused = await http.get("/v1/yjs/notes/docs/a/%2e%2e/b?offset=-1")
            assert code(refused) == (400, "INVALID_REQUEST")
        await app.close()

    asyncio.run(scenario())


def test_compactions_are_counted(document: DocumentClient, yjs_server: ServerProcess) -> None:
    def counted() -> float:
        lines = document.http.get(f"{yjs_server.url}/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith('millstream_compactions_total{kind="yjs"}')]
        return float(line.split()[-1])

    before = counted()
    document.write(Typist().type("x" * 16_384))  # four times the threshold
    document.wait_for_snapshot()
    assert counted() > before


def test_what_the_adapters_refuse_by_themselves_is_worded_as_everything_else(
    document: DocumentClient, yjs_server: ServerProcess, tmp_path: Path
) -> None:
    too_large = document.http.post(document.url, content=bytes(9 << 20), headers=OCTETS)
    assert code(too_large) == (413, "PAYLOAD_TOO_LARGE")
    too_long = document.http.post(document.url, content=b"", headers={"x": "x" * (33 << 10)})
    assert code(too_long) == (431, "HEADERS_TOO_LARGE")
    elsewhere = httpx.post(f"{yjs_server.url}/v1/stream/notes/s", content=bytes(9 << 20), headers=OCTETS)
    assert code(elsewhere) == (413, "payload_too_large")

    async def embedded() -> None:
        app = MillstreamApp(tmp_path / "data", http__body_bytes_max="1KiB")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://embedded") as http:
            refused = await http.post("/v1/yjs/notes/docs/plan", content=bytes(2000), headers=OCTETS)
            assert code(refused) == (413, "PAYLOAD_TOO_LARGE")
        await app.close()

    asyncio.run(embedded())
