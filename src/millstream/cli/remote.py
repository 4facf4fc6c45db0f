"""What commands that talk to a server share: its address, credentials, input and output."""

from __future__ import annotations

import argparse
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import msgspec

from millstream.cli.options import add_json, duration
from millstream.client import Chunk, Client, ClientError
from millstream.errors import ConfigurationError
from millstream.protocol.content_types import is_json, is_text

if TYPE_CHECKING:
    import ssl

DEFAULT_URL: Final = "http://127.0.0.1:4437"
CONNECTION: Final = "connection"


class ServerAddress(NamedTuple):
    """The server's address and credentials: from the options, else from the environment."""

    url: str
    token: str | None
    cacert: str | None


def add_connection(parser: argparse.ArgumentParser, *, seconds: float = 30.0) -> None:
    group = parser.add_argument_group(CONNECTION)
    group.add_argument(
        "--url",
        metavar="URL",
        help="the server, as URL or HOST:PORT; several with commas between them"
        f" (default $MILLSTREAM_URL, else {DEFAULT_URL})",
    )
    group.add_argument("--token", metavar="TOKEN", help="the token to show it (default $MILLSTREAM_TOKEN)")
    group.add_argument(
        "--cacert",
        metavar="FILE",
        help="trust the certificates in this PEM file, and no others (default $MILLSTREAM_CACERT, else the system's)",
    )
    group.add_argument(
        "--timeout",
        metavar="DURATION",
        type=duration,
        default=seconds,
        help="longest wait, such as 5s (default 30s; for cluster commands 2m, for jobs 1m)",
    )
    add_json(parser)


def server_address(options: argparse.Namespace, url: str | None = None) -> ServerAddress:
    cacert = options.cacert or os.environ.get("MILLSTREAM_CACERT") or None
    urls = url or options.url or os.environ.get("MILLSTREAM_URL") or DEFAULT_URL
    scheme = "http" if cacert is None else "https"
    parts = [part.strip() for part in urls.split(",") if part.strip()]
    return ServerAddress(
        ",".join(part if "://" in part else f"{scheme}://{part}" for part in parts),
        options.token or os.environ.get("MILLSTREAM_TOKEN") or None,
        cacert,
    )


def connect(options: argparse.Namespace, url: str | None = None, *, retries: int = 3) -> Client:
    address = server_address(options, url)
    trust = trusting(address.cacert) if address.cacert is not None else None
    return Client(address.url, address.token, timeout=options.timeout, retries=retries, ssl_context=trust)


def trusting(cacert: str) -> ssl.SSLContext:
    """A TLS context that trusts only the certificates of one file."""
    import ssl  # imported only when it is needed, because it is slow

    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else "it is no PEM file"
        raise ConfigurationError(
            f"the certificates in {cacert} cannot be used: {reason}", hint="name a PEM file with --cacert"
        ) from None


def add_action(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], explanation: str, example: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand that talks to a server. `explanation` is one sentence without its full stop."""
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
    """The content of a FILE argument: a file, or standard input for `-`."""
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{source} cannot be read: {error.strerror}") from None


@contextmanager
def open_output(target: str | None) -> Iterator[BinaryIO]:
    """The target of --output: a file, or standard output."""
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
    """A chunk as one line of JSON for programs; or for people: JSON messages one per line, other content as bytes."""
    if as_json:
        return msgspec.json.encode({**_content(chunk), "next_offset": chunk.next_offset}) + b"\n"
    if is_json(chunk.content_type):
        return b"".join([message.translate(_ONE_LINE) + b"\n" for message in chunk.messages()])
    return chunk.data


# A line break inside a JSON message can only be between its tokens.
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
    """Print names and values in two columns, without empty values."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        if value is not None:
            sys.stdout.write(f"{name:<{width}}  {value}\n")


def with_hint(error: ClientError, hint: str) -> ClientError:
    """The error with a hint for the command line, if the server gave none."""
    error.hint = error.hint or hint
    return error
