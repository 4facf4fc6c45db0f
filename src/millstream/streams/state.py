"""The state of one stream and one bucket, as of the last applied record.

`Ahead` is the part of a stream's state that accepted but not yet durable appends will bring about. Writers are
checked against it; readers never see it. It exists only while something is in flight.
"""

from __future__ import annotations

from typing import Final

from millstream.protocol.content_types import is_json, media_type
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim, ProducerState
from millstream.streams.records import ForkPoint, SnapshotRef

NO_PRODUCERS: Final[dict[str, ProducerState]] = {}


class Ahead:
    """What a stream will be once its appends in flight are durable."""

    __slots__ = ("closed", "closed_by", "position", "producers", "seq", "tail")

    def __init__(self, stream: Stream) -> None:
        self.tail = stream.tail
        self.closed = stream.closed
        self.closed_by = stream.closed_by
        self.seq = stream.seq
        self.producers: dict[str, ProducerState] = {}
        self.position = 0


class Stream:
    """One incarnation of a stream. `incarnation` is the position of the record that created it."""

    __slots__ = (
        "ahead",
        "closed",
        "closed_by",
        "content_type",
        "created_at_ms",
        "deleted",
        "earliest",
        "expiry",
        "fork",
        "forks",
        "incarnation",
        "is_json",
        "key",
        "last_access_ms",
        "last_write_at_ms",
        "media_type",
        "producers",
        "seq",
        "snapshot",
        "soft_deleted",
        "tail",
    )

    def __init__(
        self,
        incarnation: int,
        key: StreamKey,
        content_type: str,
        *,
        created_at_ms: int,
        expiry: Expiry,
        fork: ForkPoint | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.key = key
        self.content_type = content_type
        self.media_type = media_type(content_type)
        self.is_json = is_json(content_type)
        self.created_at_ms = created_at_ms
        self.last_write_at_ms = created_at_ms
        self.last_access_ms = created_at_ms
        self.expiry = expiry
        self.fork = fork
        self.tail = fork.offset if fork is not None else 0
        self.closed = False
        self.closed_by: ProducerClaim | None = None
        self.seq: str | None = None
        self.producers = NO_PRODUCERS
        # Offsets before `earliest` are no longer readable; a snapshot stands for what was there.
        self.earliest = 0
        self.snapshot: SnapshotRef | None = None
        self.forks = 0
        self.soft_deleted = False
        self.deleted = False
        self.ahead: Ahead | None = None

    def producer(self, producer_id: str) -> ProducerState | None:
        """The producer's state, appends in flight included."""
        if self.ahead is not None:
            state = self.ahead.producers.get(producer_id)
            if state is not None:
                return state
        return self.producers.get(producer_id)

    def is_expired(self, now_ms: int) -> bool:
        deadline_ms = self.expiry.deadline_ms(self.last_access_ms)
        return deadline_ms is not None and now_ms >= deadline_ms


class Bucket:
    """A namespace and how many streams it holds; soft-deleted ones count, for they still hold their names."""

    __slots__ = ("created_at_ms", "name", "streams")

    def __init__(self, name: str, created_at_ms: int, *, streams: int = 0) -> None:
        self.name = name
        self.created_at_ms = created_at_ms
        self.streams = streams
