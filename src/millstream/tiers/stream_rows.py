"""A stream as bytes: the one codec for streams, in the catalog, in manifests and on the way there.

A stream has two forms. In memory it is a `Stream` (`streams/state.py`). Stored it is a `StreamRow`: the table of
streams holds it behind the stream's newest extents (`pack_stream`), and a manifest holds the same bytes in a
`ManifestStream`, beside its name and what the catalog keeps references for: whether it expires, and its snapshot's
blob. On the way from the loop to whoever writes rows, a stream is the plain msgpack of its `Stream`
(`encode_captured`), which has all of its fields by itself.

How a new field travels:

1. it is added to `Stream`, with a default, before `ahead`, and a record's effect in `streams/machine.py` sets it;
2. it is added at the end of `StreamRow`, with the value that most streams have as its default, at the end of
   `_DEFAULTS`, and at the end of the values in `encode_stream`;
3. it is handed to `Stream` in `decode_stream`.

A row that was written before has the default then, so formats stay as they are. `tests/unit/tiers/test_catalog.py`
compares every field of `Stream` after a round trip.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from millstream.caches import cached
from millstream.protocol.content_types import JSON, OCTET_STREAM, media_type
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.streams.records import ForkPoint, SnapshotRef
from millstream.streams.state import Stream
from millstream.tiers.manifests import ManifestStream
from millstream.units import Incarnation, Milliseconds, Offset

# In a row these are numbers: the place here, so more may follow but none may move.
COMMON_TYPES: Final = (
    OCTET_STREAM,
    JSON,
    "text/plain",
    "text/plain; charset=utf-8",
    "text/plain;charset=utf-8",
    "application/json; charset=utf-8",
    "application/json;charset=utf-8",
    "application/x-ndjson",
    "text/markdown",
    "text/html",
    "application/cbor",
    "application/msgpack",
    "application/x-protobuf",
)
_NUMBERS: Final[dict[str, int | str]] = {content_type: number for number, content_type in enumerate(COMMON_TYPES)}


class StreamRow(msgspec.Struct, array_like=True, gc=False):
    """A stream in few bytes: a flush of very many streams writes the less, and more of them fit into memory. What most
    streams do not have comes last, and is left out if nothing behind it is there.
    """

    content_type: Annotated[int, msgspec.Meta(ge=0, lt=len(COMMON_TYPES))] | str
    created_at_ms: Milliseconds
    written_after_ms: Milliseconds  # since it was created
    accessed_after_ms: Milliseconds  # since it was written to
    tail: Offset
    closed: bool = False
    expiry: Expiry = NEVER
    earliest: Offset = Offset(0)
    snapshot: SnapshotRef | None = None
    closed_by: ProducerClaim | None = None
    seq: str | None = None
    fork: ForkPoint | None = None
    forks: int = 0
    soft_deleted: bool = False


# What is always there has none.
_DEFAULTS: Final[tuple[object, ...]] = (*(None,) * 5, False, NEVER, 0, None, None, None, None, 0, False)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_row: Final = msgspec.msgpack.Decoder(StreamRow).decode


# -- names -----------------------------------------------------------------------------------------------------------


def encode_key(key: StreamKey) -> bytes:
    return f"{key.bucket}\0{key.stream}".encode()


def decode_key(raw: bytes) -> StreamKey:
    bucket, _, stream = raw.decode().partition("\0")
    return StreamKey(bucket, stream)


# -- captured streams --------------------------------------------------------------------------------------------------

# A stream as it is, in the least time: what becomes of it is for whoever writes the catalog. Private to a process and
# those it starts, not a format.
decode_captured: Final = msgspec.msgpack.Decoder(list[Stream]).decode


def encode_captured(stream: Stream) -> bytes:
    hot, stream.hot = stream.hot, None
    encoded = _encode(stream)
    stream.hot = hot
    return encoded


# -- rows --------------------------------------------------------------------------------------------------------------


def encode_stream(stream: Stream) -> ManifestStream:
    written_at_ms, snapshot = stream.last_write_at_ms, stream.snapshot
    values = (
        _NUMBERS.get(stream.content_type, stream.content_type),
        stream.created_at_ms,
        written_at_ms - stream.created_at_ms,
        stream.last_access_ms - written_at_ms,
        stream.tail,
        stream.closed,
        stream.expiry,
        stream.earliest,
        snapshot,
        stream.closed_by,
        stream.seq,
        stream.fork,
        stream.forks,
        stream.soft_deleted,
    )
    count = len(values)
    while values[count - 1] == _DEFAULTS[count - 1]:
        count -= 1
    return ManifestStream(
        stream.incarnation,
        encode_key(stream.key),
        _encode(values[:count]),
        stream.expiry.deadline_ms(Milliseconds(0)) is not None,
        snapshot.blob.encode() if snapshot is not None else None,
    )


def decode_stream(key: StreamKey, packed: bytes) -> Stream:
    """A stream of the table of streams."""
    incarnation, size = _HEAD.unpack_from(packed)
    row = _decode_row(packed[_HEAD.size + size :])
    content_type, is_json = _COMMON[row.content_type] if isinstance(row.content_type, int) else _kind(row.content_type)
    at_ms = row.created_at_ms + row.written_after_ms
    expiry = row.expiry
    return Stream(  # by position: by name it takes twice the time
        incarnation,
        key,
        content_type,
        is_json,
        row.created_at_ms,
        at_ms,
        at_ms + row.accessed_after_ms if row.accessed_after_ms else at_ms,
        row.tail,
        NEVER if expiry is NEVER or expiry == NEVER else expiry,
        row.fork,
        row.closed,
        row.closed_by,
        row.seq,
        row.earliest,
        row.snapshot,
        row.forks,
        row.soft_deleted,
        row.soft_deleted,
    )


def decode_manifest_stream(stream: ManifestStream) -> Stream:
    return decode_stream(decode_key(stream.name), pack_stream(stream.incarnation, NO_EXTENTS, stream.row))


@cached("stored_content_types", 1024)
def _kind(content_type: str) -> tuple[str, bool]:
    """The type as it was given, one object for all streams, and whether it is JSON."""
    return content_type, media_type(content_type) == JSON


_COMMON: Final = [_kind(one) for one in COMMON_TYPES]


# -- the table of streams ----------------------------------------------------------------------------------------------

# What it holds of a stream: incarnation, how many bytes of extents, the extents, the StreamRow. The extents are an
# array of a few, whose first byte says how many.
_HEAD: Final = struct.Struct(">QH")
_COUNT: Final = 0x90
NO_EXTENTS: Final = bytes([_COUNT])
OWN_EXTENTS_MAX: Final = 8
_COUNTS: Final = [bytes([_COUNT | count]) for count in range(OWN_EXTENTS_MAX + 1)]


def pack_stream(incarnation: Incarnation, extents: bytes, row: bytes) -> bytes:
    return _HEAD.pack(incarnation, len(extents)) + extents + row


def row_of(packed: bytes) -> bytes:
    return packed[_HEAD.size + _HEAD.unpack_from(packed)[1] :]


def own_extents(packed: bytes | None, incarnation: Incarnation) -> bytes:
    """The extents in a row, if there is one and it is this incarnation's."""
    if packed is None:
        return NO_EXTENTS
    owner, size = _HEAD.unpack_from(packed)
    return packed[_HEAD.size : _HEAD.size + size] if owner == incarnation else NO_EXTENTS


def with_extents(own: bytes, added: Sequence[bytes]) -> bytes | None:
    """A row's extents and more of them, unless those are more than a row should hold."""
    count = (own[0] ^ _COUNT) + len(added)
    if count > OWN_EXTENTS_MAX:
        return None
    return b"".join((_COUNTS[count], own[1:], *added))
