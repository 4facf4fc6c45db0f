"""A plain keep-alive HTTP client for preparing and checking; nothing is timed with it."""

from __future__ import annotations

import http.client
from types import TracebackType
from typing import NamedTuple, Protocol

TIMEOUT_SECONDS = 30.0


class Address(Protocol):
    port: int


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Client:
    def __init__(self, server: Address) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_SECONDS)

    def request(self, method: str, path: str, body: bytes | None = None, content_type: str | None = None) -> Answer:
        """One request and its whole answer. A broken answer is an OSError, like a broken connection."""
        headers = {"Content-Type": content_type} if content_type else {}
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        except http.client.HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    def tail_bytes(self, path: str) -> int:
        """The byte position at the end of a stream (the second part of its offset)."""
        answer = self.request("HEAD", path)
        if answer.status != 200:
            raise ConnectionError(f"HEAD {path} was answered {answer.status}")
        return int(answer.headers["Stream-Next-Offset"].rpartition("_")[2])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
