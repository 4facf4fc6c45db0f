"""Clients of a cluster that keep a record: what they asked, when, what they were told, and by whom.

Each message names its writer and its number, so the content of a stream can be held against the record: every
acknowledged append once and in order, nothing that was refused, nothing twice, no read that shows what later vanished,
and the leader's answers linearizable.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import urlsplit

from millstream.cluster.placement import shard_of
from support.cluster import Cluster
from support.linearizability import NEVER, Operation, find_violation

MESSAGE_BYTES = 20
TRY_SECONDS = 1.0  # of one node; a client that waits longer finds the others no sooner
GIVE_UP_SECONDS = 60.0
# Errors after which an append may have been stored all the same.
UNKNOWN = ("outcome_unknown", "forward_failed", "log_stopped", "apply_failed", "internal_error")


def message(writer: str, number: int) -> str:
    return f"{writer:>8}:{number:010d}\n"


def split(content: bytes) -> list[str]:
    text = content.decode()
    assert len(text) % MESSAGE_BYTES == 0, "the content ends inside a message"
    return [text[at : at + MESSAGE_BYTES] for at in range(0, len(text), MESSAGE_BYTES)]


class Client:
    """Speaks to any node, follows redirects, and goes to another node when one does not answer."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._connections: dict[str, HTTPConnection] = {}
        self.url = self._random.choice(cluster.urls)

    def elsewhere(self) -> None:
        self.url = self._random.choice(self._cluster.urls)

    def try_once(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes] | None:
        """The answer, or None if there was none. One redirect is followed; the next request goes there at once."""
        for _ in range(2):
            connection = self._connection(self.url)
            try:
                connection.request(method, path, body, headers or {})
                response = connection.getresponse()
                content = response.read()
            except (OSError, HTTPException):
                connection.close()
                del self._connections[self.url]
                self.elsewhere()
                return None
            fields = {name.lower(): value for name, value in response.getheaders()}
            if response.status != 307:
                return response.status, fields, content
            parts = urlsplit(fields["location"])
            self.url = f"{parts.scheme}://{parts.netloc}"
        self.elsewhere()
        return 503, {}, b"redirected in circles"

    def _connection(self, url: str) -> HTTPConnection:
        if url not in self._connections:
            parts = urlsplit(url)
            assert parts.hostname is not None
            self._connections[url] = HTTPConnection(parts.hostname, parts.port, timeout=TRY_SECONDS)
        return self._connections[url]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class Pause(NamedTuple):
    """From when until when, by the monotonic clock, nothing was acknowledged."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Record:
    """Everything the clients of one stream know."""

    path: str
    operations: list[Operation] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    seen: list[tuple[int, bytes]] = field(default_factory=list)
    acknowledged_at: list[float] = field(default_factory=list)
    repeats: int = 0


class _Worker(threading.Thread):
    def __init__(self, cluster: Cluster, record: Record, stopping: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self.record = record
        self.client = Client(cluster, seed)
        self.stopping = stopping
        self.problems: list[str] = []
        self.random = random.Random(seed)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.step()
        except Exception as error:  # reported by the test, which sees only this
            self.problems.append(repr(error))
        finally:
            self.client.close()

    def step(self) -> None:
        raise NotImplementedError


class Producer(_Worker):
    """Appends with a producer's sequence and repeats each until it is acknowledged."""

    def __init__(self, name: str, cluster: Cluster, record: Record, stopping: threading.Event, seed: int) -> None:
        super().__init__(cluster, record, stopping, seed)
        self.writer = name
        self.number = 0

    def step(self) -> None:
        value = message(self.writer, self.number)
        claim = {"producer-id": self.writer, "producer-epoch": "0", "producer-seq": str(self.number)}
        headers = {"content-type": "text/plain", **claim}
        called = time.monotonic()
        while True:
            answer = self.client.try_once("POST", self.record.path, headers, value.encode())
            if answer is not None and answer[0] in (200, 204):
                break
            if answer is not None and answer[0] != 503:
                raise AssertionError(f"{self.record.path} {self.number}: {answer}")
            if time.monotonic() - called > GIVE_UP_SECONDS:
                raise AssertionError(f"{self.record.path}: no answer for {GIVE_UP_SECONDS} s, last {answer}")
            self.record.repeats += 1
            self.client.elsewhere()
            time.sleep(0.05)
        returned = time.monotonic()
        self.record.operations.append(Operation("append", value, 0, called, returned))
        self.record.acknowledged_at.append(returned)
        self.number += 1
        time.sleep(self.random.uniform(0.0, 0.02))


