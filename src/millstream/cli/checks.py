"""The checks of `millstream doctor` on this machine: each reports a finding and, if there is a problem, a remedy.

Checks leave nothing behind and do not disturb a server that runs on the same data directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from millstream.cli.access_checks import access, certificate, exposure
from millstream.cli.cluster_checks import cluster
from millstream.cli.findings import Finding, Level, date
from millstream.cli.locks import holder_of
from millstream.cli.store_checks import store_owner
from millstream.client import Client, ClientError
from millstream.clock import Clock
from millstream.config import Config
from millstream.descriptors import Descriptor
from millstream.errors import MillstreamError
from millstream.server.node.settings import object_store_settings
from millstream.shard.quarantine import REFUSED, SET_ASIDE, how_to_set_aside, read_all
from millstream.sizes import human_bytes
from millstream.tiers.catalog_tables import check_stored_format
from millstream.tiers.objects import open_objects

DISK_FREE_BYTES_MIN: Final = 1 << 30
DISK_FREE_BYTES_FEW: Final = 10 << 30
SYNC_SECONDS_SLOW: Final = 0.02
SYNCS: Final = 10
SKEW_SECONDS_MAX: Final = 5.0
RELEASED_AT_MS: Final = 1_760_000_000_000  # a clock that shows an earlier time is not set
DESCRIPTORS_RESERVED: Final = 256
# File systems whose content does not survive a restart of the machine.
VOLATILE: Final = ("tmpfs", "ramfs")


def run_checks(config: Config, clock: Clock) -> Iterator[Finding]:
    for check in (
        _data_directory,
        log_records,
        _disk,
        _durability,
        _object_store,
        store_owner,
        _clock,
        _descriptors,
        _memory,
        exposure,
        certificate,
        access,
        _port,
        cluster,
    ):
        yield from check(config, clock)


# -- the data directory ------------------------------------------------------------------------------------------


def _nearest(path: Path) -> Path:
    """The path itself, or the existing directory in which it would be created."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _data_directory(config: Config, clock: Clock) -> Iterator[Finding]:
    name, path = "data directory", config.server.data_dir
    place = _nearest(path)
    if not place.is_dir():
        yield Finding(name, "problem", f"{place} is not a directory", "choose another one with --data-dir")
        return
    try:
        with _Probe(place, clock) as probe:
            probe.write(b"millstream doctor\n")
    except OSError as error:
        message = f"{place} cannot be written: {error.strerror}"
        yield Finding(name, "problem", message, "give the server's user write access, or choose another one")
        return
    holder = holder_of(path / "lock")
    if holder is not None:
        yield Finding(name, "ok", f"{path} is in use by process {holder}")
    elif path.exists():
        refused = list(_refused_catalogs(path))
        yield from refused or (Finding(name, "ok", f"{path} is writable and not in use"),)
    else:
        yield Finding(name, "ok", f"{path} does not exist yet and can be made")


def _refused_catalogs(path: Path) -> Iterator[Finding]:
    """Catalogs with which a start is refused: damaged, or of another version."""
    for catalog in (path / "catalog", *sorted(path.glob("shards/*/catalog"))):
        try:
            check_stored_format(catalog)
        except MillstreamError as error:
            yield Finding("data directory", "problem", error.message, error.hint)


def log_records(config: Config, clock: Clock) -> Iterator[Finding]:
    """Records of the log that could not be applied, and those that are quarantined."""
    name, directory = "log records", config.server.data_dir / "quarantine"
    try:
        refused, aside = read_all(directory, REFUSED), read_all(directory, SET_ASIDE)
    except (MillstreamError, OSError) as error:
        yield Finding(name, "problem", str(error), "restore the directory from a copy")
        return
    for one in refused:
        message = f"position {one.position} of shard {one.shard} ({one.type}) could not be applied: {one.reason}"
        yield Finding(name, "problem", message, how_to_set_aside(one))
    if aside:
        positions = ", ".join(f"{one.position} (shard {one.shard}, {one.type})" for one in aside)
        yield Finding(name, "warning", f"set aside, and missing from the data: {positions}", f"they are in {directory}")


