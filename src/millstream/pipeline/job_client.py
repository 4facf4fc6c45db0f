"""What the jobs ask a server beyond what the data source does: where the cold tier is, and commits of compactions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from millstream.client import BadRequest, ClientError
from millstream.client import Conflict as ClientConflict
from millstream.errors import Conflict, InvalidRequest, MillstreamError
from millstream.spark.options import ColdRoot, Connection
from millstream.spark.source_client import SourceClient, StoreLocation, get_json, post_json
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import CREDENTIAL_VARIABLES, ObjectStoreSettings


class ClusterCold(msgspec.Struct, frozen=True):
    """What `GET /cluster/cold` says: where the store is, and how far the shard has come."""

    store: StoreLocation
    flushed: int
    latest: int
    buckets: list[str]


class JobClient(SourceClient):
    @property
    def connection(self) -> Connection:
        return self._connection

    def cluster_cold(self) -> ClusterCold:
        return self._ask(get_json("/cluster/cold", ClusterCold), "")

    def commit_compaction(self, replaced: Sequence[str], segments: Sequence[SegmentRef]) -> dict[str, Any]:
        """Propose a replacement; asked again after a lost answer, the server says that it is in force."""
        proposal = {"replace": list(replaced), "segments": [msgspec.structs.asdict(one) for one in segments]}
        try:
            return self._call(post_json("/cluster/compactions", proposal, dict[str, Any]))
        except ClientConflict as error:
            raise Conflict(error.message, code=error.code, hint=error.hint) from None
        except BadRequest as error:
            raise InvalidRequest(error.message, code=error.code, hint=error.hint) from None
        except ClientError as error:
            raise self._explained(error, "") from None


def store_of(client: JobClient, cold: ColdRoot) -> ObjectStoreSettings:
    """Where the object store is, with the credentials to use it: the option first, then what the server says."""
    if cold.root is not None:
        backend, path, options = cold.root.backend, cold.root.path, cold.root.options
    else:
        store = client.cluster_cold().store
        backend, path, options = store.backend, Path(store.path), store.options
    if backend == "memory":
        raise MillstreamError(
            "the server keeps its cold tier in its own memory",
            hint="jobs need a folder or an object store: cold.backend",
        )
    # Credentials the driver finds in its environment go with the tasks: executors need not have them.
    variables = CREDENTIAL_VARIABLES.get(backend, {})
    found = {name: os.environ.get(variable, "") for name, variable in variables.items()}
    given = {name: value for name, value in found.items() if value}
    return ObjectStoreSettings(backend, path, given | options | cold.credentials)


@contextmanager
def job_client(connection: Connection) -> Iterator[JobClient]:
    client = JobClient(connection)
    try:
        yield client
    finally:
        client.close()
