"""Snapshots over HTTP: publishing, retention, crashes, forks, windows and new incarnations (Extensions §2)."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server

TEXT = {"content-type": "text/plain"}
SECONDS = 30.0
MIB = 1 << 20
FLUSH_OFTEN = ("cold.flush_interval=200ms", "hot.keep_bytes=0")

_numbers = count()


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    # History moves to the cold tier all the while and does not stay in memory: reads find it wherever it is.
    settings = ("read.long_poll_timeout=500ms", "read.snapshot_bytes_max=1MiB", *FLUSH_OFTEN)
    return serve(*settings)


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=SECONDS) as opened:
        assert opened.put("/snapshots").status_code == 201
        yield opened


@pytest.fixture
def path(client: httpx.Client) -> str:
    """A text stream of its own for each test: five messages of ten bytes, `0000000000` to `4444444444`."""
    name = f"/snapshots/s{next(_numbers)}"
    assert client.put(name, headers=TEXT).status_code == 201
    for digit in range(5):
        append(client, name, b"%d" % digit * 10)
    return name


def token(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"


def append(client: httpx.Client, path: str, body: bytes) -> None:
    assert client.post(path, headers=TEXT, content=body).status_code == 204


def publish(
    client: httpx.Client, path: str, offset: int | str, body: bytes = b"state", content_type: str | None = None
) -> httpx.Response:
    name = token(offset) if isinstance(offset, int) else offset
    headers = {"content-type": content_type} if content_type is not None else {}
    return client.put(f"{path}/snapshot/{name}", headers=headers, content=body)


def published(client: httpx.Client, path: str, offset: int, body: bytes = b"state") -> None:
    assert publish(client, path, offset, body).status_code == 204


def snapshot(client: httpx.Client, path: str) -> tuple[str, bytes]:
    """The latest snapshot's offset and content, by way of the redirect."""
    answer = client.get(f"{path}/snapshot", follow_redirects=True)
    assert answer.status_code == 200, answer.text
    return answer.headers["stream-snapshot-offset"], answer.content


def blobs(server: Server, path: str) -> list[Path]:
    """The files of a stream's snapshots, and of all uploads under way."""
    name = re.compile(re.escape(path.strip("/").replace("/", "_")) + r"-\d{16}-[0-9a-f]+")
    folder, uploads = server.data_dir / "cold" / "snapshots", server.data_dir / "uploads"
    found = [file for file in folder.iterdir() if name.fullmatch(file.name)] if folder.exists() else []
    return sorted(found) + sorted(uploads.iterdir())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def pieces(total: int, size: int = 64 << 10) -> Iterator[bytes]:
    """A body without Content-Length."""
    for start in range(0, total, size):
        yield b"p" * min(size, total - start)


# -- publish and read --------------------------------------------------------------------------------------------