class _Probe:
    """A temporary file for a test write."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._path = folder / f"doctor-{clock.random_bytes(8).hex()}.probe"
        self._file = Descriptor(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, data: bytes) -> None:
        os.write(self._file.number, data)

    def sync(self) -> None:
        os.fdatasync(self._file.number)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._path.unlink()


def _disk(config: Config, clock: Clock) -> Iterator[Finding]:
    name = "disk"
    place = _nearest(config.server.data_dir)
    usage = shutil.disk_usage(place)
    message = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free on the disk of {place}"
    # The log holds what is in memory until it is flushed, and a little more.
    needed = max(DISK_FREE_BYTES_MIN, config.hot.bytes_max + 2 * config.log.segment_bytes)
    if usage.free < DISK_FREE_BYTES_MIN:
        yield Finding(
            name, "problem", message, "free some space: at least 1 GiB, or writes are refused when it is full"
        )
    elif usage.free < needed:
        hint = f"the log may take {human_bytes(needed)} while the object store is down; free some space"
        yield Finding(name, "warning", message, hint)
    else:
        level: Level = "warning" if config.cold.backend == "fs" and usage.free < DISK_FREE_BYTES_FEW else "ok"
        hint_fs = "history is kept on this disk too; watch it, or use an object store" if level == "warning" else None
        yield Finding(name, level, message, hint_fs)


def _durability(config: Config, clock: Clock) -> Iterator[Finding]:
    """Whether fdatasync really makes data durable here, and how long it takes."""
    name = "durability"
    place = _nearest(config.server.data_dir)
    kind = _file_system(place)
    if kind in VOLATILE:
        hint = "put the data directory on a disk: what is here is lost when the machine restarts"
        yield Finding(name, "problem", f"{place} is on {kind}, which is memory", hint)
        return
    try:
        with _Probe(place, clock) as probe:
            times: list[float] = []
            for _ in range(SYNCS):
                probe.write(bytes(4096))
                began = time.perf_counter()
                probe.sync()
                times.append(time.perf_counter() - began)
    except OSError as error:
        yield Finding(name, "problem", f"fdatasync fails in {place}: {error.strerror}", "use another file system")
        return
    median = statistics.median(times)
    message = f"an fdatasync takes {median * 1000:.1f} ms on {kind or 'this file system'}"
    if median > SYNC_SECONDS_SLOW:
        hint = "every acknowledgement waits for one; a local SSD takes about 1 ms"
        yield Finding(name, "warning", message, hint)
    else:
        yield Finding(name, "ok", message)


def _file_system(path: Path) -> str | None:
    """The type of the file system that a path is on, if the kernel reports it."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    best, kind = "", None
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        point = mount.replace("\\040", " ")
        if resolved.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


# -- the object store --------------------------------------------------------------------------------------------


def _object_store(config: Config, clock: Clock) -> Iterator[Finding]:
    name, settings = "object store", object_store_settings(config)
    where = f"{settings.backend} ({settings.path})" if settings.backend == "fs" else settings.backend
    if settings.backend == "memory":
        hint = "set cold.backend to fs, s3, gcs or azure: history in memory is lost when the server stops"
        yield Finding(name, "problem", "history is kept in memory", hint)
        return
    if settings.backend == "fs" and not settings.path.exists():
        yield _folder_to_be(name, where, settings.path, clock)
        return
    try:
        skew = asyncio.run(_try_store(config, clock))
    except (MillstreamError, OSError) as error:
        hint = getattr(error, "hint", None) or "check the cold.* settings, the credentials and the network"
        yield Finding(name, "problem", f"{where} cannot be used: {error}", hint)
        return
    yield Finding(name, "ok", f"{where}: an object was written, read and deleted")
    if abs(skew) > SKEW_SECONDS_MAX:
        message = f"this machine's clock and the object store's differ by {abs(skew):.0f} s"
        yield Finding("clock", "warning", message, "run an NTP client such as chrony")


def _folder_to_be(name: str, where: str, path: Path, clock: Clock) -> Finding:
    place = _nearest(path)
    try:
        with _Probe(place, clock) as probe:
            probe.write(b"millstream doctor\n")
    except OSError as error:
        message = f"{place} cannot be written: {error.strerror}"
        return Finding(name, "problem", message, "set cold.path to a folder that can be made")
    return Finding(name, "ok", f"{where} does not exist yet and can be made")


