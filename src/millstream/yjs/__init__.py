"""Yjs documents over streams: their names, framing and compaction. The HTTP routes are in `server/api`.

The documents of a service are in the bucket of that name: document `path` is the byte stream `docs/{path}`, and its
awareness streams are `awareness/{path}/{name}`. They are ordinary streams, so listings, feeds, Parquet and Spark show
them as such. Each message holds one or more lib0-framed Yjs updates, exactly as a client sent them. A document's
snapshot is its stream's snapshot, published without trimming.

From Python, with `pip install 'millstream[yjs]'`, a document is its snapshot and the updates after it, applied to a
`pycrdt.Doc`:

    from pycrdt import Doc, Text
    from millstream.yjs import apply_updates, frame_update

    document = "http://127.0.0.1:4437/v1/yjs/notes/docs/plan"
    doc = Doc({"text": Text()})
    answer = httpx.get(document, params={"offset": "snapshot"}, follow_redirects=True)
    if answer.url.params["offset"].endswith("_snapshot"):
        doc.apply_update(answer.content)                 # a snapshot is one update, not framed
    else:
        apply_updates(doc, answer.content)               # there is none yet: the first updates, framed
    offset = answer.headers["stream-next-offset"]        # where the next read goes on, live=true or not

    doc.observe(lambda event: httpx.post(document, content=frame_update(event.update), headers=...))

`examples/yjs_document.py` is that as a program. This module imports neither pycrdt nor anything of the server.
"""

from __future__ import annotations

from typing import Protocol

from millstream.protocol.lib0 import frame_update, split_frames

__all__ = ["AppliesUpdates", "apply_updates", "frame_update", "split_frames"]


class AppliesUpdates(Protocol):
    """A `pycrdt.Doc`, or any other object that takes Yjs updates."""

    def apply_update(self, update: bytes) -> None: ...


def apply_updates(doc: AppliesUpdates, data: bytes) -> int:
    """Apply the framed updates that a read of a document returned; returns how many there were."""
    updates = split_frames(data)
    for update in updates:
        doc.apply_update(update)
    return len(updates)
