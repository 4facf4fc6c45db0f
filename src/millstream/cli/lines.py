"""Appends each line of an input as a message, once and in order, in batches."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from millstream.cli.options import print_json
from millstream.cli.progress import Progress
from millstream.client import Client, IdempotentProducer, Stream
from millstream.clock import SystemClock
from millstream.errors import ConfigurationError, InvalidRequest
from millstream.protocol.content_types import is_json


def append_lines(client: Client, stream: Stream, options: argparse.Namespace) -> int:
    """Append the lines of DATA, --file or standard input; empty lines are skipped."""
    if options.seq is not None or options.if_match is not None:
        raise InvalidRequest("--lines goes with neither --seq nor --if-match")
    if options.data not in (None, "-"):
        raise InvalidRequest("--lines reads standard input or a file", hint="write - or --file FILE")
    content_type = stream.content_type()
    checks = is_json(content_type)
    # The id is unique, so its first epoch is unused and repeated appends are recognised.
    producer_id = f"millstream-cli-{SystemClock().random_bytes(8).hex()}"
    with client.producer(stream, producer_id, content_type=content_type) as producer:
        with _open(options) as source, Progress("appending", _size(source), unit="bytes") as progress:
            for number, line in enumerate(source, 1):
                message = line.rstrip(b"\r\n")
                if message:
                    if checks:
                        _check_json(message, number, producer)
                    producer.append(message)
                progress.advance(len(line))
        producer.close(close_stream=options.close)
    if options.json:
        print_json({"messages": producer.acknowledged, "next_offset": producer.next_offset, "closed": options.close})
    else:
        print(f"appended {producer.acknowledged:,} messages, next offset {producer.next_offset or 'unchanged'}")
    return 0


@contextmanager
def _open(options: argparse.Namespace) -> Iterator[BinaryIO]:
    if options.file is None or options.file == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(options.file).open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigurationError(f"{options.file} cannot be read: {error.strerror}") from None


def _size(source: BinaryIO) -> int:
    """The size of the input; 0 if it is unknown."""
    try:
        status = os.fstat(source.fileno())
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _check_json(message: bytes, number: int, producer: IdempotentProducer) -> None:
    """Refuse an invalid line here, by its number: in a batch it would make the server refuse all of it."""
    try:
        msgspec.json.decode(message, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        producer.flush()
        raise InvalidRequest(
            f"line {number} is not JSON: {error}",
            hint=f"the {producer.acknowledged:,} messages before it were appended; correct it and go on from there",
        ) from None
