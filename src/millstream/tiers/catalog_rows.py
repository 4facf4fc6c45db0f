"""The catalog's rows: what is stored of streams, buckets, subscriptions, segments and flushes, and as which bytes.

Rows are msgpack arrays; fields are only added at the end, with a default. `tiers/catalog_tables.py` says which table
holds which, under which key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from millstream.caches import cached
from millstream.protocol.content_types import JSON, OCTET_STREAM, media_type
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim, ProducerState
from millstream.streams.machine import StateMachine
from millstream.streams.records import (
    ForkPoint,
    SecretsCreated,
    SegmentRef,
    SnapshotRef,
    StoreClaimed,
    SubscriptionConfig,
    Wake,
)
from millstream.streams.state import Bucket, Stream
from millstream.streams.subscriptions import EXPLICIT, GLOB, Link, Links, Subscription
from millstream.tiers.manifests import ManifestStream


class StreamRow(msgspec.Struct, array_like=True, gc=False):
    """A stream as manifests tell of it."""

    incarnation: int
    content_type: str
    created_at_ms: int
    last_write_at_ms: int
    last_access_ms: int
    tail: int
    closed: bool
    closed_by: ProducerClaim | None
    seq: str | None
    expiry: Expiry
    fork: ForkPoint | None
    forks: int
    soft_deleted: bool
    earliest: int = 0
    snapshot: SnapshotRef | None = None


# In the table of streams these are numbers: the place here, so more may follow but none may move.
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


class StoredRow(msgspec.Struct, array_like=True, gc=False):
    """The same as the table of streams holds it, in few bytes: a flush of very many streams writes the less, and more
    of them fit into memory. What most streams do not have comes last and is left out if nothing behind it is there.
    """

    content_type: Annotated[int, msgspec.Meta(ge=0, lt=len(COMMON_TYPES))] | str
    created_at_ms: int
    written_after_ms: int  # since it was created
    accessed_after_ms: int  # since it was written to
    tail: int
    closed: bool = False
    expiry: Expiry = NEVER
    earliest: int = 0
    snapshot: SnapshotRef | None = None
    closed_by: ProducerClaim | None = None
    seq: str | None = None
    fork: ForkPoint | None = None
    forks: int = 0
    soft_deleted: bool = False


class BucketRow(msgspec.Struct, array_like=True, gc=False):
    name: str
    created_at_ms: int
    streams: int
    is_implicit: bool = False


class SubscriptionRow(msgspec.Struct, array_like=True, gc=False):
    """`packed` has the links as `streams.subscriptions.Links` packs them; older catalogs have `links` instead."""

    id: str
    created_at_ms: int
    base_url: str
    config: SubscriptionConfig
    links: dict[str, tuple[list[str], int]]
    generation: int
    wake: Wake | None
    retry_count: int
    next_attempt_ms: int | None
    packed: dict[str, int] = {}
    owner: str = ""
    is_complete: bool = True
    last_error: str | None = None


class ExtentRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of one incarnation in one row group: the offset they end at, and where they are."""

    offset_end: int
    segment: int
    row_group: int
    row_start: int
    rows: int


class PlacedExtent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The same with the offset they start at, as a stream's own row holds them."""

    offset_start: int
    offset_end: int
    segment: int
    row_group: int
    row_start: int
    rows: int

    @property
    def row(self) -> ExtentRow:
        return ExtentRow(self.offset_end, self.segment, self.row_group, self.row_start, self.rows)


class SegmentRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    segment: SegmentRef
    live_bytes: int


class FlushRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    first_position: int
    notes: str
    segments: list[int]


class SealedSegment(NamedTuple):
    """A segment and its index, as `encode_extents` wrote it, on their way into the catalog."""

    segment: SegmentRef
    extents: bytes
    shared_by: Sequence[str] = ()


class SealedFlush(NamedTuple):
    through: int
    first_position: int
    notes: str
    segments: list[SealedSegment]


class SealedReplacement(NamedTuple):
    """A compaction on its way into the catalog: the paths it replaces, the new segments with their indexes."""

    replaced: list[str]
    segments: list[SealedSegment]


class Kept(NamedTuple):
    """What counts of a stream: its messages that end beyond `earliest`."""

    earliest: int
    content_type: str
    key: StreamKey


class ColdTotals(NamedTuple):
    segments: int
    payload_bytes: int
    stored_bytes: int


class FoundExtent(NamedTuple):
    offset_start: int
    row: ExtentRow


