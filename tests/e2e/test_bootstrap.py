"""Bootstrap: snapshot and messages as multipart/mixed, read back by parsers that are not ours (Extensions §3)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from itertools import count
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server
from support.sse_parser import parse_events

TEXT = {"content-type": "text/plain"}
BYTES = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}
SECONDS = 30.0
JAVASCRIPT = Path(__file__).parent.parent / "javascript"

# What multipart parsers stumble over.
AWKWARD = (
    b"\x00",
    b"\x00\x00\x00",
    b"\r\n",
    b"\r",
    b"\n",
    b"\r\r\n",
    b"\n\n",
    b"ends in a line break\r\n",
    b"ends in CR\r",
    b"\r\nstarts with a line break",
    b"lone\rCR in the middle",
    b"--",
    b"----",
    b"\r\n--",
    b"\r\n--\r\n",
    b"--millstream-",
    b"\r\n--millstream-\r\n",
    b"\r\n--millstream-00000000000000000000000000000000\r\nContent-Type: text/plain\r\n\r\nforged",
    b"\r\n--millstream-00000000000000000000000000000000--\r\n",
    b"Content-Type: text/html\r\n\r\nnot a header",
    b"From nobody\n>From nobody",
    b"\xff\xfe\x80 not UTF-8",
    "späße 𝄞 \u2028".encode(),
    bytes(range(256)),
    b" leading and trailing space ",
    b"\t",
    b".",
)

_numbers = count()


class Part(NamedTuple):
    content_type: str
    payload: bytes


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    # History moves to the cold tier all the while and does not stay in memory: parts come from wherever they are.
    flush = ("cold.flush_interval=200ms", "hot.keep_bytes=0")
    settings = ("read.long_poll_timeout=500ms", "read.chunk_bytes_max=64KiB", *flush)
    return serve(*settings)


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=SECONDS) as opened:
        assert opened.put("/bootstrap").status_code == 201
        yield opened


@pytest.fixture
def path() -> str:
    return f"/bootstrap/s{next(_numbers)}"


def token(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"


def write(client: httpx.Client, path: str, content_type: dict[str, str], *messages: bytes) -> None:
    assert client.put(path, headers=content_type).status_code in (200, 201)
    for message in messages:
        assert client.post(path, headers=content_type, content=message).status_code == 204


def publish(client: httpx.Client, path: str, offset: int, body: bytes, content_type: str) -> None:
    answer = client.put(f"{path}/snapshot/{token(offset)}", headers={"content-type": content_type}, content=body)
    assert answer.status_code == 204


def bootstrap(client: httpx.Client, path: str) -> httpx.Response:
    answer = client.get(f"{path}/bootstrap")
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(r"multipart/mixed; boundary=[A-Za-z0-9'()+_,./:=?-]{1,70}", answer.headers["content-type"])
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["stream-up-to-date"] == "true"
    return answer


def parsed(answer: httpx.Response) -> list[Part]:
    """The parts as Python's `email` package reads them."""
    document = b"Content-Type: " + answer.headers["content-type"].encode() + b"\r\n\r\n" + answer.content
    message: Message = BytesParser(policy=HTTP).parsebytes(document)
    assert message.defects == []
    parts = []
    for part in message.iter_parts():
        ((name, content_type),) = part.raw_items()  # the plain ones are rewritten, with quotes added
        assert name == "Content-Type"
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)
        parts.append(Part(content_type, payload))
    return parts


