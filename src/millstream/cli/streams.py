"""`millstream streams ls|create|append|read|tail|head|rm|fork`: streams from the command line."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from millstream.cli.lines import append_lines
from millstream.cli.options import duration, print_json, print_table
from millstream.cli.parser import Parser
from millstream.cli.progress import Progress
from millstream.cli.remote import (
    add_action,
    connect,
    encode_chunk,
    open_output,
    print_fields,
    read_input,
    with_hint,
)
from millstream.cli.times import utc
from millstream.client import NotFound, Stream
from millstream.errors import InvalidRequest
from millstream.protocol.keys import DEFAULT_BUCKET
from millstream.protocol.offsets import parse_offset
from millstream.sizes import human_bytes


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "streams",
        help="create, append to, read and follow streams",
        description="Streams from the command line, named bucket/name; without a bucket they are in the default one.",
    )
    actions = parser.add_actions("action", "ACTION")
    for add in (_add_ls, _add_create, _add_append, _add_read, _add_tail, _add_head, _add_rm, _add_fork):
        add(actions)


def _add_ls(actions: Any) -> None:
    one = add_action(actions, "ls", _ls, "list the streams of a bucket", "millstream streams ls agents --prefix run-")
    one.add_argument(
        "bucket", metavar="BUCKET", nargs="?", default=DEFAULT_BUCKET, help=f"the bucket (default {DEFAULT_BUCKET})"
    )
    one.add_argument("--prefix", metavar="PREFIX", default="", help="only names that start with this")


def _add_create(actions: Any) -> None:
    one = add_action(
        actions, "create", _create, "create a stream", "millstream streams create agents/run-42 --json-messages"
    )
    _add_stream(one)
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--content-type", metavar="TYPE", help="content type (default application/octet-stream)")
    kind.add_argument(
        "--json-messages",
        dest="content_type",
        action="store_const",
        const="application/json",
        help="the same as --content-type application/json",
    )
    life = one.add_mutually_exclusive_group()
    life.add_argument(
        "--ttl", metavar="DURATION", type=_whole_seconds, help="delete it when nobody has used it for so long: 90s, 1h"
    )
    life.add_argument("--expires-at", metavar="TIME", help="delete it at this time, such as 2030-01-01T00:00:00Z")
    one.add_argument("--data", metavar="FILE", help="first content, from a file or - for standard input")
    one.add_argument("--closed", action="store_true", help="close it at once")
    one.add_argument("--new", action="store_true", help="fail if it exists already")


def _add_append(actions: Any) -> None:
    one = add_action(
        actions,
        "append",
        _append,
        "append to a stream",
        """echo '{"step": 1}' | millstream streams append agents/run-42 -""",
    )
    _add_stream(one)
    one.add_argument("data", metavar="DATA", nargs="?", help="what to append; - reads standard input")
    one.add_argument("--file", metavar="FILE", help="append the content of a file")
    one.add_argument("--lines", action="store_true", help="each line of the input is a message of its own")
    one.add_argument("--seq", metavar="SEQ", help="refuse it unless this is greater than the last one's")
    one.add_argument("--if-match", metavar="ETAG", help="refuse it unless the stream is still in this state")
    one.add_argument("--close", action="store_true", help="close the stream after it")


def _add_read(actions: Any) -> None:
    one = add_action(actions, "read", _read, "read a stream up to its end", "millstream streams read agents/run-42")
    _add_stream(one)
    _add_offset(one, "-1")
    one.add_argument("--output", "-o", metavar="FILE", help="write to a file instead of standard output")


def _add_tail(actions: Any) -> None:
    one = add_action(
        actions,
        "tail",
        _tail,
        "follow a stream until it is closed",
        "millstream streams tail agents/run-42 --offset -1",
    )
    _add_stream(one)
    _add_offset(one, "now")
    one.add_argument("--mode", choices=("auto", "sse", "long-poll"), default="auto", help="how (default auto)")


def _add_head(actions: Any) -> None:
    one = add_action(actions, "head", _head, "show a stream's state", "millstream streams head agents/run-42 --json")
    _add_stream(one)


def _add_rm(actions: Any) -> None:
    one = add_action(actions, "rm", _rm, "delete streams", "millstream streams rm agents/run-41 agents/run-42")
    one.add_argument("streams", metavar="STREAM", nargs="+", help="a stream, as bucket/name")


def _add_fork(actions: Any) -> None:
    one = add_action(
        actions,
        "fork",
        _fork,
        "make a stream that shares another's history",
        "millstream streams fork agents/run-42 agents/retry",
    )
    one.add_argument("source", metavar="SOURCE", help="the stream whose history is shared")
    one.add_argument("target", metavar="TARGET", help="the new stream")
    one.add_argument("--offset", metavar="OFFSET", help="where they part (default: the source's end)")
    one.add_argument("--sub-offset", metavar="N", type=int, help="so many messages or bytes into the next append")


def _whole_seconds(value: str) -> int:
    return max(1, math.ceil(duration(value)))


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", metavar="STREAM", help="the stream, as bucket/name")


def _add_offset(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--offset", metavar="OFFSET", default=default, help=f"where to start: an offset, -1 or now (default {default})"
    )


def _ls(options: argparse.Namespace) -> int:
    with connect(options) as client:
        try:
            entries = list(client.bucket(options.bucket).list(options.prefix))
        except NotFound as error:
            raise with_hint(error, "millstream buckets ls shows those there are") from None
    if options.json:
        print_json([entry._asdict() for entry in entries])
        return 0
    rows = [
        (
            entry.name,
            "closed" if entry.closed else "open",
            human_bytes(entry.tail_offset),
            utc(entry.last_write_at_ms),
            entry.content_type,
        )
        for entry in entries
    ]
    print_table(("stream", "status", "size", "last write", "content type"), rows)
    return 0


def _create(options: argparse.Namespace) -> int:
    body = read_input(options.data) if options.data is not None else None
    with connect(options) as client:
        created = client.stream(options.stream).create(
            content_type=options.content_type,
            ttl=options.ttl,
            expires_at=options.expires_at,
            closed=options.closed,
            body=body,
            only_if_absent=options.new,
        )
    if options.json:
        print_json({"stream": options.stream, **created._asdict()})
    else:
        state = "created" if created.is_new else "exists already with this configuration:"
        print(f"{state} {options.stream} ({created.content_type}), next offset {created.next_offset}")
    return 0


def _append(options: argparse.Namespace) -> int:
    if options.data is not None and options.file is not None:
        raise InvalidRequest("DATA and --file exclude each other")
    if options.data is None and options.file is None and not options.close:
        raise InvalidRequest("there is nothing to append", hint="give DATA, --file FILE, or - for standard input")
    with connect(options) as client, _existing(options.stream):
        stream = client.stream(options.stream)
        return append_lines(client, stream, options) if options.lines else _append_once(stream, options)


@contextlib.contextmanager
def _existing(stream: str) -> Iterator[None]:
    """For commands on an existing stream: if it is missing, name it and say how to create it. Answers to HEAD have no
    message."""
    try:
        yield
    except NotFound as error:
        if not error.is_servers:
            error = NotFound(f"stream {stream} does not exist")
        raise with_hint(error, f"create it first: millstream streams create {stream}") from None


def _append_once(stream: Stream, options: argparse.Namespace) -> int:
    if options.file is not None:
        data = read_input(options.file)
    elif options.data == "-":
        data = read_input("-")
    else:
        data = (options.data or "").encode()
    if not data and not options.close:
        raise InvalidRequest("the input is empty", hint="an append needs at least one byte")
    content_type = stream.content_type()
    appended = stream.append(
        data, seq=options.seq, if_match=options.if_match, close=options.close, content_type=content_type
    )
    if options.json:
        print_json(appended._asdict())
    else:
        print(appended.next_offset)
    return 0


def _read(options: argparse.Namespace) -> int:
    with connect(options) as client, open_output(options.output) as output:
        stream = client.stream(options.stream)
        start = parse_offset(options.offset) if options.offset not in ("-1", "now") else 0
        is_shown = not output.isatty() and sys.stderr.isatty()
        total = parse_offset(stream.head().next_offset) - start if is_shown else 0
        with Progress("reading", total, unit="bytes", is_shown=is_shown) as progress:
            for chunk in stream.read(options.offset):
                if chunk.data:
                    output.write(encode_chunk(chunk, as_json=options.json))
                end = parse_offset(chunk.next_offset)
                progress.advance(end - start)
                start = end
    return 0


def _tail(options: argparse.Namespace) -> int:
    output = sys.stdout.buffer
    with (
        connect(options) as client,
        _existing(options.stream),
        client.stream(options.stream).follow(options.offset, options.mode) as following,
    ):
        for chunk in following:
            output.write(encode_chunk(chunk, as_json=options.json))
            output.flush()
    return 0


def _head(options: argparse.Namespace) -> int:
    with connect(options) as client, _existing(options.stream):
        info = client.stream(options.stream).head()
    if options.json:
        print_json({"stream": options.stream, **info._asdict()})
        return 0
    print_fields(
        (
            ("stream", options.stream),
            ("status", "closed" if info.closed else "open"),
            ("content type", info.content_type),
            ("next offset", info.next_offset),
            ("earliest offset", info.earliest_offset),
            ("snapshot offset", info.snapshot_offset),
            ("time to live", None if info.ttl_seconds is None else f"{info.ttl_seconds} s since last use"),
            ("expires at", info.expires_at),
            ("etag", info.etag),
        )
    )
    return 0


def _rm(options: argparse.Namespace) -> int:
    with connect(options) as client, Progress("deleting", len(options.streams)) as progress:
        for name in options.streams:
            client.stream(name).delete()
            progress.advance()
    if options.json:
        print_json({"deleted": options.streams})
    return 0


def _fork(options: argparse.Namespace) -> int:
    with connect(options) as client:
        created = client.stream(options.target).create(
            fork_from=options.source, fork_offset=options.offset, fork_sub_offset=options.sub_offset
        )
    if options.json:
        print_json({"stream": options.target, **created._asdict()})
    else:
        state = "forked" if created.is_new else "exists already:"
        print(f"{state} {options.target} from {options.source}, next offset {created.next_offset}")
    return 0
