"""`millstream cold ls|verify|stats`: inspects the cold tier, directly in the object store."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Container
from pathlib import Path
from typing import Any

from millstream.cli.findings import counted
from millstream.cli.options import (
    add_configuration,
    add_json,
    load_configuration,
    print_json,
    print_table,
)
from millstream.cli.parser import Parser
from millstream.cli.progress import Progress
from millstream.config import Config
from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.server.node.settings import object_store_settings
from millstream.shard.restore import (
    chains_of,
    cold_view,
    find_hole,
    find_manifests,
    live_objects,
    live_segments,
)
from millstream.sizes import human_bytes
from millstream.streams.records import SegmentRef, SnapshotRef
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.inspection import what_it_holds
from millstream.tiers.manifests import decode_notes
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.owners import newest_owner
from millstream.tiers.segment_reader import FetchedRange, decode_columns
from millstream.tiers.segments import BYTES_COLUMNS, RowGroup, decode_footer
from millstream.tiers.stored_names import stored_shards


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "cold",
        help="look at the cold tier",
        description="Look at the cold tier, from the object store itself; no server need run.",
    )
    actions = parser.add_actions("action", "ACTION")
    for name, action, explanation in (
        ("ls", _ls, "list the segments in force: without those that a compaction has replaced"),
        ("stats", _stats, "add up segments, messages and bytes by bucket"),
        ("verify", _verify, "read every object and check it; exit code 1 if something is wrong"),
    ):
        one = actions.add_parser(name, help=explanation, description=f"{explanation.capitalize()}.")
        add_configuration(one)
        add_json(one)
        if name == "ls":
            one.add_argument(
                "--paths",
                action="store_true",
                help="only where each segment in force is, one a line, for DuckDB and others that read the files",
            )
        one.set_defaults(run=lambda options, action=action: asyncio.run(action(options)))


async def _open(config: Config) -> AsyncIterator[ColdTier]:
    settings = object_store_settings(config)
    if settings.backend == "memory":
        raise NotFound("the cold tier is in the server's memory", hint="cold.backend names one that can be looked at")
    if settings.backend == "fs" and not settings.path.is_dir():
        raise NotFound(f"there is no cold tier in {settings.path}", hint="name it with --data-dir or cold.path")
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


def _location(settings: ObjectStoreSettings, path: str) -> str:
    """An object's location, as other programs name it."""
    if settings.backend == "fs":
        return str(settings.path / path)
    scheme, holder = {"s3": ("s3", "bucket"), "gcs": ("gs", "bucket"), "azure": ("az", "container")}[settings.backend]
    prefix = "" if settings.path == Path() else f"{str(settings.path).strip('/')}/"
    return f"{scheme}://{settings.options[holder]}/{prefix}{path}"


async def _ls(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    async for cold in _open(config):
        segments = await live_segments(cold, await chains_of(cold))
        if options.paths:
            paths = [_location(object_store_settings(config), segment.path) for segment in segments]
            if options.json:
                print_json(paths)
            else:
                sys.stdout.writelines(f"{path}\n" for path in paths)
        elif options.json:
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
            total = totals.setdefault(segment.bucket or "(shared)", [0, 0, 0, 0])
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
    notes: list[dict[str, str]] = []
    checked = 0
    config = load_configuration(options)
    async for cold in _open(config):
        chains = []
        for shard in await stored_shards(cold.objects):
            found = await find_manifests(cold, shard)
            hole = await find_hole(cold, found)
            if hole is not None:
                problems.append({"path": hole.manifests[0], "problem": hole.describe()})
            elif found.damaged:
                problems += [{"path": path, "problem": "the manifest is damaged"} for path in sorted(found.damaged)]
            chains += found.chain.heads
            try:
                await newest_owner(cold.objects, shard)
            except Corrupt as error:
                problems.append({"path": f"owner/{shard:04d}/", "problem": error.message})
        view = await cold_view(cold, chains)
        segments = list(view.segments.values())
        # Replaced by a compaction, and kept for a while for current readers.
        old, young = await _leftovers(cold, view.segments.keys() | view.retired, config.cold.leftover_age)
        problems += [{"path": path, "problem": "no manifest names this object, and it is old"} for path in old]
        notes += [{"path": path, "note": "no manifest names this object (yet)"} for path in young]
        needed, snapshots = await live_objects(cold, chains)
        work = [(path, _check_notes(cold, path)) for path in sorted(needed)]
        work += [(f"snapshots/{one.blob}", _check_snapshot(cold, one)) for one in snapshots]
        work += [(segment.path, _check(cold, segment)) for segment in segments]
        with Progress("verifying", len(work)) as progress:
            for path, check in work:
                try:
                    await check
                except MillstreamError as error:
                    problems.append({"path": path, "problem": error.message})
                progress.advance()
        checked = len(segments)
    if options.json:
        print_json({"checked": checked, "problems": problems, "notes": notes})
    else:
        for one in problems:
            print(f"{one['path']}: {one['problem']}", file=sys.stderr)
        if notes:
            print(f"{counted(len(notes), 'object')} of a flush under way, or left by a crash: a server tidies them up")
        print(f"checked {counted(checked, 'segment')}, {counted(len(problems), 'problem')}")
    return 1 if problems else 0


async def _leftovers(cold: ColdTier, known: Container[str], age_seconds: float) -> tuple[list[str], list[str]]:
    """The segments that nothing refers to: those so old that a server should have deleted them, and the others.

    Ages are by the store's own clock, relative to the newest object there, as in the server.
    """
    entries = [entry for prefix in ("segments/", "manifests/") async for entry in cold.objects.list(prefix)]
    newest_ms = max((entry.modified_ms for entry in entries), default=0)
    unknown = [entry for entry in entries if entry.path.startswith("segments/") and entry.path not in known]
    old = [entry.path for entry in unknown if newest_ms - entry.modified_ms >= age_seconds * 1000]
    return old, sorted({entry.path for entry in unknown} - set(old))


async def _check_notes(cold: ColdTier, path: str) -> None:
    decode_notes(await cold.objects.get(path), path)


async def _check_snapshot(cold: ColdTier, snapshot: SnapshotRef) -> None:
    checksum = size = 0
    async for piece in cold.objects.stream(f"snapshots/{snapshot.blob}", snapshot.size):
        checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    if (checksum, size) != (snapshot.checksum, snapshot.size):
        raise MillstreamError("the snapshot's checksum or size differ from what the manifest says")


async def _check(cold: ColdTier, segment: SegmentRef) -> None:
    """Verify one segment: its checksum, its footer, every page, and that the index matches the rows."""
    data = await cold.objects.get(segment.path)
    if len(data) != segment.size or zlib.crc32(data) != segment.checksum:
        raise MillstreamError(
            f"size or checksum differ from what the manifest says; it holds {what_it_holds(segment, data)}"
        )
    footer = decode_footer(data[-segment.footer_bytes :], segment.path, segment.footer_checksum)
    for group in range(footer.metadata.num_row_groups):
        rows = RowGroup(decode_columns(footer.metadata, group, FetchedRange(0, data), segment.path, BYTES_COLUMNS))
        for extent in footer.extents:
            if extent.row_group == group and rows.ends[extent.row_start + extent.rows - 1] != extent.offset_end:
                raise MillstreamError(f"the index of stream {extent.stream!r} does not match its rows")
