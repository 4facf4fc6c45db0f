"""Idempotent producers: which append is new, which a repeat, which a ghost's (§5.2.1)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from millstream.errors import InvalidRequest, ProducerFenced, SequenceGap
from millstream.units import Milliseconds

INTEGER_MAX: Final = 2**53 - 1
PRODUCER_ID_BYTES_MAX: Final = 256

_INTEGER = re.compile(r"[0-9]{1,16}")


class ProducerClaim(NamedTuple):
    """What one request says of itself."""

    id: str
    epoch: int
    seq: int


class ProducerState(NamedTuple):
    """The highest sequence accepted from a producer, the epoch it was accepted in, and when."""

    epoch: int
    seq: int
    at_ms: Milliseconds = Milliseconds(0)


def parse_claim(producer_id: str | None, epoch: str | None, seq: str | None) -> ProducerClaim | None:
    if producer_id is None and epoch is None and seq is None:
        return None
    if producer_id is None or epoch is None or seq is None:
        raise InvalidRequest(
            "Producer-Id, Producer-Epoch and Producer-Seq go together", code="invalid_producer_headers"
        )
    if not producer_id:
        raise InvalidRequest("Producer-Id must not be empty", code="invalid_producer_headers")
    if len(producer_id) > PRODUCER_ID_BYTES_MAX:
        raise InvalidRequest(
            f"Producer-Id is longer than {PRODUCER_ID_BYTES_MAX} bytes", code="invalid_producer_headers"
        )
    return ProducerClaim(producer_id, _integer("Producer-Epoch", epoch), _integer("Producer-Seq", seq))


def _integer(name: str, value: str) -> int:
    if _INTEGER.fullmatch(value) is None or int(value) > INTEGER_MAX:
        raise InvalidRequest(
            f"{name} {value[:40]!r} is not an integer from 0 to 2^53-1", code="invalid_producer_headers"
        )
    return int(value)


def is_duplicate(state: ProducerState | None, claim: ProducerClaim) -> bool:
    """True for a repeat of accepted data, False for the next append in order; anything else is refused."""
    if state is None:
        if claim.seq != 0:
            raise _gap(0, claim.seq)
        return False
    if claim.epoch < state.epoch:
        raise ProducerFenced(
            f"producer epoch {claim.epoch} is stale: epoch {state.epoch} has been seen",
            current_epoch=state.epoch,
        )
    if claim.epoch > state.epoch:
        if claim.seq != 0:
            raise InvalidRequest(
                f"a new producer epoch starts at sequence 0, not {claim.seq}", code="invalid_producer_epoch"
            )
        return False
    if claim.seq <= state.seq:
        return True
    if claim.seq != state.seq + 1:
        raise _gap(state.seq + 1, claim.seq)
    return False


def _gap(expected: int, received: int) -> SequenceGap:
    return SequenceGap(
        f"producer sequence {received} leaves a gap: {expected} is next", expected=expected, received=received
    )