async def _try_store(config: Config, clock: Clock) -> float:
    """Write, read and delete a test object; returns by how many seconds the store's clock is ahead of ours."""
    objects = open_objects(object_store_settings(config))
    path, content = f"doctor/{clock.random_bytes(8).hex()}.probe", clock.random_bytes(64)
    before = clock.now_ms()
    await objects.put(path, content)
    try:
        after = clock.now_ms()
        if await objects.get(path) != content:
            raise MillstreamError("what was read is not what was written")
        modified = (await objects.head(path)).modified_ms
    finally:
        await objects.delete(path)
        if config.cold.backend == "fs":
            with contextlib.suppress(OSError):
                (object_store_settings(config).path / "doctor").rmdir()
    if modified > after:
        return (modified - after) / 1000
    return min(modified + 1000 - before, 0) / 1000  # stores report whole seconds


# -- the machine -------------------------------------------------------------------------------------------------


def _clock(config: Config, clock: Clock) -> Iterator[Finding]:
    name, now_ms = "clock", clock.now_ms()
    hint = "run an NTP client such as chrony; expiry and tokens depend on the time"
    if now_ms < RELEASED_AT_MS:
        yield Finding(name, "problem", f"the clock says {date(now_ms)}: it is not set", hint)
        return
    newest = max((_modified_ms(path) for path in config.server.data_dir.glob("log/*")), default=0)
    if newest > now_ms + SKEW_SECONDS_MAX * 1000:
        message = f"the log was written at {date(newest)}, and the clock says {date(now_ms)}: it has gone back"
        yield Finding(name, "warning", message, hint)
    else:
        yield Finding(name, "ok", f"the clock says {date(now_ms)}")


def _modified_ms(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0


def _descriptors(config: Config, clock: Clock) -> Iterator[Finding]:
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.http.connections_max + DESCRIPTORS_RESERVED
    message = f"{soft:,} open files are allowed (ulimit -n), http.connections_max is {config.http.connections_max:,}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield Finding(name, "ok", message)
    else:
        remedy = "LimitNOFILE= in the unit" if hard < needed else f"ulimit -n {needed}"
        yield Finding(name, "warning", message, f"raise the limit to {needed:,} ({remedy}), or allow fewer connections")


def _memory(config: Config, clock: Clock) -> Iterator[Finding]:
    name = "memory"
    wanted = config.hot.bytes_max + config.cold.cache_bytes
    total = _memory_bytes()
    if total is None:
        return
    message = f"{human_bytes(total)} of memory, of which messages and caches may take {human_bytes(wanted)}"
    if wanted > total * 0.8:
        yield Finding(name, "warning", message, "lower hot.bytes_max and cold.cache_bytes, or add memory")
    else:
        yield Finding(name, "ok", message)


def _memory_bytes() -> int | None:
    """The memory that this machine, or its container, may use."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return min((size for size in found if size > 0), default=None)


def _port(config: Config, clock: Clock) -> Iterator[Finding]:
    name, (host, port) = "port", config.server.listen
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            message = f"cannot listen on {where}: {error.strerror}"
            yield Finding(name, "problem", message, "choose another address with --listen HOST:PORT")
            return
        yield _neighbour(name, where, is_secure=config.tls.cert is not None)
        return
    yield Finding(name, "ok", f"{where} is free")


def _neighbour(name: str, where: str, *, is_secure: bool) -> Finding:
    """What listens on the server's port. Nothing secret is sent to it, so its certificate is not verified."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    url = f"{'https' if is_secure else 'http'}://{where.replace('0.0.0.0', '127.0.0.1').replace('[::]', '[::1]')}"
    try:
        with Client(url, timeout=2.0, retries=0, ssl_context=trust) as client:
            version = client.health().get("version")
    except ClientError:
        return Finding(name, "problem", f"another program listens on {where}", "stop it, or choose another address")
    return Finding(name, "ok", f"a millstream server ({version}) listens on {where}")
