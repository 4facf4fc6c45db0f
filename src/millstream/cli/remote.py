"""What the commands that talk to a server share: where it is, who asks, what goes in and how it comes out."""

from __future__ import annotations

import argparse
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from millstream.cli.options import add_json
from millstream.client import Chunk, Client, ClientError
from millstream.errors import ConfigurationError
from millstream.protocol.content_types import is_json, is_text

DEFAULT_URL: Final = "http://127.0.0.1:4437"
CONNECTION: Final = "connection"


def add_connection(parser: argparse.ArgumentParser, *, seconds: float = 30.0) -> None:
    group = parser.add_argument_group(CONNECTION)
    group.add_argument(
        "--url",
        metavar="URL",
        help=f"the server, or several with commas between them (default $MILLSTREAM_URL, else {DEFAULT_URL})",
    )
    group.add_argument("--token", metavar="TOKEN", help="the token to show it (default $MILLSTREAM_TOKEN)")
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=seconds,
        help="longest wait (default 30; for cluster commands 120)",
    )
    add_json(parser)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds above 0")
    return seconds


def connect(options: argparse.Namespace, url: str | None = None) -> Client:
    url = url or options.url or os.environ.get("MILLSTREAM_URL") or DEFAULT_URL
    token = options.token or os.environ.get("MILLSTREAM_TOKEN") or None
    return Client(url, token, timeout=options.timeout, retries=3)


def add_action(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], explanation: str, example: str = ""
) -> argparse.ArgumentParser:
    """A subcommand that talks to a server. `explanation` is one sentence without its full stop."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=explanation,
        description=f"{explanation[0].upper()}{explanation[1:]}.",
        epilog=f"example: {example}" if example else None,
    )
    add_connection(parser)
    parser.set_defaults(run=run)
    return parser


def read_input(source: str) -> bytes:
    """What a FILE argument means: a file, or standard input for `-`."""
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{source} cannot be read: {error.strerror}") from None


@contextmanager
def open_output(target: str | None) -> Iterator[BinaryIO]:
    """Where --output leads: a file, or standard output."""
    if target is None or target == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with Path(target).open("wb") as file:
            yield file
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from None


def encode_chunk(chunk: Chunk, *, as_json: bool) -> bytes:
    """A chunk for programs, as one JSON object on a line, or for people: JSON messages one a line, else bytes."""
    if as_json:
        return msgspec.json.encode({**_content(chunk), "next_offset": chunk.next_offset}) + b"\n"
    if is_json(chunk.content_type):
        return b"".join([message.translate(_ONE_LINE) + b"\n" for message in chunk.messages()])
    return chunk.data


# A line break inside a JSON message can only stand between its tokens.
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


def _content(chunk: Chunk) -> dict[str, object]:
    if is_json(chunk.content_type):
        return {"messages": [msgspec.Raw(message) for message in chunk.messages()]}
    if is_text(chunk.content_type):
        try:
            return {"text": chunk.data.decode()}
        except UnicodeDecodeError:
            pass
    return {"base64": b64encode(chunk.data).decode()}


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Names and values in two columns, without those that have none."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        if value is not None:
            sys.stdout.write(f"{name:<{width}}  {value}\n")


def with_hint(error: ClientError, hint: str) -> ClientError:
    """The error with advice for somebody at a command line, if the server had none."""
    error.hint = error.hint or hint
    return error
