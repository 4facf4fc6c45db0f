"""The state of one stream and one bucket, as of the last applied record.

`Ahead` is the part of a stream's state that accepted but not yet durable appends will bring about. Writers are
checked against it; readers never see it. It exists only while something is in flight.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from millstream.protocol.content_types import JSON, media_type
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.offsets import START
from millstream.protocol.producers import ProducerClaim, ProducerState
from millstream.streams.records import ForkPoint, SnapshotRef
from millstream.units import Incarnation, Milliseconds, Offset, Position

NO_PRODUCERS: Final[dict[str, ProducerState]] = {}


class Ahead(msgspec.Struct, array_like=True, gc=False, eq=False):
    """What a stream will be once its appends in flight are durable."""

    tail: Offset
    closed: bool
    closed_by: ProducerClaim | None
    seq: str | None
    producers: dict[str, ProducerState]
    position: Position = Position(0)


class Stream(msgspec.Struct, array_like=True, gc=False, eq=False):
    """One incarnation of a stream. `incarnation` is the position of the record that created it.

    There may be very many, and they come and go: a struct takes a third of the time of a class of our own, and the
    collector, which need not look at it since nothing in it leads back to it, does not.
    """

    incarnation: Incarnation
    key: StreamKey
    content_type: str
    is_json: bool
    created_at_ms: Milliseconds
    last_write_at_ms: Milliseconds
    last_access_ms: Milliseconds
    tail: Offset
    expiry: Expiry
    fork: ForkPoint | None = None
    closed: bool = False
    closed_by: ProducerClaim | None = None
    seq: str | None = None
    # Offsets before `earliest` are no longer readable; a snapshot stands for what was there.
    earliest: Offset = START
    snapshot: SnapshotRef | None = None
    forks: int = 0
    soft_deleted: bool = False
    deleted: bool = False
    ahead: Ahead | None = None
    # Where the hot tier keeps what it has of the stream: no part of the state.
    hot: Any = None

    @classmethod
    def created(
        cls,
        incarnation: Incarnation,
        key: StreamKey,
        content_type: str,
        at_ms: Milliseconds,
        expiry: Expiry = NEVER,
        fork: ForkPoint | None = None,
    ) -> Stream:
        """A new stream: empty, or with what its source has up to the fork point."""
        tail = fork.offset if fork is not None else START
        is_json = media_type(content_type) == JSON
        return cls(incarnation, key, content_type, is_json, at_ms, at_ms, at_ms, tail, expiry, fork)

    @property
    def media_type(self) -> str:
        return media_type(self.content_type)

    def is_expired(self, now_ms: Milliseconds) -> bool:
        if self.expiry is NEVER:
            return False
        deadline_ms = self.expiry.deadline_ms(self.last_access_ms)
        return deadline_ms is not None and now_ms >= deadline_ms


class Bucket:
    """A namespace and how many streams it holds; soft-deleted ones count, for they still hold their names.

    One that came into being with its first stream goes with its last.
    """

    __slots__ = ("created_at_ms", "is_implicit", "name", "streams")

    def __init__(self, name: str, created_at_ms: Milliseconds, *, streams: int = 0, is_implicit: bool = False) -> None:
        self.is_implicit = is_implicit
        self.name = name
        self.created_at_ms = created_at_ms
        self.streams = streams