def parsed_by_javascript(client: httpx.Client, path: str) -> tuple[dict[str, str], list[Part]]:
    """The headers and the parts as a Node program with a parser from npm reads them."""
    if not (JAVASCRIPT / "node_modules").is_dir():
        pytest.fail("tests/javascript/node_modules is missing: run make test")
    url = str(client.base_url).rstrip("/") + f"{path}/bootstrap"
    run = subprocess.run(
        ["node", "read_bootstrap.js", url], cwd=JAVASCRIPT, capture_output=True, text=True, timeout=SECONDS
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["status"] == 200
    return found["headers"], [Part(part["content_type"], b64decode(part["payload"])) for part in found["parts"]]


def wait_for_flush(running: Server, client: httpx.Client) -> None:
    """Wait until the catalog was written twice: the first may have been under way already."""
    catalog = running.data_dir / "catalog" / "data.mdb"
    deadline = time.monotonic() + SECONDS
    for _ in range(2):
        changed = catalog.stat().st_mtime_ns
        while catalog.stat().st_mtime_ns == changed:
            assert time.monotonic() < deadline, "no flush was written"
            client.put(f"/v1/stream/flushes/{next(_numbers)}", headers=TEXT)
            time.sleep(0.02)


def test_awkward_payloads_read_back_exactly_in_python_and_javascript(client: httpx.Client, path: str) -> None:
    write(client, path, BYTES, *AWKWARD)
    state = b"\r\n".join(AWKWARD)
    publish(client, path, 0, state, "application/x-state; version=1")
    expected = [Part("application/x-state; version=1", state)]
    expected += [Part("application/octet-stream", payload) for payload in AWKWARD]
    assert parsed(bootstrap(client, path)) == expected
    headers, parts = parsed_by_javascript(client, path)
    assert parts == expected
    assert headers["stream-snapshot-offset"] == token(0)
    assert headers["stream-next-offset"] == token(sum(map(len, AWKWARD)))


def test_payload_that_holds_an_earlier_boundary_reads_back_exactly(client: httpx.Client, path: str) -> None:
    """Boundaries are random for each answer: one that was seen can be written into a stream and does no harm."""
    write(client, path, TEXT, b"first")
    boundaries = set()
    messages = [b"first"]
    for _ in range(3):
        answer = bootstrap(client, path)
        assert parsed(answer)[1:] == [Part("text/plain", message) for message in messages]
        boundary = answer.headers["content-type"].partition("boundary=")[2].encode()
        boundaries.add(boundary)
        forged = b"\r\n--" + boundary + b"\r\nContent-Type: text/html\r\n\r\nforged\r\n--" + boundary + b"--\r\n"
        messages.append(forged)
        write(client, path, TEXT, forged)
    assert len(boundaries) == 3
    assert parsed_by_javascript(client, path)[1][1:] == [Part("text/plain", message) for message in messages]


@pytest.mark.parametrize("is_closed", [False, True])
def test_stream_without_snapshot_has_an_empty_first_part(client: httpx.Client, path: str, is_closed: bool) -> None:
    write(client, path, TEXT, b"one", b"two")
    if is_closed:
        client.post(path, headers={"stream-closed": "true"})
    answer = bootstrap(client, path)
    assert answer.headers["stream-snapshot-offset"] == "-1"
    assert answer.headers["stream-next-offset"] == token(6)
    assert answer.headers.get("stream-closed") == ("true" if is_closed else None)
    expected = [Part("application/octet-stream", b""), Part("text/plain", b"one"), Part("text/plain", b"two")]
    assert parsed(answer) == expected
    assert parsed_by_javascript(client, path)[1] == expected


def test_empty_stream_is_one_empty_part(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT)
    answer = bootstrap(client, path)
    assert parsed(answer) == [Part("application/octet-stream", b"")]
    assert (answer.headers["stream-snapshot-offset"], answer.headers["stream-next-offset"]) == ("-1", token(0))
    assert parsed_by_javascript(client, path)[1] == [Part("application/octet-stream", b"")]


def test_empty_snapshot_is_an_empty_first_part_with_its_own_type_and_offset(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, b"one", b"two")
    publish(client, path, 3, b"", "application/json")
    answer = bootstrap(client, path)
    assert answer.headers["stream-snapshot-offset"] == token(3)
    expected = [Part("application/json", b""), Part("text/plain", b"two")]
    assert parsed(answer) == expected
    assert parsed_by_javascript(client, path)[1] == expected


def test_snapshot_at_the_tail_is_the_only_part(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, b"one", b"two")
    publish(client, path, 6, b"one and two", "text/markdown")
    answer = bootstrap(client, path)
    assert parsed(answer) == [Part("text/markdown", b"one and two")]
    assert answer.headers["stream-snapshot-offset"] == answer.headers["stream-next-offset"] == token(6)


def test_json_stream_has_one_part_for_each_element_byte_for_byte(client: httpx.Client, path: str) -> None:
    write(client, path, JSON, b'[{"a": 1.00}, 12345678901234567890123456789012]', b'"x\\u0000"', b"[[1,\r\n 2],null]")
    messages = [b'{"a": 1.00}', b"12345678901234567890123456789012", b'"x\\u0000"', b"[1,\r\n 2]", b"null"]
    expected = [Part("application/json", message) for message in messages]
    assert parsed(bootstrap(client, path))[1:] == expected
    publish(client, path, len(messages[0]), b'{"a":1}', "application/json; folded=yes")
    expected[0] = Part("application/json; folded=yes", b'{"a":1}')
    answer = bootstrap(client, path)
    assert parsed(answer) == expected
    assert parsed_by_javascript(client, path)[1] == expected
    assert answer.headers["stream-next-offset"] == token(sum(map(len, messages)))


def test_content_type_of_the_parts_is_the_streams_as_stored(client: httpx.Client, path: str) -> None:
    content_type = 'text/plain; charset="utf-8"; x=Y'
    write(client, path, {"content-type": content_type}, b"one")
    assert parsed_by_javascript(client, path)[1][1:] == [Part(content_type, b"one")]


def test_closed_stream_says_so_and_has_all_its_messages(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, b"one")
    publish(client, path, 3, b"state", "text/plain")
    client.post(path, headers={**TEXT, "stream-closed": "true"}, content=b"last")
    answer = bootstrap(client, path)
    assert answer.headers["stream-closed"] == "true"
    assert parsed(answer) == [Part("text/plain", b"state"), Part("text/plain", b"last")]


@pytest.mark.parametrize("live", ["sse", "long-poll", "true", ""])
def test_live_is_400(client: httpx.Client, path: str, live: str) -> None:
    write(client, path, TEXT, b"one")
    answer = client.get(f"{path}/bootstrap", params={"live": live})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_live")


def test_unknown_stream_is_404_and_other_methods_are_405(client: httpx.Client, path: str) -> None:
    assert client.get(f"{path}/bootstrap").status_code == 404
    write(client, path, TEXT, b"one")
    for method in ("PUT", "POST", "DELETE"):
        assert client.request(method, f"{path}/bootstrap", content=b"x").status_code == 405


def test_head_has_the_headers_and_no_body(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, b"one")
    answer = client.head(f"{path}/bootstrap")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["stream-next-offset"] == token(3)
    assert client.get(path).content == b"one", "the connection is still in step"


def test_bootstrap_is_larger_than_one_chunk_of_a_read_and_still_whole(client: httpx.Client, path: str) -> None:
    messages = [os.urandom(10_000) + b"%04d" % number for number in range(60)]
    write(client, path, BYTES, *messages, b"z" * 3_000_000)
    state = os.urandom(3_000_000)
    publish(client, path, 0, state, "application/octet-stream")
    expected = [state, *messages, b"z" * 3_000_000]
    answer = bootstrap(client, path)
    assert [part.payload for part in parsed(answer)] == expected
    assert [part.payload for part in parsed_by_javascript(client, path)[1]] == expected


def test_bootstrap_of_a_fork_has_the_snapshot_and_the_shared_and_own_messages(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, b"one", b"two", b"three")
    publish(client, path, 3, b"state", "text/markdown")
    fork = f"{path}-fork"
    headers = {"stream-forked-from": path, "stream-fork-offset": token(6)}
    assert client.put(fork, headers=headers).status_code == 201
    write(client, path, TEXT, b"the source goes on")
    assert client.post(fork, headers=TEXT, content=b"own").status_code == 204
    assert client.delete(path).status_code == 204
    expected = [Part("text/markdown", b"state"), Part("text/plain", b"two"), Part("text/plain", b"own")]
    assert parsed(bootstrap(client, fork)) == expected
    assert parsed_by_javascript(client, fork)[1] == expected


def test_bootstrap_is_the_same_after_a_crash(process: ServerProcess, client: httpx.Client, path: str) -> None:
    write(client, path, BYTES, *AWKWARD)
    publish(client, path, 4, b"\x00 state", "x/y")
    before = parsed(bootstrap(client, path))
    assert before == [Part("x/y", b"\x00 state"), *[Part(BYTES["content-type"], payload) for payload in AWKWARD[2:]]]
    process.kill()
    process.start()
    assert parsed(bootstrap(client, path)) == before


# -- one consistent cut ------------------------------------------------------------------------------------------


def test_bootstrap_under_appends_and_publishes_is_one_cut_and_the_tail_continues_it(running: Server) -> None:
    """Snapshots hold the concatenation of all before them, so that any cut can be checked byte for byte."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            path = f"/bootstrap/cut-{next(_numbers)}"
            await client.put(f"/v1/stream{path}", headers=TEXT)
            written: list[tuple[int, bytes]] = []
            stop = asyncio.Event()

            async def append(writer: int) -> None:
                for number in range(10_000):
                    if stop.is_set():
                        return
                    body = b"<%d.%d>" % (writer, number)
                    answer = await client.post(path, headers=TEXT, content=body)
                    assert answer.status_code == 204
                    written.append((int(answer.headers["stream-next-offset"].partition("_")[2]), body))

            async def fold() -> None:
                """Bootstraps, joins everything to one state and publishes it, as a client would."""
                for _ in range(10_000):
                    if stop.is_set():
                        return
                    answer = await client.get(f"{path}/bootstrap")
                    state = b"".join(part.payload for part in parsed(answer))
                    offset = answer.headers["stream-next-offset"]
                    assert (await client.put(f"{path}/snapshot/{offset}", content=state)).status_code == 204

            workers = [asyncio.ensure_future(append(writer)) for writer in range(3)] + [asyncio.ensure_future(fold())]
            cuts: list[tuple[int, int, list[bytes]]] = []
            tails: list[bytes] = []
            try:
                for _ in range(25):
                    answer = await client.get(f"{path}/bootstrap")
                    assert answer.status_code == 200
                    parts = [part.payload for part in parsed(answer)]
                    start = answer.headers["stream-snapshot-offset"].rpartition("_")[2]
                    end = answer.headers["stream-next-offset"]
                    cuts.append((max(int(start), 0), int(end.rpartition("_")[2]), parts))
                    tail = await client.get(path, params={"offset": end, "live": "long-poll"})
                    assert tail.status_code in (200, 204, 410)  # gone if the next fold was faster
                    tails.append(tail.content if tail.status_code == 200 else b"")
            finally:
                stop.set()
                await asyncio.gather(*workers)
            written.sort()
            whole = b"".join(body for _, body in written)
            for (start, end, parts), tail in zip(cuts, tails, strict=True):
                assert parts[0] == whole[:start]
                assert parts[1:] == [body for position, body in written if start < position <= end]
                assert tail == whole[end : end + len(tail)]
            assert any(tails) and len({start for start, _, _ in cuts}) > 3, "the cuts were not all the same"

    asyncio.run(main())


def test_slow_bootstrap_that_a_publish_overtakes_is_still_whole(running: Server, client: httpx.Client) -> None:
    """The cut is the one its headers name, however late its bytes are fetched."""
    path = f"/bootstrap/slow-{next(_numbers)}"
    messages = [b"%03d" % number + bytes([number]) * 200_000 for number in range(60)]
    write(client, path, BYTES, *messages)
    publish(client, path, 0, b"nothing yet", "text/plain")
    wait_for_flush(running, client)
    with RawConnection(running.url, receive_buffer_bytes=16 << 10, seconds=SECONDS) as reader:
        reader.send(reader.request("GET", f"{path}/bootstrap"))
        status, headers = reader.head()
        assert status == 200
        publish(client, path, sum(map(len, messages)), b"everything", "text/plain")
        wait_for_flush(running, client)
        chunks = []
        while (chunk := reader.chunk()) is not None:
            chunks.append(chunk)
    answer = httpx.Response(200, headers={"content-type": headers["content-type"]}, content=b"".join(chunks))
    expected = [Part("text/plain", b"nothing yet"), *[Part(BYTES["content-type"], message) for message in messages]]
    assert parsed(answer) == expected


def test_sse_from_next_offset_continues_without_gap_or_double(client: httpx.Client, path: str) -> None:
    write(client, path, TEXT, *[b"[%d]" % number for number in range(20)])
    publish(client, path, 3 * 10, b"".join(b"[%d]" % number for number in range(10)), "text/plain")
    answer = bootstrap(client, path)
    received = b"".join(part.payload for part in parsed(answer))
    write(client, path, TEXT, *[b"[%d]" % number for number in range(20, 30)])
    client.post(path, headers={"stream-closed": "true"})
    query = {"offset": answer.headers["stream-next-offset"], "live": "sse"}
    with client.stream("GET", path, params=query) as events:
        for event in parse_events(events.read()):
            if event.type == "data":
                received += event.data.encode()
    assert received == b"".join(b"[%d]" % number for number in range(30))
