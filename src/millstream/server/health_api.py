"""Health: whether the process lives, and whether it can take requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from millstream import __version__
from millstream.errors import NotLeader
from millstream.server.messages import Request, Response
from millstream.shard.shard import Shard

_FIELDS: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"


class HealthApi:
    """`local_problems` and `cluster_problems` say what else keeps this node, and the cluster, from being ready."""

    def __init__(self, shards: Callable[[], Iterable[Shard]]) -> None:
        self._shards = shards
        self.is_stopping = False
        self.local_problems: Callable[[], list[str]] = list
        self.cluster_problems: Callable[[], list[str]] = list

    @staticmethod
    def alive(request: Request) -> None:
        request.reply(Response(200, _FIELDS, b'{"status":"ok","version":"%b"}' % __version__.encode()))

    def ready(self, request: Request) -> None:
        self._answer(request, self._problems())

    def ready_in_cluster(self, request: Request) -> None:
        self._answer(request, self._problems() + self.cluster_problems())

    def _problems(self) -> list[str]:
        problems = ["the server is stopping"] if self.is_stopping else []
        for shard in self._shards():
            failure = shard.committer.failure
            if failure is not None and not isinstance(failure, NotLeader):
                problems.append(failure.message)
            reason = shard.backpressure_reason()
            if reason is not None:
                problems.append(f"writers are being refused: {reason}")
        return problems + self.local_problems()

    @staticmethod
    def _answer(request: Request, problems: list[str]) -> None:
        body = {"status": "not ready", "problems": problems} if problems else {"status": "ready"}
        request.reply(Response(503 if problems else 200, _FIELDS, msgspec.json.encode(body)))
