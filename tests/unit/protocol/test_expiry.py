"""Stream-TTL and Stream-Expires-At: which forms are times, and when a stream's time is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.protocol.expiry import NEVER, TTL_SECONDS_MAX, Expiry, parse_expiry
from millstream.units import Milliseconds

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
moments = st.datetimes(datetime(1971, 1, 1), datetime(9999, 1, 1)).map(lambda m: m.replace(microsecond=0))


@given(st.integers(0, TTL_SECONDS_MAX), st.integers(0, 2**45))
def test_a_ttl_counts_from_the_last_access(ttl: int, last_access_ms: int) -> None:
    expiry = parse_expiry(str(ttl), None)
    assert expiry == Expiry(ttl_seconds=ttl)
    assert expiry.deadline_ms(Milliseconds(last_access_ms)) == last_access_ms + ttl * 1000


@pytest.mark.parametrize(
    "ttl",
    [
        "",
        " ",
        "+3600",
        "-1",
        "03600",
        "00",
        "3600.0",
        "3.6e3",
        "1_000",
        "0x10",
        " 60",
        "60 ",
        "60\n",
        "٣",
        "abc",
        str(TTL_SECONDS_MAX + 1),
        "9" * 400,
    ],
)
def test_a_ttl_in_any_other_form_is_refused(ttl: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_expiry(ttl, None)
    assert caught.value.code == "invalid_ttl"
    assert caught.value.hint


@given(
    moments,
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
    st.sampled_from("Tt "),
    st.text("0123456789", min_size=1, max_size=9) | st.none(),
)
def test_a_time_with_an_offset_and_a_fraction_is_the_instant_it_names(
    moment: datetime, offset_minutes: int, separator: str, fraction: str | None
) -> None:
    sign, magnitude = ("-" if offset_minutes < 0 else "+"), abs(offset_minutes)
    text = moment.strftime(f"%Y-%m-%d{separator}%H:%M:%S")
    text = text.rjust(19, "0") + (f".{fraction}" if fraction else "")
    text += f"{sign}{magnitude // 60:02d}:{magnitude % 60:02d}"
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    whole_seconds = (zoned - EPOCH) // timedelta(seconds=1)
    expected = whole_seconds * 1000 + int((fraction or "").ljust(3, "0")[:3])
    found = parse_expiry(None, text)
    assert found.expires_at == text
    # A floating-point second cannot hold every millisecond; one beside it makes no difference to anybody.
    assert found.expires_at_ms is not None
    assert abs(found.expires_at_ms - expected) <= 1


@pytest.mark.parametrize("text", ["2030-01-01T00:00:00Z", "2030-01-01t00:00:00z", "2029-12-31T23:00:00-01:00"])
def test_the_same_instant_in_other_letters_matches(text: str) -> None:
    found = parse_expiry(None, text)
    assert found.expires_at_ms == 1_893_456_000_000
    assert found.matches(parse_expiry(None, "2030-01-01T00:00:00+00:00"))
    assert found.deadline_ms(Milliseconds(5)) == 1_893_456_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "1893456000",
        "2030-01-01",
        "2030-01-01T00:00:00",
        "2030-01-01T00:00Z",
        "2030-1-1T00:00:00Z",
        "2030-13-01T00:00:00Z",
        "2030-02-30T00:00:00Z",
        "2030-01-01T25:00:00Z",
        "2030-01-01T00:60:00Z",
        "2030-01-01T00:00:00+24:00",
        "2030-01-01T00:00:00+1:00",
        "2030-01-01T00:00:00.Z",
        "2030-01-01T00:00:00.0000000000Z",
        "2030-01-01T00:00:00,5Z",
        "2030-01-01T00:00:00 Z",
        "20300101T000000Z",
        "2030-W01-1T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "２030-01-01T00:00:00Z",
        "2030-01-01T00:00:00Z\n",
    ],
)
def test_what_is_not_an_rfc_3339_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_expiry(None, text)
    assert caught.value.code == "invalid_expires_at"
    assert caught.value.hint


def test_both_headers_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="exclude"):
        parse_expiry("60", "2030-01-01T00:00:00Z")


def test_no_header_means_never() -> None:
    assert parse_expiry(None, None) == NEVER
    assert NEVER.deadline_ms(Milliseconds(123)) is None


def test_a_ttl_never_matches_a_fixed_time() -> None:
    assert not parse_expiry("60", None).matches(parse_expiry(None, "2030-01-01T00:00:00Z"))
    assert not parse_expiry("60", None).matches(parse_expiry("61", None))
    assert not parse_expiry("0", None).matches(NEVER)
