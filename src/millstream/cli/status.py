"""`millstream status`: whether a server is well, in one look."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from millstream.cli.options import human_bytes, print_json
from millstream.cli.remote import add_connection, connect, print_fields
from millstream.cli.terminal import Style
from millstream.client import Forbidden, Unauthorized


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="show whether a server is well",
        description="Show whether a server is well: what it holds, what waits to be flushed, and whether it takes"
        " writes. Exit code 1 if it does not, 5 if nobody answers.",
        epilog="example: millstream status --url http://127.0.0.1:4437 --json",
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    with connect(options) as client:
        began = time.perf_counter()
        health = client.health()
        seconds = time.perf_counter() - began
        try:
            stats = client.stats()
        except (Unauthorized, Forbidden):
            stats = None  # it takes an administrator's token to see more
    is_well = health.get("status") == "ok"
    if stats is not None:
        is_well = is_well and not stats["backpressure"] and stats["flush_failure"] is None
    if options.json:
        answer_ms = round(seconds * 1000, 3)
        print_json({"url": client.url, "is_well": is_well, "answer_ms": answer_ms, **health, "stats": stats})
    else:
        _show(client.url, health, stats, seconds, is_well)
    return 0 if is_well else 1


def _show(url: str, health: dict[str, Any], stats: dict[str, Any] | None, seconds: float, is_well: bool) -> None:
    style = Style(sys.stdout)
    reason = (stats["backpressure_reason"] or stats["flush_failure"]) if stats is not None else None
    state = style.green("ok") if is_well else style.red(f"not well: {reason or health.get('status')}")
    fields: list[tuple[str, object]] = [
        ("server", f"{style.bold(url)}, version {health.get('version', 'unknown')}"),
        ("status", f"{state}, answered in {seconds * 1000:.1f} ms"),
    ]
    if stats is None:
        fields.append(("storage", "not shown: the token is not an administrator's"))
    else:
        fields += _storage(stats)
    print_fields(fields)


def _storage(stats: dict[str, Any]) -> list[tuple[str, object]]:
    used = stats["hot_bytes"] / max(stats["hot_bytes_max"], 1)
    return [
        ("streams in memory", f"{stats['resident_streams']:,}"),
        ("hot", f"{human_bytes(stats['hot_bytes'])} of {human_bytes(stats['hot_bytes_max'])} ({used:.0%})"),
        ("cold", f"{human_bytes(stats['cold_bytes'])} in {stats['segment_count']:,} segments"),
        ("waits to be flushed", human_bytes(stats["flush_backlog_bytes"])),
        ("last position", f"{stats['last_position']:,} (flushed: {stats['flushed_position']:,})"),
    ]
