"""What writers ask for, after parsing and before judgement."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from millstream.errors import InvalidRequest
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.units import Incarnation, Offset

Split = list[bytes] | InvalidRequest
"""The messages of a JSON body that was split before its command is judged; or what is wrong with it."""


class ForkRequest(NamedTuple):
    source: StreamKey
    offset: Offset | None = None
    sub_offset: int = 0


class CreateStream(NamedTuple):
    """`content_type` is None when the request named none; `bucket_required` forbids creating the bucket too."""

    key: StreamKey
    content_type: str | None = None
    body: bytes = b""
    closed: bool = False
    expiry: Expiry = NEVER
    fork: ForkRequest | None = None
    seq: str | None = None
    producer: ProducerClaim | None = None
    if_match: str | None = None
    only_if_absent: bool = False
    bucket_required: bool = False
    split: Split | None = None


class AppendMessages(msgspec.Struct, frozen=True, gc=False):
    """An append, a close, or both; without a body the content type does not matter (§5.2)."""

    key: StreamKey
    content_type: str | None
    body: bytes
    close: bool = False
    seq: str | None = None
    producer: ProducerClaim | None = None
    if_match: str | None = None
    split: Split | None = None


class Created(NamedTuple):
    """A stream that exists as asked: made now, or found to match."""

    is_new: bool
    incarnation: Incarnation
    content_type: str
    tail: Offset
    closed: bool


class AppendOutcome(msgspec.Struct, frozen=True, gc=False):
    """What the writer is told: the tail, and for producers the highest sequence accepted in their epoch."""

    incarnation: Incarnation
    tail: Offset
    closed: bool
    is_new_data: bool = False
    producer_epoch: int | None = None
    producer_seq: int | None = None