def test_published_snapshot_reads_back_with_its_headers(client: httpx.Client, path: str) -> None:
    answer = publish(client, path, 30, b"\x00state\r\n\xff", "application/x-state; v=1")
    assert answer.status_code == 204
    assert answer.headers["stream-snapshot-offset"] == token(30)
    assert answer.headers["stream-next-offset"] == token(50)
    read = client.get(f"{path}/snapshot/{token(30)}")
    assert (read.status_code, read.content) == (200, b"\x00state\r\n\xff")
    assert read.headers["content-type"] == "application/x-state; v=1"
    assert read.headers["content-length"] == "9"
    assert read.headers["stream-snapshot-offset"] == read.headers["stream-next-offset"] == token(30)
    assert read.headers["stream-up-to-date"] == "false"
    head = client.head(f"{path}/snapshot/{token(30)}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == "application/x-state; v=1"


def test_snapshot_without_content_type_is_octet_stream(client: httpx.Client, path: str) -> None:
    published(client, path, 50)
    assert client.get(f"{path}/snapshot/{token(50)}").headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize("content_type", ["application/json", "text/html; charset=utf-8", "image/png", "X-a/B+c"])
def test_content_type_of_a_snapshot_comes_back_as_sent(client: httpx.Client, path: str, content_type: str) -> None:
    assert publish(client, path, 50, b"not even json", content_type).status_code == 204
    read = client.get(f"{path}/snapshot/{token(50)}")
    assert (read.headers["content-type"], read.content) == (content_type, b"not even json")
    assert client.head(path).headers["content-type"] == "text/plain", "the stream's own is another matter"


def test_malformed_content_type_is_400_and_leaves_no_file(running: Server, client: httpx.Client, path: str) -> None:
    assert publish(client, path, 50, b"x", "nonsense").status_code == 400
    wait_until(lambda: blobs(running, path) == [], "a refused upload leaves nothing behind")


def test_empty_snapshot_is_a_snapshot(client: httpx.Client, path: str) -> None:
    published(client, path, 20, b"")
    assert snapshot(client, path) == (token(20), b"")


def test_offset_may_be_the_alias_or_percent_encoded(client: httpx.Client, path: str) -> None:
    assert publish(client, path, f"{10:020d}", b"alias").status_code == 204
    assert snapshot(client, path) == (token(10), b"alias")
    assert client.get(f"{path}/snapshot/{10:020d}").content == b"alias"
    assert publish(client, path, token(20).replace("_", "%5F"), b"encoded").status_code == 204
    assert snapshot(client, path) == (token(20), b"encoded")


def test_percent_encoded_path_segments_publish_as_plain_ones_do(client: httpx.Client, path: str) -> None:
    answer = client.put(f"{path}/snapsho%74/{token(30)}", content=b"encoded", timeout=3)
    assert answer.status_code == 204
    assert snapshot(client, path) == (token(30), b"encoded")


def test_latest_snapshot_is_a_307_to_its_absolute_url(client: httpx.Client, path: str) -> None:
    assert client.get(f"{path}/snapshot").status_code == 404
    published(client, path, 20)
    answer = client.get(f"{path}/snapshot")
    assert answer.status_code == 307
    assert answer.headers["location"] == str(client.base_url).rstrip("/") + f"{path}/snapshot/{token(20)}"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["stream-snapshot-offset"] == token(20)


def test_redirect_keeps_the_encoding_of_the_stream_name(client: httpx.Client) -> None:
    path = "/snapshots/caf%C3%A9%20%3F%23"
    assert client.put(path, headers=TEXT, content=b"x").status_code == 201
    published(client, path, 1, b"coffee")
    assert f"{path}/snapshot/{token(1)}" in client.get(f"{path}/snapshot").headers["location"]
    assert snapshot(client, path) == (token(1), b"coffee")


def test_head_names_the_snapshot_only_once_there_is_one(client: httpx.Client, path: str) -> None:
    before = client.head(path)
    assert "stream-snapshot-offset" not in before.headers
    published(client, path, 30)
    after = client.head(path)
    assert after.headers["stream-snapshot-offset"] == token(30)
    assert after.headers["stream-earliest-offset"] == token(30)
    assert after.headers["stream-next-offset"] == token(50)
    assert after.headers["etag"] == before.headers["etag"], "a snapshot does not change the stream's content"


def test_snapshot_at_the_tail_is_up_to_date_and_of_a_closed_stream_says_so(client: httpx.Client, path: str) -> None:
    published(client, path, 50, b"all")
    read = client.get(f"{path}/snapshot/{token(50)}")
    assert read.headers["stream-up-to-date"] == "true"
    assert "stream-closed" not in read.headers
    client.post(path, headers={"stream-closed": "true"})
    read = client.get(f"{path}/snapshot/{token(50)}")
    assert (read.headers["stream-closed"], read.content) == ("true", b"all")


def test_closed_stream_takes_a_snapshot(client: httpx.Client, path: str) -> None:
    client.post(path, headers={"stream-closed": "true"})
    published(client, path, 30, b"late")
    assert client.get(path, params={"offset": token(30)}).content == b"3" * 10 + b"4" * 10
    assert client.head(path).headers["stream-closed"] == "true"


def test_newer_snapshot_replaces_the_older_one(running: Server, client: httpx.Client, path: str) -> None:
    published(client, path, 20, b"old")
    (old,) = blobs(running, path)
    published(client, path, 40, b"new")
    assert snapshot(client, path) == (token(40), b"new")
    assert client.get(f"{path}/snapshot/{token(20)}").status_code == 404
    wait_until(lambda: not old.exists(), "the replaced blob is removed")
    (new,) = blobs(running, path)
    assert new.read_bytes() == b"new"


def test_snapshot_published_again_at_its_offset_replaces_itself(
    running: Server, client: httpx.Client, path: str
) -> None:
    published(client, path, 20, b"first try")
    published(client, path, 20, b"second try")
    assert snapshot(client, path) == (token(20), b"second try")
    wait_until(lambda: len(blobs(running, path)) == 1, "the replaced blob is removed")


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "status", "code"),
    [
        (25, 400, "invalid_offset"),
        (1, 400, "invalid_offset"),
        (49, 400, "invalid_offset"),
        (51, 409, "snapshot_beyond_tail"),
        (60, 409, "snapshot_beyond_tail"),
        ("-1", 400, "invalid_offset"),
        ("now", 400, "invalid_offset"),
        ("25", 400, "invalid_offset"),
        ("x", 400, "invalid_offset"),
        ("0000000000000001_0000000000000010", 400, "invalid_offset"),
    ],
)
def test_offset_that_cannot_be_a_snapshots_is_refused(
    running: Server, client: httpx.Client, path: str, offset: int | str, status: int, code: str
) -> None:
    answer = publish(client, path, offset, b"refused")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert client.get(f"{path}/snapshot").status_code == 404
    assert client.get(path).content == b"".join(b"%d" % digit * 10 for digit in range(5)), "nothing was trimmed"
    wait_until(lambda: blobs(running, path) == [], "a refused upload leaves nothing behind")


