"""The catalog's rows but for those of streams (`stream_rows.py`): buckets, subscriptions, segments, extents, flushes.

Rows are msgpack arrays; fields are only added at the end, with a default. `tiers/catalog_tables.py` says which table
holds which, under which key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.machine import StateMachine
from millstream.streams.records import (
    SecretsCreated,
    SegmentRef,
    StoreClaimed,
    SubscriptionConfig,
    Wake,
)
from millstream.streams.state import Bucket
from millstream.streams.subscriptions import Links, Subscription
from millstream.units import Incarnation, Milliseconds, Offset, Position


class BucketRow(msgspec.Struct, array_like=True, gc=False):
    name: str
    created_at_ms: Milliseconds
    streams: int
    is_implicit: bool = False


class SubscriptionRow(msgspec.Struct, array_like=True, gc=False):
    """`links` as `streams.subscriptions.Links` packs them."""

    id: str
    created_at_ms: Milliseconds
    base_url: str
    config: SubscriptionConfig
    links: dict[str, int]
    generation: int
    wake: Wake | None
    retry_count: int
    next_attempt_ms: Milliseconds | None
    owner: str = ""
    is_complete: bool = True
    last_error: str | None = None


class ExtentRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of one incarnation in one row group: the offset they end at, and where they are."""

    offset_end: Offset
    segment: int
    row_group: int
    row_start: int
    rows: int


class PlacedExtent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The same with the offset they start at, as a stream's own row holds them."""

    offset_start: Offset
    offset_end: Offset
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
    first_position: Position
    notes: str
    segments: list[int]


class SealedSegment(NamedTuple):
    """A segment and its index, as `encode_extents` wrote it, on their way into the catalog."""

    segment: SegmentRef
    extents: bytes
    shared_by: Sequence[str] = ()


class SealedFlush(NamedTuple):
    through: Position
    first_position: Position
    notes: str
    segments: list[SealedSegment]


class SealedReplacement(NamedTuple):
    """A compaction on its way into the catalog: the paths it replaces, the new segments with their indexes."""

    replaced: list[str]
    segments: list[SealedSegment]


class Kept(NamedTuple):
    """What counts of a stream: its messages that end beyond `earliest`."""

    earliest: Offset
    content_type: str
    key: StreamKey


class ColdTotals(NamedTuple):
    segments: int
    payload_bytes: int
    stored_bytes: int


class FoundExtent(NamedTuple):
    offset_start: Offset
    row: ExtentRow


encode_row: Final = msgspec.msgpack.Encoder().encode
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

    position: Position
    streams: bytes  # as `encode_manifest_streams` wrote them
    removed: list[tuple[bytes, bytes]]  # incarnation, name
    freed_blobs: list[bytes]
    singletons: dict[bytes, bytes]
    trimmed: list[tuple[Incarnation, Offset]]  # incarnation, earliest offset; nobody reads what lies before
    flushes: list[SealedFlush]
    now_ms: Milliseconds
    replacements: Sequence[SealedReplacement] = ()
    # By incarnation; of streams with none of their own, those that wrote last before `producers_before_ms` go.
    producers: Sequence[tuple[Incarnation, dict[str, ProducerState]]] = ()
    producers_before_ms: Milliseconds = Milliseconds(0)


encode_checkpoint: Final = msgspec.msgpack.Encoder().encode
decode_checkpoint: Final = msgspec.msgpack.Decoder(Checkpoint).decode


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def shared_key(bucket: str) -> bytes:
    return b"b" + bucket.encode() + b"\0"


def producer_key(incarnation: Incarnation, producer_id: str) -> bytes:
    """Ids come from headers, which are latin-1; so a key is short enough for LMDB."""
    return u64(incarnation) + producer_id.encode("latin-1")


pack_pair: Final = struct.Struct(">QQ").pack
"""Two numbers as `u64` writes each."""


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


def restore_singletons(machine: StateMachine, position: Position, get: Callable[[bytes], bytes | None]) -> None:
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
            subscription.links.packed,
            subscription.generation,
            subscription.wake,
            subscription.retry_count,
            subscription.next_attempt_ms,
            subscription.owner,
            subscription.is_complete,
            subscription.last_error,
        )


def _subscription(row: SubscriptionRow) -> Subscription:
    subscription = Subscription(row.id, row.created_at_ms, row.base_url, row.config, row.owner)
    subscription.links = Links(row.links)
    subscription.generation = row.generation
    subscription.wake = row.wake
    subscription.retry_count = row.retry_count
    subscription.next_attempt_ms = row.next_attempt_ms
    subscription.is_complete = row.is_complete
    subscription.last_error = row.last_error
    return subscription
