"""Asks an application in this process, without a socket: for tests in which time is the tests' own."""

from __future__ import annotations

import asyncio

import msgspec

from millstream.server.api.app import Application
from millstream.server.http.messages import Request, Response


class Answer:
    def __init__(self, response: Response) -> None:
        self.status = response.status
        self.body = response.body
        lines = response.fields.decode("latin-1").split("\r\n")
        self.headers = dict(line.split(": ", 1) for line in lines if line)

    @property
    def error(self) -> str:
        assert isinstance(self.body, bytes)
        return str(msgspec.json.decode(self.body)["error"]["code"])


def ask(
    app: Application, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> asyncio.Future[Answer]:
    """Start a request; the future gets its answer."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    path, _, query = target.partition("?")
    fields = {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
    app.handle(Request(method, path.encode(), query.encode(), fields, body, lambda one: answer.set_result(Answer(one))))
    return answer
