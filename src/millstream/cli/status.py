"""`millstream status`: a summary of a server's state."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from millstream.cli.findings import counted
from millstream.cli.options import print_json
from millstream.cli.remote import add_connection, connect, print_fields
from millstream.cli.terminal import Style
from millstream.client import Forbidden, Unauthorized
from millstream.sizes import human_bytes


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="show whether a server is well",
        description="Show whether a server is well: whether it takes writes, whether its cluster is whole, what it"
        " holds and what waits to be flushed. Exit code 1 if something is wrong, 5 if nobody answers.",
        epilog="example: millstream status --url http://127.0.0.1:4437 --json",
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    with connect(options) as client:
        began = time.perf_counter()
        health = client.health()
        seconds = time.perf_counter() - began
        local, cluster = client.readiness(), client.readiness(of_cluster=True)
        try:
            stats = client.stats()
        except (Unauthorized, Forbidden):
            stats = None  # statistics need an administrator's token
    # Whatever keeps a node from being ready also keeps its cluster from it.
    problems = [*local.problems, *(one for one in cluster.problems if one not in local.problems)]
    if stats is not None and stats["flush_failure"] is not None:
        problems.append(f"the last flush failed: {stats['flush_failure']}")
    if options.json:
        print_json(
            {
                "url": client.url,
                "is_well": not problems,
                "answer_ms": round(seconds * 1000, 3),
                **health,
                "is_ready": local.is_ready,
                "is_cluster_ready": cluster.is_ready,
                "problems": problems,
                "stats": stats,
            }
        )
    else:
        _show(client.url, health, stats, seconds, problems)
    return 1 if problems else 0


def _show(url: str, health: dict[str, Any], stats: dict[str, Any] | None, seconds: float, problems: list[str]) -> None:
    style = Style(sys.stdout)
    state = style.green("ok") if not problems else style.red("not well")
    fields: list[tuple[str, object]] = [
        ("server", f"{style.bold(url)}, version {health.get('version', 'unknown')}"),
        ("status", f"{state}, answered in {seconds * 1000:.1f} ms"),
    ]
    fields += [("problem", style.red(one)) for one in problems]
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
        ("cold", f"{human_bytes(stats['cold_bytes'])} in {counted(stats['segment_count'], 'segment')}"),
        ("waits to be flushed", human_bytes(stats["flush_backlog_bytes"])),
        ("last position", f"{stats['last_position']:,} (flushed: {stats['flushed_position']:,})"),
    ]
