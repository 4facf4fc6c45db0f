"""Charts as SVG and pages as HTML, each in one file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final, NamedTuple

from millstream.sizes import human_bytes

COLOURS: Final = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
WIDTH: Final = 860
HEIGHT: Final = 260
SERIES_MAX: Final = 8
REST_COLOUR: Final = "#9ca3af"
LABEL_CHARACTERS_MAX: Final = 18
CHARACTER_WIDTH: Final = 7
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 14, 46

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1f2937; --faint: #6b7280; --line: #e5e7eb; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --faint: #9ca3af; --line: #374151; --paper: #111827; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 900px; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.note, figcaption { color: var(--faint); } figure { margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .35rem .6rem; border-bottom: 1px solid var(--line);
  text-align: left; font-variant-numeric: tabular-nums; } td.number, th.number { text-align: right; }
.verdict { display: inline-block; padding: .2rem .8rem; border-radius: 1rem; font-weight: 600; color: #fff; }
.good { background: #059669; } .bad { background: #dc2626; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 12px; } svg .grid { stroke: var(--line); }
.legend span { display: inline-block; margin-right: 1.2rem; } .legend i { display: inline-block; width: .8em;
  height: .8em; border-radius: 2px; margin-right: .4em; }
"""


class Series(NamedTuple):
    name: str
    values: Sequence[float]
    is_rest: bool = False
    """Several that are shown as one."""


class Palette:
    """A colour for each name, the same in all charts of a page: names get them in the order they are first given."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._colours: dict[str, str] = {}
        for name in names:
            self.colour(name)

    def colour(self, name: str) -> str:
        number = len(self._colours)
        # Steps of the golden angle: hues that lie apart, however many there are.
        colour = COLOURS[number] if number < len(COLOURS) else f"hsl({number * 137.5 % 360:.0f} 60% 45%)"
        return self._colours.setdefault(name, colour)


def stacked_bars(labels: Sequence[str], series: Sequence[Series], unit: str, palette: Palette | None = None) -> str:
    """One bar for each label, each series a piece of it; more series than colours are one called `others`."""
    shown = _limited(series)
    palette = palette or Palette()
    colours = [palette.colour(one.name) if not one.is_rest else REST_COLOUR for one in shown]
    totals = [sum(one.values[index] for one in shown) for index in range(len(labels))]
    top = _round_up(max(totals, default=0.0), unit)
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    step = inner_width / max(len(labels), 1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in range(5):
        y = _TOP + inner_height * (1 - tick / 4)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{human(top * tick / 4, unit)}</text>')
    # As many labels as have room, each as wide as the widest.
    texts = [_shortened(label) for label in labels]
    width = max(map(len, texts), default=0) * CHARACTER_WIDTH + 2 * CHARACTER_WIDTH
    every = max(-(-len(labels) * width // inner_width), 1)
    for index, label in enumerate(labels):
        x, base = _LEFT + index * step + step * 0.15, 0.0
        for number, one in enumerate(shown):
            height = inner_height * one.values[index] / top if top else 0.0
            y = _TOP + inner_height * (1 - base / top if top else 1) - height
            title = escape(f"{label} · {one.name}: {human(one.values[index], unit)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.2f}" width="{max(step * 0.7, 1):.1f}" height="{height:.2f}"'
                f' fill="{colours[number]}"><title>{title}</title></rect>'
            )
            base += one.values[index]
        if index % every == 0:
            middle = x + step * 0.35
            text = f"<title>{escape(label)}</title>{escape(texts[index])}"
            parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{text}</text>')
    parts.append("</svg>")
    legend = "".join(
        f'<span><i style="background:{colours[number]}"></i>{escape(one.name)}</span>'
        for number, one in enumerate(shown)
    )
    return f'<figure>{"".join(parts)}<figcaption class="legend">{legend}</figcaption></figure>'


def _shortened(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS_MAX else f"{label[: LABEL_CHARACTERS_MAX - 1]}…"


def _limited(series: Sequence[Series]) -> list[Series]:
    if len(series) <= SERIES_MAX:
        return list(series)
    ordered = sorted(series, key=lambda one: -sum(one.values))
    kept, rest = ordered[: SERIES_MAX - 1], ordered[SERIES_MAX - 1 :]
    others = [sum(one.values[index] for one in rest) for index in range(len(rest[0].values))]
    # In the order they were given, which is the same in every chart.
    kept = [one for one in series if one in kept]
    return [*kept, Series(f"{len(rest)} others", others, is_rest=True)]


def _round_up(value: float, unit: str) -> float:
    """The next 1, 2 or 5 times a power of ten; of bytes, of the unit that they are shown in."""
    if value <= 0:
        return 1.0
    if unit == "B" and value >= 1024:
        return 1024 * _round_up(value / 1024, unit)
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def human(value: float, unit: str) -> str:
    """A number with as many digits as are read: `12.5 MiB`, `3.2 k`."""
    if unit == "B":
        return human_bytes(round(value))
    scaled, prefix = value, ""
    for candidate in ("", "k", "M", "G", "T", "P"):
        scaled, prefix = value, candidate
        if abs(value) < 1000:
            break
        value /= 1000
    digits = f"{scaled:.0f}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f}"
    return f"{digits} {prefix}{unit}".strip()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = list(rows)
    numeric = [bool(lines) and all(isinstance(row[i], int | float) for row in lines) for i in range(len(headings))]

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f'<{tag} class="number">{_cell(value)}</{tag}>' if right else f"<{tag}>{_cell(value)}</{tag}>"
            for value, right in zip(values, numeric, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in lines)
    return f"<table><thead><tr>{cells('th', headings)}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def page(title: str, *blocks: str, made_at: datetime | None = None) -> str:
    """A page says when it was made."""
    moment = made_at or datetime.now(UTC)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    made = f'<p class="note"><time datetime="{moment.isoformat()}">{moment:%Y-%m-%d %H:%M:%S} UTC</time></p>'
    body = f"<h1>{escape(title)}</h1>{made}{''.join(blocks)}"
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n"
