"""The ledger: which versions of an application's writes were begun and committed, kept by the server that has the rows.

Producers make a repeated task harmless, but only if it has the same rows; a write that is run again with another
number of partitions has others. So each version has one attempt that may write it:

- **Begun.** Before its first append a task claims the version for its attempt, by creating the stream
  `_transactions/<hash of the application>/<version>` with a content type that names the attempt. Creating a stream is
  atomic: the first attempt gets the version, and tasks of any other are refused before they write anything.
- **Committed.** When all tasks are done, the driver closes that stream. Closing is atomic too and is never taken back.
  A version that is closed is not written again.
- An attempt that died leaves a version that was begun. Which of its rows are there cannot be told if they lie in other
  partitions now, so another attempt is refused, unless `txnResume=true` says that the partitions are the same: then
  the producers of both are the same, and the server recognises what it has.

The stream `_transactions/<hash>` has, as its snapshot, the versions that were committed last, so that an older one is
refused; streams of versions before those are deleted. None of these streams has messages: readers of the bucket never
see a row of them.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec

from millstream.client import ClientError, Conflict, Forbidden, Gone, NotFound, Unauthorized
from millstream.protocol.content_types import JSON
from millstream.protocol.keys import StreamKey
from millstream.spark.errors import SourceError
from millstream.spark.options import WriteOptions
from millstream.spark.source_client import SourceClient

PREFIX: Final = "_transactions/"
VERSIONS_KEPT: Final = 16
_ATTEMPT_TYPE: Final = "application/vnd.millstream.attempt-"


class CommittedVersions(msgspec.Struct, frozen=True):
    """What the ledger says of one application."""

    txn_app_id: str
    txn_version: int
    recent: list[int] = []


_COMMITTED: Final = msgspec.json.Decoder(CommittedVersions)


class Ledger:
    """The ledger's page for one application in one bucket."""

    def __init__(self, client: SourceClient, bucket: str, app: str) -> None:
        self._client = client
        self._app = app
        self.key = StreamKey(bucket, PREFIX + blake2b(app.encode(), digest_size=12).hexdigest())

    def committed(self) -> int | None:
        """The highest version that the page says was committed."""
        page = self._page()
        return page.txn_version if page is not None else None

    def is_committed(self, version: int) -> bool:
        """Whether a version was committed; one older than the last is an error."""
        known = self.committed()
        if known is not None and known > version and not self._is_closed(version):
            raise SourceError(
                f"the option 'txnVersion' is {version}, and {self._app!r} has committed {known}",
                hint="give a higher txnVersion, or another txnAppId",
            )
        return known == version or self._is_closed(version)

    def check_begun(self, version: int, attempt: str, *, may_resume: bool) -> None:
        """Refuse a version that another attempt has begun and not committed."""
        if may_resume:
            return
        try:
            content_type = self._client.content_type(self._claim(version))
        except ClientError as error:
            raise self._refused(error) from None
        if content_type not in (None, _ATTEMPT_TYPE + attempt):
            raise self._begun_elsewhere(version)

    def begin(self, version: int, attempt: str, *, may_resume: bool) -> bool:
        """Claim a version for an attempt, as often as it has tasks; False if it is committed already."""
        try:
            self._client.create(self._claim(version), _ATTEMPT_TYPE + attempt)
        except Conflict:
            if self._is_closed(version):
                return False
            if not may_resume:
                raise self._begun_elsewhere(version) from None
        except ClientError as error:
            raise self._refused(error) from None
        # An attempt that comes late finds no stream of a version that was committed and forgotten.
        known = self.committed()
        return known is None or known < version

    def commit(self, version: int, attempt: str) -> None:
        """All tasks are done: from now on the version is not written again."""
        claim = self._claim(version)
        try:
            with suppress(Conflict):  # it was begun by an attempt that this one resumes, or is committed
                self._client.create(claim, _ATTEMPT_TYPE + attempt)
            self._client.close_stream(claim)
            self._note(version)
        except ClientError as error:
            raise self._refused(error) from None

    def _note(self, version: int) -> None:
        page = self._page() or CommittedVersions(self._app, version)
        recent = sorted({*page.recent, version})
        forgotten, kept = recent[:-VERSIONS_KEPT], recent[-VERSIONS_KEPT:]
        self._client.create(self.key, JSON)
        noted = CommittedVersions(self._app, max(page.txn_version, *kept), kept)
        self._client.publish_snapshot(self.key, msgspec.json.encode(noted), JSON)
        for old in forgotten:
            self._client.delete(self._claim(old))

    def _claim(self, version: int) -> StreamKey:
        return StreamKey(self.key.bucket, f"{self.key.stream}/{version}")

    def _is_closed(self, version: int) -> bool:
        try:
            return self._client.is_closed(self._claim(version))
        except (NotFound, Gone):
            return False
        except ClientError as error:
            raise self._refused(error) from None

    def _page(self) -> CommittedVersions | None:
        try:
            found = self._client.snapshot(self.key)
        except NotFound:
            return None
        except ClientError as error:
            raise self._refused(error) from None
        try:
            return _COMMITTED.decode(found)
        except msgspec.MsgspecError:
            raise SourceError(
                f"stream {str(self.key)!r} is to hold the versions of {self._app!r}, and holds something else",
                hint="remove it, or set the option txnLedger=false",
            ) from None

    def _begun_elsewhere(self, version: int) -> SourceError:
        return SourceError(
            f"version {version} of {self._app!r} was begun by another run of this write, which is still under way or"
            " has failed: some of its rows may be there",
            hint="once that run has ended, run it again with the option txnResume=true if the rows are in the same"
            " partitions as before (the same input and the same number of partitions)",
        )

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