encode_row: Final = msgspec.msgpack.Encoder().encode
decode_stream_row: Final = msgspec.msgpack.Decoder(StreamRow).decode
decode_stored_row: Final = msgspec.msgpack.Decoder(StoredRow).decode
decode_extent: Final = msgspec.msgpack.Decoder(ExtentRow).decode
decode_placed: Final = msgspec.msgpack.Decoder(PlacedExtent).decode
decode_own: Final = msgspec.msgpack.Decoder(list[PlacedExtent]).decode
decode_segment: Final = msgspec.msgpack.Decoder(SegmentRow).decode
decode_producer: Final = msgspec.msgpack.Decoder(ProducerState).decode
decode_flush: Final = msgspec.msgpack.Decoder(FlushRow).decode
# Singletons: the last claim of the object store, and the digest of the manifest that led to the catalog's position.
STORE_CLAIM: Final = b"store_claim"
MANIFEST_DIGEST: Final = b"manifest"
_BUCKETS: Final = msgspec.msgpack.Decoder(list[BucketRow])
_SUBSCRIPTIONS: Final = msgspec.msgpack.Decoder(list[SubscriptionRow])
_NOTHING: Final = b"\x90"  # an empty array
_SECRETS: Final = msgspec.msgpack.Decoder(SecretsCreated)
_STORE_CLAIM: Final = msgspec.msgpack.Decoder(StoreClaimed)


class Checkpoint(NamedTuple):
    """Everything one transaction writes. Built on the loop, written elsewhere (`flush_jobs.py`)."""

    position: int
    streams: bytes  # as `encode_rows` wrote them
    removed: list[tuple[bytes, bytes]]  # incarnation, name
    freed_blobs: list[bytes]
    singletons: dict[bytes, bytes]
    trimmed: list[tuple[int, int]]  # incarnation, earliest offset; nobody reads what lies before
    flushes: list[SealedFlush]
    now_ms: int
    replacements: Sequence[SealedReplacement] = ()
    # By incarnation; of streams with none of their own, those that wrote last before `producers_before_ms` go.
    producers: Sequence[tuple[int, dict[str, ProducerState]]] = ()
    producers_before_ms: int = 0


encode_checkpoint: Final = msgspec.msgpack.Encoder().encode
decode_checkpoint: Final = msgspec.msgpack.Decoder(Checkpoint).decode


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def shared_key(bucket: str) -> bytes:
    return b"b" + bucket.encode() + b"\0"


def producer_key(incarnation: int, producer_id: str) -> bytes:
    """Ids come from headers, which are latin-1; so a key is short enough for LMDB."""
    return u64(incarnation) + producer_id.encode("latin-1")


pack_pair: Final = struct.Struct(">QQ").pack
"""Two numbers as `u64` writes each."""


# -- streams -------------------------------------------------------------------------------------------------------

# What the table of streams holds of one: incarnation, how many bytes of extents, the extents, the StoredRow. The
# extents are an array of a few, whose first byte says how many.
_HEAD: Final = struct.Struct(">QH")
_COUNT: Final = 0x90
NO_EXTENTS: Final = bytes([_COUNT])
OWN_EXTENTS_MAX: Final = 8


def pack_stream(incarnation: int, extents: bytes, stored: bytes) -> bytes:
    return _HEAD.pack(incarnation, len(extents)) + extents + stored


def row_of(packed: bytes) -> bytes:
    return packed[_HEAD.size + _HEAD.unpack_from(packed)[1] :]


def stored_row(row: bytes) -> bytes:
    """A manifest's row as the table of streams holds it."""
    one = decode_stream_row(row)
    values = (
        _NUMBERS.get(one.content_type, one.content_type),
        one.created_at_ms,
        one.last_write_at_ms - one.created_at_ms,
        one.last_access_ms - one.last_write_at_ms,
        one.tail,
        one.closed,
        one.expiry,
        one.earliest,
        one.snapshot,
        one.closed_by,
        one.seq,
        one.fork,
        one.forks,
        one.soft_deleted,
    )
    count = len(values)
    while values[count - 1] == _DEFAULTS[count - 1]:
        count -= 1
    return encode_row(values[:count])


# What is always there has none.
_DEFAULTS: Final[tuple[object, ...]] = (*(None,) * 5, False, NEVER, 0, None, None, None, None, 0, False)


def own_extents(packed: bytes | None, incarnation: int) -> bytes:
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


_COUNTS: Final = [bytes([_COUNT | count]) for count in range(OWN_EXTENTS_MAX + 1)]


