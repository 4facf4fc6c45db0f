"""`millstream quarantine`: skips a record of the log that cannot be applied."""

from __future__ import annotations

import argparse
from typing import Any

from millstream.cli.options import add_configuration, add_json, load_configuration, print_json
from millstream.errors import NotFound
from millstream.server.node.data_directory import DataDirectory
from millstream.shard.quarantine import REFUSED, SET_ASIDE, read_all, set_aside


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "quarantine",
        help="set a record aside that keeps a server from starting",
        description="Without POSITION: list the records of the log that could not be applied, and those that were set"
        " aside. With POSITION: set that record aside; the server must be stopped, and its next start passes it over."
        " What the record said is then missing; it stays in the data directory, in quarantine/.",
        epilog="example: millstream quarantine --data-dir data 10317",
    )
    parser.add_argument("position", metavar="POSITION", type=int, nargs="?", help="the record's position in the log")
    parser.add_argument("--shard", metavar="N", type=int, default=0, help="the shard it belongs to (default 0)")
    add_configuration(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    data_dir = load_configuration(options).server.data_dir
    if not data_dir.is_dir():
        raise NotFound(f"there is no data directory {data_dir}", hint="name the server's with --data-dir")
    if options.position is not None:
        directory = DataDirectory(data_dir)
        try:
            chosen = [set_aside(data_dir / "quarantine", options.shard, options.position)]
        finally:
            directory.release()
        found = [("set aside", one) for one in chosen]
    else:
        found = [("refused", one) for one in read_all(data_dir / "quarantine", REFUSED)]
        found += [("set aside", one) for one in read_all(data_dir / "quarantine", SET_ASIDE)]
    if options.json:
        print_json(
            [
                {
                    "state": state,
                    "shard": one.shard,
                    "position": one.position,
                    "type": one.type,
                    "reason": one.reason,
                    "bytes": len(one.record),
                }
                for state, one in found
            ]
        )
    else:
        for state, one in found:
            what = f"position {one.position} of shard {one.shard}, {one.type}, {len(one.record)} bytes"
            print(f"{state}: {what}: {one.reason}")
        if not found:
            print("no record was refused or set aside")
    return 0
