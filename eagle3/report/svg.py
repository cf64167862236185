"""Charts as inline SVG: pure functions from numbers to text, with axes, ticks, a legend and tooltips.

Colours are CSS classes (`s0` to `s7` and `axis`, `grid`, `mark`), so that the page decides what they look like in light
and dark. No script, no font, no external file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 520
HEIGHT = 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 44
"""Room around the plot for tick texts and axis labels, pixels."""
MAX_POINTS = 400
"""Points kept per line: more cannot be told apart at this width."""
MAX_SERIES = 8
"""Colours that can be told apart; further series share `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named line or area."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) in ascending x."""


def nice_ticks(low: float, high: float, count: int = 5) -> Sequence[float]:
    """Return about `count` round numbers covering [low, high]; the first is at most `low`, the last at least `high`."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-12, 1e-9 * size):
        high = low + (size if size > 1e-12 else 1.0)
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def short_number(value: float) -> str:
    """Return a number short enough for a tick: 1500000 becomes 1.5M, 0.00025 becomes 2.5e-04."""
    size = abs(value)
    if size and size < 0.001:
        return f"{value:.1e}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if suffix == "k" else limit)
            return f"{scaled:.4g}{suffix}"
    return f"{value:.4g}"


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `MAX_POINTS` points spread evenly, the first and last among them."""
    if len(points) <= MAX_POINTS:
        return points
    stride = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * stride)] for index in range(MAX_POINTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps values to pixels and draws what surrounds the data."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    def x(self, value: float) -> float:
        return _scale(value, self.x_ticks[0], self.x_ticks[-1], LEFT, WIDTH - RIGHT)

    def y(self, value: float) -> float:
        return _scale(value, self.y_ticks[0], self.y_ticks[-1], HEIGHT - BOTTOM, TOP)

    def axes(self, x_label: str, y_label: str, x_texts: Sequence[tuple[float, str]] | None = None) -> str:
        parts: list[str] = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text("tick", LEFT - 6, y + 4, short_number(tick), "end"))
        texts = x_texts if x_texts is not None else [(tick, short_number(tick)) for tick in self.x_ticks]
        bottom = HEIGHT - BOTTOM
        parts.extend(_text("tick", self.x(place), bottom + 16, text) for place, text in texts)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(_text("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label))
        parts.append(f'<g transform="rotate(-90 13 {(TOP + bottom) / 2:.0f})">')
        parts.append(_text("label", 13, (TOP + bottom) / 2, y_label) + "</g>")
        return "".join(parts)


def _scale(value: float, low: float, high: float, start: float, stop: float) -> float:
    return start + (value - low) / (high - low) * (stop - start)


def _wrap(title: str, body: str, names: Sequence[str]) -> str:
    return _figure(title, body, HEIGHT, _legend(names) if len(names) > 1 else "")


def _figure(title: str, body: str, height: int, legend: str) -> str:
    name = escape(title)
    picture = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{body}</svg>'
    shown = picture if body else '<p class="none">nothing to plot</p>'
    return f'<figure class="chart"><figcaption>{name}</figcaption>{shown}{legend}</figure>'


def _legend(names: Sequence[str]) -> str:
    keys = [f'<span><i class="s{index % MAX_SERIES}"></i>{escape(name)}</span>' for index, name in enumerate(names)]
    return f'<div class="legend">{"".join(keys)}</div>'


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, from_zero: bool = False) -> str:
    """Draw lines.

    Args:
        title: Shown above.
        series: Lines; those without points are left out.
        x_label: With unit.
        y_label: With unit.
        from_zero: Whether the y axis starts at 0.
    """
    drawn = [line for line in series if line.points]
    if not drawn:
        return _wrap(title, "", ())
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    frame = _Frame(
        x_ticks=nice_ticks(min(xs), max(xs)), y_ticks=nice_ticks(0.0 if from_zero else min(ys), max(ys), count=5)
    )
    body = [frame.axes(x_label, y_label)]
    for index, line in enumerate(drawn):
        kept = thinned(line.points)
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in kept)
        body.append(f'<polyline class="line s{index % MAX_SERIES}" points="{path}"/>')
        body.extend(
            _dot(frame.x(x), frame.y(y), f"{line.name}: {short_number(y)} at {short_number(x)}", index) for x, y in kept
        )
    return _wrap(title, "".join(body), [line.name for line in drawn])


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, text: str, index: int) -> str:
    tip = f"<title>{escape(text)}</title>"
    return f'<circle class="dot s{index % MAX_SERIES}" cx="{x:.1f}" cy="{y:.1f}" r="4">{tip}</circle>'


def _rect(x: float, y: float, width: float, height: float, text: str, index: int) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{max(0.0, height):.1f}" rx="2"'
    return f'<rect class="bar s{index % MAX_SERIES}" {place}><title>{escape(text)}</title></rect>'


def area_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """Draw areas stacked on one another; all series share the x values of the first."""
    drawn = [area for area in series if area.points]
    if not drawn:
        return _wrap(title, "", ())
    xs = [x for x, _ in thinned(drawn[0].points)]
    columns = [[y for _, y in thinned(area.points)] for area in drawn]
    tops: list[list[float]] = []
    for column in columns:
        below = tops[-1] if tops else [0.0] * len(xs)
        tops.append([base + max(0.0, value) for base, value in zip(below, column, strict=True)])
    frame = _Frame(x_ticks=nice_ticks(min(xs), max(xs)), y_ticks=nice_ticks(0.0, max(tops[-1])))
    body = [frame.axes(x_label, y_label)]
    below = [0.0] * len(xs)
    for index, (area, top) in enumerate(zip(drawn, tops, strict=True)):
        upper = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, top, strict=True)]
        lower = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, below, strict=True)]
        body.append(f'<polygon class="area s{index % MAX_SERIES}" points="{" ".join([*upper, *reversed(lower)])}"/>')
        body.append(f'<polyline class="line s{index % MAX_SERIES}" points="{" ".join(upper)}"/>')
        body.extend(
            _dot(frame.x(x), frame.y(y), f"{area.name}: {short_number(value)} at {short_number(x)}", index)
            for x, y, value in zip(xs, top, columns[index], strict=True)
        )
        below = top
    return _wrap(title, "".join(body), [area.name for area in drawn])


def bar_chart(
    title: str, categories: Sequence[str], series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str
) -> str:
    """Draw upright bars, one group per category with one bar per series, its value above it."""
    values = [value for column in series.values() for value in column]
    if not categories or not values:
        return _wrap(title, "", ())
    frame = _Frame(x_ticks=(0.0, float(len(categories))), y_ticks=nice_ticks(0.0, max(*values, 0.0)))
    body = [frame.axes(x_label, y_label, [(index + 0.5, name) for index, name in enumerate(categories)])]
    slot = (WIDTH - LEFT - RIGHT) / len(categories)
    width = min(56.0, slot * 0.72 / len(series))
    for number, (name, column) in enumerate(series.items()):
        for index, value in enumerate(column):
            x = frame.x(index + 0.5) + (number - len(series) / 2) * width
            y = frame.y(value)
            text = f"{name}, {categories[index]}: {value:.4g}"
            body.append(_rect(x + 1, y, width - 2, HEIGHT - BOTTOM - y, text, number))
            body.append(_text("value", x + width / 2, y - 4, short_number(value)))
    return _wrap(title, "".join(body), list(series))


def histogram(title: str, values: Sequence[float], *, x_label: str, y_label: str = "samples", index: int = 0) -> str:
    """Draw how often values fall into about 24 equal bins; `index` picks the colour."""
    if not values:
        return _wrap(title, "", ())
    ticks = nice_ticks(min(0.0, *values), max(values), count=6)
    low, high = ticks[0], ticks[-1]
    num_bins = 24
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / (high - low) * num_bins))] += 1
    frame = _Frame(x_ticks=ticks, y_ticks=nice_ticks(0.0, float(max(counts))))
    body = [frame.axes(x_label, y_label)]
    for number, count in enumerate(counts):
        start = low + (high - low) * number / num_bins
        stop = low + (high - low) * (number + 1) / num_bins
        x, y = frame.x(start), frame.y(count)
        text = f"{short_number(start)} to {short_number(stop)}: {count}"
        body.append(_rect(x + 1, y, frame.x(stop) - x - 2, HEIGHT - BOTTOM - y, text, index))
    return _wrap(title, "".join(body), ())


def share_bars(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draw one lying bar of full width per row, divided by the shares of its parts.

    A part keeps its colour in all rows.
    """
    totals: dict[str, float] = {}
    for parts in rows.values():
        for name, value in parts.items():
            totals[name] = totals.get(name, 0.0) + max(0.0, value)
    if not any(totals.values()):
        return _wrap(title, "", ())
    names = _folded(totals)
    label_room, thickness, gap = 130, 24, 12
    width = WIDTH - label_room - RIGHT
    body: list[str] = []
    for row, (label, parts) in enumerate(rows.items()):
        total = sum(max(0.0, value) for value in parts.values())
        y = TOP + row * (thickness + gap)
        body.append(_text("tick", label_room - 8, y + 16, label if len(label) <= 19 else label[:18] + "…", "end"))
        x = float(label_room)
        for index, name in enumerate(names):
            value = _part(parts, name, names)
            if not total or value <= 0:
                continue
            length = width * value / total
            text = f"{label}, {name}: {value:.6g} ({value / total:.1%})"
            body.append(_rect(x, y, length - 2, thickness, text, index))
            if length > 44:
                body.append(_text("inside", x + length / 2, y + 16, f"{value / total:.0%}"))
            x += length
    height = TOP * 2 + len(rows) * (thickness + gap) - gap
    return _figure(title, "".join(body), height, _legend(names))


OTHER = "other"


def _folded(totals: Mapping[str, float]) -> Sequence[str]:
    names = [name for name, _ in sorted(totals.items(), key=lambda item: -item[1])]
    return names if len(names) <= MAX_SERIES else [*names[: MAX_SERIES - 1], OTHER]


def _part(parts: Mapping[str, float], name: str, names: Sequence[str]) -> float:
    if name == OTHER and OTHER not in parts:
        return sum(max(0.0, value) for key, value in parts.items() if key not in names)
    return max(0.0, parts.get(name, 0.0))
