"""`millstream token create|ls|revoke|url`: the token file of a server, and tokens that a server makes for URLs.

A running server sees changes of the file by itself; only `url` talks to one.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import Any

from millstream.access.authenticator import tokens_path
from millstream.access.scopes import EVERY_BUCKET, Scope, parse_scope
from millstream.access.token_file import NAME_CHARACTERS_MAX, TokenEntry, create_token, read_tokens, revoke_token
from millstream.cli.options import add_configuration, add_json, duration, load_configuration, print_json, print_table
from millstream.cli.parser import Parser
from millstream.cli.remote import add_action, connect
from millstream.client.calls import address_of, url_token
from millstream.clock import SystemClock
from millstream.config import DURATION
from millstream.errors import InvalidRequest


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "token",
        help="make, list and revoke access tokens",
        description="The token file of a server, which a running one reads again when it changes, and tokens for URLs,"
        " which a running one makes.",
    )
    actions = parser.add_actions("action", "ACTION")
    create = actions.add_parser(
        "create",
        help="make a token and print it",
        description="Make a token and print it, this once: the file keeps its hash only. It may do what it is given,"
        " on every bucket and prefix that is named.",
    )
    create.add_argument(
        "--bucket", action="append", default=[], help="a bucket it is for, or '*' for every one; repeatable"
    )
    create.add_argument(
        "--prefix", action="append", default=[], help="only streams whose names start with this; repeatable"
    )
    create.add_argument("--read", action="store_true", help="may read")
    create.add_argument("--write", action="store_true", help="may create, append to and delete streams")
    create.add_argument(
        "--admin", action="store_true", help="may do all of it, and buckets too; with '*' also metrics and the server"
    )
    create.add_argument("--expires", metavar="DURATION", help="how long it is good, such as 12h or 30d (default: ever)")
    create.add_argument("--name", default="", help="what it is called in lists and logs")
    create.set_defaults(run=_create)
    ls = actions.add_parser("ls", help="list the tokens", description="List the tokens; their secrets are not known.")
    ls.set_defaults(run=_ls)
    revoke = actions.add_parser("revoke", help="make a token useless", description="Make a token useless at once.")
    revoke.add_argument("id", help="the token's id, as `millstream token ls` shows it")
    revoke.set_defaults(run=_revoke)
    for one in (create, ls, revoke):
        add_configuration(one)
        add_json(one)
    url = add_action(
        actions,
        "url",
        _url,
        "print the URL of a stream with a token in it, which reads this stream and nothing else until it expires",
        "millstream token url team-a/chat --expires 10m",
    )
    url.add_argument("stream", metavar="STREAM", help="as BUCKET/STREAM, or STREAM in the default bucket")
    url.add_argument(
        "--expires",
        metavar="DURATION",
        type=duration,
        help="how long it is good, such as 10m (default 5m; at most the server's auth.url_token_max)",
    )


def _create(options: argparse.Namespace) -> int:
    clock = SystemClock()
    expires_at_ms = None
    if options.expires is not None:
        try:
            expires_at_ms = clock.now_ms() + int(DURATION.parse(options.expires) * 1000)
        except ValueError:
            raise InvalidRequest(f"--expires {options.expires!r} is not {DURATION.expects}") from None
    if len(options.name) > NAME_CHARACTERS_MAX or not options.name.isprintable():
        raise InvalidRequest(f"--name has at most {NAME_CHARACTERS_MAX} characters, all printable")
    config = load_configuration(options)
    path = tokens_path(config)
    entry, token = create_token(path, clock, options.name, _scopes(options), expires_at_ms)
    if options.json:
        print_json({**_described(entry), "token": token})
    else:
        print(token)
        print(f"token {entry.id} may {', '.join(entry.scopes)}; it is shown only now", file=sys.stderr)
        if not config.auth.enabled:
            print("note: auth.enabled is not set here, so this server asks nobody for tokens", file=sys.stderr)
    return 0


def _scopes(options: argparse.Namespace) -> list[Scope]:
    actions = [action for action in ("read", "write", "admin") if getattr(options, action)]
    if not actions:
        raise InvalidRequest("the token could do nothing", hint="add --read, --write or --admin")
    if not options.bucket:
        raise InvalidRequest("the token has no bucket", hint=f"add --bucket NAME, or --bucket '{EVERY_BUCKET}'")
    scopes = [
        Scope(action, bucket, prefix)
        for bucket in options.bucket
        for prefix in options.prefix or [""]
        for action in actions
    ]
    for scope in scopes:
        if parse_scope(str(scope)) != scope:
            raise InvalidRequest(f"{str(scope)!r} is not a scope", hint="buckets have no '/', neither has spaces")
    return scopes


def _ls(options: argparse.Namespace) -> int:
    entries = sorted(read_tokens(tokens_path(load_configuration(options))).entries.values(), key=_created_at)
    if options.json:
        print_json([_described(entry) for entry in entries])
    else:
        headings = ("id", "name", "scopes", "created", "expires")
        rows = [
            (entry.id, entry.name, " ".join(entry.scopes), _day(entry.created_at_ms), _expiry(entry))
            for entry in entries
        ]
        print_table(headings, rows)
    return 0


def _revoke(options: argparse.Namespace) -> int:
    entry = revoke_token(tokens_path(load_configuration(options)), options.id)
    if options.json:
        print_json(_described(entry))
    else:
        print(f"revoked {entry.id} {entry.name}".rstrip())
    return 0


def _url(options: argparse.Namespace) -> int:
    seconds = None if options.expires is None else max(round(options.expires), 1)
    address = address_of(options.stream)
    with connect(options) as client:
        made = client.call(url_token(address, seconds))
    server = client.url.partition(",")[0].rstrip("/")  # any node of a cluster will do
    url = f"{server}{address.path}?token={made.token}"
    if options.json:
        print_json({"url": url, "token": made.token, "expires_at_ms": made.expires_at_ms})
    else:
        print(url)
        print(f"it reads {options.stream} until {_day(made.expires_at_ms)} UTC", file=sys.stderr)
    return 0


def _described(entry: TokenEntry) -> dict[str, object]:
    return {
        "id": entry.id,
        "name": entry.name,
        "scopes": entry.scopes,
        "created_at_ms": entry.created_at_ms,
        "expires_at_ms": entry.expires_at_ms,
    }


def _created_at(entry: TokenEntry) -> int:
    return entry.created_at_ms


def _day(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="minutes").removesuffix("+00:00")


def _expiry(entry: TokenEntry) -> str:
    if entry.expires_at_ms is None:
        return "never"
    is_past = entry.expires_at_ms <= SystemClock().now_ms()
    return _day(entry.expires_at_ms) + (" (expired)" if is_past else "")
