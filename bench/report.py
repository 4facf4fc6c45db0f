"""Turns results into tables (Markdown), data (JSON) and charts (PNG).

A ratio says how many times better millstream is than a peer, in whichever direction is better for the figure: above 1
millstream wins, below 1 it loses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench import appends
from bench.measurement import OURS, YARDSTICK, Cell, Goal, Metric, Results
from bench.peers import Skipped

COLORS = {
    OURS: "#0b6e99",
    "millstream, memory": "#7fb7d3",
    YARDSTICK: "#b8b8b8",
    "Node, memory": "#8fbf6b",
    "Node, file": "#4f8a3a",
    "Rust": "#d9843b",
    "Ursula": "#9a6bb5",
}
PIXELS_PER_INCH = 130
ROUNDS = "rounds.json"


# -- tables ----------------------------------------------------------------------------------------------------


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width if column == 0 else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return "\n".join([line(headings), line(rule), *map(line, rows)])


def _ratio(metric: Metric, row: Mapping[str, Cell], peer: str) -> float | None:
    ours, theirs = (row[name].median(metric.key) if name in row else None for name in (OURS, peer))
    return None if ours is None or theirs is None else metric.advantage(ours, theirs)


def _show_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×" if ratio >= 3 else f"{ratio:.2f}×"


def _show_value(cell: Cell | None, metric: Metric) -> str:
    if cell is None:
        return "–"
    if cell.problems:
        return "invalid"
    value = cell.median(metric.key)
    return "–" if value is None else f"{value:,.{metric.digits}f}"


def metric_table(results: Results, metric: Metric) -> str:
    servers = results.servers()
    peers = [name for name in servers if name != OURS]
    compares = OURS in servers
    rows = [
        [case, *(_show_value(row.get(name), metric) for name in servers)]
        + ([_show_ratio(_ratio(metric, row, peer)) for peer in peers] if compares else [])
        for case, row in results.cells.items()
        if not results.goals or _is_measured(row, metric)
    ]
    return table([metric.title, *servers, *([f"vs {peer}" for peer in peers] if compares else [])], rows)


def _is_measured(row: Mapping[str, Cell], metric: Metric) -> bool:
    return any(cell.problems or cell.median(metric.key) is not None for cell in row.values())


def overview(collected: Sequence[Results]) -> str:
    """One line for each headline case: the main figure of every server and the ratios."""
    servers = list(dict.fromkeys(name for results in collected if results.headline for name in results.servers()))
    peers = [name for name in servers if name != OURS]
    rows = []
    for results, case, metric in _headlines(collected):
        row = results.cells[case]
        rows.append(
            [f"{results.title}: {case} ({metric.title})"]
            + [_show_value(row.get(name), metric) for name in servers]
            + [_show_ratio(_ratio(metric, row, peer)) for peer in peers]
        )
    return table(["", *servers, *(f"vs {peer}" for peer in peers)], rows)


def goals(collected: Sequence[Results]) -> str:
    """One line for each goal: the figure, what it is compared with, and whether the goal is met."""
    rows = []
    for results in collected:
        metrics = {metric.key: metric for metric in results.metrics}
        for goal in results.goals:
            if goal.case in results.cells:
                rows.append(_goal_row(results, goal, metrics[goal.metric]))
    return table(["", OURS, YARDSTICK, "ratio", "goal", ""], rows)


def _goal_row(results: Results, goal: Goal, metric: Metric) -> list[str]:
    row = results.cells[goal.case]
    value, ratio = row[OURS].median(metric.key), _plain_ratio(row, metric)
    reached = ratio if goal.is_ratio else value
    is_met = reached is not None and (reached >= goal.limit if metric.higher_is_better else reached <= goal.limit)
    sign = "≥" if metric.higher_is_better else "≤"
    return [
        f"{results.title}: {goal.case} ({metric.title})",
        _show_value(row.get(OURS), metric),
        _show_value(row.get(YARDSTICK), metric),
        _show_ratio(ratio),
        f"{sign} {goal.limit:g}{'×' if goal.is_ratio else ''}",
        "–" if reached is None else "met" if is_met else "missed",
    ]


def _plain_ratio(row: Mapping[str, Cell], metric: Metric) -> float | None:
    """The figure as a multiple of the yardstick's, whichever direction is better."""
    ours, theirs = (row[name].median(metric.key) if name in row else None for name in (OURS, YARDSTICK))
    return ours / theirs if ours is not None and theirs else None


