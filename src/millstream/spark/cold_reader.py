"""Reads segments where the options and the server say the cold tier is. What fails is said in terms of the options.

`tiers/segment_reader.py` does the reading, as it does for the server and the jobs. Knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as arrow

from millstream.errors import Corrupt, NotFound, Unavailable
from millstream.spark.errors import SegmentMissing, SourceError
from millstream.spark.options import ColdRoot
from millstream.spark.source_client import StoreLocation
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import Objects, ObjectStoreSettings, open_store
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import Footer


def store_settings(store: StoreLocation, root: ColdRoot) -> ObjectStoreSettings | None:
    """Where the object store is: what the option `cold` says, or else the server; None if only the server has it."""
    if root.root is not None:
        return ObjectStoreSettings(root.root.backend, root.root.path, root.root.options | root.credentials)
    if store.backend == "memory":
        return None
    return ObjectStoreSettings(store.backend, Path(store.path), store.options | root.credentials)


class ColdReader:
    def __init__(self, settings: ObjectStoreSettings) -> None:
        self._settings = settings
        self._folder = settings.path if settings.backend == "fs" else None
        # A folder may be missing on this machine. It is read as files, so that no store has to be opened in it.
        store = open_store(settings) if self._folder is None else None
        self._reader = SegmentReader(Objects(store, self._folder, read_only=True))

    def footers(self, segments: Sequence[SegmentRef]) -> Iterator[tuple[SegmentRef, Footer]]:
        """The segments in their order, each with its footer."""
        found = self._reader.footers(segments)
        for segment in segments:
            with self._explained(segment):
                yield next(found)

    def footer(self, segment: SegmentRef) -> Footer:
        with self._explained(segment):
            return self._reader.footer(segment)

    def tables(
        self, segment: SegmentRef, footer: Footer, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[list[int], arrow.Table]]:
        """Some columns of some row groups, several row groups in a table, with their numbers."""
        with self._explained(segment):
            yield from self._reader.tables(segment, footer.metadata, groups, columns)

    def row_groups(
        self, segment: SegmentRef, footer: Footer, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[int, arrow.Table]]:
        """The same, one row group in a table."""
        with self._explained(segment):
            yield from self._reader.row_groups(segment, footer.metadata, groups, columns)

    @contextmanager
    def _explained(self, segment: SegmentRef) -> Iterator[None]:
        where = self._folder or f"{self._settings.backend} {self._settings.options.get('bucket', '')}"
        what = f"segment {segment.path}"
        try:
            yield
        except NotFound:
            raise SegmentMissing(
                f"{what} is not in the cold tier at {where}",
                hint="if the store is mounted elsewhere on this machine, say where with the option 'cold'",
            ) from None
        except Unavailable as error:
            raise SourceError(
                f"{what} cannot be read from the cold tier at {where}: {error.message}",
                hint="check that this machine reaches the store, and its credentials: AWS_ACCESS_KEY_ID and the like in"
                " the environment, or the options cold.accessKeyId, cold.secretAccessKey",
            ) from None
        except Corrupt as error:
            raise SourceError(
                f"{what} is damaged: {error.message}", hint="run `millstream cold verify`, and restore the object"
            ) from None
