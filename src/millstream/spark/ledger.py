"""The ledger: which version of an application's writes was committed last, kept by the server that holds the rows.

Producers make a repeated task harmless, but only if it has the same rows; a write that is run again with another
number of partitions has others. So the driver notes a version once all of its tasks are done, and a version that is
noted is not written again. The note is the snapshot of a stream without messages, `_transactions/<hash>`, in the
bucket of the write: readers of the bucket never see a row of it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from millstream.client import ClientError, Forbidden, NotFound, Unauthorized
from millstream.protocol.content_types import JSON
from millstream.protocol.keys import StreamKey
from millstream.spark.errors import SourceError
from millstream.spark.options import WriteOptions
from millstream.spark.source_client import SourceClient

PREFIX: Final = "_transactions/"


class CommittedVersion(msgspec.Struct, frozen=True):
    """What the ledger says of one application."""

    txn_app_id: str
    txn_version: int


_COMMITTED_VERSION: Final = msgspec.json.Decoder(CommittedVersion)


class Ledger:
    """The ledger's page for one application in one bucket. Nothing is written to it but by `commit`."""

    def __init__(self, client: SourceClient, bucket: str, app: str) -> None:
        self._server = client
        self._app = app
        self.key = StreamKey(bucket, PREFIX + blake2b(app.encode(), digest_size=12).hexdigest())

    def committed(self) -> int | None:
        """The version that was committed last."""
        try:
            found = self._server.snapshot(self.key)
        except NotFound:
            return None
        except ClientError as error:
            raise self._refused(error) from None
        try:
            return _COMMITTED_VERSION.decode(found).txn_version
        except msgspec.MsgspecError:
            raise SourceError(
                f"stream {str(self.key)!r} is to hold the versions of {self._app!r}, and holds something else",
                hint="remove it, or set the option txnLedger=false",
            ) from None

    def commit(self, version: int) -> None:
        known = self.committed()
        if known is not None and known >= version:
            return
        try:
            self._server.create(self.key, JSON)
            self._server.publish_snapshot(self.key, msgspec.json.encode(CommittedVersion(self._app, version)), JSON)
        except ClientError as error:
            raise self._refused(error) from None

    def _refused(self, error: ClientError) -> SourceError:
        hint = error.hint
        if isinstance(error, Unauthorized | Forbidden):
            hint = (
                f"give the option 'token' one that may read and write {PREFIX!r} too; or set txnLedger=false, if a"
                " version is always written in the same partitions"
            )
        return SourceError(
            f"the versions of {self._app!r} cannot be kept in {str(self.key)!r}: {error.message}", hint=hint
        )


def is_committed(client: SourceClient, options: WriteOptions) -> bool:
    """Whether the version of this write was committed before; one older than that is an error."""
    ledger = ledger_of(client, options)
    if ledger is None:
        return False
    version, known = options.transaction_version, ledger.committed()
    assert version is not None
    if known is not None and known > version:
        raise SourceError(
            f"the option 'txnVersion' is {version}, and {options.transaction_app_id!r} has committed {known}",
            hint="give a higher txnVersion, or another txnAppId",
        )
    return known == version


def ledger_of(client: SourceClient, options: WriteOptions) -> Ledger | None:
    """The ledger of a write; None for one that is no transaction."""
    if options.transaction_app_id is None or options.transaction_version is None or not options.has_ledger:
        return None
    if options.bucket is None:
        raise SourceError(
            "the option 'txnAppId' needs the option 'bucket': versions are noted in a bucket",
            hint="name one of the buckets that are written to",
        )
    return Ledger(client, options.bucket, options.transaction_app_id)
