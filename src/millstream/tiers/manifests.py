"""Manifests: what one flush added to the cold tier, beside its segments. See docs/formats/manifest.md.

A manifest holds the catalog rows that changed since the flush before it, so the chain of them, in order of
position, is the catalog: a new machine rebuilds everything from manifests and segments alone. Now and then a full
one, in several parts, holds every row and makes the ones before it superfluous.

What happened to streams besides messages (created, closed, deleted, snapshots) is in a notes object of its own, which
the feed reads.

Compaction replaces segments by others; a manifest says so in `replacements`. `ColdView` is what a chain amounts to.

Each manifest names the one before it by its digest and carries the epoch of the owner that wrote it (`owners.py`). So
a chain can be verified, a missing link is told from the leftover of a crash, and what an owner wrote after it had been
replaced does not count. `find_chain` is the one place that decides which manifests count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.errors import Corrupt, OtherFormat
from millstream.protocol.producers import ProducerState
from millstream.streams.records import SegmentRef
from millstream.tiers.checked import Checked, seal, unseal
from millstream.units import Incarnation, Milliseconds, Offset, Position

FORMAT: Final = 5

T = TypeVar("T")


class ManifestStream(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stream's name (`bucket \\0 stream`) and its StreamRow (`stream_rows.py`), as the catalog holds it."""

    incarnation: Incarnation
    name: bytes
    row: bytes
    expires: bool
    blob: bytes | None


