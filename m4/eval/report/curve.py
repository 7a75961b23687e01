"""Training curves as inline SVG: for the report, without scripts, in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 12, 34
_MOST_POINTS = 240  # a series is averaged down to so many: more do not show, and weigh


def points(rows: Iterable[Mapping], key: str) -> Points:
    """(step, value) of the rows of a metrics.jsonl that have a finite `key`, by step. Where a run
    was resumed and steps come twice, the later row counts."""
    at = {}
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            at[row["step"]] = float(value)
    return sorted(at.items())


def svg(series: Mapping[str, Points], y_label: str, x_label: str = "step") -> Markup:
    """A line a series, coloured by the page's CSS variables --series-0, --series-1, ...

    Empty where no series has two points. The labels are escaped.
    """
    drawn = {name: _thinned(line) for name, line in series.items() if len(line) > 1}
    if not drawn:
        return Markup("")
    together = np.concatenate(list(drawn.values()))
    left, right = float(together[:, 0].min()), float(together[:, 0].max())
    y_ticks = ticks(float(together[:, 1].min()), float(together[:, 1].max()))
    low, high = y_ticks[0], y_ticks[-1]
    x_ticks = [tick for tick in ticks(left, right) if left <= tick <= right]

    def x_of(x: float) -> float:
        share = (x - left) / ((right - left) or 1)
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * share, 1)

    def y_of(y: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - y) / (high - low), 1)

    parts = [
        Markup('<svg class="curve" viewBox="0 0 {} {}" role="img" aria-label="{} by {}">').format(
            _WIDTH, _HEIGHT, y_label, x_label
        )
    ]
    for tick in y_ticks:
        parts.append(
            Markup(
                '<line x1="{0}" x2="{1}" y1="{2}" y2="{2}" class="grid"/>'
                '<text x="{3}" y="{2}" dy="4" text-anchor="end">{4}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, y_of(tick), _LEFT - 6, _short(tick))
        )
    for tick in x_ticks:
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x_of(tick), _HEIGHT - _BOTTOM + 16, _short(tick)
            )
        )
    parts.append(
        Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
            _WIDTH - _RIGHT, _HEIGHT - 4, x_label
        )
    )
    for number, line in enumerate(drawn.values()):
        parts.append(
            Markup('<polyline points="{}" style="stroke:var(--series-{})"/>').format(
                " ".join(f"{x_of(x)},{y_of(y)}" for x, y in line), number % 4
            )
        )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _thinned(line: Points) -> np.ndarray:
    """[points, 2], means of neighbours where there are too many."""
    values = np.asarray(line, float)
    if len(values) <= _MOST_POINTS:
        return values
    return np.stack([part.mean(axis=0) for part in np.array_split(values, _MOST_POINTS)])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, 4 to 8 of them, from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * size for size in (1, 2, 5, 10) if span / (power * size) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
