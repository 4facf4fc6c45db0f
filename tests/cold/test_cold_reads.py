"""A reader cannot tell hot from cold: one server that flushes all the time and one that never does, asked the same."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support.cold import SECONDS, stats, token, wait_until, wait_until_flushed
from support.raw_http import RawConnection
from support.server import ServerProcess
from support.sse_parser import Event, parse_events

CHUNK_BYTES = 4096
SHARED = (f"read.chunk_bytes_max={CHUNK_BYTES}", "read.long_poll_timeout=300ms", "read.sse_lifetime=60s")
FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "hot.resident_streams_max=4", "cold.cache_bytes=2MiB")
NEVER_FLUSHING = ("cold.flush_interval=1h", "hot.keep_bytes=8GiB")
COMPARED = (
    "content-type",
    "cache-control",
    "stream-next-offset",
    "stream-up-to-date",
    "stream-closed",
    "stream-snapshot-offset",
    "stream-earliest-offset",
    "retry-after",
)
TEXT, BYTES, JSON = "text/plain", "application/octet-stream", "application/json"


class Pair(NamedTuple):
    """The server under test and the one that has everything in memory."""

    cold: httpx.Client
    hot: httpx.Client

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """The same request to both; the answers must be the same, but for what is random or of the clock."""
        first = self.cold.request(method, path, **arguments)
        second = self.hot.request(method, path, **arguments)
        assert normal(first) == normal(second), (method, path, arguments)
        return first


def normal(answer: httpx.Response) -> tuple[Any, ...]:
    """An answer without incarnations, positions and boundaries, which two servers number differently."""
    fields = {name: answer.headers.get(name) for name in COMPARED}
    body = answer.content
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        body = answer.json()["error"]["code"].encode()
    boundary = re.fullmatch(r"multipart/mixed; boundary=(.*)", fields["content-type"] or "")
    if boundary is not None:
        fields["content-type"] = "multipart/mixed"
        body = body.replace(boundary[1].encode(), b"BOUNDARY")
    etag = answer.headers.get("etag")
    return answer.status_code, fields, etag.partition(":")[2] if etag else None, body


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        ServerProcess(folder / "flushing", settings=(*SHARED, *FLUSHING)) as cold,
        ServerProcess(folder / "never", settings=(*SHARED, *NEVER_FLUSHING)) as hot,
        httpx.Client(base_url=cold.url, timeout=SECONDS) as cold_client,
        httpx.Client(base_url=hot.url, timeout=SECONDS) as hot_client,
    ):
        yield Pair(cold_client, hot_client)
        assert stats(hot_client)["flush_count"] == 0
        assert stats(cold_client)["flush_count"] > 0
        assert "Traceback" not in cold.stderr() + hot.stderr()


def new_bucket(pair: Pair, name: str) -> str:
    assert [client.put(f"/{name}").status_code for client in pair] == [201, 201]
    return f"/{name}"


# -- everything at random ------------------------------------------------------------------------------------------


class Model:
    """Drives both servers with one random sequence of writes and compares what they say after each."""

    def __init__(self, pair: Pair, bucket: str, seed: int) -> None:
        self.pair = pair
        self.bucket = bucket
        self.random = random.Random(seed)
        self.streams: dict[str, str] = {}  # path → content type
        self.ends: dict[str, list[int]] = {}  # path → where its appends ended, as far as known
        self._made = 0

    def run(self, steps: int) -> None:
        for _ in range(4):
            self.create()
        writes = (self.append,) * 12 + (self.create, self.fork, self.fork, self.snapshot, self.close, self.delete)
        for step in range(steps):
            self.random.choice(writes)()
            self.random.choice((self.read, self.read, self.read, self.catch_up, self.bootstrap, self.long_poll))()
            if step % 12 == 11:
                wait_until_flushed(self.pair.cold, released=True)
                self.catch_up()
        wait_until_flushed(self.pair.cold, released=True)
        for path in self.streams:
            self.catch_up(path)
            self.bootstrap(path)

    # -- writes --------------------------------------------------------------------------------------------

    def create(self) -> None:
        path = f"{self.bucket}/s{self._made}"
        self._made += 1
        content_type = self.random.choice((TEXT, BYTES, JSON))
        body = self.body(content_type) if self.random.random() < 0.5 else b""
        answer = self.pair.ask("PUT", path, headers={"content-type": content_type}, content=body)
        assert answer.status_code == 201
        self.streams[path] = content_type
        self.ends[path] = [0, offset_of(answer)]

    def body(self, content_type: str) -> bytes:
        size = self.random.choice((1, 10, 100, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9000))
        if content_type != JSON:
            return self.random.randbytes(size) if content_type == BYTES else self.letters(size).encode()
        count = self.random.choice((1, 1, 2, 5, 40))
        elements = [json.dumps({"n": self.random.randrange(10**9), "pad": self.letters(size // count)})] * count
        return f"[{', '.join(elements)}]".encode() if count > 1 else elements[0].encode()

    def letters(self, size: int) -> str:
        return "".join(self.random.choices("abc \nxyz\r", k=size))

    def any_path(self) -> str:
        if not self.streams:
            self.create()
        return self.random.choice(list(self.streams))

    def append(self) -> None:
        path = self.any_path()
        content_type = self.streams[path]
        for _ in range(self.random.choice((1, 1, 3))):
            answer = self.pair.ask(
                "POST", path, headers={"content-type": content_type}, content=self.body(content_type)
            )
            assert answer.status_code in (204, 409)
            if answer.status_code == 204:
                self.ends[path].append(offset_of(answer))

    def close(self) -> None:
        if self.random.random() < 0.3:
            self.pair.ask("POST", self.any_path(), headers={"stream-closed": "true"})

    def delete(self) -> None:
        if len(self.streams) > 6:
            path = self.any_path()
            assert self.pair.ask("DELETE", path).status_code == 204
            del self.streams[path], self.ends[path]
            self.pair.ask("GET", path)

    def fork(self) -> None:
        source = self.any_path()
        path = f"{self.bucket}/f{self._made}"
        self._made += 1
        headers = {"stream-forked-from": source}
        if self.random.random() < 0.8:
            headers["stream-fork-offset"] = token(self.offset(source))
            if self.random.random() < 0.5:
                headers["stream-fork-sub-offset"] = str(self.random.choice((0, 1, 2, 7, 40, 4000)))
        answer = self.pair.ask("PUT", path, headers=headers)
        if answer.status_code == 201:
            self.streams[path] = self.streams[source]
            forked = offset_of(answer)
            self.ends[path] = [end for end in self.ends[source] if end < forked] + [forked]

    def snapshot(self) -> None:
        path = self.any_path()
        offset = self.offset(path)
        content = self.random.randbytes(self.random.choice((0, 10, 5000)))
        answer = self.pair.ask("PUT", f"{path}/snapshot/{token(offset)}", content=content)
        assert answer.status_code in (204, 400, 409, 410), answer.text
        if answer.status_code == 204:
            read = self.pair.ask("GET", f"{path}/snapshot/{token(offset)}")
            assert read.content == content
        self.pair.ask("HEAD", path)

    def offset(self, path: str) -> int:
        """Mostly a boundary between appends, now and then anything."""
        tail = self.ends[path][-1]
        return self.random.choice(self.ends[path]) if self.random.random() < 0.8 else self.random.randint(0, tail + 2)

    # -- reads ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        path = self.any_path()
        query = {"offset": self.random.choice(("-1", "now", *[token(self.offset(path))] * 6))}
        if self.random.random() < 0.4:
            query["max_bytes"] = str(self.random.choice((1, 50, 1000, CHUNK_BYTES - 1, 10**6)))
        self.pair.ask("GET", path, params=query)
        self.pair.ask("HEAD", path)
        for client in self.pair:  # each by its own tag
            etag = client.get(path, params=query).headers.get("etag")
            if etag is not None:
                again = client.get(path, params=query, headers={"if-none-match": etag})
                assert (again.status_code, again.headers["etag"], again.content) == (304, etag, b"")

    def catch_up(self, path: str | None = None) -> None:
        """Every chunk from the start, each compared."""
        path = path or self.any_path()
        query = {"offset": "-1"}
        if self.random.random() < 0.3:
            query["max_bytes"] = str(self.random.choice((700, 1500)))
        earliest = self.pair.ask("HEAD", path).headers.get("stream-earliest-offset")
        if earliest is not None:
            assert self.pair.ask("GET", path, params=query).status_code == 410
            query["offset"] = earliest
        for _ in range(10_000):
            answer = self.pair.ask("GET", path, params=query)
            assert answer.status_code == 200
            if answer.headers.get("stream-up-to-date") == "true":
                return
            query["offset"] = answer.headers["stream-next-offset"]
        raise AssertionError(f"{path} does not end")

    def bootstrap(self, path: str | None = None) -> None:
        assert self.pair.ask("GET", f"{path or self.any_path()}/bootstrap").status_code == 200

    def long_poll(self) -> None:
        path = self.any_path()
        self.pair.ask("GET", path, params={"offset": token(self.random.choice(self.ends[path])), "live": "long-poll"})


def offset_of(answer: httpx.Response) -> int:
    return int(answer.headers["stream-next-offset"].partition("_")[2])


@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_writes_reads_the_same_from_cold_as_from_memory(pair: Pair, seed: int) -> None:
    Model(pair, new_bucket(pair, f"random-{seed}"), seed).run(110)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_sequences_of_writes_read_the_same_from_cold_as_from_memory(pair: Pair, seed: int) -> None:
    Model(pair, new_bucket(pair, f"random-{seed}"), seed).run(600)


# -- one thing at a time -------------------------------------------------------------------------------------------


def test_an_append_of_more_rows_than_a_row_group_holds_reads_the_same_from_any_offset(pair: Pair) -> None:
    path = new_bucket(pair, "row-groups") + "/many"
    numbers = list(range(40_000))
    pair.ask("PUT", path, headers={"content-type": JSON})
    pair.ask("POST", path, headers={"content-type": JSON}, content=json.dumps(numbers))
    wait_until_flushed(pair.cold, released=True)
    found: list[int] = []
    offset = "-1"
    while True:
        answer = pair.ask("GET", path, params={"offset": offset})
        found += answer.json()
        if answer.headers.get("stream-up-to-date") == "true":
            break
        offset = answer.headers["stream-next-offset"]
    assert found == numbers
    for number in (9, 16_383, 16_384, 16_385, 32_768, 39_999):
        start = len("".join(map(str, range(number))))
        assert pair.ask("GET", path, params={"offset": token(start)}).json()[0] == number


def fork_far_inside(bucket: str, clients: tuple[httpx.Client, ...]) -> None:
    """Fork at the 17,000th message of one append of 20,000, which no row group holds whole."""
    source = f"{bucket}/source"
    for client in clients:
        client.put(source, headers={"content-type": JSON})
        client.post(source, headers={"content-type": JSON}, content=json.dumps(list(range(20_000))))
    wait_until_flushed(clients[0], released=True)
    headers = {"stream-forked-from": source, "stream-fork-offset": token(0), "stream-fork-sub-offset": "17000"}
    for client in clients:
        forked = client.put(f"{bucket}/fork", headers=headers)
        assert forked.status_code == 201, forked.text
        assert forked.headers["stream-next-offset"] == token(len("".join(map(str, range(17_000)))))


def test_a_fork_in_a_row_group_larger_than_the_cache_is_possible(pair: Pair) -> None:
    fork_far_inside(new_bucket(pair, "fork-cache"), tuple(pair))


def test_a_fork_inside_an_append_that_spans_row_groups_is_possible(tmp_path: Path) -> None:
    settings = ("cold.flush_interval=100ms", "hot.keep_bytes=0B")
    with (
        ServerProcess(tmp_path / "data", settings=settings) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        client.put("/fork-groups")
        fork_far_inside("/fork-groups", (client,))


def test_forks_whose_points_lie_in_cold_show_the_same_bytes_and_cut_messages(pair: Pair) -> None:
    bucket = new_bucket(pair, "cold-forks")
    source = f"{bucket}/source"
    pair.ask("PUT", source, headers={"content-type": TEXT})
    for number in range(30):
        pair.ask("POST", source, headers={"content-type": TEXT}, content=f"<message {number:03d}>".encode() * 20)
    wait_until_flushed(pair.cold, released=True)
    size = len("<message 000>") * 20
    whole = pair.cold.get(source, params={"offset": "-1"}).content
    for number, sub_offset in ((0, 0), (0, 5), (7, 0), (7, 1), (7, size - 1), (7, size), (29, 3), (30, 0)):
        path = f"{bucket}/fork-{number}-{sub_offset}"
        fork = {"stream-forked-from": source, "stream-fork-offset": token(number * size)}
        assert pair.ask("PUT", path, headers={**fork, "stream-fork-sub-offset": str(sub_offset)}).status_code == 201
        pair.ask("POST", path, headers={"content-type": TEXT}, content=b"[own]")
        expected = b"".join(f"<message {one:03d}>".encode() * 20 for one in range(30))[: number * size + sub_offset]
        assert caught_up(pair, path) == expected + b"[own]"
    wait_until_flushed(pair.cold, released=True)
    for number in (0, 7):
        assert caught_up(pair, f"{bucket}/fork-{number}-1" if number else f"{bucket}/fork-0-5").endswith(b"[own]")
    nested = {"stream-forked-from": f"{bucket}/fork-7-1", "stream-fork-offset": token(3 * size)}
    assert pair.ask("PUT", f"{bucket}/nested", headers=nested).status_code == 201
    assert caught_up(pair, f"{bucket}/nested") == whole[: 3 * size]
    refused = {"stream-forked-from": source, "stream-fork-offset": token(size + 1)}
    assert pair.ask("PUT", f"{bucket}/refused", headers=refused).status_code == 400


def caught_up(pair: Pair, path: str) -> bytes:
    content, offset = b"", "-1"
    while True:
        answer = pair.ask("GET", path, params={"offset": offset})
        content += answer.content
        if answer.headers.get("stream-up-to-date") == "true":
            return content
        offset = answer.headers["stream-next-offset"]


@pytest.mark.parametrize("where", ["fork", "snapshot"])
def test_an_offset_whose_cold_messages_were_trimmed_is_refused_as_from_memory(pair: Pair, where: str) -> None:
    bucket = new_bucket(pair, f"trimmed-{where}")
    path = f"{bucket}/trimmed"
    pair.ask("PUT", path, headers={"content-type": TEXT}, content=b"one")
    pair.ask("POST", path, headers={"content-type": TEXT}, content=b"two")
    wait_until_flushed(pair.cold, released=True)
    assert pair.ask("PUT", f"{path}/snapshot/{token(6)}", content=b"all").status_code == 204
    wait_until_flushed(pair.cold, released=True)
    if where == "fork":
        fork = {"stream-forked-from": path, "stream-fork-offset": token(3)}
        refused = pair.ask("PUT", f"{bucket}/fork", headers=fork)
    else:
        refused = pair.ask("PUT", f"{path}/snapshot/{token(3)}", content=b"older")
    assert refused.status_code in (409, 410)


def test_a_chunk_that_starts_in_cold_and_ends_in_memory_is_the_same(pair: Pair) -> None:
    path = new_bucket(pair, "the-seam") + "/seam"
    pair.ask("PUT", path, headers={"content-type": BYTES})
    for round_ in range(6):
        for number in range(5):
            body = bytes([round_ * 5 + number]) * 300
            pair.ask("POST", path, headers={"content-type": BYTES}, content=body)
        # At once after the appends, some are not flushed yet; those before are.
        for offset in range(0, (round_ + 1) * 1500, 750):
            pair.ask("GET", path, params={"offset": token(offset)})
        wait_until_flushed(pair.cold, released=True)
    assert caught_up(pair, path) == b"".join(bytes([number]) * 300 for number in range(30))


# -- live ----------------------------------------------------------------------------------------------------------


class Follower(threading.Thread):
    """Follows by SSE and keeps the events, until it has seen what it was told to wait for."""

    def __init__(self, client: httpx.Client, target: str, last: bytes, *headers: tuple[str, str]) -> None:
        super().__init__(daemon=True)
        self._connection = RawConnection(str(client.base_url).rstrip("/"), seconds=SECONDS)
        self._connection.send(self._connection.request("GET", target, headers))
        self.status, self.headers = self._connection.head()
        self._last = last
        self.received = b""
        self.start()

    def run(self) -> None:
        with self._connection:
            while (chunk := self._connection.chunk()) is not None:
                self.received += chunk
                at = self.received.find(self._last)
                if at >= 0 and b"event: control" in self.received[at:] and self.received.endswith(b"\n\n"):
                    return

    def events(self) -> list[Event]:
        self.join(SECONDS)
        assert not self.is_alive(), self.received[-500:]
        return parse_events(self.received)


def without_cursor(events: list[Event]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for event in events:
        if event.type == "control":
            control = json.loads(event.data)
            control.pop("streamCursor", None)
            found.append(("control", control))
        else:
            found.append((event.type, event.data))
    return found


@pytest.mark.parametrize("content_type", [TEXT, JSON])
def test_sse_from_the_beginning_runs_through_cold_into_live_with_the_same_events(pair: Pair, content_type: str) -> None:
    path = new_bucket(pair, f"sse-{'json' if content_type == JSON else 'text'}") + "/followed"
    pair.ask("PUT", path, headers={"content-type": content_type})
    history = [json.dumps({"n": number, "pad": "x" * 400}) for number in range(60)]
    for message in history:
        pair.ask("POST", path, headers={"content-type": content_type}, content=message)
    wait_until_flushed(pair.cold, released=True)
    followers = [Follower(client, f"{path}?offset=-1&live=sse", b"the end") for client in pair]
    for follower in followers:
        wait_until(lambda follower=follower: b"upToDate" in follower.received, "the followers have caught up")
    live = [json.dumps({"n": number}) for number in range(60, 70)]
    for message in live:
        # One at a time, so that both followers get it as one event.
        before = [len(follower.received) for follower in followers]
        pair.ask("POST", path, headers={"content-type": content_type}, content=message)
        for follower, size in zip(followers, before, strict=True):
            wait_until(
                lambda follower=follower, size=size: b"upToDate" in follower.received[size:], "an event for an append"
            )
    pair.ask("POST", path, headers={"content-type": content_type}, content=json.dumps("the end"))
    events = [follower.events() for follower in followers]
    assert without_cursor(events[0]) == without_cursor(events[1])
    data = "".join(event.data for event in events[0] if event.type == "data")
    if content_type == JSON:
        elements = [one for event in events[0] if event.type == "data" for one in json.loads(event.data)]
        assert elements == [*map(json.loads, history + live), "the end"]
    else:
        assert data == "".join(history + live) + '"the end"'


def test_long_polls_give_cold_data_at_once_and_then_wait_for_live_data(pair: Pair) -> None:
    path = new_bucket(pair, "long-polls") + "/polled"
    pair.ask("PUT", path, headers={"content-type": TEXT})
    for number in range(20):
        pair.ask("POST", path, headers={"content-type": TEXT}, content=f"{number:03d}".encode() * 200)
    wait_until_flushed(pair.cold, released=True)
    content, offset = b"", "-1"
    while True:
        answer = pair.ask("GET", path, params={"offset": offset, "live": "long-poll"})
        offset = answer.headers["stream-next-offset"]
        if answer.status_code == 204:
            break
        content += answer.content
    assert content == b"".join(f"{number:03d}".encode() * 200 for number in range(20))
    answers: list[httpx.Response] = []

    def poll(client: httpx.Client) -> None:
        while True:
            answer = client.get(path, params={"offset": offset, "live": "long-poll"})
            if answer.status_code == 200:
                answers.append(answer)
                return

    threads = [threading.Thread(target=poll, args=(client,)) for client in pair]
    for thread in threads:
        thread.start()
    pair.ask("POST", path, headers={"content-type": TEXT}, content=b"live")
    for thread in threads:
        thread.join(SECONDS)
    assert [answer.content for answer in answers] == [b"live", b"live"]


# -- the feed ------------------------------------------------------------------------------------------------------


def feed(client: httpx.Client, bucket: str, cuts: random.Random | None = None) -> list[dict[str, Any]]:
    """The whole feed, in pages whose sizes are cut at random."""
    items: list[dict[str, Any]] = []
    after = ""
    for _ in range(100_000):
        query = {"after": after}
        if cuts is not None:
            query["max_bytes"] = str(cuts.choice((1, 100, 1000, 5000)))
        answer = client.get(f"{bucket}/streams/feed", params=query)
        assert answer.status_code == 200, answer.text
        items += [json.loads(line) for line in answer.content.splitlines()]
        after = answer.headers["stream-feed-token"]
        if answer.headers.get("stream-up-to-date") == "true":
            return items
    raise AssertionError("the feed does not end")


def unnumbered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: item[name] for name in item if name not in ("position", "appended_at_ms")} for item in items]


def test_the_feed_from_the_start_is_the_same_through_cold_wherever_it_is_cut(pair: Pair) -> None:
    bucket = new_bucket(pair, "feed-cold")
    chance = random.Random(7)
    for number in range(60):
        path = f"{bucket}/s{chance.randrange(5)}"
        content_type = JSON if path.endswith(("1", "3")) else TEXT
        pair.ask("PUT", path, headers={"content-type": content_type})
        body = json.dumps([{"n": number, "pad": "x" * chance.randrange(300)}] * chance.choice((1, 3)))
        close = {"stream-closed": "true"} if number in (40, 50) else {}
        pair.ask("POST", path, headers={"content-type": content_type, **close}, content=body)
        if number % 15 == 14:
            wait_until_flushed(pair.cold, released=True)
            assert unnumbered(feed(pair.cold, bucket)) == unnumbered(feed(pair.hot, bucket))
    expected = unnumbered(feed(pair.hot, bucket))
    assert len(expected) > 60
    for seed in range(4):
        found = feed(pair.cold, bucket, random.Random(seed))
        assert unnumbered(found) == expected
        positions = [item["position"] for item in found]
        assert positions == sorted(positions)
    arrow = pair.cold.get(f"{bucket}/streams/feed", headers={"accept": "application/vnd.apache.arrow.stream"})
    assert arrow.status_code == 200


def test_the_feed_by_sse_runs_from_the_start_through_cold_into_live(pair: Pair) -> None:
    bucket = new_bucket(pair, "feed-sse")
    for number in range(40):
        path = f"{bucket}/s{number % 3}"
        pair.ask("PUT", path, headers={"content-type": TEXT})
        pair.ask("POST", path, headers={"content-type": TEXT}, content=f"<{number}>".encode() * 50)
        if number == 20:
            wait_until_flushed(pair.cold, released=True)
    wait_until_flushed(pair.cold, released=True)
    followers = [Follower(client, f"{bucket}/streams/feed?live=sse", b"the end") for client in pair]
    for number in range(20):
        pair.ask("POST", f"{bucket}/s{number % 3}", headers={"content-type": TEXT}, content=f"<live {number}>".encode())
    pair.ask("POST", f"{bucket}/s0", headers={"content-type": TEXT}, content=b"the end")
    found = []
    for follower in followers:
        events = [event for event in follower.events() if event.type != "control"]
        found.append(unnumbered([json.loads(event.data) for event in events]))
    assert found[0] == found[1]
    assert found[0] == unnumbered(feed(pair.hot, bucket))
    ids = [event.id for event in followers[0].events() if event.type != "control"]
    resumed = Follower(pair.cold, f"{bucket}/streams/feed?live=sse", b"the end", ("last-event-id", ids[17]))
    rest = [json.loads(event.data) for event in resumed.events() if event.type != "control"]
    assert unnumbered(rest) == found[0][18:]


@pytest.mark.parametrize("how", ["deleted", "trimmed"])
def test_the_feed_shows_no_messages_of_streams_that_are_gone_wherever_they_lay(pair: Pair, how: str) -> None:
    bucket = new_bucket(pair, f"feed-{how}")
    for name in ("kept", "gone"):
        pair.ask("PUT", f"{bucket}/{name}", headers={"content-type": TEXT}, content=f"first of {name}".encode())
        pair.ask("POST", f"{bucket}/{name}", headers={"content-type": TEXT}, content=f"last of {name}".encode())
    wait_until_flushed(pair.cold, released=True)
    assert unnumbered(feed(pair.cold, bucket)) == unnumbered(feed(pair.hot, bucket))
    if how == "deleted":
        pair.ask("DELETE", f"{bucket}/gone")
    else:
        assert pair.ask("PUT", f"{bucket}/gone/snapshot/{token(13)}", content=b"state").status_code == 204
    wait_until_flushed(pair.cold, released=True)
    assert unnumbered(feed(pair.cold, bucket)) == unnumbered(feed(pair.hot, bucket))
