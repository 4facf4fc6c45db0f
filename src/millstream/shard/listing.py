"""Listing: the streams of a bucket in order, a page at a time.

The catalog has most of them, sorted, as of the last checkpoint; streams that changed since are in memory. A page
costs what it holds plus what changed, however many streams there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

from millstream.protocol.keys import StreamKey
from millstream.streams.namespace import Namespace
from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog
from millstream.tiers.stream_rows import decode_key, decode_stream, encode_key
from millstream.units import Milliseconds


class Page(NamedTuple):
    streams: list[Stream]
    has_more: bool


class Listing:
    def __init__(self, namespace: Namespace, catalog: Catalog) -> None:
        self._namespace = namespace
        self._catalog = catalog

    def page(self, bucket: str, prefix: str, after: str, limit: int, now_ms: Milliseconds) -> Page:
        """Up to `limit` live streams whose names start with `prefix` and sort behind `after`."""
        found = list(islice(self._live(bucket, prefix, after, now_ms), limit + 1))
        return Page(found[:limit], len(found) > limit)

    def _live(self, bucket: str, prefix: str, after: str, now_ms: Milliseconds) -> Iterator[Stream]:
        unsaved = {
            encode_key(stream.key): stream
            for stream in self._namespace.unsaved()
            if stream.key.bucket == bucket and stream.key.stream.startswith(prefix) and stream.key.stream > after
        }
        saved = self._saved(bucket, prefix, after)
        last = None
        for name, row in merge(saved, ((name, b"") for name in sorted(unsaved)), key=lambda item: item[0]):
            if name == last:
                continue
            last = name
            stream = unsaved.get(name) or self._current(name, row)
            if stream is not None and not stream.deleted and not self._namespace.is_expired(stream, now_ms):
                yield stream

    def _saved(self, bucket: str, prefix: str, after: str) -> Iterator[tuple[bytes, bytes]]:
        start = encode_key(StreamKey(bucket, after)) if after else b""
        return self._catalog.scan(encode_key(StreamKey(bucket, prefix)), start)

    def _current(self, name: bytes, row: bytes) -> Stream | None:
        """The stream of a catalog row, unless it is gone since; not kept in memory for having been listed."""
        stream = decode_stream(decode_key(name), row)
        if self._namespace.is_removed(stream.incarnation):
            return None
        return self._namespace.if_resident(stream.incarnation) or stream