def glance(collected: Sequence[Results]) -> str:
    """The overview and the goals, as far as there are any."""
    parts = [overview(collected)] if _headlines(collected) else []
    parts += [goals(collected)] if any(results.goals for results in collected) else []
    return "\n\n".join(parts)


def _headlines(collected: Sequence[Results]) -> list[tuple[Results, str, Metric]]:
    found = []
    for results in collected:
        cases = [case for case in results.headline if case in results.cells]
        found += [(results, case, metric) for case in cases for metric in _main_metrics(results)]
    return found


def overview_page(collected: Sequence[Results], skipped: Sequence[Skipped]) -> str:
    """All benchmarks on one page: the headlines and the goals."""
    parts = [
        "# Benchmark results",
        "Written by `make bench`; how to read it is in [../README.md](../README.md). A ratio (`vs`) says how many "
        "times better millstream is than that peer in the same run: above 1 it wins, below 1 it loses.",
        "\n".join(f"- [{results.title}]({results.name}.md)" for results in collected),
        *(f"Skipped: {one.name}: {one.reason}." for one in skipped),
        overview(collected),
        "![Ratios](overview.png)",
        "## Goals",
        "millstream against a yardstick of its own, measured in the same run. Here a ratio is millstream's figure "
        "divided by the yardstick's.",
        goals(collected),
    ]
    return "\n\n".join(parts) + "\n"


def page(results: Results) -> str:
    """One benchmark: when, what and where, and its table."""
    metrics = [
        metric for metric in _main_metrics(results) if any(_is_measured(row, metric) for row in results.cells.values())
    ]
    parts = [
        f"# {results.title}",
        results.method,
        "\n".join(f"- {key}: {value}" for key, value in results.environment.items()),
        *([goals([results])] if results.goals else [metric_table(results, metric) for metric in metrics]),
        f"![{results.title}]({results.name}.png)",
        *_remarks(results),
    ]
    return "\n\n".join(parts) + "\n"


def _main_metrics(results: Results) -> Sequence[Metric]:
    return results.metrics[:2] if results.name in ("live", "startup") else results.metrics[:1]


def _remarks(results: Results) -> list[str]:
    lines = []
    for case, row in results.cells.items():
        for name, cell in row.items():
            lines += [f"- **Invalid**: {case}, {name}: {problem}" for problem in dict.fromkeys(cell.problems)]
            lines += [f"- {case}, {name}: {note}" for note in cell.notes]
    return ["\n".join(lines)] if lines else []