def test_offset_older_than_the_retained_is_410_with_the_earliest(client: httpx.Client, path: str) -> None:
    published(client, path, 30, b"kept")
    for offset in (0, 10, 20, 25):
        answer = publish(client, path, offset, b"too old")
        assert answer.status_code == 410
        assert answer.headers["stream-earliest-offset"] == token(30)
    assert snapshot(client, path) == (token(30), b"kept")


def test_offset_inside_a_json_append_is_a_boundary_between_its_elements(client: httpx.Client) -> None:
    path = f"/snapshots/json-{next(_numbers)}"
    client.put(path, headers={"content-type": "application/json"}, content=b'[{"a":1}, 22 ,"x"]')
    assert publish(client, path, 7, b"one element").status_code == 204
    assert client.get(path, params={"offset": token(7)}).content == b'[22,"x"]'
    assert publish(client, path, 8).status_code == 400
    assert publish(client, path, 9).status_code == 204


def test_unknown_stream_is_404_and_its_upload_is_discarded(running: Server, client: httpx.Client) -> None:
    path = "/snapshots/absent"
    assert publish(client, path, 0, b"x" * 100_000).status_code == 404
    wait_until(lambda: blobs(running, path) == [], "a refused upload leaves nothing behind")
    assert client.get("/snapshots/absent/snapshot").status_code == 404
    assert client.get(f"/snapshots/absent/snapshot/{token(0)}").status_code == 404


@pytest.mark.parametrize("has_length", [True, False])
def test_snapshot_larger_than_the_limit_is_413(
    running: Server, client: httpx.Client, path: str, has_length: bool
) -> None:
    url = f"{path}/snapshot/{token(50)}"
    exact = b"e" * MIB
    content: bytes | Iterator[bytes] = b"x" * (MIB + 1) if has_length else pieces(MIB + 1)
    answer = client.put(url, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert client.get(f"{path}/snapshot").status_code == 404
    wait_until(lambda: blobs(running, path) == [], "a refused upload leaves nothing behind")
    assert client.put(url, content=exact).status_code == 204, "the limit itself is allowed"
    assert snapshot(client, path) == (token(50), exact)


def test_latest_snapshot_is_not_deleted_and_any_other_is_404(client: httpx.Client, path: str) -> None:
    assert client.delete(f"{path}/snapshot/{token(20)}").status_code == 404
    published(client, path, 20)
    refused = client.delete(f"{path}/snapshot/{token(20)}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "snapshot_in_use")
    assert client.delete(f"{path}/snapshot/{token(30)}").status_code == 404
    published(client, path, 40)
    assert client.delete(f"{path}/snapshot/{token(20)}").status_code == 404
    assert client.delete(f"{path}/snapshot/nonsense").status_code == 400
    assert snapshot(client, path)[0] == token(40)


@pytest.mark.parametrize(("method", "suffix"), [("PUT", "/snapshot"), ("POST", f"/snapshot/{token(50)}")])
def test_method_without_meaning_on_a_snapshot_is_405(client: httpx.Client, path: str, method: str, suffix: str) -> None:
    answer = client.request(method, path + suffix, content=b"x")
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]


# -- retention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_offset_before_the_snapshot_is_410_with_the_earliest(client: httpx.Client, path: str, live: str | None) -> None:
    published(client, path, 30)
    mode = {"live": live} if live is not None else {}
    for offset in ("-1", token(0), token(10), token(29), f"{20:020d}"):
        answer = client.get(path, params={"offset": offset, **mode})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "offset_trimmed")
        assert answer.headers["stream-earliest-offset"] == token(30)
    assert client.get(path).status_code == 410, "no offset means the beginning"


def test_offset_at_or_after_the_snapshot_reads_on(client: httpx.Client, path: str) -> None:
    published(client, path, 30)
    rest = b"3" * 10 + b"4" * 10
    assert client.get(path, params={"offset": token(30)}).content == rest
    assert client.get(path, params={"offset": token(30), "live": "long-poll"}).content == rest
    assert client.get(path, params={"offset": token(40)}).content == b"4" * 10
    assert client.get(path, params={"offset": token(50)}).content == b""
    assert client.get(path, params={"offset": "now"}).status_code == 200
    append(client, path, b"5" * 10)
    assert client.get(path, params={"offset": token(40)}).content == b"4" * 10 + b"5" * 10


