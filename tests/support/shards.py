"""Opens real shards on a directory: file log, catalog and object store as a server has them, time as tests say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from millstream.errors import Unavailable
from millstream.log.disk import Disk
from millstream.log.file_log import FileLog
from millstream.pending import Pending
from millstream.protocol.keys import StreamKey, parse_v1_path
from millstream.shard.flush.limits import FlushLimits
from millstream.shard.quarantine import Quarantine
from millstream.shard.settings import ShardSettings
from millstream.shard.shard import Shard
from millstream.streams.commands import AppendMessages, CreateStream, ForkRequest
from millstream.streams.limits import DEFAULT_LIMITS, StreamLimits
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.units import Offset
from support.fake_time import FakeClock, turns

# So far away in fake time that only a test that asks for a flush gets one.
NO_FLUSHES_SECONDS = 10.0**9
CACHE_BYTES = 1 << 20


def key_of(path: str | StreamKey) -> StreamKey:
    return path if isinstance(path, StreamKey) else parse_v1_path(path)


def create(path: str | StreamKey, **fields: Any) -> CreateStream:
    fork = fields.pop("fork", None)
    if isinstance(fork, tuple) and not isinstance(fork, ForkRequest):
        fork = ForkRequest(key_of(fork[0]), *fork[1:])
    return CreateStream(key_of(path), fork=fork, **fields)


def append(path: str | StreamKey, body: bytes = b"", content_type: str | None = "text/plain", **fields: Any) -> Any:
    return AppendMessages(key_of(path), content_type if body else None, body, **fields)


class ShardDriver:
    """A started shard, asked as tests ask."""

    def __init__(self, shard: Shard, log: FileLog, catalog: Catalog) -> None:
        self.shard = shard
        self.log = log
        self.catalog = catalog

    def ask(self, method: Callable[..., Pending[Any]], *args: Any, **keywords: Any) -> asyncio.Future[Any]:
        """Start a command; the future gets the outcome, errors as values."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        method(*args, **keywords).when_settled(future.set_result)
        return future

    async def outcome(self, method: Callable[..., Pending[Any]], *args: Any, **keywords: Any) -> Any:
        """Run a command to its end; errors are raised."""
        return await method(*args, **keywords)

    async def create(self, path: str | StreamKey, **fields: Any) -> Any:
        return await self.outcome(self.shard.create, create(path, **fields))

    async def append(self, path: str | StreamKey, body: bytes = b"", **fields: Any) -> Any:
        return await self.outcome(self.shard.append, append(path, body, **fields))

    async def delete(self, path: str | StreamKey) -> Any:
        return await self.outcome(self.shard.delete, key_of(path))

    async def checkpoint(self) -> int:
        """Flush: the catalog reflects the present, and what the log held is cold.

        On a busy machine a flush process at idle priority may get nowhere; as in a server, the next try has normal
        priority.
        """
        try:
            return await self.shard.flusher.flush()
        except Unavailable as error:
            if error.code != "flush_failed":
                raise
            return await self.shard.flusher.flush()

    async def messages(self, path: str | StreamKey, offset: int = 0, bytes_max: int = 1 << 30) -> list[bytes]:
        """Whole messages, from wherever they are."""
        stream = self.shard.get(key_of(path))
        result = await self.shard.reader.read_messages(stream, Offset(offset), bytes_max)
        return list(map(bytes, result.messages))

    async def crash(self) -> None:
        """Let go of the files without a last checkpoint, as the end of the process would."""
        for task in self.shard._tasks:
            task.cancel()
        await asyncio.gather(*self.shard._tasks, return_exceptions=True)
        await self.shard.background.end()
        self.log.close()
        self.shard.flusher.close()
        self.shard.cold.close()
        self.catalog.close()


def open_shard(
    directory: Path,
    clock: FakeClock,
    *,
    disk: Disk | None = None,
    segment_bytes: int = 64 << 10,
    hot_bytes_max: int = 1 << 30,
    flush_seconds: float = NO_FLUSHES_SECONDS,
    keep_bytes: int = 0,
    resident_streams_max: int = 10_000,
    limits: StreamLimits = DEFAULT_LIMITS,
) -> ShardDriver:
    """A shard that has recovered but not started; it closes its files if it refuses to."""
    # Tests that hold the disk still must not hold the loop with it.
    log = FileLog(directory / "log", clock, segment_bytes=segment_bytes, block_seconds_max=0.0, disk=disk)
    catalog = Catalog(directory / "catalog")
    objects = open_objects(ObjectStoreSettings("fs", directory / "cold", {}))
    cold = ColdTier(objects, catalog, CACHE_BYTES)
    try:
        shard = Shard(
            log,
            catalog,
            cold,
            Blobs(objects, directory / "uploads"),
            clock,
            ShardSettings(
                hot_bytes_max=hot_bytes_max,
                flush=FlushLimits(flush_seconds, 1 << 40, keep_bytes, hot_bytes_max // 2, resident_streams_max),
                streams=limits,
            ),
            quarantine=Quarantine(directory / "quarantine"),
        )
    except BaseException:
        log.close()
        cold.close()
        catalog.close()
        raise
    return ShardDriver(shard, log, catalog)


@asynccontextmanager
async def started(
    directory: Path, clock: FakeClock, *, crash: bool = True, **options: Any
) -> AsyncIterator[ShardDriver]:
    """A running shard that ends in a crash, or with `crash=False` in an orderly stop."""
    driver = open_shard(directory, clock, **options)
    try:
        await driver.shard.start()
    except BaseException:
        await driver.crash()
        raise
    await turns(2)  # its periodic tasks count from here, not from whenever they first run
    try:
        yield driver
    finally:
        if crash:
            await driver.crash()
        else:
            await driver.shard.stop()
