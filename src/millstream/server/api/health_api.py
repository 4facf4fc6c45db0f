"""Health: whether the process lives, and whether it can take requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from millstream import __version__
from millstream.errors import NotLeader, ReadOnly
from millstream.server.http.messages import Request, Response
from millstream.shard.shard import Shard
from millstream.tasks import Supervisor

_FIELDS: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"


class HealthApi:
    """`local_problems` and `cluster_problems` say what else keeps this node, and the cluster, from being ready."""

    def __init__(self, shards: Callable[[], Iterable[Shard]], supervisor: Supervisor) -> None:
        self._shards = shards
        self.supervisor = supervisor
        self.is_stopping = False
        self.local_problems: Callable[[], list[str]] = list
        self.cluster_problems: Callable[[], list[str]] = list

    @staticmethod
    def alive(request: Request) -> None:
        request.reply(Response(200, _FIELDS, b'{"status":"ok","version":"%b"}' % __version__.encode()))

    def ready(self, request: Request) -> None:
        self._answer(request, self._problems())

    def ready_in_cluster(self, request: Request) -> None:
        self._answer(request, self.problems())

    def problems(self) -> list[str]:
        """What keeps this node, and the cluster, from being ready."""
        return self._problems() + self.cluster_problems()

    def _problems(self) -> list[str]:
        problems = ["the server is stopping"] if self.is_stopping else []
        for shard in self._shards():
            failure = shard.committer.failure
            if failure is not None and not isinstance(failure, NotLeader | ReadOnly):
                problems.append(failure.message)
            elif shard.ownership.refusal is not None:
                problems.append(shard.ownership.refusal.message)
            if shard.committer.stuck_seconds > shard.stuck_seconds_max:
                waited = f"{shard.committer.stuck_seconds:.0f} s"
                problems.append(f"shard {shard.number}: writes have waited {waited} for the log to store them")
            damaged = shard.damaged()
            if damaged:
                path, what = next(iter(damaged.items()))
                problems.append(
                    f"{len(damaged)} objects of the cold tier are missing or damaged, the first is {path}: {what}"
                )
            reason = shard.backpressure_reason()
            if reason is not None:
                problems.append(f"writers are being refused: {reason}")
        return problems + self.supervisor.problems + self.local_problems()

    @staticmethod
    def _answer(request: Request, problems: list[str]) -> None:
        body = {"status": "not ready", "problems": problems} if problems else {"status": "ready"}
        request.reply(Response(503 if problems else 200, _FIELDS, msgspec.json.encode(body)))
