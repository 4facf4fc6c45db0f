"""Documents behind tokens and limits: who may do what, and refusals in the words of the Yjs protocol (§10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.protocol.lib0 import frame_update
from support.access import bearer, make_token
from support.raw_http import RawConnection
from support.server import ServerProcess

DOCUMENT = "/v1/yjs/notes/docs/plans/july"
OCTETS = {"content-type": "application/octet-stream"}
UPDATE = frame_update(b"an update")


class Guarded:
    def __init__(self, directory: Path) -> None:
        tokens = directory / "tokens.json"
        self.writer = make_token(tokens, "read:notes", "write:notes")
        self.reader = make_token(tokens, "read:notes")
        self.planner = make_token(tokens, "read:notes/docs/plans/", "write:notes/docs/plans/")
        self.stranger = make_token(tokens, "read:other", "write:other")
        self.settings = ("auth.enabled=true", f"auth.tokens_file={tokens}", "yjs.long_poll_timeout=1s")
        self.url = ""

    def request(
        self, method: str, token: str | None, path: str = DOCUMENT, body: bytes | None = None
    ) -> httpx.Response:
        headers = {**OCTETS, **(bearer(token) if token is not None else {})}
        return httpx.request(method, self.url + path, headers=headers, content=body, timeout=20)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("yjs-access")
    guarded = Guarded(directory)
    with ServerProcess(directory / "data", settings=guarded.settings) as server:
        guarded.url = server.url
        assert guarded.request("POST", guarded.writer, body=UPDATE).status_code == 204
        yield guarded


def code_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


@pytest.mark.parametrize(
    "query", ["?offset=snapshot", "?offset=-1", "?offset=-1&live=sse", "?awareness=default&offset=now"]
)
def test_reading_without_a_token_is_unauthorized(guarded: Guarded, query: str) -> None:
    response = guarded.request("GET", None, DOCUMENT + query)
    assert (response.status_code, code_of(response)) == (401, "UNAUTHORIZED")
    assert response.headers["www-authenticate"].startswith("Bearer")


def test_writing_without_a_token_is_unauthorized_and_stores_nothing(guarded: Guarded) -> None:
    before = guarded.request("GET", guarded.reader, DOCUMENT + "?offset=-1").content
    for method, body in (("POST", UPDATE), ("PUT", None), ("DELETE", None)):
        response = guarded.request(method, None, body=body)
        assert (response.status_code, code_of(response)) == (401, "UNAUTHORIZED"), method
    assert guarded.request("GET", guarded.reader, DOCUMENT + "?offset=-1").content == before


def test_a_wrong_token_is_unauthorized(guarded: Guarded) -> None:
    response = guarded.request("GET", "mst_0_nonsense", DOCUMENT + "?offset=-1")
    assert (response.status_code, code_of(response)) == (401, "UNAUTHORIZED")


def test_a_reader_reads_documents_and_awareness_and_writes_neither(guarded: Guarded) -> None:
    assert guarded.request("GET", guarded.reader, DOCUMENT + "?offset=-1").content == UPDATE
    assert guarded.request("GET", guarded.reader, DOCUMENT + "?offset=snapshot").status_code == 307
    for path in (DOCUMENT, DOCUMENT + "?awareness=default"):
        assert guarded.request("POST", guarded.reader, path, UPDATE).status_code == 403


def test_a_token_for_another_service_is_refused_alike_whether_a_document_exists_or_not(guarded: Guarded) -> None:
    answers = [
        guarded.request("GET", guarded.stranger, f"/v1/yjs/notes/docs/{name}?offset=-1")
        for name in ("plans/july", "no/such/document")
    ]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert answers[0].content == answers[1].content


def test_a_token_for_a_prefix_reaches_the_documents_below_it_alone(guarded: Guarded) -> None:
    assert guarded.request("POST", guarded.planner, "/v1/yjs/notes/docs/plans/may", UPDATE).status_code == 204
    assert guarded.request("POST", guarded.planner, "/v1/yjs/notes/docs/diary", UPDATE).status_code == 403


def test_too_many_requests_are_rate_limited(tmp_path: Path) -> None:
    settings = ("limits.exempt_loopback=false", "limits.address_requests_per_second=1", "limits.burst=2s")
    with ServerProcess(tmp_path / "data", settings=settings) as server, RawConnection(server.url, seconds=20) as raw:
        raw.send(raw.request("GET", DOCUMENT + "?offset=-1", []) * 12)
        answers = [raw.answer() for _ in range(12)]
    refused = [answer for answer in answers if answer.status == 429]
    assert refused
    for answer in refused:
        assert b'"RATE_LIMITED"' in answer.body
        assert any(name.lower() == "retry-after" for name in answer.headers)
