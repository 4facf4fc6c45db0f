"""Yjs documents as tests use them: over plain HTTP with pycrdt, and through real clients in Node."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from pycrdt import Doc, Text

from millstream.yjs import apply_updates, frame_update

CLIENTS = Path(__file__).parents[1] / "yjs" / "clients.js"
OCTETS = {"content-type": "application/octet-stream"}
WAIT_SECONDS = 20.0


class Typist:
    """Somebody who types: each change becomes an update to be posted."""

    def __init__(self) -> None:
        self.doc = Doc({"text": Text()})
        self.updates: list[bytes] = []
        self._subscription = self.doc.observe(lambda event: self.updates.append(event.update))
        self._length = 0

    def type(self, text: str) -> bytes:
        self.doc["text"].insert(self._length, text)
        self._length += len(text)
        return self.updates[-1]

    @property
    def text(self) -> str:
        return str(self.doc["text"])


class DocumentClient:
    """A document's routes, and the states they are waited for."""

    def __init__(self, base_url: str, path: str) -> None:
        self.url = f"{base_url}/docs/{path}"
        self.http = httpx.Client(timeout=70)

    def create(self) -> DocumentClient:
        self.http.put(self.url, headers=OCTETS).raise_for_status()
        return self

    def get(self, **query: str) -> httpx.Response:
        return self.http.get(self.url, params=query)

    def post(self, body: bytes, **query: str) -> httpx.Response:
        return self.http.post(self.url, content=body, params=query, headers=OCTETS)

    def write(self, *updates: bytes) -> str:
        """Post updates in one request; returns the offset behind them."""
        answer = self.post(b"".join(map(frame_update, updates)))
        assert answer.status_code == 204, answer.text
        return answer.headers["stream-next-offset"]

    def discover(self) -> str:
        """Where discovery leads: `-1`, or a snapshot's name."""
        answer = self.get(offset="snapshot")
        assert answer.status_code == 307, answer.text
        return str(httpx.URL(answer.headers["location"]).params["offset"])

    def wait_for_snapshot(self, *, other_than: str = "-1") -> str:
        return str(wait_for(self.discover, lambda token: token not in ("-1", other_than)))

    def load(self) -> str:
        """The text that a new reader sees: by way of the snapshot, then up to the tail."""
        doc = Doc({"text": Text()})
        token = self.discover()
        if token != "-1":
            answer = self.get(offset=token)
            answer.raise_for_status()
            doc.apply_update(answer.content)
            token = answer.headers["stream-next-offset"]
        self._read_on(doc, token)
        return str(doc["text"])

    def load_from_beginning(self) -> str:
        doc = Doc({"text": Text()})
        self._read_on(doc, "-1")
        return str(doc["text"])

    def _read_on(self, doc: Doc[Text], token: str) -> None:
        while True:
            answer = self.get(offset=token)
            answer.raise_for_status()
            apply_updates(doc, answer.content)
            token = answer.headers["stream-next-offset"]
            if answer.headers.get("stream-up-to-date") == "true":
                return


def wait_for(look: Callable[[], Any], holds: Callable[[Any], bool], seconds: float = WAIT_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if holds(seen):
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s; last seen: {seen!r}")
        time.sleep(0.02)


class NodeClients:
    """The published provider, in a Node process of its own; any number of clients in it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", str(CLIENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CLIENTS.parent
        )
        self._numbers = itertools.count(1)

    def ask(self, command: str, **options: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **options}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise AssertionError(f"{command}: {answer['error']}")
        return answer["value"]

    def join(self, base_url: str, path: str, **options: Any) -> NodeClient:
        """A new client that has loaded the document."""
        client = NodeClient(self, f"client-{next(self._numbers)}")
        client.loaded = client.ask("load", baseUrl=base_url, docId=path, **options)
        return client

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class NodeClient:
    def __init__(self, node: NodeClients, name: str) -> None:
        self._node = node
        self._name = name
        self.loaded: dict[str, float] = {}

    def ask(self, command: str, **options: Any) -> Any:
        return self._node.ask(command, id=self._name, **options)

    @property
    def text(self) -> str:
        return str(self.ask("text"))

    def insert(self, text: str, index: int | None = None) -> None:
        self.ask("insert", text=text, index=index)

    def wait_for_text(self, text: str, seconds: float = WAIT_SECONDS) -> None:
        self.ask("waitText", text=text, milliseconds=seconds * 1000)

    def wait_for_length(self, length: int, seconds: float = WAIT_SECONDS) -> None:
        self.ask("waitLength", length=length, milliseconds=seconds * 1000)

    def wait_for_present(self, *names: str, seconds: float = WAIT_SECONDS) -> None:
        self.ask("waitPresent", names=list(names), milliseconds=seconds * 1000)
