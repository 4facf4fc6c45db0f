"""Requests and answers as the client's core sees them: values, no I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

Value: TypeAlias = str | Callable[[], str]
"""A header's or a query parameter's: fixed, or from a function that is called for each request."""
AsyncValue: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""The same, where the function may also be a coroutine function."""
Values: TypeAlias = Mapping[str, Value]
AsyncValues: TypeAlias = Mapping[str, AsyncValue]


class Origin(NamedTuple):
    """Where a server is: what a connection is made to."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == (443 if self.scheme == "https" else 80)
        return host if is_usual else f"{host}:{self.port}"


class Request(NamedTuple):
    """`target` is path and query as they go on the wire, or a whole URL; header names are lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Response(NamedTuple):
    """Header names are lower case; a repeated header is one value joined by commas."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def is_true(self, name: str) -> bool:
        return self.headers.get(name, "").lower() == "true"
