"""`millstream restore`: rebuild an empty data directory from the object store alone."""

from __future__ import annotations

import argparse
import asyncio
import shutil
from typing import Any

from millstream.cli.options import add_configuration, add_json, load_configuration, print_json
from millstream.cli.progress import Progress
from millstream.clock import SystemClock
from millstream.config import Config
from millstream.errors import Conflict
from millstream.log.file_log import FileLog
from millstream.server.run import DataDirectory, object_store_settings
from millstream.shard.restore import Restored, restore
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import open_objects


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "restore",
        help="rebuild an empty data directory from the object store",
        description="Rebuild an empty data directory from the manifests and segments in the object store. Every stream"
        " comes back up to its last flushed message, with its state. Then start the server on it.",
    )
    add_configuration(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    restored = asyncio.run(_restore(config))
    if options.json:
        print_json(restored._asdict())
    else:
        print(
            f"restored {restored.streams:,} streams and {restored.segments:,} segments, up to position"
            f" {restored.position:,}, into {config.server.data_dir}"
        )
    return 0


async def _restore(config: Config) -> Restored:
    directory = DataDirectory(config.server.data_dir)
    data_dir = config.server.data_dir
    # The catalog gets its name when it is whole: a restore that failed can be tried again.
    unfinished, finished = data_dir / "catalog.restoring", data_dir / "catalog"
    log = FileLog(data_dir / "log", SystemClock())
    if log.exists or finished.exists():
        directory.release()
        raise Conflict(f"the data directory {data_dir} is not empty", hint="restore into a new one with --data-dir")
    shutil.rmtree(unfinished, ignore_errors=True)
    catalog = Catalog(unfinished)
    cold = ColdTier(open_objects(object_store_settings(config)), catalog, config.cold.cache_bytes)
    bars: list[Progress] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress("restoring", total).__enter__())
        bars[0].advance()

    try:
        restored = await restore(cold, catalog, SystemClock().now_ms(), on_progress)
    finally:
        for bar in bars:
            bar.__exit__(None, None, None)
        cold.close()
        catalog.close()
        directory.release()
    # An empty log that starts where the catalog ends: without one the server would take it for lost.
    log.start(restored.position, lambda *_: None)
    log.close()
    unfinished.rename(finished)
    return restored
