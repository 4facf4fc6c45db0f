"""Options and output formats that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from millstream import config as configuration

DURATION_SECONDS_MAX: Final = 1e10


def add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="where data lives (default ./data)")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML configuration file")
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one setting; repeatable"
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """The options of a server besides its configuration, which `doctor` takes too."""
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on (default 127.0.0.1:4437)")
    parser.add_argument("--node-id", metavar="N", help="this node's number in its cluster (default 1)")
    parser.add_argument(
        "--advertise", metavar="HOST:PORT", help="address by which others reach this node (default: that of --listen)"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen to other machines although [auth] or [tls] is missing"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def load_configuration(options: argparse.Namespace) -> configuration.Config:
    assignments = list(options.set)
    for name in ("listen", "node_id", "advertise"):
        if getattr(options, name, None) is not None:
            assignments.append(f"server.{name}={getattr(options, name)}")
    if getattr(options, "insecure", False):
        assignments.append("server.insecure=true")
    if options.data_dir is not None:
        assignments.append(f"server.data_dir={options.data_dir}")
    return configuration.load(options.config, os.environ, assignments)


def duration(value: str) -> float:
    """An argument in seconds, or with a unit."""
    try:
        seconds = float(value) if value.replace(".", "", 1).isdecimal() else float(configuration.DURATION.parse(value))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < DURATION_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{value!r} is not a duration such as 90s or 1h, above 0")
    return seconds


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as needed; numbers are right-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells), 0) for i, heading in enumerate(headings)]
    numeric = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(headings))]
    for line in ([*headings], *cells):
        padded = [
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(line, widths, numeric, strict=True)
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
