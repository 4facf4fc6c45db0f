"""The Prometheus text format, version 0.0.4: families of samples as lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from millstream.measures import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, str]


class Family(NamedTuple):
    """Samples that share a name: a gauge's or a counter's value, or a histogram, under each set of labels."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Labels, float | Histogram]]


def counter(name: str, text: str, value: float) -> Family:
    return Family(name, "counter", text, [({}, value)])


def gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [({}, value)])


def merged(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms with the same bounds."""
    total = Histogram(histograms[0].bounds)
    for histogram in histograms:
        total.counts = [a + b for a, b in zip(total.counts, histogram.counts, strict=True)]
        total.sum += histogram.sum
    return total


def render(families: Iterable[Family]) -> bytes:
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            if isinstance(value, Histogram):
                lines += _histogram(family.name, labels, value)
            else:
                lines.append(f"{family.name}{_braced(labels)} {_number(value)}")
    return "\n".join(lines).encode() + b"\n"


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterable[str]:
    below = 0
    for bound, count in zip([*map(_number, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        below += count
        yield f"{name}_bucket{_braced({**labels, 'le': bound})} {below}"
    yield f"{name}_sum{_braced(labels)} {_number(histogram.sum)}"
    yield f"{name}_count{_braced(labels)} {below}"


def _braced(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
