"""`millstream serve`: runs a server until it is stopped."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from millstream.cli.options import add_configuration, add_server, load_configuration
from millstream.config import unknown_variables
from millstream.server.node.logs import configure_logging
from millstream.server.node.run import serve

logger = logging.getLogger("millstream")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="run a server",
        description="Run a server until SIGTERM or SIGINT. On SIGHUP it reads tokens, keys, certificate, limits and"
        " logging again.",
    )
    add_server(parser)
    parser.add_argument(
        "--examples",
        metavar="DIR",
        type=Path,
        nargs="?",
        const=Path("examples"),
        help="serve the examples built in DIR (default ./examples) below /examples/",
    )
    add_configuration(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = load_configuration(options)
    configure_logging(config.logging)
    for sentence in unknown_variables(os.environ):
        logger.warning(sentence)
    # Requests create no cycles, so frequent collections cost more than they free.
    gc.set_threshold(50_000, 20, 50)
    # A log thread that has finished a sync should get the interpreter lock soon.
    sys.setswitchinterval(0.0005)
    announce = partial(print, flush=True)
    uvloop.run(serve(config, announce, examples=options.examples, load=lambda: load_configuration(options)))
    return 0
