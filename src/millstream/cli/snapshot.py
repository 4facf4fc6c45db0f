"""`millstream snapshot publish|get|ls|rm`: snapshots from the command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from millstream.cli.options import print_json, print_table
from millstream.cli.parser import Parser
from millstream.cli.remote import add_action, connect, open_output, read_input, with_hint
from millstream.client import NotFound
from millstream.protocol.content_types import OCTET_STREAM
from millstream.sizes import human_bytes


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "snapshot",
        help="publish, fetch and list snapshots",
        description="Snapshots from the command line: a snapshot stands for all of a stream before its offset.",
    )
    actions = parser.add_actions("action", "ACTION")

    one = add_action(
        actions,
        "publish",
        _publish,
        "publish a snapshot, which replaces all history before its offset",
        "millstream snapshot publish docs/page state.bin --offset 0000000000000000_0000000000001234",
    )
    _add_stream(one)
    one.add_argument("file", metavar="FILE", help="the snapshot; - reads standard input")
    one.add_argument("--offset", metavar="OFFSET", required=True, help="everything before it is in the snapshot")
    one.add_argument(
        "--content-type", metavar="TYPE", default=OCTET_STREAM, help=f"content type (default {OCTET_STREAM})"
    )

    one = add_action(actions, "get", _get, "fetch a snapshot", "millstream snapshot get docs/page -o state.bin")
    _add_stream(one)
    one.add_argument("--offset", metavar="OFFSET", help="its offset (default: the latest)")
    one.add_argument("--output", "-o", metavar="FILE", help="write to a file instead of standard output")

    one = add_action(actions, "ls", _ls, "list the snapshots of a stream", "millstream snapshot ls docs/page")
    _add_stream(one)

    one = add_action(
        actions,
        "rm",
        _rm,
        "delete a snapshot; the server refuses this for the latest one",
        "millstream snapshot rm docs/page 0000000000000000_0000000000001234",
    )
    _add_stream(one)
    one.add_argument("offset", metavar="OFFSET", help="the snapshot's offset")


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", metavar="STREAM", help="the stream, as bucket/name")


def _publish(options: argparse.Namespace) -> int:
    data = read_input(options.file)
    with connect(options) as client:
        client.stream(options.stream).publish_snapshot(data, options.offset, options.content_type)
    if options.json:
        print_json({"stream": options.stream, "offset": options.offset, "size": len(data)})
    else:
        print(f"published {human_bytes(len(data))} at {options.offset}; older offsets can no longer be read")
    return 0


def _get(options: argparse.Namespace) -> int:
    with connect(options) as client:
        try:
            snapshot = client.stream(options.stream).snapshot(options.offset)
        except NotFound as error:
            raise with_hint(error, f"see what there is: millstream snapshot ls {options.stream}") from None
    if options.json and options.output is None:
        sys.stderr.write("millstream: --json describes the snapshot; its content goes to --output FILE\n")
    if options.output is not None or not options.json:
        with open_output(options.output) as output:
            output.write(snapshot.data)
    if options.json:
        described = snapshot._asdict()
        del described["data"]
        print_json({"stream": options.stream, "size": len(snapshot.data), **described})
    return 0


def _ls(options: argparse.Namespace) -> int:
    with connect(options) as client:
        try:
            info = client.stream(options.stream).head()
        except NotFound:  # an answer to HEAD has no error message
            raise NotFound(f"stream {options.stream} does not exist") from None
    offsets = [info.snapshot_offset] if info.snapshot_offset is not None else []
    if options.json:
        print_json([{"offset": offset, "up_to_date": offset == info.next_offset} for offset in offsets])
    else:
        rows = [(offset, "yes" if offset == info.next_offset else "no") for offset in offsets]
        print_table(("offset", "up to date"), rows)
    return 0


def _rm(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.stream(options.stream).delete_snapshot(options.offset)
    if options.json:
        print_json({"deleted": options.offset})
    return 0
