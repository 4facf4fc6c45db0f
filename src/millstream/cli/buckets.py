"""`millstream buckets ls|create|rm|show|feed`: buckets from the command line."""

from __future__ import annotations

import argparse
import sys
from base64 import b64encode
from typing import Any

import msgspec

from millstream.cli.options import print_json
from millstream.cli.parser import Parser
from millstream.cli.remote import add_action, connect, print_fields, with_hint
from millstream.cli.times import utc
from millstream.client import Conflict, FeedItem, NotFound
from millstream.protocol.content_types import is_json, is_text


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "buckets",
        help="create, inspect, follow and delete buckets",
        description="Buckets from the command line: each holds streams, and has a feed of all that happens in them.",
    )
    actions = parser.add_actions("action", "ACTION")

    add_action(actions, "ls", _ls, "list the buckets there are", "millstream buckets ls")

    one = add_action(actions, "create", _create, "create a bucket", "millstream buckets create agents")
    _add_bucket(one)
    one.add_argument("--exist-ok", action="store_true", help="do not mind if it exists already")

    one = add_action(actions, "rm", _rm, "delete an empty bucket", "millstream buckets rm agents")
    _add_bucket(one)

    one = add_action(actions, "show", _show, "show a bucket", "millstream buckets show agents")
    _add_bucket(one)

    one = add_action(
        actions,
        "feed",
        _feed,
        "print everything that happened in a bucket, one JSON object a line",
        "millstream buckets feed agents --follow",
    )
    _add_bucket(one)
    one.add_argument("--after", metavar="TOKEN", help="only what happened after this token, or now")
    one.add_argument("--prefix", metavar="PREFIX", default="", help="only streams whose names start with this")
    one.add_argument("--follow", action="store_true", help="go on with what happens from now on")


def _add_bucket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bucket", metavar="BUCKET", help="the bucket: 4 to 64 of a-z, 0-9, _ and -")


def _ls(options: argparse.Namespace) -> int:
    with connect(options) as client:
        names = client.buckets()
    if options.json:
        print_json(names)
    else:
        for name in names:
            print(name)
    return 0


def _create(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.bucket(options.bucket).create(exist_ok=options.exist_ok)
    if options.json:
        print_json({"bucket": options.bucket})
    else:
        print(f"created {options.bucket}")
    return 0


def _rm(options: argparse.Namespace) -> int:
    with connect(options) as client:
        try:
            client.bucket(options.bucket).delete()
        except Conflict as error:
            raise with_hint(error, f"its streams: millstream streams ls {options.bucket}") from None
    if options.json:
        print_json({"deleted": options.bucket})
    return 0


def _show(options: argparse.Namespace) -> int:
    with connect(options) as client:
        try:
            info = client.bucket(options.bucket).info()
        except NotFound as error:
            raise with_hint(error, f"create it: millstream buckets create {options.bucket}") from None
    if options.json:
        print_json(info._asdict())
    else:
        print_fields((("bucket", info.name), ("streams", f"{info.streams:,}"), ("created", utc(info.created_at_ms))))
    return 0


def _feed(options: argparse.Namespace) -> int:
    output = sys.stdout.buffer
    with connect(options) as client:
        bucket = client.bucket(options.bucket)
        pages = bucket.feed(options.after, prefix=options.prefix, live="auto" if options.follow else None)
        for page in pages:
            for item in page.items:
                output.write(msgspec.json.encode(_described(item)) + b"\n")
            output.flush()
    return 0


def _described(item: FeedItem) -> dict[str, object]:
    described = item._asdict()
    payload = described.pop("payload")
    if payload is None:
        return described
    if is_json(item.content_type):
        return {**described, "message": msgspec.Raw(payload)}
    if is_text(item.content_type):
        try:
            return {**described, "text": payload.decode()}
        except UnicodeDecodeError:
            pass
    return {**described, "base64": b64encode(payload).decode()}