def test_snapshot_at_the_start_retains_everything(client: httpx.Client, path: str) -> None:
    published(client, path, 0, b"nothing yet")
    assert client.get(path, params={"offset": "-1"}).content == b"".join(b"%d" % digit * 10 for digit in range(5))
    assert snapshot(client, path) == (token(0), b"nothing yet")


def test_long_poll_at_the_tail_survives_a_publish(client: httpx.Client, path: str, running: Server) -> None:
    with RawConnection(running.url) as waiting:
        waiting.send(waiting.request("GET", f"{path}?offset={token(50)}&live=long-poll"))
        published(client, path, 50)
        append(client, path, b"after")
        answer = waiting.answer()
    assert (answer.status, answer.body) == (200, b"after")


def test_sse_reader_overtaken_by_a_snapshot_sees_no_gap(tmp_path: Path) -> None:
    """A client too slow for its stream falls behind what is retained: it may be cut off, but never skips a byte."""
    message = b"m" * 100_000
    with ServerProcess(tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        client.put("/slow")
        client.put("/slow/s", headers=TEXT)
        for number in range(120):
            append(client, "/slow/s", b"%06d" % number + message)
        tail = client.head("/slow/s").headers["stream-next-offset"]
        with RawConnection(server.url, receive_buffer_bytes=16 << 10) as reader:
            reader.send(reader.request("GET", "/slow/s?offset=-1&live=sse", [("Connection", "close")]))
            assert reader.head()[0] == 200
            assert publish(client, "/slow/s", tail).status_code == 204
            client.post("/slow/s", headers={**TEXT, "stream-closed": "true"}, content=b"%06d" % 120 + message)
            received = reader.rest()
        seen = [int(number) for number in re.findall(rb"(\d{6})m", received)]
        assert seen == list(range(len(seen))), "messages arrive in order and without a gap"
        assert "Traceback" not in server.stderr()


# -- durability --------------------------------------------------------------------------------------------------


def test_snapshot_is_there_after_kill_right_after_204(process: ServerProcess, client: httpx.Client, path: str) -> None:
    published(client, path, 20, b"first")
    for offset in (20, 30, 40):
        body = os.urandom(200_000)
        published(client, path, offset, body)
        process.kill()
        process.start()
        assert snapshot(client, path) == (token(offset), body)
        assert client.get(path, params={"offset": "-1"}).headers["stream-earliest-offset"] == token(offset)
        rest = b"".join(b"%d" % digit * 10 for digit in range(offset // 10, 5))
        assert client.get(path, params={"offset": token(offset)}).content == rest


def test_kill_during_an_upload_keeps_the_old_snapshot_and_leaves_no_stray_file(
    process: ServerProcess, client: httpx.Client, path: str
) -> None:
    published(client, path, 20, b"old")
    before = blobs(process, path)
    with RawConnection(process.url) as uploading:
        head = uploading.request("PUT", f"{path}/snapshot/{token(30)}", [("Content-Length", "900000")])
        uploading.send(head + b"n" * 500_000)

        def arrived() -> bool:
            return sum(file.stat().st_size for file in set(blobs(process, path)) - set(before)) == 500_000

        wait_until(arrived, "the upload is on disk in part")
        process.kill()
    process.start()
    assert snapshot(client, path) == (token(20), b"old")
    wait_until(lambda: blobs(process, path) == before, "the upload is removed")
    assert client.get(path, params={"offset": token(20)}).status_code == 200


def test_client_that_goes_away_during_an_upload_leaves_no_file(
    running: Server, client: httpx.Client, path: str
) -> None:
    with RawConnection(running.url) as uploading:
        head = uploading.request("PUT", f"{path}/snapshot/{token(30)}", [("Content-Length", "900000")])
        uploading.send(head + b"n" * 100_000)
        wait_until(lambda: blobs(running, path) != [], "the upload has begun")
    wait_until(lambda: blobs(running, path) == [], "the upload is discarded")
    assert client.get(f"{path}/snapshot").status_code == 404


def test_uploads_that_nobody_finished_are_removed_at_start(
    process: ServerProcess, client: httpx.Client, path: str
) -> None:
    published(client, path, 20, b"kept")
    stray = process.data_dir / "uploads/00ff"
    process.kill()
    stray.write_bytes(b"left behind")
    process.start()
    wait_until(lambda: not stray.exists(), "it is removed")
    assert snapshot(client, path) == (token(20), b"kept")


def test_kill_while_snapshots_are_published_leaves_one_whole_snapshot_per_stream(tmp_path: Path) -> None:
    """Whatever the moment, each stream has the last acknowledged snapshot or the one in flight, and its file alone."""

    async def publish_until_the_end(url: str, name: str, acknowledged: dict[str, int]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
            for number in range(1, 10_000):
                try:
                    await client.post(f"/kills/{name}", headers=TEXT, content=b"x")
                    answer = await client.put(f"/kills/{name}/snapshot/{token(number)}", content=b"%d;" % number * 2000)
                except httpx.TransportError:
                    return
                assert answer.status_code == 204
                acknowledged[name] = number

    async def until_killed(server: ServerProcess, acknowledged: dict[str, int]) -> None:
        tasks = [asyncio.ensure_future(publish_until_the_end(server.url, name, acknowledged)) for name in "abcd"]
        async with asyncio.timeout(SECONDS):
            while sum(acknowledged.values()) < 60:
                await asyncio.sleep(0.005)
        server.kill()
        await asyncio.gather(*tasks)

    with (
        ServerProcess(tmp_path / "data", settings=(*FLUSH_OFTEN, "cold.leftover_age=0s")) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/kills")
        for name in "abcd":
            client.put(f"/kills/{name}", headers=TEXT)
        acknowledged: dict[str, int] = {}
        asyncio.run(until_killed(server, acknowledged))
        server.start()
        for name in "abcd":
            offset, body = snapshot(client, f"/kills/{name}")
            number = int(offset.partition("_")[2])
            assert number in (acknowledged[name], acknowledged[name] + 1)
            assert body == b"%d;" % number * 2000
        client.post("/kills/a", headers=TEXT, content=b"later than what was left behind")
        for name in "abcd":
            wait_until(lambda name=name: len(blobs(server, f"/kills/{name}")) == 1, "only the latest remains")


# -- large bodies ------------------------------------------------------------------------------------------------


def high_water_bytes(server: ServerProcess) -> int:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) << 10


def test_upload_of_100_mib_is_streamed_to_disk_and_back(tmp_path: Path) -> None:
    size = 100 * MIB
    piece = os.urandom(MIB)
    with ServerProcess(tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=120) as client:
        client.put("/large")
        client.put("/large/s", headers=TEXT, content=b"x")
        before = high_water_bytes(server)
        url = f"/large/s/snapshot/{token(1)}"
        assert client.put(url, content=(piece for _ in range(size // MIB))).status_code == 204
        with client.stream("GET", url) as answer:
            assert answer.headers["content-length"] == str(size)
            position = 0
            for received in answer.iter_bytes(MIB):
                assert received == piece
                position += len(received)
        assert position == size
        with client.stream("GET", "/large/s/bootstrap") as answer:
            assert sum(map(len, answer.iter_bytes())) > size
        assert high_water_bytes(server) - before < 64 * MIB, "nowhere is the body held whole"
        assert [file.stat().st_size for file in blobs(server, "/large/s")] == [size]


# -- concurrency -------------------------------------------------------------------------------------------------


def test_publishing_while_appends_run_fails_no_append_and_changes_no_byte(running: Server) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            path = f"/v1/stream/snapshots/busy-{next(_numbers)}"
            bucketed = path.removeprefix("/v1/stream")
            await client.put(path, headers=TEXT)
            written: list[tuple[int, bytes]] = []
            stop = asyncio.Event()

            async def write(writer: int) -> None:
                for number in range(10_000):
                    if stop.is_set():
                        return
                    body = b"%d-%d;" % (writer, number)
                    answer = await client.post(path, headers=TEXT, content=body)
                    assert answer.status_code == 204
                    end = int(answer.headers["stream-next-offset"].partition("_")[2])
                    written.append((end, body))

            writers = [asyncio.ensure_future(write(writer)) for writer in range(4)]
            last = token(0)
            try:
                for number in range(15):
                    last = (await client.head(path)).headers["stream-next-offset"]
                    body = b"s%d" % number * 20_000
                    assert (await client.put(f"{bucketed}/snapshot/{last}", content=body)).status_code == 204
                    read = await client.get(f"{bucketed}/snapshot/{last}")
                    assert read.content == body
            finally:
                stop.set()
                await asyncio.gather(*writers)
            start = int(last.partition("_")[2])
            written.sort()
            position = 0
            for end, body in written:
                position += len(body)
                assert end == position
            expected = b"".join(body for end, body in written if end > start)
            assert (await client.get(path, params={"offset": last})).content == expected

    asyncio.run(main())


def test_of_two_racing_publishers_the_later_offset_stands(running: Server) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            for number in range(10):
                path = f"/snapshots/racers-{number}"
                await client.put(f"/v1/stream{path}", headers=TEXT, content=b"one")
                await client.post(path, headers=TEXT, content=b"two")
                offsets = [3, 6] if number % 2 else [6, 3]
                answers = await asyncio.gather(
                    *[client.put(f"{path}/snapshot/{token(n)}", content=b"at %d" % n) for n in offsets]
                )
                statuses = {offset: answer.status_code for offset, answer in zip(offsets, answers, strict=True)}
                assert statuses[6] == 204
                assert statuses[3] in (204, 409, 410)
                latest = await client.get(f"{path}/snapshot", follow_redirects=True)
                assert (latest.headers["stream-snapshot-offset"], latest.content) == (token(6), b"at 6")

    asyncio.run(main())
    for number in range(10):
        wait_until(lambda path=f"/snapshots/racers-{number}": len(blobs(running, path)) == 1, "the latest remains")


def test_of_publishers_racing_at_one_offset_one_stands_whole(running: Server) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            path = f"/snapshots/same-{next(_numbers)}"
            await client.put(f"/v1/stream{path}", headers=TEXT, content=b"one")
            url = f"{path}/snapshot/{token(3)}"
            bodies = [b"%d" % n * 50_000 for n in range(10)]
            answers = await asyncio.gather(*[client.put(url, content=body) for body in bodies])
            assert {answer.status_code for answer in answers} == {204}
            assert (await client.get(url)).content in bodies

    asyncio.run(main())


def test_snapshot_reads_under_constant_publishing_are_whole(running: Server) -> None:
    """A snapshot that is replaced while it is being read is still read whole."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            path = f"/snapshots/replaced-{next(_numbers)}"
            await client.put(f"/v1/stream{path}", headers=TEXT, content=b"one")
            url = f"{path}/snapshot/{token(3)}"
            await client.put(url, content=b"first" * 1000)
            stop = asyncio.Event()

            async def replace() -> None:
                for number in range(10_000):
                    if stop.is_set():
                        return
                    assert (await client.put(url, content=b"%05d" % number * 1000)).status_code == 204

            async def read(target: str) -> None:
                for _ in range(60):
                    answer = await client.get(target)
                    assert (answer.status_code, answer.content) == (200, answer.content[:5] * 1000)

            replacing = [asyncio.ensure_future(replace()) for _ in range(2)]
            try:
                await asyncio.gather(*[read(url) for _ in range(4)])
            finally:
                stop.set()
                await asyncio.gather(*replacing)

    asyncio.run(main())


# -- forks -------------------------------------------------------------------------------------------------------


def fork(client: httpx.Client, source: str, offset: int | None = None) -> httpx.Response:
    headers = {"stream-forked-from": source}
    if offset is not None:
        headers["stream-fork-offset"] = token(offset)
    return client.put(f"{source}-fork-{next(_numbers)}", headers=headers)


def forked(client: httpx.Client, source: str, offset: int | None = None) -> str:
    answer = fork(client, source, offset)
    assert answer.status_code == 201, answer.text
    return answer.headers["location"].removeprefix(str(client.base_url).rstrip("/"))


def test_fork_of_a_trimmed_stream_before_its_earliest_offset_is_410(client: httpx.Client, path: str) -> None:
    published(client, path, 30)
    for offset in (0, 10, 20):
        answer = fork(client, path, offset)
        assert (answer.status_code, answer.headers["stream-earliest-offset"]) == (410, token(30))
    assert client.delete(path).status_code == 204
    assert client.head(path).status_code == 404, "the refused forks hold no reference"


@pytest.mark.parametrize("offset", [30, 40, 50, None])
def test_fork_of_a_trimmed_stream_has_a_snapshot_of_its_own(
    client: httpx.Client, path: str, offset: int | None
) -> None:
    assert publish(client, path, 30, b"shared", "text/markdown").status_code == 204
    copy = forked(client, path, offset)
    assert client.delete(path).status_code == 204
    assert snapshot(client, copy) == (token(30), b"shared")
    read = client.get(f"{copy}/snapshot/{token(30)}")
    assert read.headers["content-type"] == "text/markdown"
    end = 50 if offset is None else offset
    assert client.head(copy).headers["stream-earliest-offset"] == token(30)
    assert client.get(copy, params={"offset": "-1"}).status_code == 410
    append(client, copy, b"own")
    expected = b"".join(b"%d" % digit * 10 for digit in range(3, end // 10)) + b"own"
    assert client.get(copy, params={"offset": token(30)}).content == expected


def test_snapshot_of_a_fork_leaves_its_source_alone(client: httpx.Client, path: str) -> None:
    published(client, path, 10, b"the source's")
    copy = forked(client, path, 40)
    append(client, copy, b"own")
    for offset in (20, 40, 43):
        published(client, copy, offset, b"the fork's at %d" % offset)
        assert snapshot(client, copy) == (token(offset), b"the fork's at %d" % offset)
        assert client.get(copy, params={"offset": token(offset - 1)}).status_code == 410
    assert publish(client, copy, 42).status_code == 410
    assert snapshot(client, path) == (token(10), b"the source's")
    assert client.get(path, params={"offset": token(10)}).content == b"".join(b"%d" % n * 10 for n in range(1, 5))


def test_offset_inside_the_forked_part_that_is_no_boundary_is_400(client: httpx.Client, path: str) -> None:
    copy = forked(client, path, 40)
    append(client, copy, b"own")
    assert publish(client, copy, 25).status_code == 400
    assert publish(client, copy, 41).status_code == 400
    assert publish(client, copy, 44).status_code == 409


def test_publishing_on_a_source_leaves_its_forks_bytes_readable(
    process: ServerProcess, client: httpx.Client, path: str
) -> None:
    whole = b"".join(b"%d" % digit * 10 for digit in range(5))
    copy = forked(client, path, 40)
    published(client, path, 50, b"everything")
    assert client.get(path, params={"offset": "-1"}).status_code == 410
    assert client.get(copy, params={"offset": "-1"}).content == whole[:40]
    process.kill()
    process.start()
    assert client.get(copy, params={"offset": "-1"}).content == whole[:40]
    second = forked(client, copy, 20)
    assert client.delete(copy).status_code == 204
    assert client.get(second, params={"offset": "-1"}).content == whole[:20]
    assert client.get(path, params={"offset": token(50)}).content == b""
    process.kill()
    process.start()
    assert client.get(second, params={"offset": "-1"}).content == whole[:20]


def test_fork_of_a_stream_with_a_snapshot_survives_restart_and_the_sources_blob(
    process: ServerProcess, client: httpx.Client, path: str
) -> None:
    published(client, path, 30, b"first")
    copy = forked(client, path)
    published(client, path, 50, b"second")
    process.kill()
    process.start()
    assert snapshot(client, copy) == (token(30), b"first")
    assert snapshot(client, path) == (token(50), b"second")
    assert len(blobs(process, copy)) == 1
    assert client.delete(copy).status_code == 204
    wait_until(lambda: blobs(process, copy) == [], "the fork's blob goes with it")
    assert snapshot(client, path) == (token(50), b"second")


def test_forks_that_race_with_a_publish_read_what_they_forked(running: Server) -> None:
    """A fork is made before or after the source is trimmed, never half of each."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            for number in range(15):
                path = f"/snapshots/forked-{number}"
                await client.put(f"/v1/stream{path}", headers=TEXT, content=b"0" * 10)
                for digit in range(1, 5):
                    await client.post(path, headers=TEXT, content=b"%d" % digit * 10)
                first = await client.put(f"{path}/snapshot/{token(10)}", content=b"at 10")
                assert first.status_code == 204
                requests = [client.put(f"{path}/snapshot/{token(50)}", content=b"at 50")]
                for copy in range(4):
                    headers = {"stream-forked-from": path, "stream-fork-offset": token(40)}
                    requests.insert(number % 5, client.put(f"{path}-copy-{copy}", headers=headers))
                answers = await asyncio.gather(*requests)
                statuses = sorted(answer.status_code for answer in answers)
                assert set(statuses) <= {201, 204, 410}, [answer.text for answer in answers]
                for copy in range(4):
                    read = await client.get(f"{path}-copy-{copy}", params={"offset": token(10)})
                    if read.status_code != 404:
                        assert read.content == b"".join(b"%d" % digit * 10 for digit in range(1, 4)), read.text
                        state = await client.get(f"{path}-copy-{copy}/snapshot", follow_redirects=True)
                        assert (state.headers["stream-snapshot-offset"], state.content) == (token(10), b"at 10")

    asyncio.run(main())


def test_forks_that_race_with_the_delete_of_their_source_are_whole_or_404(running: Server) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            for number in range(15):
                path = f"/snapshots/orphaned-{number}"
                await client.put(f"/v1/stream{path}", headers=TEXT, content=b"0" * 10)
                await client.post(path, headers=TEXT, content=b"1" * 10)
                assert (await client.put(f"{path}/snapshot/{token(10)}", content=b"state")).status_code == 204
                headers = {"stream-forked-from": path}
                made, deleted = await asyncio.gather(client.put(f"{path}-copy", headers=headers), client.delete(path))
                assert deleted.status_code == 204
                assert made.status_code in (201, 404, 409), made.text
                read = await client.get(f"{path}-copy", params={"offset": token(10)})
                if made.status_code == 201:
                    assert (read.status_code, read.content) == (200, b"1" * 10)
                    state = await client.get(f"{path}-copy/snapshot/{token(10)}")
                    assert (state.status_code, state.content) == (200, b"state")
                else:
                    assert read.status_code == 404

    asyncio.run(main())


# -- windows and new incarnations --------------------------------------------------------------------------------


def test_use_of_a_snapshot_restarts_the_window(running: Server, client: httpx.Client) -> None:
    """More than one window passes while streams are in use; a neighbour nobody uses expires, and its blob with it."""
    paths = {way: f"/snapshots/window-{way}" for way in ("publish", "bootstrap", "snapshot", "none")}
    for path in paths.values():
        assert client.put(path, headers={**TEXT, "stream-ttl": "1"}, content=b"x").status_code == 201
        published(client, path, 1)
    started = time.monotonic()
    while client.head(paths["none"]).status_code == 200 or time.monotonic() < started + 1.6:
        assert time.monotonic() < started + SECONDS
        published(client, paths["publish"], 1)
        assert client.get(f"{paths['bootstrap']}/bootstrap").status_code == 200
        assert client.get(f"{paths['snapshot']}/snapshot/{token(1)}").status_code == 200
        time.sleep(0.1)
    assert [client.head(path).status_code for path in paths.values()] == [200, 200, 200, 404]
    wait_until(lambda: all(client.head(path).status_code == 404 for path in paths.values()), "unused, they expire")
    assert client.get(f"{paths['publish']}/snapshot").status_code == 404
    for path in paths.values():
        wait_until(lambda path=path: blobs(running, path) == [], "their blobs are removed")


def test_recreated_stream_has_no_snapshot_and_starts_at_zero(
    process: ServerProcess, client: httpx.Client, path: str
) -> None:
    published(client, path, 30, b"old life")
    assert client.delete(path).status_code == 204
    assert client.get(f"{path}/snapshot/{token(30)}").status_code == 404
    assert client.put(path, headers=TEXT, content=b"new life").status_code == 201
    head = client.head(path)
    assert "stream-snapshot-offset" not in head.headers
    assert "stream-earliest-offset" not in head.headers
    assert client.get(f"{path}/snapshot").status_code == 404
    assert client.get(path, params={"offset": "-1"}).content == b"new life"
    wait_until(lambda: blobs(process, path) == [], "the old blob is removed")
    process.kill()
    process.start()
    assert client.get(path, params={"offset": "-1"}).content == b"new life"
    assert client.get(f"{path}/snapshot").status_code == 404


def test_snapshot_uploaded_while_its_stream_is_recreated_never_shows_in_the_new_one(running: Server) -> None:
    async def slowly(started: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[bytes]:
        yield b"old "
        started.set()
        await go_on.wait()
        yield b"life"

    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            path = "/snapshots/reborn"
            await client.put(f"/v1/stream{path}", headers=TEXT, content=b"old bytes")
            started, go_on = asyncio.Event(), asyncio.Event()
            upload = asyncio.ensure_future(client.put(f"{path}/snapshot/{token(9)}", content=slowly(started, go_on)))
            async with asyncio.timeout(SECONDS):
                await started.wait()
            assert (await client.delete(path)).status_code == 204
            assert (await client.put(path, headers=TEXT, content=b"new")).status_code == 201
            go_on.set()
            assert (await upload).status_code == 409, "offset 9 lies beyond the new stream's tail"
            assert (await client.get(path)).content == b"new"
            assert (await client.get(f"{path}/snapshot")).status_code == 404

    asyncio.run(main())


def test_what_streams_and_snapshots_hold_is_sandboxed_in_a_browser(client: httpx.Client) -> None:
    """Whoever may write could otherwise have a script run under the origin of the console."""
    script = b"<script>fetch('/')</script>"
    path = "/snapshots/page"
    assert client.put(path, headers={"content-type": "text/html"}, content=script).status_code == 201
    published(client, path, len(script), script)
    client.post(path, headers={"content-type": "text/html"}, content=script)
    offset = client.get(f"{path}/snapshot", follow_redirects=False).headers["stream-snapshot-offset"]
    for target in (f"{path}?offset={offset}", f"{path}/snapshot/{offset}"):
        answer = client.get(target)
        assert (answer.status_code, answer.content) == (200, script)
        assert answer.headers["content-security-policy"] == "sandbox"