class Appender(Producer):
    """Appends plainly, each once: without an answer it does not know, after a 503 it knows that nothing was written."""

    def step(self) -> None:
        value = message(self.writer, self.number)
        self.number += 1
        called = time.monotonic()
        answer = self.client.try_once("POST", self.record.path, {"content-type": "text/plain"}, value.encode())
        if answer is not None and answer[0] == 204:
            self.record.operations.append(Operation("append", value, 0, called, time.monotonic()))
            self.record.acknowledged_at.append(time.monotonic())
        elif answer is not None and answer[0] == 503 and not any(code.encode() in answer[2] for code in UNKNOWN):
            self.record.refused.add(value)
            self.client.elsewhere()
            time.sleep(0.05)
        elif answer is None or answer[0] == 503:
            self.record.operations.append(Operation("append", value, 0, called, NEVER))
        else:
            raise AssertionError(f"{self.record.path} {self.number}: {answer}")
        time.sleep(self.random.uniform(0.0, 0.05))


class Reader(_Worker):
    """Reads the whole stream at some node. What the leader answers must be linearizable; the rest a beginning."""

    def step(self) -> None:
        self.client.elsewhere()
        called = time.monotonic()
        answer = self.client.try_once("GET", f"{self.record.path}?offset=-1")
        returned = time.monotonic()
        if answer is not None and answer[0] == 200:
            self.record.seen.append((0, answer[2]))
            if answer[1].get("millstream-role") == "leader" and answer[1].get("stream-up-to-date") == "true":
                count = len(answer[2]) // MESSAGE_BYTES
                self.record.operations.append(Operation("read", "", count, called, returned))
        elif answer is not None and answer[0] != 503:
            raise AssertionError(f"{self.record.path}: {answer}")
        time.sleep(self.random.uniform(0.02, 0.1))


class Tailer(_Worker):
    """Follows the stream by long-poll, at one node after another, always from where it stands."""

    offset = 0

    def step(self) -> None:
        token = f"0000000000000000_{self.offset:016d}"
        answer = self.client.try_once("GET", f"{self.record.path}?offset={token}&live=long-poll")
        if answer is None or answer[0] == 503:
            time.sleep(0.05)
        elif answer[0] == 200:
            end = int(answer[1]["stream-next-offset"].partition("_")[2])
            if end < self.offset:
                raise AssertionError(f"{self.record.path}: set back from {self.offset} to {end}")
            self.record.seen.append((self.offset, answer[2]))
            self.offset = end
        elif answer[0] != 204:
            raise AssertionError(f"{self.record.path}: {answer}")
        if self.random.random() < 0.05:
            self.client.elsewhere()


class Load:
    """Producers, appenders, readers and tailers on a few streams, until `stop`."""

    def __init__(self, cluster: Cluster, name: str, *, seed: int, streams: int = 2) -> None:
        self._cluster = cluster
        self._stopping = threading.Event()
        self.records = [Record(f"/v1/stream/{bucket}/s") for bucket in _buckets(name, streams, cluster.shards)]
        self._workers: list[_Worker] = []
        client = Client(cluster, seed)
        for number, record in enumerate(self.records):
            _insist(client, "PUT", record.path, {"content-type": "text/plain"}, (200, 201))
            arguments = (cluster, record, self._stopping)
            for index in range(2):
                self._workers.append(Producer(f"p{number}{index}", *arguments, seed + 10 * number + index))
            self._workers.append(Appender(f"a{number}", *arguments, seed + 10 * number + 3))
            self._workers.append(Reader(*arguments, seed + 10 * number + 4))
            self._workers.append(Tailer(*arguments, seed + 10 * number + 5))
        client.close()

    def start(self) -> Load:
        for worker in self._workers:
            worker.start()
        return self

    def acknowledged_since(self, moment: float) -> list[float]:
        return sorted(at for record in self.records for at in list(record.acknowledged_at) if at > moment)

    def wait_for_writes(self, since: float, seconds: float = 30.0) -> float:
        """Wait until every stream takes writes again; returns how long the longest went without, from `since`."""
        deadline = time.monotonic() + seconds
        while True:
            first = [next((at for at in list(one.acknowledged_at) if at > since), None) for one in self.records]
            if all(at is not None for at in first):
                return max(at for at in first if at is not None) - since
            problems = [problem for worker in self._workers for problem in worker.problems]
            assert not problems, problems[:3]
            assert time.monotonic() < deadline, f"writes were not back within {seconds} s"
            time.sleep(0.02)

    def longest_pause(self, since: float) -> Pause:
        """The longest time any stream went without an acknowledgement, from `since` to the last one."""
        longest = Pause(since, since)
        for record in self.records:
            times = [since, *sorted(at for at in record.acknowledged_at if at > since)]
            longest = max(longest, *(Pause(*pair) for pair in pairwise(times)), key=lambda one: one.seconds)
        return longest

    def stop(self) -> None:
        self._stopping.set()
        for worker in self._workers:
            worker.join(GIVE_UP_SECONDS + 10)
        assert not any(worker.is_alive() for worker in self._workers)
        problems = [problem for worker in self._workers for problem in worker.problems]
        assert not problems, problems[:5]

    def check(self, *, on_all_nodes: bool = True) -> None:
        """Hold the final content, at every node that is up, against the record."""
        for record in self.records:
            final = read_all(self._cluster, record.path)
            _check_content(record, split(final))
            for offset, content in record.seen:
                there = final[offset : offset + len(content)]
                assert there == content, (
                    f"{record.path}: a reader saw what vanished: at {offset} {_difference(content, there)}"
                )
            violation = find_violation(record.operations, split(final))
            assert violation is None, f"{record.path}: {violation}"
            if on_all_nodes:
                for node in self._cluster.nodes.values():
                    if node.is_running:
                        _wait_for_content(node.url, record.path, final)

    @property
    def counts(self) -> str:
        appends = sum(1 for one in self.records for op in one.operations if op.kind == "append")
        reads = sum(1 for one in self.records for op in one.operations if op.kind == "read")
        repeats = sum(one.repeats for one in self.records)
        return f"{appends} appends, {reads} reads at the leader, {repeats} repeats"