class ManifestFlush(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One flush: the positions it covers, its notes (or "") and its segments."""

    first: Position
    through: Position
    notes: str
    segments: list[SegmentRef]


class Replacement(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A compaction: the paths of segments that no longer count, and those that hold their live messages instead.

    In a full manifest nothing is replaced: it lists the compacted segments there are.
    """

    replaced: list[str]
    segments: list[SegmentRef]


class ManifestFormat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every manifest of every version begins with."""

    format: int


class Manifest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Brings a catalog from position `first` to position `through`.

    A full one has `first` 0 and comes in `parts`; only together do they say everything.
    """

    format: int
    shard: int
    first: Position
    through: Position
    at_ms: Milliseconds
    part: int
    parts: int
    flushes: list[ManifestFlush]
    removed_segments: list[str]
    streams: list[ManifestStream]
    removed_streams: list[tuple[Incarnation, bytes]]
    trimmed: list[tuple[Incarnation, Offset]]
    singletons: dict[str, bytes]
    replacements: list[Replacement] = []
    # Only in full ones: paths that were replaced and are not deleted yet.
    retired: list[str] = []
    # Whose it is, and the digest of the manifest that ends where this one begins; nothing for the first. A full one has
    # the digest of the one whose state it repeats.
    epoch: int = 0
    previous: bytes = b""
    # What changed of producers, by incarnation.
    producers: list[tuple[Incarnation, dict[str, ProducerState]]] = []


class _Skimmed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A manifest of which only what a chain needs is decoded: the rest may be very much."""

    format: int
    shard: int
    first: Position
    through: Position
    at_ms: Milliseconds
    part: int
    parts: int
    flushes: msgspec.Raw
    removed_segments: msgspec.Raw
    streams: msgspec.Raw
    removed_streams: msgspec.Raw
    trimmed: msgspec.Raw
    singletons: msgspec.Raw
    replacements: msgspec.Raw = msgspec.Raw()
    retired: msgspec.Raw = msgspec.Raw()
    epoch: int = 0
    previous: bytes = b""


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
    position: Position
    event: str
    stream: str
    at_ms: Milliseconds
    offset: Offset
    content_type: str


class ManifestHead(NamedTuple):
    """What a chain is built from."""

    path: str
    first: Position
    through: Position
    part: int
    parts: int
    at_ms: Milliseconds = Milliseconds(0)
    epoch: int = 0
    digest: bytes = b""
    previous: bytes = b""

    @property
    def is_full(self) -> bool:
        return self.first == 0

    @property
    def state(self) -> bytes:
        """The digest by which a successor names what this manifest leads to."""
        return self.previous if self.is_full else self.digest


class Chain(NamedTuple):
    """The manifests that count, in order, and what else there is.

    `beyond` reach further than the chain does, and cannot be reached: one or more manifests are missing before them.
    `passed` were overtaken: leftovers of crashes, what an earlier owner wrote too late, what a full one repeats.
    """

    heads: list[ManifestHead]
    beyond: list[ManifestHead]
    passed: list[ManifestHead]

    @property
    def through(self) -> Position:
        return self.heads[-1].through if self.heads else Position(1)

    @property
    def state(self) -> bytes:
        return self.heads[-1].state if self.heads else b""


_ENCODER: Final = msgspec.msgpack.Encoder()
_FORMAT: Final = msgspec.msgpack.Decoder(ManifestFormat)
_MANIFEST: Final = msgspec.msgpack.Decoder(Manifest)
_SKIMMED: Final = msgspec.msgpack.Decoder(_Skimmed)
_NOTES: Final = msgspec.msgpack.Decoder(list[FeedNote])


encode_manifest_streams: Final = msgspec.msgpack.Encoder().encode
decode_manifest_streams: Final = msgspec.msgpack.Decoder(list[ManifestStream]).decode
"""The rows of a manifest by themselves: they may be very many, and are handed on as they are."""


def encode_manifest(manifest: Manifest, rows: bytes | None = None) -> bytes:
    """A manifest; its rows may be encoded already."""
    if rows is not None:
        encoded: Any = msgspec.Raw(rows)
        manifest = msgspec.structs.replace(manifest, streams=encoded)
    return seal(_ENCODER.encode(manifest))


def read_manifest(data: bytes, path: str) -> tuple[Manifest, ManifestHead]:
    """A manifest, and what a chain needs of it."""
    checked = unseal(data, path)
    manifest = _decode(_MANIFEST, checked, path)
    return manifest, _head(path, manifest, checked)


def read_head(data: bytes, path: str) -> ManifestHead:
    """Only what a chain needs of a manifest, of which every byte is compared with its digest all the same."""
    checked = unseal(data, path)
    return _head(path, _decode(_SKIMMED, checked, path), checked)


def _decode(decoder: msgspec.msgpack.Decoder[T], checked: Checked, path: str) -> T:
    try:
        found = _FORMAT.decode(checked.content).format
        if found != FORMAT:
            raise OtherFormat(f"the manifest {path}", found=found, known=FORMAT)
        return decoder.decode(checked.content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the manifest {path} cannot be read: {error}", code="object_damaged") from None


def _head(path: str, manifest: Manifest | _Skimmed, checked: Checked) -> ManifestHead:
    return ManifestHead(
        path,
        manifest.first,
        manifest.through,
        manifest.part,
        manifest.parts,
        manifest.at_ms,
        manifest.epoch,
        checked.digest,
        manifest.previous,
    )


def encode_notes(notes: list[FeedNote]) -> bytes:
    return seal(_ENCODER.encode(notes))


def decode_notes(data: bytes, path: str) -> list[FeedNote]:
    try:
        return _NOTES.decode(unseal(data, path).content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the notes {path} cannot be read: {error}", code="object_damaged") from None


def find_chain(heads: list[ManifestHead]) -> Chain:
    """The manifests that count: from the beginning or a whole full one, each linked to the one before it.

    Where there is a choice, the owner with the later epoch is right, and of one owner's the one that reaches further: a
    crash, or a flush that failed, may leave a manifest that was never sealed beside its successor.
    """
    full: dict[tuple[Position, bytes, int], dict[int, ManifestHead]] = {}
    steps: dict[Position, list[ManifestHead]] = {}
    for head in heads:
        if head.is_full:
            full.setdefault((head.through, head.previous, head.epoch), {})[head.part] = head
        else:
            steps.setdefault(head.first, []).append(head)
    starts: list[tuple[Position, bytes, list[ManifestHead]]] = [(Position(1), b"", [])]
    for (through, state, _), parts in full.items():
        if len(parts) == max(part.parts for part in parts.values()):  # only the last one knows how many
            starts.append((through, state, [parts[number] for number in sorted(parts)]))
    best: list[ManifestHead] = []
    follow = _follower(steps)
    for position, state, chain in sorted(starts, key=lambda start: start[0]):
        extended = [*chain, *follow(position, state)]
        if extended and (not best or _reach(extended[-1]) >= _reach(best[-1])):
            best = extended
    return _with_the_rest(best, heads)


def _reach(head: ManifestHead) -> tuple[int, Position]:
    return head.epoch, head.through


def _follower(steps: dict[Position, list[ManifestHead]]) -> Callable[[Position, bytes], list[ManifestHead]]:
    """Follows the steps from a place, by those that lead furthest."""
    # From the last to the first, so that whatever a step leads to is known when it is judged.
    ends: dict[str, tuple[int, Position, Milliseconds]] = {}
    following: dict[str, ManifestHead | None] = {}

    def choose(position: Position, state: bytes) -> ManifestHead | None:
        options = [step for step in steps.get(position, ()) if not (step.previous and state) or step.previous == state]
        return max(options, key=lambda step: ends[step.path], default=None)

    for first in sorted(steps, reverse=True):
        for step in steps[first]:
            after = following[step.path] = choose(step.through, step.digest) if step.through > first else None
            ends[step.path] = ends[after.path] if after is not None else (step.epoch, step.through, step.at_ms)

    def follow(position: Position, state: bytes) -> list[ManifestHead]:
        found: list[ManifestHead] = []
        step = choose(position, state)
        while step is not None:
            found.append(step)
            step = following[step.path]
        return found

    return follow


def _with_the_rest(best: list[ManifestHead], heads: list[ManifestHead]) -> Chain:
    """Tell apart what was overtaken and what lies behind a hole."""
    counted = {head.path for head in best}
    through = best[-1].through if best else Position(1)
    # What a place on the chain leads to was there to be chosen and was not, and so was what follows that in turn.
    reached: dict[Position, set[bytes]] = {Position(1): {b""}}
    for head in best:
        reached.setdefault(head.through, set()).add(head.state)
    beyond, passed = [], []
    for head in sorted((one for one in heads if one.path not in counted), key=lambda one: (one.first, one.through)):
        states = reached.get(head.first, set())
        is_linked = not head.is_full and bool(states) and (not head.previous or bool(states & {b"", head.previous}))
        if is_linked:
            reached.setdefault(head.through, set()).add(head.state)
        if is_linked or head.through <= through:
            passed.append(head)
        else:
            beyond.append(head)
    return Chain(best, beyond, passed)
