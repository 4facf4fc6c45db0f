"""HTTP over a bare socket: sends exactly the bytes a test wants, and reads answers strictly, each within a deadline."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

SECONDS = 10.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal, whose form is checked on the way."""
        assert self.headers.get("content-type") == "application/json", self
        error = json.loads(self.body)["error"]
        assert isinstance(error["code"], str) and error["code"], self
        assert isinstance(error["message"], str) and error["message"], self
        return dict(error)


class ConnectionEnded(AssertionError):
    """The server hung up where an answer was due."""


class RawConnection:
    """One connection. Everything that waits gives up after `seconds`."""

    def __init__(self, url: str, *, seconds: float = SECONDS, receive_buffer_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.host = parts.netloc
        self.seconds = seconds
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(seconds)
        self.socket.connect((parts.hostname, parts.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.settimeout(self.seconds)
        self.socket.sendall(data)

    def request(
        self,
        method: str,
        target: str | bytes,
        headers: Iterable[tuple[str, str | bytes]] = (),
        body: bytes | None = None,
        *,
        version: str = "1.1",
        host: bool = True,
    ) -> bytes:
        """The bytes of a request; Content-Length is added when there is a body."""
        raw = target.encode() if isinstance(target, str) else target
        lines = [b"%b %b HTTP/%b" % (method.encode(), raw, version.encode())]
        if host:
            lines.append(b"Host: " + self.host.encode())
        for name, value in headers:
            lines.append(b"%b: %b" % (name.encode(), value.encode() if isinstance(value, str) else value))
        if body is not None:
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")

    def exchange(
        self,
        method: str,
        target: str | bytes,
        headers: Iterable[tuple[str, str | bytes]] = (),
        body: bytes | None = None,
    ) -> Answer:
        self.send(self.request(method, target, headers, body))
        return self.answer(method)

    def finish_sending(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    # -- receiving -------------------------------------------------------------------------------------------

    def _receive(self, deadline: float) -> bool:
        """Take in more bytes; False at the end of the connection."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"no answer within {self.seconds} s; so far {self.buffer[:200]!r}")
        self.socket.settimeout(remaining)
        try:
            data = self.socket.recv(65_536)
        except ConnectionResetError:
            return False
        self.buffer += data
        return bool(data)

    def _until(self, mark: bytes, deadline: float) -> bytes:
        while mark not in self.buffer:
            if not self._receive(deadline):
                raise ConnectionEnded(f"the connection ended where {mark!r} was due; so far {self.buffer[:200]!r}")
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    def _exactly(self, size: int, deadline: float) -> bytes:
        while len(self.buffer) < size:
            if not self._receive(deadline):
                raise ConnectionEnded(f"the connection ended after {len(self.buffer)} of {size} bytes")
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer; its body is left unread."""
        deadline = time.monotonic() + self.seconds
        status_line, *lines = self._until(b"\r\n\r\n", deadline).split(b"\r\n")
        version, status, _ = status_line.split(b" ", 2)
        assert version == b"HTTP/1.1" and status.isdigit() and len(status) == 3, status_line
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(b": ")
            assert colon and name == name.strip(), line
            assert name.decode() not in headers, f"{name!r} is repeated"
            headers[name.decode()] = value.decode("latin-1")
        return int(status), headers

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, whole."""
        deadline = time.monotonic() + self.seconds
        status, headers = self.head()
        if method == "HEAD" or status in (204, 304) or 100 <= status < 200:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            chunks = []
            while (chunk := self.chunk(deadline)) is not None:
                chunks.append(chunk)
            return Answer(status, headers, b"".join(chunks))
        if "content-length" in headers:
            return Answer(status, headers, self._exactly(int(headers["content-length"]), deadline))
        return Answer(status, headers, self.rest())

    def chunk(self, deadline: float | None = None) -> bytes | None:
        """The next chunk of a chunked body; None after the last."""
        deadline = deadline or time.monotonic() + self.seconds
        size = int(self._until(b"\r\n", deadline), 16)
        data = self._exactly(size, deadline)
        assert self._exactly(2, deadline) == b"\r\n"
        return data if size else None

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        deadline = time.monotonic() + self.seconds
        while self._receive(deadline):
            pass
        data, self.buffer = self.buffer, b""
        return data

    def assert_ended(self) -> None:
        """The server has hung up and sent nothing more."""
        assert self.rest() == b""
