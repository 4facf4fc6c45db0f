"""Reports: a bucket has one colour all through a page, labels do not run into each other, and a page has its date."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

from millstream.pipeline.charts import COLOURS, HEIGHT, REST_COLOUR, Palette, Series, page, stacked_bars
from millstream.pipeline.usage import UsageRow, render


def legend(chart: str) -> dict[str, str]:
    found = re.findall(r'<i style="background:([^"]+)"></i>([^<]+)</span>', chart)
    return {name: colour for colour, name in found}


def test_bucket_keeps_its_colour_in_every_chart_of_a_page() -> None:
    buckets = [f"bucket-{number:02d}" for number in range(12)]
    rows = [UsageRow(one, "2026-01-01", n + 1, 100 - n, 10 * ((n * 7) % 12), 5) for n, one in enumerate(buckets)]
    charts = [legend(part) for part in render(rows).split("<h2>")[1:4]]
    assert all(len(set(chart.values())) == len(chart) for chart in charts), "no two of a chart look alike"
    for name in buckets:
        assert len({chart[name] for chart in charts if name in chart}) <= 1
    assert all(chart["5 others"] == REST_COLOUR for chart in charts)


def test_palette_never_gives_two_names_one_colour() -> None:
    palette = Palette(map(str, range(40)))
    assert len({palette.colour(str(number)) for number in range(40)}) == 40
    assert palette.colour("0") == COLOURS[0]


def test_long_labels_are_cut_and_have_room() -> None:
    labels = [f"a-bucket-with-a-long-name-{number}" for number in range(20)]
    chart = stacked_bars(labels, [Series("live", [1.0] * 20)], "B")
    found = re.findall(rf'<text x="([0-9.]+)" y="{HEIGHT - 26}"[^>]*><title>([^<]+)</title>([^<]+)</text>', chart)
    assert found and all(len(text) <= 18 for _, _, text in found)
    assert all(title in labels for _, title, _ in found), "the whole name is in the title"
    places = [float(x) for x, _, _ in found]
    assert all(after - before >= 18 * 7 for before, after in pairwise(places))


def test_page_says_when_it_was_made() -> None:
    assert "2026-01-31 12:00:00 UTC" in page("Audit", made_at=datetime(2026, 1, 31, 12, tzinfo=UTC))
    assert f"{datetime.now(UTC):%Y-%m-%d}" in page("Usage")