def as_data(collected: Sequence[Results], skipped: Sequence[Skipped]) -> str:
    """Everything that was measured, every round, as JSON; `read` understands it."""
    content = {
        "skipped": {one.name: one.reason for one in skipped},
        "described": {results.name: _description(results) for results in collected},
        "benchmarks": {
            results.name: {
                case: {name: _cell_data(results, row, name) for name in row} for case, row in results.cells.items()
            }
            for results in collected
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _description(results: Results) -> dict[str, object]:
    return {
        "title": results.title,
        "method": results.method,
        "environment": dict(results.environment),
        "metrics": [dataclasses.asdict(metric) for metric in results.metrics],
        "headline": list(results.headline),
        "goals": [dataclasses.asdict(goal) for goal in results.goals],
    }


def read(directory: Path) -> list[Results]:
    """What an earlier run on this machine has written, so that a run of some benchmarks keeps those of the others."""
    try:
        content = json.loads((directory / ROUNDS).read_text())
    except FileNotFoundError:
        return []
    return [
        Results(
            name,
            about["title"],
            about["method"],
            [Metric(**metric) for metric in about["metrics"]],
            about["headline"],
            [Goal(**goal) for goal in about["goals"]],
            about["environment"],
            {
                case: {server: Cell(cell["rounds"], cell["problems"], cell["notes"]) for server, cell in row.items()}
                for case, row in content["benchmarks"][name].items()
            },
        )
        for name, about in content.get("described", {}).items()
    ]


def _cell_data(results: Results, row: Mapping[str, Cell], name: str) -> dict[str, object]:
    cell = row[name]
    medians = {metric.key: cell.median(metric.key) for metric in results.metrics}
    ratios = {metric.key: _ratio(metric, row, name) for metric in results.metrics if name != OURS}
    return {
        "median": {key: round(value, 4) for key, value in medians.items() if value is not None},
        "millstream_advantage": {key: round(value, 3) for key, value in ratios.items() if value is not None},
        "rounds": [{key: round(value, 4) for key, value in sample.items()} for sample in cell.samples],
        "problems": cell.problems,
        "notes": cell.notes,
    }


# -- charts ----------------------------------------------------------------------------------------------------


def write(collected: Sequence[Results], skipped: Sequence[Skipped], directory: Path, *, is_all: bool) -> None:
    """A page for each benchmark, one for all of them if they are all there, and the rounds, which stay out of git."""
    directory.mkdir(exist_ok=True)
    (directory / ROUNDS).write_text(as_data(collected, skipped))
    for results in collected:
        (directory / f"{results.name}.md").write_text(page(results))
    pyplot.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    )
    if is_all:
        (directory / "overview.md").write_text(overview_page(collected, skipped))
        _overview_chart(collected, directory / "overview.png")
    for results in collected:
        draw = _appends_chart if results.name == "appends" else _goals_chart if results.goals else _plain_chart
        draw(results, directory / f"{results.name}.png")


def _plain_number(value: float, _: object = None) -> str:
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _limits(rows: Iterable[Mapping[str, Cell]], metric: Metric) -> tuple[float, float]:
    """From a little below the smallest bar to where the label of the highest still fits."""
    medians = (cell.median(metric.key) for row in rows for cell in row.values())
    values = [value for value in medians if value] or [1.0]
    return min(values) / 2.5, max(values) * 1.8


def _bars(
    axes: Axes,
    rows: Mapping[str, Mapping[str, Cell]],
    servers: Sequence[str],
    metric: Metric,
    limits: tuple[float, float],
) -> None:
    """Groups of bars: one group a case, one bar a server, each with its value. Logarithmic: ratios are distances."""
    width = 0.84 / len(servers)
    floor, _ = limits
    for column, name in enumerate(servers):
        for group, row in enumerate(rows.values()):
            value = row[name].median(metric.key) if name in row else None
            at = group + (column - (len(servers) - 1) / 2) * width
            if value is None:
                reason = "invalid" if name in row and row[name].problems else "n/a"
                axes.text(at, floor * 1.1, reason, ha="center", va="bottom", rotation=90, color="#888", fontsize=7)
                continue
            axes.bar(at, value, width * 0.94, color=COLORS.get(name, "#777"))
            axes.text(at, value * 1.04, _short(value), ha="center", va="bottom", fontsize=6.5, color="#333")
    axes.set_yscale("log")
    axes.set_ylim(limits)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.tick_params(axis="x", length=0)
    direction = "higher is better" if metric.higher_is_better else "lower is better"
    axes.set_ylabel(f"{metric.title}, log scale\n({direction})")


def _legend(figure: pyplot.Figure, servers: Sequence[str]) -> None:
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS.get(name, "#777")) for name in servers]
    figure.legend(handles, servers, loc="outside lower center", ncols=len(servers), frameon=False)


def _save(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, dpi=PIXELS_PER_INCH)
    pyplot.close(figure)


def _appends_chart(results: Results, path: Path) -> None:
    """Throughput above, p99 below; a column for each size and number of streams, a group for each connection count."""
    kinds = [(size, streams) for size in appends.SIZES for streams in appends.STREAMS]
    metrics = [metric for metric in results.metrics if metric.key in ("per_second", "p99_ms")]
    figure, grid = pyplot.subplots(len(metrics), len(kinds), figsize=(19, 8), layout="constrained", squeeze=False)
    servers = results.servers()
    for column, (size, streams) in enumerate(kinds):
        rows = {
            f"{connections} conn.": results.cells.get(appends.case_name(size, streams, connections), {})
            for connections in appends.CONNECTIONS
        }
        for line, metric in enumerate(metrics):
            _bars(grid[line][column], rows, servers, metric, _limits(results.cells.values(), metric))
            if column:
                grid[line][column].set_ylabel("")
        grid[0][column].set_title(f"{size} to {streams:,} stream{'' if streams == 1 else 's'}")
    figure.suptitle("Durable appends", fontsize=13, fontweight="bold")
    _legend(figure, servers)
    _save(figure, path)


