"""Charts write sizes as everything else does, and their axes end at a round number of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipeline.charts import Series, _round_up, human, stacked_bars
from millstream.sizes import human_bytes


def test_sizes_have_the_same_units_in_charts_as_in_commands() -> None:
    assert human(5 << 20, "B") == human_bytes(5 << 20) == "5.0 MiB"
    assert "20.0 MiB" in stacked_bars(["today"], [Series("bucket", [float(17 << 20)])], "B")
    assert "20 M" in stacked_bars(["today"], [Series("bucket", [17e6])], "")


@given(st.integers(1, 1 << 50))
def test_an_axis_of_bytes_ends_at_a_round_number_of_some_unit(value: int) -> None:
    top = _round_up(value, "B")
    assert value <= top
    while top >= 1024 and top % 1024 == 0:
        top //= 1024
    assert top in {factor * 10**power for factor in (1, 2, 5) for power in range(4)} | {10_000}
