"""`millstream`: finds the command, runs it, and reports an error in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from millstream import __version__
from millstream.cli import exit_codes
from millstream.cli.allocator import choose_returning_allocator
from millstream.cli.parser import Parser, report_error
from millstream.errors import MillstreamError

# Each is a module of this package. Only the requested one is imported: some import the whole server.
COMMANDS = (
    "serve",
    "streams",
    "buckets",
    "snapshot",
    "status",
    "doctor",
    "quarantine",
    "restore",
    "cold",
    "cluster",
    "pipeline",
    "token",
    "completion",
)


def build_parser(commands: Iterable[str] = COMMANDS) -> Parser:
    parser = Parser(
        prog="millstream",
        description="Durable streams over plain HTTP.",
        epilog="`millstream COMMAND --help` says more; `millstream serve` starts a server.",
    )
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    found = parser.add_actions("command", "COMMAND")
    for command in commands:
        import_module(f"millstream.cli.{command}").add_parser(found)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else None
    if command == "serve":
        choose_returning_allocator()
    needed = [command] if command in COMMANDS else [] if command == "--version" else COMMANDS
    options = build_parser(needed).parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except MillstreamError as error:
        report_error(error.message, error.hint, error.code, as_json=getattr(options, "json", False))
        return exit_codes.exit_code_of(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output again at exit and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.BROKEN_PIPE


def entry() -> NoReturn:
    run_and_leave()


def run_and_leave(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run and exit without tearing down the interpreter, which the object store's threads do not survive cleanly."""
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