def _plain_chart(results: Results, path: Path) -> None:
    """The first metrics of a benchmark side by side."""
    shown = [metric for metric in results.metrics if metric.key not in ("server_cpu_us", "client_busy", "requests")]
    shown = shown[:3]
    figure, grid = pyplot.subplots(
        1, len(shown), figsize=(max(6.5, 5.4 * len(shown)), 4.2), layout="constrained", squeeze=False
    )
    servers = results.servers()
    for axes, metric in zip(grid[0], shown, strict=True):
        rows = {
            case.replace(", ", ",\n"): row
            for case, row in results.cells.items()
            if any(cell.problems or cell.median(metric.key) is not None for cell in row.values())
        }
        _bars(axes, rows, servers, metric, _limits(rows.values(), metric))
    figure.suptitle(results.title, fontsize=13, fontweight="bold")
    _legend(figure, servers)
    _save(figure, path)


def _goals_chart(results: Results, path: Path) -> None:
    """A line for each goal, as a share of its limit: left of the line at 1 it is met when less is better."""
    metrics = {metric.key: metric for metric in results.metrics}
    shown = [goal for goal in results.goals if goal.case in results.cells]
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.42 * len(shown)), layout="constrained")
    for line, goal in enumerate(shown):
        metric, row = metrics[goal.metric], results.cells[goal.case]
        value = _plain_ratio(row, metric) if goal.is_ratio else row[OURS].median(metric.key)
        if not value:
            axes.text(1.03, line, "invalid" if row[OURS].problems else "n/a", va="center", fontsize=7, color="#888")
            continue
        margin = value / goal.limit if metric.higher_is_better else goal.limit / value
        axes.barh(line, margin - 1, 0.62, left=1, color=COLORS[OURS] if margin >= 1 else "#c8553d")
        unit = metric.title.rpartition(", ")[2]
        shown_value = f"{_show_ratio(value)} the yardstick" if goal.is_ratio else f"{_short(value)} {unit}"
        sign, times = "≥" if metric.higher_is_better else "≤", "×" if goal.is_ratio else ""
        axes.annotate(
            f"{shown_value}; goal {sign} {goal.limit:g}{times}",
            (margin, line),
            xytext=(4 if margin >= 1 else -4, 0),
            textcoords="offset points",
            va="center",
            ha="left" if margin >= 1 else "right",
            fontsize=7,
        )
    axes.set_xscale("log")
    axes.margins(x=0.45)
    axes.axvline(1, color="#333", linewidth=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_yticks(range(len(shown)), [f"{goal.case}\n{metrics[goal.metric].title}" for goal in shown])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_xlabel("missed by a factor of  ←  goal (log scale)  →  met with this much to spare")
    figure.suptitle(f"{results.title}: how far from the goals?", fontsize=13, fontweight="bold")
    _save(figure, path)


def _overview_chart(collected: Sequence[Results], path: Path) -> None:
    """How many times better millstream is than each peer, for the headline cases."""
    headlines = _headlines(collected)
    servers = dict.fromkeys(name for results in collected if results.headline for name in results.servers())
    peers = [name for name in servers if name != OURS]
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.5 * len(headlines)), layout="constrained")
    step = 0.8 / max(1, len(peers))
    for line, (results, case, metric) in enumerate(headlines):
        for index, peer in enumerate(peers):
            ratio = _ratio(metric, results.cells[case], peer)
            at = line + (index - (len(peers) - 1) / 2) * step
            if ratio is None:
                row = results.cells[case]
                is_invalid = any(row[name].problems for name in (OURS, peer) if name in row)
                axes.text(1.03, at, "invalid" if is_invalid else "n/a", va="center", fontsize=6.5, color="#888")
                continue
            axes.barh(at, ratio - 1, step * 0.9, left=1, color=COLORS.get(peer, "#777"))
            axes.annotate(
                _show_ratio(ratio),
                (ratio, at),
                xytext=(3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                va="center",
                ha="left" if ratio >= 1 else "right",
                fontsize=6.5,
            )
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.axvline(1, color="#333", linewidth=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_yticks(
        range(len(headlines)),
        [f"{results.title}: {case}\n{metric.title}" for results, case, metric in headlines],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(headlines) - 0.45, -0.55)
    axes.set_xlabel("worse  ←  millstream compared with the peer (log scale)  →  better")
    figure.suptitle("How many times better is millstream?", fontsize=13, fontweight="bold")
    _legend(figure, [f"{peer}" for peer in peers])
    _save(figure, path)
