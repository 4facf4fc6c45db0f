"""`millstream cold ls|verify|stats`: look at the cold tier, from the object store itself."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from millstream.cli.findings import counted
from millstream.cli.options import (
    add_configuration,
    add_json,
    human_bytes,
    load_configuration,
    print_json,
    print_table,
)
from millstream.cli.progress import Progress
from millstream.config import Config
from millstream.errors import ConfigurationError, MillstreamError
from millstream.server.run import object_store_settings
from millstream.shard.restore import chains_of, cold_view, live_objects, live_segments
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import open_objects
from millstream.tiers.segments import decode_footer, decode_row_group, row_group_range


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cold",
        help="look at the cold tier",
        description="Look at the cold tier, from the object store itself; no server need run.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action, explanation in (
        ("ls", _ls, "list the segments"),
        ("stats", _stats, "add up segments, messages and bytes by bucket"),
        ("verify", _verify, "read every segment and check it; exit code 1 if something is wrong"),
    ):
        one = actions.add_parser(name, help=explanation, description=f"{explanation.capitalize()}.")
        add_configuration(one)
        add_json(one)
        one.set_defaults(run=lambda options, action=action: asyncio.run(action(options)))


async def _open(config: Config) -> AsyncIterator[ColdTier]:
    settings = object_store_settings(config)
    if settings.backend == "fs" and not settings.path.is_dir():
        raise ConfigurationError(
            f"there is no cold tier in {settings.path}", hint="name it with --data-dir or cold.path"
        )
    with tempfile.TemporaryDirectory() as scratch:
        catalog = Catalog(Path(scratch))
        cold = ColdTier(open_objects(settings), catalog, 32 << 20)
        try:
            yield cold
        finally:
            cold.close()
            catalog.close()


def _row(segment: SegmentRef) -> dict[str, object]:
    return {
        "path": segment.path,
        "bucket": segment.bucket,
        "messages": segment.rows,
        "payload_bytes": segment.payload_bytes,
        "size": segment.size,
        "first_position": segment.first_position,
        "last_position": segment.last_position,
    }


async def _ls(options: argparse.Namespace) -> int:
    async for cold in _open(load_configuration(options)):
        segments = await live_segments(cold, await chains_of(cold))
        if options.json:
            print_json([_row(segment) for segment in segments])
        else:
            headings = ("messages", "payload", "size", "positions", "path")
            rows = [
                (
                    segment.rows,
                    human_bytes(segment.payload_bytes),
                    human_bytes(segment.size),
                    f"{segment.first_position}–{segment.last_position}",
                    segment.path,
                )
                for segment in segments
            ]
            print_table(headings, rows)
    return 0


async def _stats(options: argparse.Namespace) -> int:
    async for cold in _open(load_configuration(options)):
        totals: dict[str, list[int]] = {}
        for segment in await live_segments(cold, await chains_of(cold)):
            total = totals.setdefault(segment.bucket, [0, 0, 0, 0])
            for index, value in enumerate((1, segment.rows, segment.payload_bytes, segment.size)):
                total[index] += value
        names = ("segments", "messages", "payload_bytes", "size")
        if options.json:
            print_json({bucket: dict(zip(names, total, strict=True)) for bucket, total in sorted(totals.items())})
        else:
            rows = [
                (bucket, count, messages, human_bytes(payload), human_bytes(size), f"{payload / max(size, 1):.1f}×")
                for bucket, (count, messages, payload, size) in sorted(totals.items())
            ]
            print_table(("bucket", "segments", "messages", "payload", "stored", "compression"), rows)
    return 0


async def _verify(options: argparse.Namespace) -> int:
    problems: list[dict[str, str]] = []
    checked = 0
    async for cold in _open(load_configuration(options)):
        view = await cold_view(cold, await chains_of(cold))
        segments = list(view.segments.values())
        # Replaced by compaction, and kept for a while for those who still read them.
        known = view.segments.keys() | view.retired
        async for entry in cold.objects.list("segments/"):
            if entry.path not in known:
                problems.append({"path": entry.path, "problem": "no manifest names this object"})
        others = await live_objects(cold, await chains_of(cold))
        with Progress("verifying", len(segments) + len(others)) as progress:
            for path in sorted(others):
                try:
                    await cold.objects.head(path)
                except MillstreamError as error:
                    problems.append({"path": path, "problem": error.message})
                progress.advance()
            for segment in segments:
                try:
                    await _check(cold, segment)
                except MillstreamError as error:
                    problems.append({"path": segment.path, "problem": error.message})
                checked += 1
                progress.advance()
    if options.json:
        print_json({"checked": checked, "problems": problems})
    else:
        for found in problems:
            print(f"{found['path']}: {found['problem']}", file=sys.stderr)
        print(f"checked {counted(checked, 'segment')}, {counted(len(problems), 'problem')}")
    return 1 if problems else 0


async def _check(cold: ColdTier, segment: SegmentRef) -> None:
    """One segment: its checksum, its footer, every page, and that the index says what the rows do."""
    data = await cold.objects.get(segment.path)
    if len(data) != segment.size or zlib.crc32(data) != segment.checksum:
        raise MillstreamError("size or checksum differ from what the manifest says")
    footer = decode_footer(data[-segment.footer_bytes :], segment.path, segment.footer_checksum)
    for group in range(footer.metadata.num_row_groups):
        start, end = row_group_range(footer.metadata, group)
        rows = decode_row_group(footer.metadata, group, start, data[start:end], segment.path)
        for extent in footer.extents:
            if extent.row_group == group and rows.ends[extent.row_start + extent.rows - 1] != extent.offset_end:
                raise MillstreamError(f"the index of stream {extent.stream!r} does not match its rows")
