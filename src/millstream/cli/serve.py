"""`millstream serve`: run a server until it is told to stop."""

from __future__ import annotations

import argparse
import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from millstream.cli.options import add_configuration, load_configuration
from millstream.server.logs import configure_logging
from millstream.server.run import serve


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run a server",
        description="Run a server until SIGTERM or SIGINT. On SIGHUP it reads tokens, keys, certificate, limits and"
        " logging again.",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on (default 127.0.0.1:4437)")
    parser.add_argument(
        "--examples",
        metavar="DIR",
        type=Path,
        nargs="?",
        const=Path("examples"),
        help="serve the examples built in DIR (default ./examples) below /examples/",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen to other machines although [auth] or [tls] is missing"
    )
    add_configuration(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    configure_logging(config.logging)
    # Requests make no cycles; collecting them often costs more than it frees.
    gc.set_threshold(50_000, 20, 50)
    # A log thread that has finished a sync should not wait long for its turn to say so.
    sys.setswitchinterval(0.0005)
    announce = partial(print, flush=True)
    uvloop.run(serve(config, announce, examples=options.examples, load=lambda: load_configuration(options)))
    return 0
