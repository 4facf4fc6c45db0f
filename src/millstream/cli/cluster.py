"""`millstream cluster`: administration of a running cluster, through any of its nodes."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final, TypeVar

from millstream.cli.options import print_json, print_table
from millstream.cli.parser import Parser
from millstream.cli.remote import add_connection, connect
from millstream.cli.terminal import Style
from millstream.client import NotFound, calls
from millstream.client.conversation import Call
from millstream.errors import MillstreamError, Unavailable

# Adding a node ends when it has caught up; removing one ends when other nodes have its data.
TIMEOUT_SECONDS: Final = 120.0

T = TypeVar("T")


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "cluster",
        help="look after a cluster: status, transfer, add, remove, drain",
        description="Look after a running cluster, through any of its nodes.",
    )
    actions = parser.add_actions("action", "ACTION")
    status = _action(actions, "status", "who is there, who leads what, and how far each shard has come")
    status.set_defaults(run=_status)
    transfer = _action(actions, "transfer", "move leadership to another node")
    transfer.add_argument("--shard", type=_number, metavar="N", help="only this shard (default: all of its leader)")
    transfer.add_argument("--to", type=_number, metavar="NODE", help="who takes over (default: whoever leads least)")
    transfer.set_defaults(run=_transfer)
    add = _action(actions, "add", "let a node lead (again), and wait until it can: one that is new or was drained")
    add.add_argument("node", type=_number, metavar="NODE", help="its server.node_id")
    add.set_defaults(run=lambda options: _member(options, "active"))
    drain = _action(
        actions, "drain", "let a node lead nothing, and wait until others lead what it led; it goes on following"
    )
    drain.add_argument("node", type=_number, metavar="NODE", help="its server.node_id")
    drain.set_defaults(run=lambda options: _member(options, "draining"))
    remove = _action(actions, "remove", "drain a node, move its replicas to others, and let it go")
    remove.add_argument("node", type=_number, metavar="NODE", help="its server.node_id")
    remove.set_defaults(run=lambda options: _member(options, "removed"))


def _action(actions: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
    add_connection(parser, seconds=TIMEOUT_SECONDS)
    return parser


def _number(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is not a number; `millstream cluster status` shows them")
    return int(value)


def _call(options: argparse.Namespace, call: Call[T], url: str | None = None) -> T:
    with connect(options, url) as client:
        try:
            return client.call(call)
        except NotFound as error:
            if error.code == "node_not_found":
                raise
            raise MillstreamError(
                f"{client.url} is not a node of a cluster",
                hint="name one with --url; a server becomes one by cluster.name in its configuration",
            ) from None


def _status(options: argparse.Namespace) -> int:
    status = _call(options, calls.document("/cluster/status"))
    if options.json:
        print_json(status)
        return 0 if status["ready"] else 1
    style = Style(sys.stdout)
    down = [f"node {member['node_id']}" for member in status["members"] if not member.get("up", True)]
    word = style.green("ready") if status["ready"] else style.red("not ready")
    missing = style.red(f", but {' and '.join(down)} {'is' if len(down) == 1 else 'are'} down") if down else ""
    name = f"cluster {status['cluster']}" if status["cluster"] else "a single server, no cluster"
    print(f"{name}, seen from node {status['node_id']}: {word}{missing}")
    for reason in status["missing"]:
        print(f"  {reason}")
    print()
    print_table(
        ("node", "address", "state", "ready", "leads"),
        [
            (
                member["node_id"],
                member["advertise"],
                member["state"] if member.get("up", True) else "down",
                "yes" if member["ready"] else "no",
                ", ".join(map(str, member["leads"])) or "-",
            )
            for member in status["members"]
        ],
    )
    print()
    print_table(
        ("shard", "leader", "generation", "last", "applied here", "flushed"),
        [
            (
                shard["shard"],
                "none" if shard["leader_id"] is None else f"node {shard['leader_id']}",
                shard["generation"],
                shard["last_position"],
                shard["applied_position"],
                shard["flushed_position"],
            )
            for shard in status["shards"]
        ],
    )
    return 0 if status["ready"] else 1


def _transfer(options: argparse.Namespace) -> int:
    status = _call(options, calls.document("/cluster/status"))
    shard = options.shard if options.shard is not None else 0
    if not 0 <= shard < len(status["shards"]):
        raise MillstreamError(f"there is no shard {shard}: the cluster has {len(status['shards'])}")
    leader = status["shards"][shard]["leader"]
    if leader is None:
        raise Unavailable(f"shard {shard} has no leader at the moment", hint="try again in a few seconds")
    order = calls.order("/cluster/transfer-leader", shard=options.shard, node=options.to)
    answer = _call(options, order, leader)
    if options.json:
        print_json(answer)
    else:
        for moved in answer["transferred"]:
            print(f"shard {moved['shard']} is led by node {moved['node']} now")
    return 0


def _member(options: argparse.Namespace, state: str) -> int:
    answer = _call(options, calls.order("/cluster/members", node=options.node, state=state))
    if options.json:
        print_json(answer)
    else:
        words = {
            "active": "can lead" if answer["up"] else "can lead when it is up; it is down now",
            "draining": "leads nothing any more; others lead what it led",
            "removed": "is no longer part of the cluster",
        }
        print(f"node {options.node} {words[state]}")
    return 0
