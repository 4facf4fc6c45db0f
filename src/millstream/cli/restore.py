"""`millstream restore`: rebuild an empty data directory from the object store alone.

Of a cluster it rebuilds that of the node which begins it again: the catalogs of all shards, and where their logs go on.
The other nodes start empty and restore themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from millstream.cli.options import add_configuration, add_json, load_configuration, print_json
from millstream.cli.progress import Progress
from millstream.clock import SystemClock
from millstream.cluster.origins import Origins, write_origins
from millstream.cluster.placement import shard_of
from millstream.config import Config
from millstream.errors import ConfigurationError, Conflict, NotFound
from millstream.log.file_log import FileLog
from millstream.server.run import DataDirectory, object_store_settings
from millstream.shard.restore import Restored, restore, stored_shards
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import decode_key
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import Objects, open_objects


class RestoredCluster(NamedTuple):
    """What became of the shards, by their numbers; None for one that was never flushed."""

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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    data_dir = config.server.data_dir
    if config.cluster.name:
        cluster = asyncio.run(_restore_cluster(config))
        if options.json:
            print_json({"shards": [one._asdict() if one is not None else None for one in cluster.shards]})
        else:
            found = [one for one in cluster.shards if one is not None]
            print(
                f"restored {sum(one.streams for one in found):,} streams and {sum(one.segments for one in found):,}"
                f" segments of {len(cluster.shards)} shards into {data_dir}; start this node, and the others with empty"
                " data directories"
            )
        return 0
    restored = asyncio.run(_restore(config))
    if options.json:
        print_json(restored._asdict())
    else:
        print(
            f"restored {restored.streams:,} streams and {restored.segments:,} segments, up to position"
            f" {restored.position:,}, into {data_dir}"
        )
    return 0


async def _restore(config: Config) -> Restored:
    data_dir = config.server.data_dir
    objects = open_objects(object_store_settings(config))
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
        restored = await _restore_catalog(config, objects, data_dir, 0)
    finally:
        directory.release()
    # An empty log that starts where the catalog ends: without one the server would take it for lost.
    log.start(restored.position, lambda *_: None)
    log.close()
    (data_dir / "catalog.restoring").rename(data_dir / "catalog")
    return restored


async def _restore_cluster(config: Config) -> RestoredCluster:
    data_dir, shards = config.server.data_dir, config.cluster.shards
    if config.server.node_id != config.cluster.bootstrap_node_id:
        raise ConfigurationError(
            f"this is node {config.server.node_id}, and node {config.cluster.bootstrap_node_id} begins the cluster",
            hint="restore there; the other nodes start with empty data directories and restore themselves",
        )
    objects = open_objects(object_store_settings(config))
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
        # One attempt leaves all of it or nothing that counts: a restore that failed is begun anew.
        shutil.rmtree(data_dir / "shards", ignore_errors=True)
        restored: list[Restored | None] = []
        for number in range(shards):
            place = data_dir / "shards" / f"{number:04d}"
            place.mkdir(parents=True)
            restored.append(await _restore_catalog(config, objects, place, number) if number in stored else None)
            if number in stored:
                (place / "catalog.restoring").rename(place / "catalog")
        write_origins(
            data_dir, Origins(config.cluster.name, [one.position if one is not None else 1 for one in restored])
        )
    finally:
        directory.release()
    return RestoredCluster(restored)


async def _restore_catalog(config: Config, objects: Objects, place: Path, shard: int) -> Restored:
    """Fill `catalog.restoring`. It gets its name when all is whole: a restore that failed can be tried again."""
    unfinished = place / "catalog.restoring"
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
        restored = await restore(cold, catalog, SystemClock().now_ms(), on_progress, shard=shard)
        if config.cluster.name:
            _check_placement(catalog, shard, config.cluster.shards)
        return restored
    finally:
        for bar in bars:
            bar.__exit__(None, None, None)
        cold.close()
        catalog.close()


def _check_placement(catalog: Catalog, shard: int, shards: int) -> None:
    """Every bucket must be where the nodes will look for it."""
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
