"""Health: whether the process is running, and whether it can accept requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream import __version__
from millstream.errors import NotLeader, ReadOnly
from millstream.server.api.responses import JSON_FIELDS, as_json
from millstream.server.http.messages import Answer, Request, Response
from millstream.shard.shard import Shard
from millstream.tasks import Supervisor


class HealthApi:
    """`local_problems` and `cluster_problems` return further reasons why this node, or the cluster, is not ready."""

    def __init__(
        self,
        shards: Callable[[], Iterable[Shard]],
        supervisor: Supervisor,
        local_problems: Callable[[], list[str]] = list,
        cluster_problems: Callable[[], list[str]] = list,
    ) -> None:
        self._shards = shards
        self.supervisor = supervisor
        self.is_stopping = False
        self._local_problems = local_problems
        self._cluster_problems = cluster_problems

    @staticmethod
    def alive(request: Request) -> Answer:
        return Response(200, JSON_FIELDS, b'{"status":"ok","version":"%b"}' % __version__.encode())

    def ready(self, request: Request) -> Answer:
        return self._answer(self._problems())

    def ready_in_cluster(self, request: Request) -> Answer:
        return self._answer(self.problems())

    def problems(self) -> list[str]:
        """The reasons why this node, or the cluster, is not ready."""
        return self._problems() + self._cluster_problems()

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
        return problems + self.supervisor.problems + self._local_problems()

    @staticmethod
    def _answer(problems: list[str]) -> Response:
        body = {"status": "not ready", "problems": problems} if problems else {"status": "ready"}
        return as_json(body, 503 if problems else 200)
