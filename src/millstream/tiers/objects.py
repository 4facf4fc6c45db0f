"""Object storage: one small interface over obstore, for a local folder, memory, S3, GCS and Azure.

Objects are immutable and written once: `put` never replaces. Paths are relative to the configured root. Errors are
ours: `Unavailable` while the store cannot be reached, `NotFound` for an object that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from millstream.errors import ConfigurationError, NotFound, ReadOnly, Unavailable
from millstream.tiers.damage import Damage
from millstream.tiers.folder_sync import FolderSync

STREAM_CHUNK_BYTES: Final = 1 << 20
PARTS_AT_ONCE: Final = 2  # of 5 MiB each, while a large object is uploaded

# Where jobs look for the credentials of a store, by the names they have in the configuration.
CREDENTIAL_VARIABLES: Final = {
    "s3": {
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    },
    "gcs": {"service_account": "GOOGLE_SERVICE_ACCOUNT"},
    "azure": {"account_key": "AZURE_STORAGE_ACCOUNT_KEY"},
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectStoreSettings:
    """Where the store is. `path` is the folder for `fs` and the prefix of all objects otherwise."""

    backend: str
    path: Path
    options: dict[str, str]


class ObjectInfo(NamedTuple):
    path: str
    size: int
    modified_ms: int


def open_objects(settings: ObjectStoreSettings, *, read_only: bool = False) -> Objects:
    if settings.backend == "fs":
        settings.path.mkdir(parents=True, exist_ok=True)
    return Objects(open_store(settings), settings.path if settings.backend == "fs" else None, read_only=read_only)


def open_store(settings: ObjectStoreSettings) -> Any:
    """The store as obstore knows it; credentials that are not given come from the environment."""
    prefix = "" if settings.path == Path() else str(settings.path).strip("/")
    limits: Any = {"timeout": timedelta(seconds=30), "connect_timeout": timedelta(seconds=5)}
    retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=15)}
    options = settings.options
    if settings.backend == "fs":
        return LocalStore(settings.path)
    if settings.backend == "memory":
        return MemoryStore()
    if settings.backend == "s3":
        client: Any = {**limits, "allow_http": options.get("endpoint", "").startswith("http://")}
        return S3Store(
            _required(options, "bucket", "cold.s3_bucket"),
            prefix=prefix or None,
            config=_given(options, "region", "endpoint", "access_key_id", "secret_access_key", "session_token"),
            client_options=client,
            retry_config=retry,
        )
    if settings.backend == "gcs":
        return GCSStore(
            _required(options, "bucket", "cold.gcs_bucket"),
            prefix=prefix or None,
            config=_given(options, "service_account"),
            client_options=limits,
            retry_config=retry,
        )
    return AzureStore(
        _required(options, "container", "cold.azure_container"),
        prefix=prefix or None,
        config=_given(options, "account_name", "account_key"),
        client_options=limits,
        retry_config=retry,
    )


def _given(options: dict[str, str], *names: str) -> Any:
    return {name: options[name] for name in names if options.get(name)}


def _required(options: dict[str, str], name: str, key: str) -> str:
    if not options.get(name):
        raise ConfigurationError(f"{key} is not set; the object store needs it")
    return options[name]


@contextmanager
def _our_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError):
        raise NotFound(f"the object {path} is not in the store", code="object_not_found") from None
    except exceptions.AlreadyExistsError:
        raise Unavailable(f"the object {path} exists already", code="object_exists") from None
    except (exceptions.BaseError, OSError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise Unavailable(
            f"the object store failed: {reason}", code="object_store_unavailable", retry_after_seconds=5
        ) from None


class Objects:
    """`read_only` refuses whatever would change the store."""

    def __init__(self, store: Any, folder: Path | None, *, read_only: bool = False) -> None:
        self._store = store
        self.read_only = read_only
        self.damage = Damage()
        # How many objects of others were last seen under a prefix: that is said when it changes, not at each listing.
        self.foreign: dict[str, int] = {}
        self._folder = folder  # where the files are, if they are files
        self._sync = FolderSync(folder) if folder is not None else None
        self._under_way: set[str] = set()

    async def put(self, path: str, data: bytes | memoryview | Path) -> None:
        """Store an object that is not there yet; durable when this returns."""
        self._may_change(path)
        self._under_way.add(path)
        try:
            with _our_errors(path):
                # Only small objects can be refused if they exist; names are never reused, so large ones need not be.
                mode: Any = "create" if not isinstance(data, Path) and len(data) < 4 << 20 else "overwrite"
                await obstore.put_async(self._store, path, data, mode=mode, max_concurrency=PARTS_AT_ONCE)
                await self._synced(path)
        finally:
            self._under_way.discard(path)

    async def _synced(self, path: str) -> None:
        """obstore renames a finished file into place but does not wait for the disk; an acknowledgement must."""
        if self._folder is not None and self._sync is not None:
            await self._sync.sync(self._folder / path)

    async def get(self, path: str) -> bytes:
        return await self._call(path, self._get(path))

    async def _get(self, path: str) -> bytes:
        result = await obstore.get_async(self._store, path)
        return bytes(await result.bytes_async())

    async def get_range(self, path: str, start: int, end: int) -> bytes:
        return bytes(await self._call(path, obstore.get_range_async(self._store, path, start=start, end=end)))

    def get_ranges_now(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several ranges, each from its start to its end, for a thread that may wait and decodes them there."""
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        with _our_errors(path):
            return [bytes(one) for one in obstore.get_ranges(self._store, path, starts=starts, ends=ends)]

    def file(self, path: str) -> Path | None:
        """The object as a file, where objects are files: native code reads it without asking Python for each piece."""
        return self._folder / path if self._folder is not None else None

    async def stream(self, path: str, size: int) -> AsyncIterator[bytes]:
        """An object of known size, piece by piece. (Ranges: obstore's own streaming takes 15 times as long on disk.)"""
        pending: asyncio.Task[bytes] | None = None
        try:
            for start in range(0, size + STREAM_CHUNK_BYTES, STREAM_CHUNK_BYTES):
                ready, pending = pending, None
                if start < size:  # on its way while the piece before it is being sent
                    piece = self.get_range(path, start, min(start + STREAM_CHUNK_BYTES, size))
                    pending = asyncio.ensure_future(piece)
                if ready is not None:
                    yield await ready
        finally:
            if pending is not None:
                pending.cancel()

    async def head(self, path: str) -> ObjectInfo:
        return _info(await self._call(path, obstore.head_async(self._store, path)))

    async def copy(self, source: str, target: str) -> None:
        self._may_change(target)
        await self._call(source, obstore.copy_async(self._store, source, target))
        with _our_errors(target):
            await self._synced(target)

    async def delete(self, path: str) -> None:
        """Remove an object; one that is gone already is as good."""
        self._may_change(path)
        try:
            await self._call(path, obstore.delete_async(self._store, path))
        except NotFound:
            return

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        with _our_errors(prefix):
            async for page in obstore.list(self._store, prefix or None):
                for entry in page:
                    yield _info(entry)

    def remove_partial_files(self, before_ms: float) -> None:
        """Delete what a crash in the middle of a put leaves in a folder: `name#number`, never a whole object.

        Only what is older than that, by the clock of the disk.
        """
        self._may_change("")
        for path in self._folder.rglob("*#*") if self._folder is not None else ():
            name, _, number = str(path.relative_to(self._folder or "")).rpartition("#")
            if number.isdecimal() and name not in self._under_way:
                with suppress(FileNotFoundError):  # it was finished just now
                    if path.stat().st_mtime * 1000 < before_ms:
                        path.unlink()

    def _may_change(self, path: str) -> None:
        if self.read_only:
            raise ReadOnly(f"the object {path} stays as it is: the object store was opened for reading only")

    @staticmethod
    async def _call(path: str, call: Awaitable[T]) -> T:
        with _our_errors(path):
            return await call


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))
