"""Load that keeps account: clients that write and tail through crashes, and remember what they were told.

A message says who wrote it and which it is, so the final content of a stream can be held against the accounts.
"""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

RECONNECT_SECONDS = 60.0


class StreamUnderLoad(NamedTuple):
    path: str
    is_json: bool

    @property
    def name(self) -> str:
        """As the client calls it."""
        return self.path.removeprefix("/v1/stream/")

    @property
    def content_type(self) -> str:
        return "application/json" if self.is_json else "application/octet-stream"


class Message(NamedTuple):
    writer: str
    number: int
    part: int
    parts: int
    padding: str

    def encode(self, is_json: bool) -> bytes:
        text = json.dumps(self._asdict())
        return text.encode() if is_json else f"{len(text):06d}{text}".encode()


def split(stream: StreamUnderLoad, content: bytes) -> list[bytes]:
    """The messages of a stream's content, each as it was sent."""
    if stream.is_json:
        return [json.dumps(element).encode() for element in json.loads(content)]
    messages = []
    while content:
        end = 6 + int(content[:6])
        assert len(content) >= end, "the content ends inside a message"
        messages.append(content[:end])
        content = content[end:]
    return messages


def decode(stream: StreamUnderLoad, message: bytes) -> Message:
    return Message(**json.loads(message if stream.is_json else message[6:]))


class Client:
    """One keep-alive connection that comes back when the server does."""

    def __init__(self, url: str, stopping: threading.Event) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._connection = HTTPConnection(parts.hostname, parts.port, timeout=20)
        self.stopping = stopping

    def try_once(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes] | None:
        """The answer, or None if the connection failed before there was one."""
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            content = response.read()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, content
        except (OSError, HTTPException):
            self._connection.close()
            return None

    def insist(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            answer = self.try_once(method, path, headers, body)
            if answer is not None:
                return answer
            assert time.monotonic() < deadline, "the server did not come back"
            time.sleep(0.01)

    def close(self) -> None:
        self._connection.close()


@dataclass
class Account:
    """What one writer knows of its appends to one stream."""

    stream: StreamUnderLoad
    sent: dict[int, list[bytes]] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)  # number → the offset after it
    unanswered: set[int] = field(default_factory=set)


class Writer(threading.Thread):
    """Appends to several streams in turn until told to stop. As a producer it retries what got no answer."""

    def __init__(
        self,
        name: str,
        url: str,
        streams: list[StreamUnderLoad],
        *,
        idempotent: bool,
        stopping: threading.Event,
        seed: int,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.accounts = [Account(stream) for stream in streams]
        self.idempotent = idempotent
        self.problems: list[str] = []
        self.repeats = {200: 0, 204: 0}
        self._client = Client(url, stopping)
        self._stopping = stopping
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            number = 0
            while not self._stopping.is_set():
                for account in self.accounts:
                    self._append(account, number)
                number += 1
        except Exception as error:  # reported by the test, which sees only this
            self.problems.append(repr(error))
        finally:
            self._client.close()

    def _append(self, account: Account, number: int) -> None:
        stream = account.stream
        parts = self._random.choice((1, 1, 3)) if stream.is_json else 1
        padding = "x" * int(self._random.paretovariate(1) * 20 % 4000)
        messages = [Message(self.name, number, part, parts, padding).encode(stream.is_json) for part in range(parts)]
        account.sent[number] = messages
        body = messages[0] if parts == 1 else b"[" + b",".join(messages) + b"]"
        headers = {"content-type": stream.content_type}
        if self.idempotent:
            headers |= self._claim(number)
        answer = self._client.try_once("POST", stream.path, headers, body)
        if answer is None:
            if not self.idempotent:
                account.unanswered.add(number)
                self._client.insist("GET", "/healthz", {})
                return
            answer = self._come_back(account, number, headers, body)
        status, fields, content = answer
        if status not in ((200, 204) if self.idempotent else (204,)):
            self.problems.append(f"{stream.path} {number}: {status} {content!r}")
            self._stopping.set()
            return
        if status == 204 and self.idempotent:
            account.acknowledged[number] = -1  # a duplicate's answer gives the tail, not where the message ended
        else:
            account.acknowledged[number] = int(fields["stream-next-offset"].partition("_")[2])

    def _claim(self, number: int) -> dict[str, str]:
        return {"producer-id": self.name, "producer-epoch": "0", "producer-seq": str(number)}

    def _come_back(
        self, account: Account, number: int, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """After a crash: what was acknowledged is a duplicate now, what was not is judged by the server."""
        if number - 1 in account.acknowledged:
            again = {**headers, **self._claim(number - 1)}
            status, _, content = self._client.insist("POST", account.stream.path, again, body)
            if status != 204:
                self.problems.append(f"{account.stream.path} {number - 1} was acknowledged, now {status} {content!r}")
        answer = self._client.insist("POST", account.stream.path, headers, body)
        self.repeats[answer[0]] = self.repeats.get(answer[0], 0) + 1
        return answer


class Seen(NamedTuple):
    """What a reader was given between two offsets."""

    start: int
    end: int
    content: bytes


class Tailer(threading.Thread):
    """Follows a stream by long-poll or SSE through every crash, always from where it stood."""

    def __init__(self, url: str, stream: StreamUnderLoad, mode: str, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.seen: list[Seen] = []
        self.problems: list[str] = []
        self._mode = mode
        self._offset = 0
        self._client = Client(url, stopping)
        self._stopping = stopping

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._mode == "sse":
                    self._follow()
                else:
                    self._poll()
        except Exception as error:  # reported by the test, which sees only this
            self.problems.append(repr(error))
        finally:
            self._client.close()

    @property
    def _live_read(self) -> str:
        return f"{self.stream.path}?offset={0:016d}_{self._offset:016d}&live={self._mode}"

    def _note(self, end: int, content: bytes) -> None:
        self.seen.append(Seen(self._offset, end, content))
        self._offset = end

    def _poll(self) -> None:
        answer = self._client.try_once("GET", self._live_read, {})
        if answer is None:
            time.sleep(0.02)
        elif answer[0] == 200:
            self._note(int(answer[1]["stream-next-offset"].partition("_")[2]), answer[2])
        elif answer[0] != 204:
            self.problems.append(f"{self._live_read}: {answer}")
            self._stopping.set()

    def _follow(self) -> None:
        connection = self._client._connection
        try:
            connection.request("GET", self._live_read)
            response = connection.getresponse()
            if response.status != 200:
                self.problems.append(f"{self._live_read}: {response.status} {response.read()!r}")
                self._stopping.set()
                return
            data = b""
            while not self._stopping.is_set() and (line := response.readline()):
                data = self._event_line(line, data)
        except (OSError, HTTPException):
            time.sleep(0.02)
        finally:
            connection.close()

    def _event_line(self, line: bytes, data: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return data
        payload = line[5:].rstrip(b"\n")
        if not payload.startswith(b'{"streamNextOffset"'):
            return payload
        control: dict[str, Any] = json.loads(payload)
        if data:
            end = int(control["streamNextOffset"].partition("_")[2])
            self._note(end, data if self.stream.is_json else base64.b64decode(data))
        return b""
