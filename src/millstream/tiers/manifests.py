"""Manifests: what one flush added to the cold tier, beside its segments. See docs/formats/manifest.md.

A manifest holds the catalog rows that changed since the flush before it, so the chain of them, in order of
position, is the catalog: a new machine rebuilds everything from manifests and segments alone. Now and then a full
one, in several parts, holds every row and makes the ones before it superfluous.

What happened to streams besides messages (created, closed, deleted, snapshots) is in a notes object of its own, which
the feed reads.

Compaction replaces segments by others; a manifest says so in `replacements`. `ColdView` is what a chain amounts to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef

FORMAT: Final = 1
# The format of manifests that know of compaction: a reader that does not must refuse them.
FORMAT_WITH_REPLACEMENTS: Final = 2


class ManifestStream(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A catalog row: the stream's name (`bucket \\0 stream`) and its StreamRow."""

    incarnation: int
    name: bytes
    row: bytes
    expires: bool
    blob: bytes | None


class ManifestFlush(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One flush: the positions it covers, its notes (or "") and its segments."""

    first: int
    through: int
    notes: str
    segments: list[SegmentRef]


class Replacement(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A compaction: the paths of segments that no longer count, and those that hold their live messages instead.

    In a full manifest nothing is replaced: it lists the compacted segments there are.
    """

    replaced: list[str]
    segments: list[SegmentRef]


class Manifest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Brings a catalog from position `first` to position `through`.

    A full one has `first` 0 and comes in `parts`; only together do they say everything.
    """

    format: int
    shard: int
    first: int
    through: int
    at_ms: int
    part: int
    parts: int
    flushes: list[ManifestFlush]
    removed_segments: list[str]
    streams: list[ManifestStream]
    removed_streams: list[tuple[int, bytes]]
    trimmed: list[tuple[int, int]]
    singletons: dict[str, bytes]
    replacements: list[Replacement] = []
    # Only in full ones: paths that were replaced and are not deleted yet.
    retired: list[str] = []


def manifest_format(replacements: list[Replacement], retired: list[str]) -> int:
    return FORMAT_WITH_REPLACEMENTS if replacements or retired else FORMAT


class ColdView:
    """The segments that a chain of manifests, added in order, leaves: those that count, and those on their way out."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self.segments: dict[str, SegmentRef] = {}
        self.retired: set[str] = set()
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        for flush in manifest.flushes:
            self.segments.update({segment.path: segment for segment in flush.segments})
        for replacement in manifest.replacements:
            for path in replacement.replaced:
                self.segments.pop(path, None)
            self.retired.update(replacement.replaced)
            self.segments.update({segment.path: segment for segment in replacement.segments})
        self.retired.update(manifest.retired)
        for path in manifest.removed_segments:
            self.segments.pop(path, None)
            self.retired.discard(path)


class FeedNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    bucket: str
    position: int
    event: str
    stream: str
    at_ms: int
    offset: int
    content_type: str


class ManifestHead(NamedTuple):
    """What a chain is built from."""

    path: str
    first: int
    through: int
    part: int
    parts: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_MANIFEST: Final = msgspec.msgpack.Decoder(Manifest)
_NOTES: Final = msgspec.msgpack.Decoder(list[FeedNote])


encode_rows: Final = msgspec.msgpack.Encoder().encode
decode_rows: Final = msgspec.msgpack.Decoder(list[ManifestStream]).decode
"""The rows of a manifest by themselves: they may be very many, and are handed on as they are."""


def encode_manifest(manifest: Manifest, rows: bytes | None = None) -> bytes:
    """A manifest; its rows may be encoded already."""
    if rows is not None:
        encoded: Any = msgspec.Raw(rows)
        manifest = msgspec.structs.replace(manifest, streams=encoded)
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes, path: str) -> Manifest:
    try:
        manifest = _MANIFEST.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the manifest {path} cannot be read: {error}") from None
    if manifest.format not in (FORMAT, FORMAT_WITH_REPLACEMENTS):
        raise Corrupt(f"the manifest {path} has format {manifest.format}; this millstream reads formats 1 and 2")
    return manifest


def encode_notes(notes: list[FeedNote]) -> bytes:
    return _ENCODER.encode(notes)


def decode_notes(data: bytes, path: str) -> list[FeedNote]:
    try:
        return _NOTES.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the notes {path} cannot be read: {error}") from None


def longest_chain(heads: list[ManifestHead]) -> list[ManifestHead]:
    """The manifests that together reach furthest, in order: a whole full one or the beginning, then one after another.

    A crash may leave a manifest that was never sealed beside its successor; the chain that goes further is the one
    that was.
    """
    full: dict[int, dict[int, ManifestHead]] = {}
    steps: dict[int, list[ManifestHead]] = {}
    for head in heads:
        if head.first == 0:
            full.setdefault(head.through, {})[head.part] = head
        else:
            steps.setdefault(head.first, []).append(head)
    starts: dict[int, list[ManifestHead]] = {1: []}
    for through, parts in full.items():
        if len(parts) == max(part.parts for part in parts.values()):  # only the last one knows how many
            starts[through] = [parts[number] for number in sorted(parts)]
    best: list[ManifestHead] = []
    for position, chain in sorted(starts.items()):
        extended = _extend(chain, position, steps)
        if not best or (extended and extended[-1].through >= best[-1].through):
            best = extended or best
    return best


def _extend(chain: list[ManifestHead], position: int, steps: dict[int, list[ManifestHead]]) -> list[ManifestHead]:
    """Follow the steps from a position as far as they go, by the furthest reach from each place."""
    reach: dict[int, tuple[int, ManifestHead | None]] = {}
    for first in sorted(steps, reverse=True):
        options = [(reach.get(step.through, (step.through, None))[0], step) for step in steps[first]]
        reach[first] = max(options, key=lambda option: option[0])
    chain = list(chain)
    while (step := reach.get(position, (0, None))[1]) is not None:
        chain.append(step)
        position = step.through
    return chain
