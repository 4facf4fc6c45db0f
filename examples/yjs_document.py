"""A shared text in the terminal: shows a Yjs document as others edit it, and adds the lines you type.

    millstream serve --examples                  # and open /examples/editor/?doc=welcome in a browser
    python examples/yjs_document.py              # --url http://127.0.0.1:4437/v1/yjs/notes/docs/welcome

Needs `pip install 'millstream[yjs]' httpx`. With `--once` it prints the text as it is and ends.
"""

from __future__ import annotations

import argparse
import sys
import threading

import httpx
from pycrdt import Doc, Text, TransactionEvent

from millstream.yjs import apply_updates, frame_update

OCTETS = {"content-type": "application/octet-stream"}


class SharedText:
    """The text of a document, kept up to date; what is added to it goes to everybody."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=90)
        self.lock = threading.Lock()
        self.doc = Doc({"text": Text()})
        self.offset = self._load()

    def _load(self) -> str:
        """Take the snapshot, if there is one, and the updates after it; returns where to read on."""
        self.http.put(self.url, headers=OCTETS).raise_for_status()
        answer = self.http.get(self.url, params={"offset": "snapshot"}, follow_redirects=True).raise_for_status()
        if answer.url.params["offset"].endswith("_snapshot"):
            self.doc.apply_update(answer.content)
            answer = self._read(answer.headers["stream-next-offset"])
        apply_updates(self.doc, answer.content)
        while answer.headers.get("stream-up-to-date") != "true":
            answer = self._read(answer.headers["stream-next-offset"])
            apply_updates(self.doc, answer.content)
        return answer.headers["stream-next-offset"]

    def _read(self, offset: str, **query: str) -> httpx.Response:
        return self.http.get(self.url, params={"offset": offset, **query}).raise_for_status()

    def wait(self) -> bool:
        """Wait for updates, for up to a minute; returns whether there were any."""
        answer = self._read(self.offset, live="true")
        self.offset = answer.headers["stream-next-offset"]
        with self.lock:
            return apply_updates(self.doc, answer.content) > 0

    def add(self, line: str) -> None:
        updates: list[bytes] = []

        def note(event: TransactionEvent) -> None:
            updates.append(event.update)

        with self.lock:
            subscription = self.doc.observe(note)
            text = self.doc["text"]
            text.insert(len(text), line)
            self.doc.unobserve(subscription)
        body = b"".join(frame_update(update) for update in updates)
        httpx.post(self.url, content=body, headers=OCTETS).raise_for_status()

    def __str__(self) -> str:
        with self.lock:
            return str(self.doc["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Show and edit a shared text.")
    parser.add_argument("--url", default="http://127.0.0.1:4437/v1/yjs/notes/docs/welcome")
    parser.add_argument("--once", action="store_true", help="print the text and end")
    options = parser.parse_args()
    shared = SharedText(options.url)
    print(shared, flush=True)
    if options.once:
        return

    def follow() -> None:
        while True:
            if shared.wait():
                print(f"\n--- now ---\n{shared}", flush=True)

    threading.Thread(target=follow, daemon=True).start()
    for line in sys.stdin:
        shared.add(line)


if __name__ == "__main__":
    main()
