"""`millstream cluster`: what an operator asks of a running cluster, through any of its nodes."""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from typing import Any

import msgspec

from millstream.cli.options import add_json, print_json, print_table
from millstream.errors import MillstreamError, Unavailable

URL_DEFAULT = "http://127.0.0.1:4437"
TIMEOUT_SECONDS = 120.0


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cluster",
        help="look after a cluster: status, transfer, add, remove, drain",
        description="Look after a running cluster, through any of its nodes.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = _action(actions, "status", "who is there, who leads what, and how far each shard has come")
    status.set_defaults(run=_status)
    transfer = _action(actions, "transfer", "move leadership to another node")
    transfer.add_argument("--shard", type=int, metavar="N", help="only this shard (default: all that its leader leads)")
    transfer.add_argument("--to", type=int, metavar="NODE", help="the node to take over (default: whoever leads least)")
    transfer.set_defaults(run=_transfer)
    add = _action(actions, "add", "let a node lead (again), and wait until it can: one that is new or was drained")
    add.add_argument("node", type=int, metavar="NODE", help="its server.node_id")
    add.set_defaults(run=lambda options: _member(options, "active"))
    drain = _action(actions, "drain", "let a node lead nothing any more; it goes on following")
    drain.add_argument("node", type=int, metavar="NODE", help="its server.node_id")
    drain.set_defaults(run=lambda options: _member(options, "draining"))
    remove = _action(actions, "remove", "drain a node, move its replicas to others, and let it go")
    remove.add_argument("node", type=int, metavar="NODE", help="its server.node_id")
    remove.set_defaults(run=lambda options: _member(options, "removed"))


def _action(actions: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
    parser.add_argument(
        "--url",
        default=os.environ.get("MILLSTREAM_URL", URL_DEFAULT),
        help=f"any node of the cluster (default $MILLSTREAM_URL or {URL_DEFAULT})",
    )
    parser.add_argument(
        "--token", default=os.environ.get("MILLSTREAM_TOKEN", ""), help="bearer token, if one is needed"
    )
    add_json(parser)
    return parser


def _call(options: argparse.Namespace, path: str, body: dict[str, Any] | None = None, url: str | None = None) -> Any:
    request = urllib.request.Request(
        (url or options.url).rstrip("/") + path,
        data=msgspec.json.encode(body) if body is not None else None,
        headers={"content-type": "application/json"},
    )
    if options.token:
        request.add_header("authorization", f"Bearer {options.token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as refusal:
        raise _refusal(refusal.code, refusal.read()) from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(
            f"{options.url} does not answer: {reason}", hint="name a node that is up with --url"
        ) from None


def _refusal(status: int, body: bytes) -> MillstreamError:
    try:
        error = msgspec.json.decode(body)["error"]
        return MillstreamError(str(error["message"]), code=str(error["code"]), hint=error.get("hint"))
    except (msgspec.DecodeError, KeyError, TypeError):
        return MillstreamError(f"the node answered {status}: {body[:200].decode(errors='replace')}")


def _status(options: argparse.Namespace) -> int:
    status = _call(options, "/cluster/status")
    if options.json:
        print_json(status)
        return 0 if status["ready"] else 1
    word = "ready" if status["ready"] else "not ready"
    print(f"cluster {status['cluster']}, seen from node {status['node_id']}: {word}")
    for reason in status["missing"]:
        print(f"  {reason}")
    print()
    print_table(
        ("node", "address", "state", "ready", "leads"),
        [
            (
                member["node_id"],
                member["advertise"],
                member["state"],
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
    status = _call(options, "/cluster/status")
    shard = options.shard if options.shard is not None else 0
    if not 0 <= shard < len(status["shards"]):
        raise MillstreamError(f"there is no shard {shard}: the cluster has {len(status['shards'])}")
    leader = status["shards"][shard]["leader"]
    if leader is None:
        raise Unavailable(f"shard {shard} has no leader at the moment", hint="try again in a few seconds")
    body = {"shard": options.shard, "node": options.to}
    answer = _call(options, "/cluster/transfer-leader", {k: v for k, v in body.items() if v is not None}, leader)
    if options.json:
        print_json(answer)
    else:
        for moved in answer["transferred"]:
            print(f"shard {moved['shard']} is led by node {moved['node']} now")
    return 0


def _member(options: argparse.Namespace, state: str) -> int:
    answer = _call(options, "/cluster/members", {"node": options.node, "state": state})
    if options.json:
        print_json(answer)
    else:
        words = {
            "active": "can lead",
            "draining": "leads nothing any more",
            "removed": "is no longer part of the cluster",
        }
        print(f"node {options.node} {words[state]}")
    return 0
