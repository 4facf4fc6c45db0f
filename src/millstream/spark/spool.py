"""The rows of one task, all of them: in memory while they are few, in a file that is mapped when they are many.

A writer has to see all rows of a stream before it sends the first, and the memory of an executor is limited.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as arrow

MEMORY_BYTES: Final = 64 << 20


class Spool:
    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._batches: list[arrow.RecordBatch] = []
        self._bytes = 0
        self._path: Path | None = None
        self._writer: arrow.ipc.RecordBatchFileWriter | None = None
        self._file: arrow.MemoryMappedFile | None = None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def add(self, batch: arrow.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > self._memory_bytes:
            self._spill()

    def _spill(self) -> None:
        if self._writer is None:
            with tempfile.NamedTemporaryFile(prefix="millstream-rows-", suffix=".arrow", delete=False) as file:
                self._path = Path(file.name)
            self._writer = arrow.ipc.new_file(str(self._path), self._batches[0].schema)
        for batch in self._batches:
            self._writer.write_batch(batch)
        self._batches, self._bytes = [], 0

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def table(self) -> arrow.Table | None:
        """All rows in the order they came in; None if there are none."""
        if self._writer is not None:
            self._spill()
            self._finish()
            self._file = arrow.memory_map(str(self._path))
            return arrow.ipc.open_file(self._file).read_all()
        return arrow.Table.from_batches(self._batches) if self._batches else None
