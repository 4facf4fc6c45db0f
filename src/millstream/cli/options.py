"""Options that several commands share, and how they print."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from millstream import config as configuration


def add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="where data lives (default ./data)")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML configuration file")
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one setting; repeatable"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def load_configuration(options: argparse.Namespace) -> configuration.Config:
    assignments = list(options.set)
    if getattr(options, "listen", None) is not None:
        assignments.append(f"server.listen={options.listen}")
    if getattr(options, "insecure", False):
        assignments.append("server.insecure=true")
    if options.data_dir is not None:
        assignments.append(f"server.data_dir={options.data_dir}")
    return configuration.load(options.config, os.environ, assignments)


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be; numbers to the right."""
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


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
