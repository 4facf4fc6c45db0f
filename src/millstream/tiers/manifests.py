"""Manifests: what one flush added to the cold tier, beside its segments. See docs/formats/manifest.md.

A manifest holds the catalog rows that changed since the flush before it, so the chain of them, in order of
position, is the catalog: a new machine rebuilds everything from manifests and segments alone. It also holds the
notes of its piece of the log, which are not messages and so not in the segments.
"""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef

FORMAT: Final = 1


class ManifestStream(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A catalog row: the stream's name (`bucket \\0 stream`) and its StreamRow."""

    incarnation: int
    name: bytes
    row: bytes
    expires: bool
    blob: bytes | None


class ManifestNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    bucket: str
    position: int
    event: str
    stream: str
    at_ms: int
    offset: int
    content_type: str


class Manifest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Positions `first` up to `through`. A `full` one holds every row and starts a chain."""

    format: int
    shard: int
    first: int
    through: int
    at_ms: int
    full: bool
    segments: list[SegmentRef]
    removed_segments: list[str]
    streams: list[ManifestStream]
    removed_streams: list[tuple[int, bytes]]
    trimmed: list[tuple[int, int]]
    singletons: dict[str, bytes]
    notes: list[ManifestNote]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes, path: str) -> Manifest:
    try:
        manifest = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the manifest {path} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise Corrupt(f"the manifest {path} has format {manifest.format}; this millstream reads format {FORMAT}")
    return manifest
