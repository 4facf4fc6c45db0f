"""What tests of the jobs share: a server with history, and ways to fill it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx

from millstream.spark.options import ColdRoot, Connection
from support.cold import FolderStore, read_all, wait_until_flushed
from support.server import ServerProcess

FLUSHING = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=1h")
JSON = {"content-type": "application/json"}
NO_COLD = ColdRoot(None, {})


class Scene(NamedTuple):
    server: ServerProcess
    client: httpx.Client
    store: FolderStore
    connection: Connection

    @property
    def source(self) -> dict[str, str]:
        """The options of the data source."""
        return {"url": self.connection.url}

    def bucket(self, name: str) -> None:
        assert self.client.put(f"/{name}").status_code == 201

    def create(self, path: str, content_type: str = "application/json") -> None:
        assert self.client.put(path, headers={"content-type": content_type}).status_code == 201

    def append(self, path: str, *values: Any) -> None:
        answer = self.client.post(path, headers=JSON, content=json.dumps(list(values)).encode())
        assert answer.status_code == 204, answer.text

    def flushed(self) -> None:
        wait_until_flushed(self.client, released=True)

    def read(self, path: str) -> bytes:
        return read_all(self.client, path)

    def feed(self, bucket: str) -> list[dict[str, Any]]:
        """Everything the bucket's feed tells, page by page."""
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            answer = self.client.get(f"/{bucket}/streams/feed", params={"after": token, "max_bytes": "5000"})
            assert answer.status_code == 200, answer.text
            items += [json.loads(line) for line in answer.content.splitlines()]
            token = answer.headers["stream-feed-token"]
            if answer.headers.get("stream-up-to-date") == "true":
                return items


def fill(scene: Scene, bucket: str, flushes: int = 4, streams: int = 4) -> list[str]:
    """Several flushes of a few streams, JSON and text; returns their paths."""
    scene.bucket(bucket)
    paths = [f"/{bucket}/s{number}" for number in range(streams)]
    for number, path in enumerate(paths):
        scene.create(path, "application/json" if number % 2 == 0 else "text/plain")
    for flush in range(flushes):
        for number, path in enumerate(paths):
            if number % 2 == 0:
                scene.append(path, *({"n": flush * 10 + i, "stream": number, "pad": "x" * 50} for i in range(5)))
            else:
                body = f"<{flush}.{number}>".encode() * 20
                answer = scene.client.post(path, headers={"content-type": "text/plain"}, content=body)
                assert answer.status_code == 204
        scene.flushed()
    return paths


def longest(state: bytes | None, messages: list[bytes]) -> bytes:
    """A fold of a user's own: the longest message so far."""
    return max([state or b"", *messages], key=len)
