"""What a benchmark yields: figures for each case and server, a sample a round, and in which order they are taken."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import Peer, Server, ServerFailed

Figures = dict[str, float]

OURS = "millstream"
YARDSTICK = "yardstick"


class Invalid(Exception):
    """A round whose figures must not be used, with the reason."""


@dataclass(frozen=True)
class Plan:
    """How long and how often to measure, and where the servers keep their data."""

    rounds: int
    seconds: int
    is_quick: bool
    data_parent: Path
    streams: int = 1_000_000
    large_mib: int = 20480
    parts: Sequence[str] = ()
    prepared: Path | None = None


@dataclass(frozen=True)
class Metric:
    """A figure that is reported: its key in the samples, its heading, and which direction is better."""

    key: str
    title: str
    higher_is_better: bool = True
    digits: int = 0

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times better ours is; below 1 it is worse."""
        better, worse = (ours, theirs) if self.higher_is_better else (theirs, ours)
        return better / worse if worse else float("inf")


@dataclass(frozen=True)
class Goal:
    """What millstream sets itself for a case: a limit for a figure, or for its ratio to the yardstick's."""

    case: str
    metric: str
    limit: float
    is_ratio: bool = False


@dataclass
class Cell:
    """All rounds of one case on one server."""

    samples: list[Figures] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        """The median over the rounds, or nothing if a round was invalid or none measured this."""
        values = [sample[key] for sample in self.samples if key in sample]
        return statistics.median(values) if values and not self.problems else None


@dataclass
class Results:
    """The outcome of one benchmark. `headline` names the cases that the overview shows.

    A benchmark that compares millstream with itself has goals instead, and a column `YARDSTICK`.
    """

    name: str
    title: str
    method: str
    metrics: Sequence[Metric]
    headline: Sequence[str]
    goals: Sequence[Goal] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def cell(self, case: str, server: str) -> Cell:
        return self.cells.setdefault(case, {}).setdefault(server, Cell())

    def servers(self) -> list[str]:
        return list(dict.fromkeys(server for row in self.cells.values() for server in row))


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    run: Callable[[Sequence[Peer], Plan], Results]


def alternate(
    results: Results,
    servers: Sequence[Server],
    cases: Iterable[str],
    rounds: int,
    measure: Callable[[str, Server], Figures],
) -> None:
    """Measure every case on every server in turn, round by round; each round begins with another server."""
    cases = list(cases)
    for turn in range(rounds):
        first = turn % len(servers)
        for case in cases:
            for server in (*servers[first:], *servers[:first]):
                record(results.cell(case, server.name), lambda case=case, server=server: measure(case, server))
            progress(f"{results.name}: {case}, round {turn + 1} of {rounds}: {_glance(results, case)}")


def record(cell: Cell, measure: Callable[[], Figures]) -> None:
    """Take one sample; what makes it invalid is kept and shown instead of its figures."""
    try:
        cell.samples.append(measure())
    except (Invalid, ServerFailed, OSError, subprocess.TimeoutExpired) as error:
        cell.problems.append(str(error) or type(error).__name__)
        progress(f"  INVALID: {cell.problems[-1]}")


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _glance(results: Results, case: str) -> str:
    metric = results.metrics[0]
    values = ((name, cell.samples[-1].get(metric.key)) for name, cell in results.cells[case].items() if cell.samples)
    return ", ".join(f"{name} {value:,.{metric.digits}f}" for name, value in values if value is not None)
