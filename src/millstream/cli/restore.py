"""`millstream restore`: rebuilds an empty data directory from the object store alone.

It claims the store, so a server that still writes to it stops. With `--read-only` it claims nothing, and a server on
the directory refuses writes and changes nothing in the store: a drill beside the running server.

For a cluster it rebuilds the directory of the node that creates the cluster again: the catalogs of all shards, and the
first positions of their logs. The other nodes start empty and restore themselves. With `--read-only` any node's
configuration works, and the server on the directory is one process that needs neither brokers nor other nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from millstream.cli.options import add_configuration, add_json, load_configuration, print_json
from millstream.cli.progress import Progress
from millstream.clock import SystemClock
from millstream.cluster.origins import Origins, write_origins
from millstream.cluster.placement import shard_of
from millstream.config import Config, ServerSection
from millstream.errors import ConfigurationError, Conflict, NotFound
from millstream.log.file_log import FileLog
from millstream.server.node.data_directory import DataDirectory
from millstream.server.node.read_only import mark_read_only
from millstream.server.node.settings import object_store_settings
from millstream.shard.ownership import take_over
from millstream.shard.restore import Restored, find_hole, find_manifests, restore
from millstream.streams.records import StoreClaimed
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import Objects, open_objects
from millstream.tiers.stored_names import stored_shards
from millstream.tiers.stream_rows import decode_key
from millstream.units import Position

UNFINISHED: Final = "catalog.restoring"
CACHE_BYTES: Final = 1 << 20


class RestoredCluster(NamedTuple):
    """The results by shard number; None for a shard that was never flushed."""

    shards: list[Restored | None]


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "restore",
        help="rebuild an empty data directory from the object store",
        description="Rebuild an empty data directory from the manifests and segments in the object store. Every stream"
        " comes back up to its last flushed message, with its state. Then start the server on it. A cluster that has"
        " lost all its nodes is restored with the configuration of its bootstrap node, which is then started with the"
        " others, their data directories empty.",
    )
    add_configuration(parser)
    add_json(parser)
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="for a drill: leave the store to its owner; a server on this data directory then only reads",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="if a manifest is missing or damaged, restore what comes before it; if notes or snapshots are, restore"
        " the rest; nothing is deleted",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    data_dir = config.server.data_dir
    if config.cluster.name:
        cluster = asyncio.run(_restore_cluster(config, options))
        _tell_of_losses(*(one for one in cluster.shards if one is not None))
        if options.json:
            print_json({"shards": [one._asdict() if one is not None else None for one in cluster.shards]})
        else:
            found = [one for one in cluster.shards if one is not None]
            print(
                f"restored {sum(one.streams for one in found):,} streams and {sum(one.segments for one in found):,}"
                f" segments of {len(cluster.shards)} shards into {data_dir}"
                + (
                    ", for reading only: start it by itself"
                    if options.read_only
                    else "; start this node, and the others with empty data directories"
                )
            )
        return 0
    restored = asyncio.run(_restore(config, options))
    _tell_of_losses(restored)
    if options.json:
        print_json(restored._asdict())
    else:
        print(
            f"restored {restored.streams:,} streams and {restored.segments:,} segments, up to position"
            f" {restored.position:,}, into {data_dir}"
            + (", for reading only" if options.read_only else "; the object store is this one's from now on")
        )
    return 0


def _tell_of_losses(*restored: Restored) -> None:
    for one in restored:
        for path, reason in sorted(one.lost.items()):
            print(f"lost: {path}: {reason}", file=sys.stderr)


async def _restore(config: Config, options: argparse.Namespace) -> Restored:
    data_dir = config.server.data_dir
    objects = _open_store(config)
    directory = DataDirectory(data_dir)
    try:
        log = FileLog(data_dir / "log", SystemClock())
        if log.exists or (data_dir / "catalog").exists():
            raise _not_empty(data_dir)
        shards = await stored_shards(objects)
        if shards and shards[-1] > 0:
            raise Conflict(
                f"the object store holds a cluster of several shards (up to number {shards[-1]}), and this is the"
                " configuration of a single server",
                hint="restore with the configuration of the cluster's bootstrap node, [cluster] and all",
            )
        restored, _ = await _restore_catalog(config, objects, data_dir, 0, options)
        mark_read_only(data_dir, options.read_only)
    finally:
        directory.release()
    _begin_log(data_dir, restored)
    (data_dir / UNFINISHED).rename(data_dir / "catalog")
    return restored


def _begin_log(place: Path, restored: Restored) -> None:
    """Create an empty log that starts where the catalog ends: without it the server would consider the log lost."""
    log = FileLog(place / "log", SystemClock())
    log.start(restored.position, lambda *_: None)
    log.close()


def _open_store(config: Config) -> Objects:
    settings = object_store_settings(config)
    if settings.backend == "fs" and not settings.path.is_dir():
        raise NotFound(
            f"there is no object store in {settings.path}: nothing to restore",
            code="nothing_to_restore",
            hint=_where_else(settings.path),
        )
    return open_objects(settings)


def _where_else(looked: Path) -> str:
    """A hint for a missing store: where one was found, or how to configure it."""
    usual = ServerSection().data_dir / "cold"
    if usual.is_dir() and usual.absolute() != looked.absolute():
        return f"there is one in {usual}: add --set cold.path={usual}"
    return "name it with --set cold.path=FOLDER; without that it is looked for in cold/ in the data directory"


async def _restore_cluster(config: Config, options: argparse.Namespace) -> RestoredCluster:
    data_dir, shards = config.server.data_dir, config.cluster.shards
    if config.server.node_id != config.cluster.bootstrap_node_id and not options.read_only:
        raise ConfigurationError(
            f"this is node {config.server.node_id}, and node {config.cluster.bootstrap_node_id} begins the cluster",
            hint="restore there; the other nodes start with empty data directories and restore themselves",
        )
    objects = _open_store(config)
    directory = DataDirectory(data_dir)
    try:
        if any((data_dir / name).exists() for name in ("log", "catalog", "broker", "node.json")):
            raise _not_empty(data_dir)
        stored = await stored_shards(objects)
        if not stored:
            raise NotFound(
                "the object store holds no manifests: there is nothing to restore", code="nothing_to_restore"
            )
        if stored[-1] >= shards:
            raise Conflict(
                f"the object store holds shard {stored[-1]}, and cluster.shards is {shards}",
                hint="set cluster.shards to what the cluster was begun with",
            )
        # A restore is complete or leaves nothing that counts, so a failed restore starts again.
        shutil.rmtree(data_dir / "shards", ignore_errors=True)
        restored: list[Restored | None] = []
        claims: list[StoreClaimed | None] = []
        for number in range(shards):
            place = data_dir / "shards" / f"{number:04d}"
            place.mkdir(parents=True)
            if number not in stored:
                restored.append(None)
                claims.append(None)
            else:
                one, claim = await _restore_catalog(config, objects, place, number, options)
                restored.append(one)
                claims.append(claim)
                if options.read_only:
                    _begin_log(place, one)
                (place / UNFINISHED).rename(place / "catalog")
        mark_read_only(data_dir, options.read_only)
        if not options.read_only:
            positions = [one.position if one is not None else Position(1) for one in restored]
            write_origins(data_dir, Origins(config.cluster.name, positions, claims))
    finally:
        directory.release()
    return RestoredCluster(restored)


async def _restore_catalog(
    config: Config, objects: Objects, place: Path, shard: int, options: argparse.Namespace
) -> tuple[Restored, StoreClaimed | None]:
    """Fill `catalog.restoring`. It is renamed when it is complete, so a failed restore can be repeated.

    The store is claimed last, when nothing can fail any more. What its owner flushed until then is restored too.
    """
    restored = await _fill_catalog(config, objects, place, shard, options)
    if options.read_only:
        return restored, None
    catalog = Catalog(place / UNFINISHED)
    is_lossy = bool(restored.lost) or await _has_hole(objects, catalog, shard)
    catalog.close()
    claim = await take_over(objects, shard, SystemClock(), breaks_history=is_lossy)
    while True:
        catalog = Catalog(place / UNFINISHED)
        try:
            if await _is_whole(objects, catalog, shard):
                catalog.note_claim(claim)
                return restored, claim
        finally:
            catalog.close()
        restored = await _fill_catalog(config, objects, place, shard, options)


async def _is_whole(objects: Objects, catalog: Catalog, shard: int) -> bool:
    cold = ColdTier(objects, catalog, CACHE_BYTES)
    try:
        return (await find_manifests(cold, shard)).chain.through == catalog.position
    finally:
        cold.close()


async def _has_hole(objects: Objects, catalog: Catalog, shard: int) -> bool:
    cold = ColdTier(objects, catalog, CACHE_BYTES)
    try:
        return await find_hole(cold, await find_manifests(cold, shard)) is not None
    finally:
        cold.close()


async def _fill_catalog(
    config: Config, objects: Objects, place: Path, shard: int, options: argparse.Namespace
) -> Restored:
    unfinished = place / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    catalog = Catalog(unfinished)
    cold = ColdTier(objects, catalog, config.cold.cache_bytes)
    bars: list[Progress] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:
            label = f"restoring shard {shard}" if config.cluster.name else "restoring"
            bars.append(Progress(label, total).__enter__())
        bars[0].advance()

    try:
        now_ms = SystemClock().now_ms()
        restored = await restore(cold, catalog, now_ms, on_progress, shard=shard, accept_loss=options.accept_loss)
        if config.cluster.name:
            _check_placement(catalog, shard, config.cluster.shards)
        return restored
    finally:
        for bar in bars:
            bar.__exit__(None, None, None)
        cold.close()
        catalog.close()


def _check_placement(catalog: Catalog, shard: int, shards: int) -> None:
    """Every bucket must be in the shard where the nodes look for it."""
    for name, _ in catalog.scan(b""):
        bucket = decode_key(name).bucket
        if shard_of(bucket, shards) != shard:
            raise Conflict(
                f"bucket {bucket!r} was written to shard {shard}, and with cluster.shards = {shards} it belongs to"
                f" {shard_of(bucket, shards)}",
                hint="set cluster.shards to what the cluster was begun with",
            )


def _not_empty(data_dir: Path) -> Conflict:
    return Conflict(f"the data directory {data_dir} is not empty", hint="restore into a new one with --data-dir")
