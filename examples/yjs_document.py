"""A shared text in the terminal: shows a Yjs document as others edit it, and adds the lines you type.

    millstream serve --examples                  # and open /examples/editor/?doc=welcome in a browser
    python examples/yjs_document.py              # --url http://127.0.0.1:4437/v1/yjs/notes/docs/welcome

Needs `pip install 'millstream[yjs]'`. With `--once` it prints the text as it is and ends.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from urllib.parse import quote

from pycrdt import Doc, Text, TransactionEvent

from millstream.client import Call, Client, Request
from millstream.yjs import apply_updates, frame_update

OCTETS = {"content-type": "application/octet-stream"}


class SharedText:
    """The text of a document, kept up to date; what is added to it goes to everybody."""

    def __init__(self, url: str) -> None:
        server, _, document = url.partition("/v1/yjs/")
        service, _, path = document.partition("/docs/")
        self.client = Client(server)
        self.target = f"/v1/yjs/{quote(service)}/docs/{quote(path)}"
        self.lock = threading.Lock()
        self.doc = Doc({"text": Text()})
        self._send("PUT")  # if it is not there yet
        # A document's updates are a stream like any other, in the bucket of its service.
        self.updates = self.client.stream(f"{service}/docs/{path}")
        start = self.updates.bootstrap()
        if start.snapshot is not None:
            self.doc.apply_update(start.snapshot.data)
        apply_updates(self.doc, b"".join(start.messages))
        self.offset = start.next_offset

    def _send(self, method: str, body: bytes = b"") -> None:
        self.client.call(Call(Request(method, self.target, OCTETS, body), lambda answer: None))

    def changes(self) -> Iterator[None]:
        """Take in what others write, for ever; one turn for each time that something changed."""
        for chunk in self.updates.follow(self.offset):
            with self.lock:
                changed = apply_updates(self.doc, chunk.data)
            if changed:
                yield

    def add(self, line: str) -> None:
        updates: list[bytes] = []

        def note(event: TransactionEvent) -> None:
            updates.append(event.update)

        with self.lock:
            subscription = self.doc.observe(note)
            text = self.doc["text"]
            text.insert(len(text), line)
            self.doc.unobserve(subscription)
        # Applied twice, an update changes nothing more: it may be sent again without asking whether it arrived.
        self._send("POST", b"".join(frame_update(update) for update in updates))

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
        for _ in shared.changes():
            print(f"\n--- now ---\n{shared}", flush=True)

    threading.Thread(target=follow, daemon=True).start()
    for line in sys.stdin:
        shared.add(line)


if __name__ == "__main__":
    main()
