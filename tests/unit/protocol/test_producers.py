"""Idempotent producers: new, repeated, fenced or out of order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import InvalidRequest, ProducerFenced, SequenceGap
from millstream.protocol.producers import INTEGER_MAX, ProducerClaim, ProducerState, is_duplicate, parse_claim

small = st.integers(0, 4)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=256), st.data())
def test_a_claim_survives_the_round_trip_through_headers(producer_id: str, data: st.DataObject) -> None:
    epoch, seq = data.draw(st.integers(0, INTEGER_MAX)), data.draw(st.integers(0, INTEGER_MAX))
    assert parse_claim(producer_id, str(epoch), str(seq)) == ProducerClaim(producer_id, epoch, seq)


def test_no_header_is_no_claim() -> None:
    assert parse_claim(None, None, None) is None


@pytest.mark.parametrize(
    "headers",
    [("p", None, None), (None, "0", None), (None, None, "0"), ("p", "0", None), ("p", None, "0"), (None, "0", "0")],
)
def test_some_headers_without_the_others_are_refused(headers: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(InvalidRequest, match="go together"):
        parse_claim(*headers)


@pytest.mark.parametrize("value", ["", "-1", "+1", "1.0", "1e3", "abc", " 1", "1 ", "٣", str(2**53), "9" * 17])
def test_a_number_that_is_no_integer_up_to_2_to_the_53_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match="Producer-Epoch"):
        parse_claim("p", value, "0")
    with pytest.raises(InvalidRequest, match="Producer-Seq"):
        parse_claim("p", "0", value)


@pytest.mark.parametrize("producer_id", ["", "x" * 257])
def test_an_id_that_is_empty_or_too_long_is_refused(producer_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Producer-Id"):
        parse_claim(producer_id, "0", "0")


@settings(max_examples=200)
@given(st.tuples(small, small) | st.none(), small, small)
def test_every_claim_falls_under_exactly_one_rule(known: tuple[int, int] | None, epoch: int, seq: int) -> None:
    state = ProducerState(*known) if known is not None else None
    claim = ProducerClaim("p", epoch, seq)
    if state is None:
        expected = 0 if seq else None
    elif epoch < state.epoch:
        with pytest.raises(ProducerFenced) as fenced:
            is_duplicate(state, claim)
        assert fenced.value.current_epoch == state.epoch
        return
    elif epoch > state.epoch:
        if seq:
            with pytest.raises(InvalidRequest) as invalid:
                is_duplicate(state, claim)
            assert invalid.value.code == "invalid_producer_epoch"
        else:
            assert is_duplicate(state, claim) is False
        return
    elif seq <= state.seq:
        assert is_duplicate(state, claim) is True
        return
    else:
        expected = state.seq + 1 if seq > state.seq + 1 else None
    if expected is None:
        assert is_duplicate(state, claim) is False
    else:
        with pytest.raises(SequenceGap) as gap:
            is_duplicate(state, claim)
        assert (gap.value.expected, gap.value.received) == (expected, seq)