def _difference(seen: bytes, there: bytes) -> str:
    at = next(
        (at for at, pair in enumerate(zip(seen, there, strict=False)) if pair[0] != pair[1]), min(len(seen), len(there))
    )
    at -= at % MESSAGE_BYTES
    return f"+{at}: saw {seen[at : at + 60]!r} of {len(seen)}, there is {there[at : at + 60]!r} of {len(there)}"


def _buckets(name: str, count: int, shards: int) -> list[str]:
    """Names of buckets that lie in the shards in turn."""
    candidates = (f"{name}-{number}" for number in range(10_000))
    return [next(one for one in candidates if shard_of(one, shards) == index % shards) for index in range(count)]


def _check_content(record: Record, final: list[str]) -> None:
    assert len(set(final)) == len(final), f"{record.path}: a message is there twice"
    there = set(final)
    for operation in record.operations:
        if operation.kind == "append" and operation.returned != NEVER:
            assert operation.value in there, f"{record.path}: {operation.value!r} was acknowledged and is gone"
    assert not there & record.refused, f"{record.path}: what was refused is there: {sorted(there & record.refused)[:3]}"
    # A plain append without an answer may still arrive, later than its writer's next: only a producer's is fenced.
    unknown = {one.value for one in record.operations if one.kind == "append" and one.returned == NEVER}
    last: dict[str, int] = {}
    for value in final:
        writer, _, number = value.strip().partition(":")
        if value in unknown:
            continue
        assert int(number) > last.get(writer, -1), f"{record.path}: {value!r} is out of order"
        if writer.startswith("p"):
            assert int(number) == last.get(writer, -1) + 1, f"{record.path}: something before {value!r} is missing"
        last[writer] = int(number)


def _insist(
    client: Client, method: str, path: str, headers: dict[str, str], statuses: tuple[int, ...]
) -> tuple[int, dict[str, str], bytes]:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while True:
        answer = client.try_once(method, path, headers)
        if answer is not None and answer[0] in statuses:
            return answer
        assert time.monotonic() < deadline, f"{method} {path}: {answer}"
        client.elsewhere()
        time.sleep(0.1)


def read_all(cluster: Cluster, path: str) -> bytes:
    """The whole stream as its leader has it."""
    client = Client(cluster, 1)
    deadline = time.monotonic() + GIVE_UP_SECONDS
    content, offset = b"", "-1"
    while True:
        answer = client.try_once("GET", f"{path}?offset={offset}")
        if answer is not None and answer[0] == 200 and answer[1].get("millstream-role") == "leader":
            content += answer[2]
            offset = answer[1]["stream-next-offset"]
            if "stream-up-to-date" in answer[1]:
                client.close()
                return content
        else:
            assert time.monotonic() < deadline, f"{path}: {answer}"
            client.elsewhere()
            time.sleep(0.05)


def _wait_for_content(url: str, path: str, final: bytes) -> None:
    """A node that follows has the same bytes, sooner or later."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    parts = urlsplit(url)
    while True:
        content = b""
        try:
            connection = HTTPConnection(parts.hostname or "", parts.port, timeout=TRY_SECONDS)
            offset = "-1"
            for _ in range(1000):
                connection.request("GET", f"{path}?offset={offset}")
                response = connection.getresponse()
                piece = response.read()
                if response.status != 200 or not piece:
                    break
                content += piece
                offset = response.getheader("stream-next-offset") or offset
            connection.close()
        except (OSError, HTTPException):
            pass
        if content == final:
            return
        assert time.monotonic() < deadline, f"{url}{path}: {len(content)} bytes, expected {len(final)}"
        time.sleep(0.1)
