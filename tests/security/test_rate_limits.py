"""Limits per principal and per address: 429 with Retry-After, for those over it and for nobody else."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from support.access import bearer, make_token
from support.raw_http import Answer, RawConnection
from support.server import ServerProcess

TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/limits/s"


def answers(url: str, count: int, **headers: str) -> list[Answer]:
    """The answers to requests that reach the server all at once, however slow the machine is."""
    with RawConnection(url, seconds=20) as connection:
        request = connection.request("GET", "/v1/stream/limits/none", list(headers.items()))
        connection.send(request * count)
        return [connection.answer() for _ in range(count)]


def statuses(url: str, count: int, **headers: str) -> list[int]:
    return [answer.status for answer in answers(url, count, **headers)]


def test_requests_beyond_the_rate_of_an_address_get_429_and_are_served_again_later(tmp_path: Path) -> None:
    settings = ("limits.exempt_loopback=false", "limits.address_requests_per_second=5", "limits.burst=1s")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        seen = answers(server.url, 40)
        assert {answer.status for answer in seen} == {404, 429}
        assert 5 <= [answer.status for answer in seen].count(404) <= 20
        refused = next(answer for answer in seen if answer.status == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.error["code"] == "too_many_requests"
        time.sleep(1.1)
        assert httpx.get(server.url + PATH).status_code == 404


def test_an_invalid_path_counts_as_any_other(tmp_path: Path) -> None:
    settings = ("limits.exempt_loopback=false", "limits.address_requests_per_second=5", "limits.burst=1s")
    with ServerProcess(tmp_path / "data", settings=settings) as server, RawConnection(server.url) as connection:
        connection.send(connection.request("GET", "/v1/stream/%zz") * 40)
        assert {connection.answer().status for _ in range(40)} == {400, 429}


def test_bytes_beyond_the_rate_get_429_counting_what_is_sent_and_what_is_read(tmp_path: Path) -> None:
    settings = ("limits.exempt_loopback=false", "limits.address_bytes_per_second=100KiB", "limits.burst=1s")
    with ServerProcess(tmp_path / "data", settings=settings) as server, httpx.Client(base_url=server.url) as client:
        body = bytes(60 << 10)
        assert client.put(PATH, headers=TEXT, content=body).status_code == 201
        assert client.get(PATH).status_code == 200  # 120 KiB so far: more than there is
        refused = client.get(PATH)
        assert refused.status_code == 429
        time.sleep(int(refused.headers["retry-after"]) + 0.2)
        assert client.get(PATH).content == body


def test_a_principal_over_its_rate_does_not_slow_another(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    greedy, modest = (make_token(tokens, "read:limits", name=name) for name in ("greedy", "modest"))
    settings = (
        "auth.enabled=true",
        f"auth.tokens_file={tokens}",
        "limits.principal_requests_per_second=5",
        "limits.burst=1s",
    )
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        assert 429 in statuses(server.url, 40, **bearer(greedy))
        assert statuses(server.url, 3, **bearer(modest)) == [404] * 3


def test_live_reads_of_one_principal_and_of_one_address_are_bounded(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    mine, theirs, writer = (make_token(tokens, "read:limits", "write:limits", name=name) for name in "abc")
    settings = (
        "auth.enabled=true",
        f"auth.tokens_file={tokens}",
        "limits.principal_live_max=2",
        "limits.exempt_loopback=false",
        "limits.address_live_max=3",
    )
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        assert httpx.put(server.url + PATH, headers={**TEXT, **bearer(writer)}).status_code == 201
        readers: list[RawConnection] = []

        def follow(token: str, mode: str = "sse") -> int:
            reader = RawConnection(server.url)
            readers.append(reader)
            reader.send(reader.request("GET", f"{PATH}?offset=now&live={mode}", list(bearer(token).items())))
            return reader.head()[0]

        try:
            assert [follow(mine), follow(mine), follow(mine)] == [200, 200, 429]
            assert [follow(theirs), follow(theirs)] == [200, 429]
            # One that leaves makes room, for its principal and at its address.
            readers[0].socket.close()
            deadline = time.monotonic() + 10
            while follow(mine) != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            for reader in readers:
                reader.socket.close()


def test_a_trusted_proxy_says_who_the_client_is_and_nobody_else_does(tmp_path: Path) -> None:
    # So slow a rate that what is used up stays so for the rest of the test.
    settings = ("limits.address_requests_per_second=1", "limits.burst=10s", "server.trusted_proxies=127.0.0.1")
    with ServerProcess(tmp_path / "trusting", settings=settings) as server:

        def ask(count: int, forwarded: str) -> list[int]:
            return statuses(server.url, count, **{"x-forwarded-for": forwarded})

        assert 429 in ask(60, "203.0.113.1")
        assert ask(2, "203.0.113.2") == [404, 404]
        # What the client itself put in front of the proxy's entry does not count.
        assert 429 in ask(9, "198.51.100.7, 203.0.113.1")
        # All of an IPv6 network is one address.
        assert 429 in ask(60, "2001:db8::1")
        assert 429 in ask(9, "2001:db8::2")
        assert ask(2, "2001:db8:0:1::1") == [404, 404]
    wary = (*settings[:2], "limits.exempt_loopback=false")
    with ServerProcess(tmp_path / "wary", settings=wary) as server, RawConnection(server.url) as connection:
        for number in range(60):
            fields = [("X-Forwarded-For", f"203.0.113.{number}")]
            connection.send(connection.request("GET", "/v1/stream/limits/none", fields))
        assert 429 in {connection.answer().status for _ in range(60)}
