"""Conditional writes: If-Match, If-None-Match and Stream-Seq, alone and in a crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server

TEXT = {"content-type": "text/plain"}
SECONDS = 30.0
WRITERS = 200

_numbers = count()


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    settings = ("read.long_poll_timeout=500ms",)
    return serve(*settings)


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=SECONDS) as opened:
        assert opened.put("/conditional").status_code == 201
        yield opened


@pytest.fixture
def path(client: httpx.Client) -> str:
    """A text stream of its own for each test, with one message in it."""
    name = f"/conditional/{next(_numbers)}"
    assert client.put(name, headers=TEXT, content=b"start;").status_code == 201
    return name


def append(client: httpx.Client, path: str, body: bytes, **headers: str) -> httpx.Response:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, headers={**TEXT, **fields}, content=body)


def content(client: httpx.Client, path: str) -> bytes:
    return client.get(path, params={"offset": "-1"}).content


# -- a crowd -----------------------------------------------------------------------------------------------------

EtagSource = Callable[[httpx.AsyncClient, str, httpx.Response], Awaitable[str]]


async def etag_of_head(client: httpx.AsyncClient, path: str, won: httpx.Response) -> str:
    return (await client.head(path)).headers["etag"]


async def etag_of_read(client: httpx.AsyncClient, path: str, won: httpx.Response) -> str:
    return (await client.get(path, params={"offset": "-1"})).headers["etag"]


async def etag_of_read_at_the_tail(client: httpx.AsyncClient, path: str, won: httpx.Response) -> str:
    tail = (await client.head(path)).headers["stream-next-offset"]
    return (await client.get(path, params={"offset": tail})).headers["etag"]


async def etag_of_previous_post(client: httpx.AsyncClient, path: str, won: httpx.Response) -> str:
    return won.headers["etag"]


@pytest.mark.timeout(120)
def test_of_200_writers_with_the_same_if_match_exactly_one_wins_each_round(
    running: Server, client: httpx.Client
) -> None:
    """Each round gets its ETag from another place; in between, all 200 wait at the line and start together."""
    sources: list[EtagSource] = [
        etag_of_head,
        etag_of_read,
        etag_of_previous_post,
        etag_of_read_at_the_tail,
    ]

    async def main() -> None:
        limits = httpx.Limits(max_connections=WRITERS, max_keepalive_connections=WRITERS)
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS, limits=limits) as crowd:
            path = "/conditional/crowd"
            won = await crowd.put(path, headers=TEXT)
            expected = b""
            for number, source in enumerate(sources):
                etag = await source(crowd, path, won)

                def write(writer: int, number: int = number, etag: str = etag) -> Awaitable[httpx.Response]:
                    body = b"%d:%03d;" % (number, writer)
                    return crowd.post(path, headers={**TEXT, "if-match": etag}, content=body)

                answers = await asyncio.gather(*map(write, range(WRITERS)))
                winners = [writer for writer, answer in enumerate(answers) if answer.status_code == 204]
                assert len(winners) == 1
                assert {answer.status_code for answer in answers} == {204, 412}
                won = answers[winners[0]]
                expected += b"%d:%03d;" % (number, winners[0])
                assert (await crowd.get(path)).content == expected, "the loser's bytes are nowhere"
            assert (await crowd.head(path)).headers["etag"] == won.headers["etag"]

    asyncio.run(main())


def test_of_many_creators_with_if_none_match_exactly_one_wins(running: Server, client: httpx.Client) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as crowd:
            path = "/conditional/creators"
            answers = await asyncio.gather(
                *[
                    crowd.put(path, headers={**TEXT, "if-none-match": "*"}, content=b"by %03d" % writer)
                    for writer in range(100)
                ]
            )
            winners = [writer for writer, answer in enumerate(answers) if answer.status_code == 201]
            assert len(winners) == 1
            assert {answer.status_code for answer in answers} == {201, 412}
            assert (await crowd.get(path)).content == b"by %03d" % winners[0]

    asyncio.run(main())


def test_of_two_closers_with_the_same_if_match_one_closes(running: Server, client: httpx.Client) -> None:
    async def main(path: str, etag: str) -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as other:
            headers = {**TEXT, "if-match": etag, "stream-closed": "true"}
            answers = await asyncio.gather(*[other.post(path, headers=headers, content=b"%d" % n) for n in range(20)])
            statuses = [answer.status_code for answer in answers]
            assert statuses.count(204) == 1
            assert set(statuses) <= {204, 409, 412}
            final = await other.get(path, params={"offset": "-1"})
            assert final.content == b"%d" % statuses.index(204)
            assert final.headers["stream-closed"] == "true"

    path = "/conditional/closers"
    etag = client.put(path, headers=TEXT).headers["etag"]
    asyncio.run(main(path, etag))


# -- If-Match on POST --------------------------------------------------------------------------------------------


def test_append_with_the_current_etag_succeeds_and_a_stale_one_is_412(client: httpx.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    first = append(client, path, b"one;", if_match=etag)
    assert first.status_code == 204
    stale = append(client, path, b"two;", if_match=etag)
    assert (stale.status_code, stale.json()["error"]["code"]) == (412, "precondition_failed")
    assert append(client, path, b"three;", if_match=first.headers["etag"]).status_code == 204
    assert content(client, path) == b"start;one;three;"


def test_etag_of_a_create_serves_the_first_append(client: httpx.Client) -> None:
    path = "/conditional/created"
    etag = client.put(path, headers=TEXT).headers["etag"]
    assert append(client, path, b"one", if_match=etag).status_code == 204
    assert append(client, path, b"two", if_match=etag).status_code == 412


def test_etag_of_a_read_that_stops_before_the_tail_does_not_match(client: httpx.Client, path: str) -> None:
    append(client, path, b"more;")
    partial = client.get(path, params={"offset": "-1", "max_bytes": "1"})
    assert partial.content == b"start;"
    assert append(client, path, b"lost", if_match=partial.headers["etag"]).status_code == 412
    whole = client.get(path, params={"offset": partial.headers["stream-next-offset"]})
    assert append(client, path, b"won", if_match=whole.headers["etag"]).status_code == 204
    assert content(client, path) == b"start;more;won"


def test_etag_of_a_long_poll_matches(client: httpx.Client, path: str) -> None:
    etag = client.get(path, params={"offset": "-1", "live": "long-poll"}).headers["etag"]
    assert append(client, path, b"one", if_match=etag).status_code == 204


@pytest.mark.parametrize("form", ['"other", {0}', '{0}, "other"', "*", '{0} ,"x"'])
def test_if_match_may_be_a_list_or_a_star(client: httpx.Client, path: str, form: str) -> None:
    etag = client.head(path).headers["etag"]
    assert append(client, path, b"one", if_match=form.format(etag)).status_code == 204
    assert content(client, path) == b"start;one"


@pytest.mark.parametrize("form", ['"other"', "W/{0}", "{1}", '""', "x", '"0:-1:0000000000000000_0000000000000006"'])
def test_if_match_that_names_no_present_state_is_412(client: httpx.Client, path: str, form: str) -> None:
    etag = client.head(path).headers["etag"]
    assert append(client, path, b"one", if_match=form.format(etag, etag.strip('"'))).status_code == 412
    assert content(client, path) == b"start;"


def test_if_match_on_close_is_checked_and_close_changes_the_etag(client: httpx.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    append(client, path, b"one;")
    assert client.post(path, headers={"stream-closed": "true", "if-match": etag}).status_code == 412
    current = client.head(path).headers["etag"]
    closed = client.post(path, headers={"stream-closed": "true", "if-match": current})
    assert closed.status_code == 204
    head = client.head(path)
    assert head.headers["etag"] == closed.headers["etag"] != current
    assert append(client, path, b"late", if_match=head.headers["etag"]).status_code == 409


def test_duplicate_of_a_producer_is_204_although_its_if_match_is_stale(client: httpx.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    claim = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0", "if_match": etag}
    assert append(client, path, b"once;", **claim).status_code == 200
    assert append(client, path, b"once;", **claim).status_code == 204
    assert content(client, path) == b"start;once;"


def test_refused_condition_leaves_producer_and_stream_seq_alone(client: httpx.Client, path: str) -> None:
    stale = {"if_match": '"stale"', "stream_seq": "5", "producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    assert append(client, path, b"lost", **stale).status_code == 412
    assert append(client, path, b"one;", stream_seq="1").status_code == 204
    claim = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    assert append(client, path, b"two;", **claim).status_code == 200
    assert content(client, path) == b"start;one;two;"


def test_old_etag_never_matches_after_delete_and_recreate(client: httpx.Client, path: str) -> None:
    seen = []
    for _ in range(3):
        etag = client.head(path).headers["etag"]
        assert etag not in seen
        seen.append(etag)
        for old in seen[:-1]:
            assert append(client, path, b"lost", if_match=old).status_code == 412
            assert client.head(path, headers={"if-none-match": old}).status_code == 200
            assert client.get(path, headers={"if-none-match": old}).status_code == 200
        assert client.delete(path).status_code == 204
        assert append(client, path, b"lost", if_match=etag).status_code == 404
        assert client.put(path, headers=TEXT, content=b"start;").status_code == 201
    assert content(client, path) == b"start;"


# -- PUT ---------------------------------------------------------------------------------------------------------


def test_put_with_if_match_of_the_present_state_is_200_and_of_another_412(client: httpx.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    assert client.put(path, headers={**TEXT, "if-match": etag}).status_code == 200
    append(client, path, b"more;")
    assert client.put(path, headers={**TEXT, "if-match": etag}).status_code == 412
    assert client.put(path, headers={**TEXT, "if-match": "*"}).status_code == 200
    assert content(client, path) == b"start;more;"


@pytest.mark.parametrize("condition", ["*", '"1:-1:0000000000000000_0000000000000000"'])
def test_put_with_if_match_of_a_stream_that_does_not_exist_is_412(client: httpx.Client, condition: str) -> None:
    path = f"/conditional/absent-{next(_numbers)}"
    assert client.put(path, headers={**TEXT, "if-match": condition}).status_code == 412
    assert client.head(path).status_code == 404


def test_put_with_if_none_match_star_is_201_then_412(client: httpx.Client) -> None:
    path = f"/conditional/new-{next(_numbers)}"
    assert client.put(path, headers={**TEXT, "if-none-match": "*"}, content=b"first").status_code == 201
    again = client.put(path, headers={**TEXT, "if-none-match": "*"}, content=b"second")
    assert (again.status_code, again.json()["error"]["code"]) == (412, "precondition_failed")
    assert content(client, path) == b"first"
    client.delete(path)
    assert client.put(path, headers={**TEXT, "if-none-match": "*"}).status_code == 201


# -- HEAD and GET with If-None-Match -----------------------------------------------------------------------------


def test_head_with_if_none_match_is_304_until_the_state_changes(client: httpx.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    for condition in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        unchanged = client.head(path, headers={"if-none-match": condition})
        assert (unchanged.status_code, unchanged.headers["etag"]) == (304, etag)
    append(client, path, b"more;")
    changed = client.head(path, headers={"if-none-match": etag})
    assert changed.status_code == 200
    etag = changed.headers["etag"]
    client.post(path, headers={"stream-closed": "true"})
    assert client.head(path, headers={"if-none-match": etag}).status_code == 200, "closing is a change"


def test_etag_of_a_post_and_of_head_are_the_same(client: httpx.Client, path: str) -> None:
    posted = append(client, path, b"more;").headers["etag"]
    assert client.head(path).headers["etag"] == posted
    assert client.head(path, headers={"if-none-match": posted}).status_code == 304


def test_read_with_if_none_match_is_304_until_there_is_more(client: httpx.Client, path: str) -> None:
    first = client.get(path, params={"offset": "-1"})
    again = client.get(path, params={"offset": "-1"}, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    append(client, path, b"more;")
    changed = client.get(path, params={"offset": "-1"}, headers={"if-none-match": first.headers["etag"]})
    assert (changed.status_code, changed.content) == (200, b"start;more;")


# -- Stream-Seq --------------------------------------------------------------------------------------------------


def test_stream_seq_must_grow_as_text(client: httpx.Client, path: str) -> None:
    assert append(client, path, b"a;", stream_seq="10").status_code == 204
    for refused in ("10", "09", "1", ""):
        assert append(client, path, b"lost", stream_seq=refused).status_code == 409
    assert append(client, path, b"b;", stream_seq="9").status_code == 204, "as text, 9 comes after 10"
    assert append(client, path, b"c;").status_code == 204, "an append without one is not ordered by it"
    assert append(client, path, b"lost", stream_seq="80").status_code == 409
    assert content(client, path) == b"start;a;b;c;"


def test_of_many_writers_with_the_same_stream_seq_one_wins(running: Server, client: httpx.Client) -> None:
    async def main(path: str) -> bytes:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as other:
            expected = b""
            for number in range(3):
                headers = {**TEXT, "stream-seq": f"{number:04d}"}
                answers = await asyncio.gather(
                    *[other.post(path, headers=headers, content=b"%d.%02d;" % (number, n)) for n in range(40)]
                )
                statuses = [answer.status_code for answer in answers]
                assert statuses.count(204) == 1 and set(statuses) == {204, 409}
                expected += b"%d.%02d;" % (number, statuses.index(204))
            return expected

    path = "/conditional/sequence"
    client.put(path, headers=TEXT)
    expected = asyncio.run(main(path))
    assert content(client, path) == expected
    assert client.post(path, headers={**TEXT, "stream-seq": "0002"}, content=b"x").status_code == 409


def test_stream_seq_and_etag_survive_a_crash(process: ServerProcess, client: httpx.Client, path: str) -> None:
    etag = append(client, path, b"kept;", stream_seq="5").headers["etag"]
    process.kill()
    process.start()
    assert client.head(path).headers["etag"] == etag
    assert append(client, path, b"lost", stream_seq="5").status_code == 409
    assert append(client, path, b"next;", if_match=etag, stream_seq="6").status_code == 204
    assert content(client, path) == b"start;kept;next;"


def test_pipelined_appends_with_the_same_if_match_let_only_the_first_through(
    running: Server, client: httpx.Client, path: str
) -> None:
    """One write of one connection: the appends are checked while the ones before them are still in flight."""
    etag = client.head(path).headers["etag"]
    with RawConnection(running.url) as connection:
        fields = [("Content-Type", "text/plain"), ("If-Match", etag)]
        connection.send(b"".join(connection.request("POST", path, fields, b"%d;" % n) for n in range(20)))
        statuses = [connection.answer("POST").status for _ in range(20)]
    assert statuses == [204] + [412] * 19
    assert content(client, path) == b"start;0;"
