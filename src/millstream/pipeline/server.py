"""What the jobs ask a server beyond what the data source does: where the cold tier is, and commits of compactions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from millstream.errors import Conflict, InvalidRequest, MillstreamError
from millstream.spark.options import ColdRoot, Connection
from millstream.spark.server import Server, Store
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import ObjectStoreSettings

# Credentials the driver finds in its environment go with the tasks: executors need not have them.
CREDENTIALS: Final = {
    "s3": {
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    },
    "gcs": {"service_account": "GOOGLE_SERVICE_ACCOUNT"},
    "azure": {"account_key": "AZURE_STORAGE_ACCOUNT_KEY"},
}


class ClusterCold(msgspec.Struct, frozen=True):
    """What `GET /cluster/cold` says: where the store is, and how far the shard has come."""

    store: Store
    flushed: int
    latest: int
    buckets: list[str]


class JobServer(Server):
    @property
    def connection(self) -> Connection:
        return self._connection

    def cluster_cold(self) -> ClusterCold:
        answer = self._ask("GET", "/cluster/cold")
        self._expect(answer, "")
        return msgspec.json.decode(answer.body, type=ClusterCold)

    def commit_compaction(self, replaced: Sequence[str], segments: Sequence[SegmentRef]) -> dict[str, Any]:
        """Propose a replacement; asked again after a lost answer, the server says that it is in force."""
        body = msgspec.json.encode(
            {"replace": list(replaced), "segments": [msgspec.structs.asdict(segment) for segment in segments]}
        )
        answer = self._ask("POST", "/cluster/compactions", {"content-type": "application/json"}, body)
        problem = answer.problem if answer.status >= 400 else {}
        if answer.status == 409:
            raise Conflict(problem["message"], code=problem["code"], hint=problem.get("hint"))
        if answer.status == 400:
            raise InvalidRequest(problem["message"], code=problem["code"], hint=problem.get("hint"))
        self._expect(answer, "")
        return dict(msgspec.json.decode(answer.body))


def store_of(server: JobServer, cold: ColdRoot) -> ObjectStoreSettings:
    """Where the object store is, with the credentials to use it: the option first, then what the server says."""
    if cold.root is not None:
        backend, path, options = cold.root.backend, cold.root.path, cold.root.options
    else:
        store = server.cluster_cold().store
        backend, path, options = store.backend, Path(store.path), store.options
    if backend == "memory":
        raise MillstreamError(
            "the server keeps its cold tier in its own memory",
            hint="jobs need a folder or an object store: cold.backend",
        )
    found = {name: os.environ.get(variable, "") for name, variable in CREDENTIALS.get(backend, {}).items()}
    given = {name: value for name, value in found.items() if value}
    return ObjectStoreSettings(backend, path, given | options | cold.credentials)


@contextmanager
def connected(connection: Connection) -> Iterator[JobServer]:
    server = JobServer(connection)
    try:
        yield server
    finally:
        server.close()
