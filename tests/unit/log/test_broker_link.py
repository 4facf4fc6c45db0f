"""The link to the broker, closed: nobody waits for an answer that can no longer come."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from millstream.errors import Unavailable
from millstream.log.broker_link import BrokerLink, BrokerSettings

NOWHERE = BrokerSettings(["nats://127.0.0.1:9"], "", "")


def waiting_in_a_thread(link: BrokerLink) -> tuple[threading.Thread, list[Unavailable]]:
    refused: list[Unavailable] = []

    def wait() -> None:
        try:
            link.wait(asyncio.sleep(600))
        except Unavailable as error:
            refused.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    return thread, refused


def test_a_thread_that_waits_for_an_answer_is_released_when_the_link_is_closed() -> None:
    link = BrokerLink(NOWHERE, "tests")
    thread, refused = waiting_in_a_thread(link)
    link.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [error.code for error in refused] == ["broker_unavailable"]


def test_a_client_that_does_not_close_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.sleep(600)

    link = BrokerLink(NOWHERE, "tests")
    monkeypatch.setattr(link.client, "close", never)
    thread, refused = waiting_in_a_thread(link)
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 8
    thread.join(5)
    assert not thread.is_alive() and len(refused) == 1


def test_what_is_asked_after_the_end_is_refused_at_once() -> None:
    link = BrokerLink(NOWHERE, "tests")
    link.close()
    link.close()
    with pytest.raises(Unavailable):
        link.wait(asyncio.sleep(0))


def test_a_wait_has_an_end_and_the_work_ends_with_it() -> None:
    link = BrokerLink(NOWHERE, "tests")
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def ask() -> None:
        await link.ask(work(), 0.05)

    try:
        with pytest.raises(Unavailable):
            link.wait(work(), 0.05)
        assert ended.wait(5)
        ended.clear()
        with pytest.raises(Unavailable):
            asyncio.run(ask())
        assert ended.wait(5)
    finally:
        link.close()
