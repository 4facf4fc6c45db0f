"""No request holds the loop for more than 100 ms, whatever is in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from millstream import config as configuration
from millstream.server.api.front import Front
from millstream.server.node.standalone import Node
from support.application import ask
from support.stalls import STALL_SECONDS_MAX, Stalls, measured_stalls

MIB = 1 << 20
JSON = {"content-type": "application/json"}
PATH = "/v1/stream/stalls/s"
MESSAGES_MAX = 131_072

Scenario = Callable[[Front, Node], Awaitable[Stalls]]


def measure(directory: Path, scenario: Scenario, *settings: str) -> Stalls:
    async def main() -> Stalls:
        node = Node(configuration.load(None, {}, (f"server.data_dir={directory}", *settings)))
        app = await node.start()
        try:
            return await scenario(app, node)
        finally:
            await node.stop()

    return asyncio.run(main())


def array_of(message: bytes, count: int) -> bytes:
    return b"[" + b",".join([message] * count) + b"]"


def test_the_meter_sees_a_loop_that_is_held() -> None:
    """By a callback, and by a thread that keeps the interpreter to itself."""

    async def main() -> tuple[float, float]:
        async with measured_stalls() as by_callback:
            until = time.process_time() + 0.15
            while time.process_time() < until:
                pass
        async with measured_stalls() as by_thread:
            await asyncio.to_thread(pow, 3, 3_000_000, 10**1_000_000)
        return by_callback.worst_seconds, by_thread.worst_seconds

    by_callback, by_thread = asyncio.run(main())
    assert by_callback >= 0.15
    assert by_thread > STALL_SECONDS_MAX


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(array_of(b"1", 4 * MIB - 1), 413, id="8 MiB of tiny messages, refused"),
        pytest.param(array_of(b"1", MESSAGES_MAX), 200, id="as many tiny messages as allowed"),
        pytest.param(array_of(b'{"a":1,"b":[2,3],"c":"' + b"x" * 34 + b'","d":{}}', MESSAGES_MAX), 200, id="8 MiB"),
        pytest.param(array_of(b'"' + b"x" * (8 * MIB - 4) + b'"', 1), 200, id="8 MiB in one message"),
        pytest.param(b"[" + array_of(b"1", 4 * MIB - 2) + b"]", 200, id="8 MiB in one message of many commas"),
        pytest.param(b"[" * (8 * MIB), 400, id="8 MiB of brackets"),
        pytest.param(array_of(b"1", 120_000) + b"x", 400, id="invalid at its very end"),
    ],
)
def test_a_large_body_does_not_hold_the_loop(tmp_path: Path, method: str, body: bytes, status: int) -> None:
    assert len(body) <= 9 * MIB

    async def scenario(app: Front, node: Node) -> Stalls:
        if method == "POST":
            assert (await ask(app, "PUT", PATH, b"", JSON)).status == 201
        async with measured_stalls() as stalls:
            answer = await ask(app, method, PATH, body, JSON)
        accepted = {"POST": 204, "PUT": 201}[method]
        assert answer.status == (accepted if status == 200 else status), answer.body
        if status == 413:
            assert answer.error == "too_many_messages"
        return stalls

    stalls = measure(tmp_path, scenario)
    assert stalls.beats > 0
    assert stalls.worst_seconds < STALL_SECONDS_MAX


def test_deleting_the_end_of_a_chain_of_forks_does_not_hold_the_loop(tmp_path: Path) -> None:
    depth = 1_200

    async def scenario(app: Front, node: Node) -> Stalls:
        assert (await ask(app, "PUT", f"{PATH}0", b"[1]", JSON)).status == 201
        for number in range(1, depth + 1):
            fork = {"stream-forked-from": f"{PATH}{number - 1}", **JSON}
            assert (await ask(app, "PUT", f"{PATH}{number}", b"[1]", fork)).status == 201
            assert (await ask(app, "DELETE", f"{PATH}{number - 1}")).status == 204
        async with measured_stalls() as stalls:
            assert (await ask(app, "GET", f"{PATH}{depth}?offset=-1")).status == 200
            assert (await ask(app, "DELETE", f"{PATH}{depth}")).status == 204
        assert node.shard.namespace.resident_count() == 0
        return stalls

    stalls = measure(tmp_path, scenario, f"streams.fork_depth_max={depth}")
    assert stalls.worst_seconds < STALL_SECONDS_MAX
