"""The audit as a page: the verdict, what was checked, what is wrong, and how the store is filled."""

from __future__ import annotations

from html import escape
from typing import Final

from millstream.pipeline import charts
from millstream.pipeline.audit import AuditReport, SegmentFigure
from millstream.pipeline.usage import day_of
from millstream.sizes import human_bytes

SIZE_STEPS: Final = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
SIZE_NAMES: Final = ("< 1 MiB", "1–4 MiB", "4–16 MiB", "16–64 MiB", "64–256 MiB", "≥ 256 MiB")


def render(report: AuditReport, url: str) -> str:
    is_good = not report.problems
    verdict = "everything is as it should be" if is_good else f"{len(report.problems):,} problems"
    blocks = [
        f'<p class="note">{escape(url)}, {positions(report)}, checked in {report.seconds:.1f} s</p>',
        f'<p><span class="verdict {"good" if is_good else "bad"}">{verdict}</span></p>',
        charts.table(
            ("segments", "messages", "payload", "streams", "problems"),
            [
                (
                    report.segments,
                    report.messages,
                    human_bytes(report.payload_bytes),
                    report.streams,
                    len(report.problems),
                )
            ],
        ),
    ]
    if report.problems:
        rows = [(problem.kind, problem.where, problem.what) for problem in report.problems]
        blocks += ["<h2>Problems</h2>", charts.table(("what", "where", "why"), rows)]
    if report.figures:
        palette = charts.Palette(sorted({figure.bucket for figure in report.figures}))
        blocks += ["<h2>Live payload by day</h2>", _by_day(report.figures, palette)]
        blocks += ["<h2>Live and dead payload by bucket</h2>", _by_bucket(report.figures)]
        blocks += ["<h2>Segments by size</h2>", _by_size(report.figures)]
    return charts.page("Audit of the cold tier", *blocks)


def positions(report: AuditReport) -> str:
    """How far the audit went, by shard where there are several."""
    if len(report.through) == 1:
        return f"up to position {next(iter(report.through.values())):,}"
    return "up to the positions " + ", ".join(f"{shard}.{at}" for shard, at in sorted(report.through.items()))


def _by_day(figures: list[SegmentFigure], palette: charts.Palette) -> str:
    days = sorted({figure.day for figure in figures})
    series = []
    for bucket in sorted({figure.bucket for figure in figures}):
        totals = dict.fromkeys(days, 0.0)
        for figure in figures:
            if figure.bucket == bucket:
                totals[figure.day] += figure.live_bytes
        series.append(charts.Series(bucket, list(totals.values())))
    return charts.stacked_bars([day_of(day) for day in days], series, "B", palette)


def _by_bucket(figures: list[SegmentFigure]) -> str:
    buckets = sorted({figure.bucket for figure in figures})
    live = dict.fromkeys(buckets, 0.0)
    dead = dict(live)
    for figure in figures:
        live[figure.bucket] += figure.live_bytes
        dead[figure.bucket] += figure.payload_bytes - figure.live_bytes
    series = [charts.Series("live", list(live.values())), charts.Series("dead", list(dead.values()))]
    return charts.stacked_bars(buckets, series, "B")


def _by_size(figures: list[SegmentFigure]) -> str:
    counts = [0.0] * len(SIZE_NAMES)
    for figure in figures:
        counts[sum(figure.stored_bytes >= step for step in SIZE_STEPS)] += 1
    return charts.stacked_bars(SIZE_NAMES, [charts.Series("segments", counts)], "")