def encode_key(key: StreamKey) -> bytes:
    return f"{key.bucket}\0{key.stream}".encode()


def decode_key(raw: bytes) -> StreamKey:
    bucket, _, stream = raw.decode().partition("\0")
    return StreamKey(bucket, stream)


def encode_stream(stream: Stream) -> ManifestStream:
    row = StreamRow(
        stream.incarnation,
        stream.content_type,
        stream.created_at_ms,
        stream.last_write_at_ms,
        stream.last_access_ms,
        stream.tail,
        stream.closed,
        stream.closed_by,
        stream.seq,
        stream.expiry,
        stream.fork,
        stream.forks,
        stream.soft_deleted,
        stream.earliest,
        stream.snapshot,
    )
    return ManifestStream(
        stream.incarnation,
        encode_key(stream.key),
        encode_row(row),
        stream.expiry.deadline_ms(0) is not None,
        stream.snapshot.blob.encode() if stream.snapshot is not None else None,
    )


# A stream as it is, in the least time: what becomes of it is for whoever writes the catalog. Private to a process and
# those it starts, not a format.
_encode_captured: Final = msgspec.msgpack.Encoder().encode
decode_captured: Final = msgspec.msgpack.Decoder(list[Stream]).decode


def encode_captured(stream: Stream) -> bytes:
    hot, stream.hot = stream.hot, None
    encoded = _encode_captured(stream)
    stream.hot = hot
    return encoded


def decode_stream(key: StreamKey, packed: bytes) -> Stream:
    """A stream of the table of streams."""
    incarnation, size = _HEAD.unpack_from(packed)
    row = decode_stored_row(packed[_HEAD.size + size :])
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


@cached("stored_content_types", 1024)
def _kind(content_type: str) -> tuple[str, bool]:
    """The type as it was given, one object for all streams, and whether it is JSON."""
    return content_type, media_type(content_type) == JSON


_COMMON: Final = [_kind(one) for one in COMMON_TYPES]


def encode_singletons(machine: StateMachine) -> dict[bytes, bytes]:
    buckets = machine.namespace.buckets
    singletons = {
        b"buckets": encode_row(
            [BucketRow(one.name, one.created_at_ms, one.streams, one.is_implicit) for one in buckets.values()]
        ),
        b"subscriptions": encode_row(list(_subscription_rows(machine.subscriptions.by_id.values()))),
    }
    if machine.secrets is not None:
        singletons[b"secrets"] = encode_row(machine.secrets)
    if machine.store_claim is not None:
        singletons[STORE_CLAIM] = encode_row(machine.store_claim)
    return singletons


def decode_claim(row: bytes | None) -> StoreClaimed | None:
    return _STORE_CLAIM.decode(row) if row is not None else None


def restore_singletons(machine: StateMachine, position: int, get: Callable[[bytes], bytes | None]) -> None:
    """The reverse of `encode_singletons`, into a machine that has none of it yet."""
    secrets = get(b"secrets")
    machine.restore(
        position,
        [
            Bucket(row.name, row.created_at_ms, streams=row.streams, is_implicit=row.is_implicit)
            for row in _BUCKETS.decode(get(b"buckets") or _NOTHING)
        ],
        [_subscription(row) for row in _SUBSCRIPTIONS.decode(get(b"subscriptions") or _NOTHING)],
        _SECRETS.decode(secrets) if secrets is not None else None,
        decode_claim(get(STORE_CLAIM)),
    )


def _subscription_rows(subscriptions: Iterable[Subscription]) -> Iterator[SubscriptionRow]:
    for subscription in subscriptions:
        yield SubscriptionRow(
            subscription.id,
            subscription.created_at_ms,
            subscription.base_url,
            subscription.config,
            {},
            subscription.generation,
            subscription.wake,
            subscription.retry_count,
            subscription.next_attempt_ms,
            subscription.links.packed,
            subscription.owner,
            subscription.is_complete,
            subscription.last_error,
        )


def _subscription(row: SubscriptionRow) -> Subscription:
    subscription = Subscription(row.id, row.created_at_ms, row.base_url, row.config, row.owner)
    subscription.links = Links(row.packed)
    for path, (types, acked) in row.links.items():
        subscription.links.put(path, Link(acked, EXPLICIT in types, GLOB in types))
    subscription.generation = row.generation
    subscription.wake = row.wake
    subscription.retry_count = row.retry_count
    subscription.next_attempt_ms = row.next_attempt_ms
    subscription.is_complete = row.is_complete
    subscription.last_error = row.last_error
    return subscription
