"""`millstream`: finds the command and says what went wrong in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from millstream import __version__
from millstream.cli import cold, pipeline, restore, serve
from millstream.errors import MillstreamError

COMMANDS = (serve, restore, cold, pipeline)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="millstream", description="Durable streams over plain HTTP.")
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return 1


def entry() -> NoReturn:
    run_and_leave()


def run_and_leave(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run and leave without tearing the interpreter down: the object store's threads do not survive that cleanly."""
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
