"""Asks every route there is, and looks at what caches are told of the answers."""

from __future__ import annotations

import httpx

from millstream.server.api.front import Front
from support.access import bearer

OFFSET = "0000000000000000_0000000000000001"
# Of every kind of resource, paths at which it is; a kind that is missing here fails the test that uses this.
TARGETS = {
    "stream": [
        "/v1/stream/team-a/s",
        "/team-a/s?offset=-1&max_bytes=1",
        "/team-a/s?offset=-1&live=sse",
        "/team-a/s?offset=-1&live=long-poll",
        "/team-a/s?offset=now&live=long-poll",
        "/team-a/none",
    ],
    "yjs": [
        "/v1/yjs/team-a/docs/plan",
        "/v1/yjs/team-a/docs/plan?offset=snapshot",
        "/v1/yjs/team-a/docs/plan?offset=-1&live=long-poll",
        "/v1/yjs/team-a/docs/plan?awareness=default&offset=-1&live=sse",
    ],
    "control": ["/v1/stream/__ds/subscriptions/x", "/v1/stream/__ds/subscriptions/x/claim"],
    "cluster operation": ["/cluster/status", "/cluster/transfer-leader"],
    "health": ["/healthz"],
    "readiness": ["/readyz/local"],
    "cluster readiness": ["/readyz/cluster"],
    "metrics": ["/metrics"],
    "url tokens": ["/v1/tokens"],
    "stats": ["/cluster/hot-cold-stats"],
    "compactions": ["/cluster/compactions"],
    "cluster cold": ["/cluster/cold"],
    "bucket": ["/team-a"],
    "listing": ["/team-a/streams"],
    "feed": ["/team-a/streams/feed", "/team-a/streams/feed?live=sse", "/team-a/streams/feed?after=now&live=long-poll"],
    "cold": ["/team-a/streams/cold"],
    "bootstrap": ["/team-a/s/bootstrap"],
    "latest snapshot": ["/team-a/s/snapshot"],
    "snapshot": [f"/team-a/s/snapshot/{OFFSET}"],
}
OPEN = {"health", "readiness", "cluster readiness"}
METHODS_IN_ORDER = ["PUT", "POST", "GET", "HEAD", "DELETE"]
BODIES = {
    "bucket": b"",
    "url tokens": b'{"stream": "/team-a/s"}',
    "cold": b'{"incarnations": [1]}',
    "yjs": b"\x02\x00\x00",
}


def prepare(client: httpx.Client) -> None:
    assert client.put("/team-a").status_code == 201
    assert client.put("/team-a/s", headers={"content-type": "text/plain"}, content=b"1").status_code == 201


def check_every_route(url: str, app: Front, token: str) -> int:
    """Ask every route with every method it handles; returns how many answers there were."""
    assert app.routes.keys() == TARGETS.keys(), "a new kind of route needs a line in TARGETS"
    count = 0
    with httpx.Client(base_url=url, headers=bearer(token), timeout=30) as client:
        prepare(client)
        # What removes things comes last.
        for method in METHODS_IN_ORDER:
            for kind, methods in app.routes.items():
                if method in methods or (method == "HEAD" and "GET" in methods):
                    for target in TARGETS[kind]:
                        check_answer(client, method, target, kind)
                        count += 1
    return count


def check_answer(client: httpx.Client, method: str, target: str, kind: str) -> None:
    body = BODIES.get(kind, b"1") if method in ("PUT", "POST") else b""
    etag = None
    for _ in range(2):  # the second time with a condition, so that 304s are seen as well
        headers = {"content-type": "text/plain" if kind == "stream" else "application/octet-stream"}
        if etag is not None:
            headers["if-none-match"] = etag
        with client.stream(method, target, headers=headers, content=body) as answer:
            caching, vary = answer.headers.get("cache-control", ""), answer.headers.get("vary", "")
        described = f"{method} {target}: {answer.status_code} {caching!r} {vary!r}"
        assert answer.status_code < 500, described
        assert "public" not in caching, described
        if kind not in OPEN:
            assert caching.split(", ")[0] == "private", described
            assert vary.split(", ").count("authorization") == 1, described
        etag = answer.headers.get("etag")
        if etag is None or method not in ("GET", "HEAD"):
            return
