"""The records of the shard log: everything that ever happens to a shard, in order.

A record carries all that commits with it: the bytes, the producer's sequence, `Stream-Seq` and closure are one
record, so there is no crash between them. Records are msgpack arrays `[tag, field, …]`; fields are only ever
added at the end, with a default, and a tag is never reused. `docs/formats/log.md` describes them for readers in
other languages.

Positions number what happens in a shard. A record takes one position, each of its messages the next ones, and if it
closes its stream that takes one more. So every message has a position of its own, positions totally order
all messages of a shard, and two messages have consecutive positions only if one append wrote both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.errors import Corrupt
from millstream.protocol.keys import StreamKey
from millstream.protocol.offsets import START
from millstream.protocol.producers import ProducerClaim
from millstream.units import Incarnation, Milliseconds, Offset, Position


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all records."""


class BucketCreated(Record, frozen=True, tag=1):
    bucket: str
    at_ms: Milliseconds


class BucketDeleted(Record, frozen=True, tag=2):
    bucket: str
    at_ms: Milliseconds


class ForkPoint(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a fork left its source: `offset` is a message boundary, the other two what the request asked for."""

    source: Incarnation
    offset: Offset
    requested_offset: Offset
    requested_sub_offset: int


class SnapshotRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A published snapshot: what it stands for, and the blob that holds it."""

    offset: Offset
    content_type: str
    blob: str
    size: int
    checksum: int


class StreamCreated(Record, frozen=True, tag=3):
    """A stream begins. Its incarnation, the number all later records use, is this record's position."""

    bucket: str
    stream: str
    at_ms: Milliseconds
    content_type: str
    messages: list[bytes]
    closed: bool = False
    ttl_seconds: int | None = None
    expires_at: str | None = None
    expires_at_ms: Milliseconds | None = None
    fork: ForkPoint | None = None
    seq: str | None = None
    producer: ProducerClaim | None = None
    earliest: Offset = START
    snapshot: SnapshotRef | None = None


class Appended(Record, frozen=True, tag=4):
    """Messages at `offset`, the tail they were appended to; with `close`, the last ones."""

    stream: Incarnation
    offset: Offset
    at_ms: Milliseconds
    messages: list[bytes]
    close: bool = False
    seq: str | None = None
    producer: ProducerClaim | None = None


class StreamDeleted(Record, frozen=True, tag=5):
    """The end of an incarnation; it names the stream too, for those who follow a bucket."""

    stream: Incarnation
    at_ms: Milliseconds
    key: StreamKey
    expired: bool = False


class StreamsTouched(Record, frozen=True, tag=6):
    """Reads that restarted the sliding windows of these streams, and when."""

    accessed: dict[Incarnation, Milliseconds]


class SecretsCreated(Record, frozen=True, tag=7):
    """The shard's own keys: the seed of the webhook signing key and the key of lease tokens."""

    webhook_seed: bytes
    token_key: bytes


class Wake(msgspec.Struct, array_like=True, frozen=True):
    """A wake in progress: who may work until when.

    `tails` is empty since what a wake tells of is decided when it is told; in older logs it has a tail for each link.
    """

    wake_id: str
    lease_until_ms: Milliseconds
    tails: dict[str, Offset] = {}
    holder: str | None = None


class SubscriptionConfig(msgspec.Struct, array_like=True, frozen=True):
    """What a client asked for, normalised; two equal configurations are the same subscription."""

    type: str
    pattern: str | None
    streams: list[str]
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: Milliseconds
    description: str | None


class SubscriptionCreated(Record, frozen=True, tag=8):
    """`links` maps each linked path to (link types, acknowledged offset); an offset of -1 acknowledges nothing.

    If there are many links this has the first of them, and is not `complete`: `SubscriptionChanged` records bring the
    others, and the last of those `completes` it. One that a crash left incomplete is deleted.
    """

    id: str
    at_ms: Milliseconds
    base_url: str
    config: SubscriptionConfig
    links: dict[str, tuple[list[str], Offset]]
    owner: str = ""
    complete: bool = True


class SubscriptionDeleted(Record, frozen=True, tag=9):
    id: str
    at_ms: Milliseconds


class SubscriptionChanged(Record, frozen=True, tag=10):
    """The new state of a subscription's moving parts. `linked` and `acked` add to it; the rest replaces."""

    id: str
    at_ms: Milliseconds
    generation: int
    wake: Wake | None = None
    retry_count: int = 0
    next_attempt_ms: Milliseconds | None = None
    linked: dict[str, tuple[list[str], Offset]] = {}
    unlinked: list[str] = []
    acked: dict[str, Offset] = {}
    completes: bool = False
    last_error: str | None = None


class SnapshotPublished(Record, frozen=True, tag=11):
    """A snapshot becomes the one that counts; with `trims`, what came before its offset is given up."""

    stream: Incarnation
    at_ms: Milliseconds
    snapshot: SnapshotRef
    trims: bool = True


class SegmentRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A cold segment: where it lies and what is in it."""

    path: str
    bucket: str
    size: int
    checksum: int
    rows: int
    payload_bytes: int
    first_position: Position
    last_position: Position
    first_at_ms: Milliseconds
    last_at_ms: Milliseconds
    footer_bytes: int
    footer_checksum: int


class SegmentSealed(Record, frozen=True, tag=12):
    """The cold tier now covers everything before position `through`; what came from `first` on is new in it."""

    first: Position
    through: Position
    at_ms: Milliseconds
    manifest: str
    notes: str
    segments: list[SegmentRef]


class SegmentsReplaced(Record, frozen=True, tag=13):
    """The live messages of the segments at these paths are in new segments from now on."""

    at_ms: Milliseconds
    replaced: list[str]
    segments: list[SegmentRef]


class StreamTrimmed(Record, frozen=True, tag=14):
    """What came before `earliest`, a message boundary, is given up."""

    stream: Incarnation
    at_ms: Milliseconds
    earliest: Offset


class LeaderStarted(Record, frozen=True, tag=20):
    """A node begins to lead the shard: everything before this is its predecessors', and they can add nothing more."""

    node: int
    generation: int
    at_ms: Milliseconds


class StoreClaimed(Record, frozen=True, tag=21):
    """Whoever writes this log is about to own its part of the object store, by this epoch. See `tiers/owners.py`.

    The last one again, with the same claim, says that the log goes on from here without the store having been asked.
    """

    store: str
    epoch: int
    since: int
    claim: str
    at_ms: Milliseconds


AnyRecord = (
    BucketCreated
    | BucketDeleted
    | StreamCreated
    | Appended
    | StreamDeleted
    | StreamsTouched
    | SecretsCreated
    | SubscriptionCreated
    | SubscriptionDeleted
    | SubscriptionChanged
    | SnapshotPublished
    | SegmentSealed
    | SegmentsReplaced
    | StreamTrimmed
    | LeaderStarted
    | StoreClaimed
)

_ENCODER: Final = msgspec.msgpack.Encoder()
_BATCH_DECODER: Final = msgspec.msgpack.Decoder(list[AnyRecord])
_DECODER: Final = msgspec.msgpack.Decoder(AnyRecord)
_ARRAY32: Final = struct.Struct(">BI")

encode_record = _ENCODER.encode


def span(record: AnyRecord) -> int:
    """How many positions a record takes: its own, one for each message, and one for closing its stream."""
    if isinstance(record, Appended):
        return 1 + len(record.messages) + record.close
    if isinstance(record, StreamCreated):
        return 1 + len(record.messages) + record.closed
    return 1


def encode_batch(encoded_records: Sequence[bytes]) -> bytes:
    """One msgpack array of records that are encoded already: what the log stores as a unit."""
    return _ARRAY32.pack(0xDD, len(encoded_records)) + b"".join(encoded_records)


def decode_batch(payload: bytes) -> list[AnyRecord]:
    try:
        return _BATCH_DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None


def decode_record(encoded: bytes) -> AnyRecord:
    try:
        record: AnyRecord = _DECODER.decode(encoded)
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> Corrupt:
    return Corrupt(
        f"a log batch holds a record this version cannot read: {error}",
        hint="the data was written by a newer millstream, or is damaged",
    )
