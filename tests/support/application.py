"""Asks an application in this process, without a socket: for tests in which time is the tests' own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from millstream.config import Config
from millstream.errors import MillstreamError
from millstream.pending import Pending
from millstream.server.api.front import Front
from millstream.server.api.handlers import ApiSettings, Handlers
from millstream.server.api.single_node import single_node_front
from millstream.server.http.limits import read_limits
from millstream.server.http.messages import Request, Response
from millstream.server.http.metrics import Metrics
from millstream.shard.shard import Shard
from millstream.tiers.objects import ObjectStoreSettings


def front_over(shard: Shard) -> Front:
    """A front over a shard, as a server with the default settings has it."""
    metrics = Metrics()
    settings = ApiSettings(read_limits(Config()), ObjectStoreSettings("memory", Path(), {}))
    return single_node_front(shard, Handlers(shard, settings, metrics), metrics)


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
    app: Front, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> asyncio.Future[Answer]:
    """Start a request; the future gets its answer."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    path, _, query = target.partition("?")
    fields = {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
    request = Request(method, path.encode(), query.encode(), fields, body)

    def answered(outcome: Response | MillstreamError) -> None:
        answer.set_result(Answer(app.answered(request, outcome)))

    given = app.handle(request)
    if isinstance(given, Pending):
        given.when_settled(answered)
    else:
        answered(given)
    return answer
