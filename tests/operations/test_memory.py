"""Memory of requests: what is answered or given up is freed at once, not when cycles are collected some day."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream import config as configuration
from millstream.pending import Pending
from millstream.server.api.front import Front
from millstream.server.api.live import LongPoll
from millstream.server.http.messages import Request
from millstream.server.node.standalone import Node
from support.application import ask

PATH = "/v1/stream/memory/s"
TEXT = {"content-type": "text/plain"}


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left(before: frozenset[int] = frozenset()) -> list[object]:
    """Requests and long-polls that there are, but for those that there were before: other tests may have servers."""
    found = [one for one in gc.get_objects() if isinstance(one, Request | LongPoll)]
    return [one for one in found if id(one) not in before]


async def go_away(app: Front, query: str, after_turns: int) -> None:
    """Ask, and hang up when the server has begun to work on it."""

    def answered(outcome: object) -> None:
        raise AssertionError("nobody is there to be answered")

    answer = app.handle(Request("GET", PATH.encode(), query.encode(), {}, b""))
    assert isinstance(answer, Pending)
    answer.when_settled(answered)
    for _ in range(after_turns):
        await asyncio.sleep(0)
    answer.abandon()


@pytest.mark.parametrize(
    "limits",
    [(), ("limits.exempt_loopback=false", "limits.address_bytes_per_second=1GiB", "limits.address_live_max=1000")],
)
def test_requests_that_are_answered_or_given_up_leave_nothing_behind(tmp_path: Path, limits: tuple[str, ...]) -> None:
    async def scenario() -> None:
        settings = ("cold.flush_interval=50ms", "hot.keep_bytes=0B", "cold.cache_bytes=0B", *limits)
        node = Node(configuration.load(None, {}, (f"server.data_dir={tmp_path}", *settings)))
        app = await node.start()
        assert (await ask(app, "PUT", PATH, b"x" * 100_000, TEXT)).status == 201
        while node.shard.hot.bytes:
            await asyncio.sleep(0.02)
        with no_collections():
            before = frozenset(map(id, left()))
            for turns in range(4):
                await go_away(app, "offset=now&live=long-poll", turns)
                await go_away(app, "offset=-1", turns)
            polls = [ask(app, "GET", f"{PATH}?offset=now&live=long-poll") for _ in range(4)]
            assert (await ask(app, "POST", PATH, b"more", TEXT)).status == 204
            assert [(await poll).body for poll in polls] == [b"more"] * 4
            assert (await ask(app, "GET", f"{PATH}?offset=-1")).body == b"x" * 100_000 + b"more"
            # Refused by the shard, and for a path that can name nothing.
            assert (await ask(app, "POST", PATH, b"{}", {"content-type": "application/json"})).status == 409
            assert (await ask(app, "GET", "/v1/stream/%zz")).status == 400
            for target in ("/v1/stream/%ff", "/abc", "/team-a/%C0"):
                assert (await ask(app, "PUT", target, b"x" * 1000, TEXT)).status == 400
            await asyncio.sleep(0.2)  # what was being fetched arrives all the same
            assert left(before) == []
        await node.stop()

    asyncio.run(scenario())
