"""The ΔBLEU plot of the page: inline SVG in the page's colours, a group a language for its script.

The same picture as `plot.figure`, which is that of files, for a screen: two widths of it, with a
text for each language that shows where the pointer is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from m4.eval.report.curve import ticks
from m4.eval.scoring.delta import METRIC_NAMES, UNDERTRAINED, Delta, small_tests
from m4.eval.scoring.levels import LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.trend import trend, window_size

WIDTHS = {"wide": 1180, "narrow": 390}  # of a screen, and of a phone
_LEFT, _RIGHT, _TOP = 44, 8, 20
_LETTER = 11.0
_BARS = 54  # height of the training pairs
# Circle, square, triangle, diamond, of a radius of 1.
_MARKERS = (
    (("m", -1, 0), ("a", 1, 1, 0, 1, 0, 2, 0), ("a", 1, 1, 0, 1, 0, -2, 0)),
    (("m", -0.9, -0.9), ("h", 1.8), ("v", 1.8), ("h", -1.8), ("z",)),
    (("m", 0, -1.15), ("l", 1.1, 2), ("h", -2.2), ("z",)),
    (("m", 0, -1.25), ("l", 1.1, 1.25), ("l", -1.1, 1.25), ("l", -1.1, -1.25), ("z",)),
)


def marker(number: int, radius: float) -> str:
    """The path of a system's marker around the point where the path is."""
    parts = []
    for letter, *values in _MARKERS[number % len(_MARKERS)]:
        flags = (2, 3, 4) if letter == "a" else ()
        sized = [v if i in flags else round(v * radius, 2) for i, v in enumerate(values)]
        parts.append(letter + " ".join(f"{value:g}" for value in sized))
    return "".join(parts)


@dataclass(frozen=True)
class _Frame:
    """Where things are: a panel a side one below the other, then bars and labels."""

    width: int
    panel: int
    languages: Sequence[str]
    sides: Sequence[str]
    low: float
    high: float

    @property
    def slot(self) -> float:
        return (self.width - _LEFT - _RIGHT) / len(self.languages)

    def x(self, place: float) -> float:
        return round(_LEFT + (place + 0.5) * self.slot, 1)

    def top(self, side: int) -> float:
        return _TOP + side * (self.panel + 12)

    def y(self, side: int, value: float) -> float:
        share = (self.high - min(max(value, self.low), self.high)) / (self.high - self.low)
        return round(self.top(side) + self.panel * share, 1)

    @property
    def foot(self) -> float:
        """Of the bars."""
        return self.top(len(self.sides)) + _BARS

    @property
    def labelled(self) -> bool:
        return self.slot >= 0.8 * _LETTER

    @property
    def height(self) -> float:
        longest = max(map(len, self.languages)) if self.labelled else 0
        return self.foot + 6 + 0.62 * _LETTER * longest + 16


def svg(
    rows: Sequence[Delta],
    kind: str,
    levels: ResourceLevels,
    families: Mapping[str, int],
    texts: Mapping[str, str],
    window: int = 10,
) -> Markup:
    """Points, intervals and trends of all systems over the languages by falling training size.

    kind: of `WIDTHS`. families: language -> the number of its family's colour. texts: language ->
    what shows where the pointer is. What is small, hollow or pale is so in `plot.plot`, too.
    """
    pairs = {row.language: row.train_pairs for row in rows}
    languages = sorted(pairs, key=lambda language: (-pairs[language], language))
    sides = [side for side in SIDES if any(row.side == side for row in rows)]
    small = small_tests(rows, levels)
    ruling = [row for row in rows if row.direction not in small] or list(rows)
    edges = [bound for row in ruling for bound in (row.low, row.high, row.delta, 0.0)]
    marks = ticks(min(edges), max(edges))
    panel = 300 if len(sides) == 1 else 210
    frame = _Frame(WIDTHS[kind], panel, languages, sides, marks[0], marks[-1])
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    head = Markup('<svg class="chart {}" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">')
    label = f"Δ{metric} of {len(languages)} languages by training size"
    parts = [head.format(kind, frame.width, frame.height, label)]
    parts += _bands(frame, [levels.of(pairs[language]) for language in languages])
    for number, side in enumerate(sides):
        parts += _axis(frame, number, marks, f"Δ{metric}, {side.replace('->', ' → ')}")
    parts += _slots(frame, rows, small, pairs, families, texts)
    for number, side in enumerate(sides):
        mine = [row for row in rows if row.side == side]
        parts += _trends(frame, number, mine, small, window)
    middle = (frame.x(0) + frame.x(len(languages) - 1)) / 2
    parts.append(
        Markup('<text class="soft" x="{}" y="{:.0f}" text-anchor="middle">{}</text></svg>').format(
            middle, frame.height - 4, "languages, by falling number of training pairs"
        )
    )
    return Markup("").join(parts)


def _bands(frame: _Frame, found: Sequence[str]) -> list[Markup]:
    """The resource levels as stripes, with their names above."""
    stripe = Markup('<rect class="band {}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    text = Markup('<text class="soft" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
    parts, start = [], 0
    for name in LEVELS:
        count = found.count(name)
        left, wide = _LEFT + start * frame.slot, count * frame.slot
        if count:
            parts.append(stripe.format(name, left, _TOP, wide, frame.foot - _TOP))
        if wide > 0.62 * _LETTER * len(name):
            parts.append(text.format(left + wide / 2, _TOP - 6, name))
        start += count
    return parts


def _axis(frame: _Frame, side: int, marks: Sequence[float], label: str) -> list[Markup]:
    line = Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>')
    text = Markup('<text class="soft" x="{}" y="{}" dy="4" text-anchor="end">{}</text>')
    parts = []
    for mark in marks:
        y = frame.y(side, mark)
        parts.append(line.format("grid" if mark else "zero", _LEFT, frame.width - _RIGHT, y, y))
        shown = f"{mark:+g}".replace("-", "−") if mark else "0"
        parts.append(text.format(_LEFT - 6, y, shown))
    x, y = 11, frame.top(side) + frame.panel / 2
    turned = Markup('<text x="{0}" y="{1}" transform="rotate(-90 {0} {1})" text-anchor="middle">')
    return [*parts, turned.format(x, y) + label + Markup("</text>")]


def _slots(
    frame: _Frame,
    rows: Sequence[Delta],
    small: Collection[str],
    pairs: Mapping[str, int],
    families: Mapping[str, int],
    texts: Mapping[str, str],
) -> list[Markup]:
    """A group a language: its text, bar, label, intervals and points, and what the pointer hits."""
    systems = list(dict.fromkeys(row.system for row in rows))
    radius = min(4.0, 0.3 * frame.slot + 0.9)
    step = min(6.0, 0.8 * frame.slot / len(systems))
    least, most = math.log(min(pairs.values()) / 2), math.log(max(pairs.values()) * 1.1)
    by_language: dict[str, list[Delta]] = {}
    for row in rows:
        by_language.setdefault(row.language, []).append(row)
    opened = Markup('<g data-language="{}"><title>{}</title>')
    bar = Markup('<rect class="bar f{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
    label = Markup('<text x="{0}" y="{1}" transform="rotate(-90 {0} {1})" dy="3.5" '
                   'text-anchor="end">{2}</text>')  # fmt: skip
    point = Markup('<g class="s{}{}"><path d="M{} {}V{}"/><path class="dot" d="M{} {}{}"/></g>')
    hit = Markup('<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/></g>')
    parts = []
    for place, language in enumerate(frame.languages):
        x, wide = frame.x(place), 0.8 * frame.slot
        parts.append(opened.format(language, texts[language]))
        tall = _BARS * (math.log(max(pairs[language], 1)) - least) / ((most - least) or 1.0)
        parts.append(bar.format(families[language], x - wide / 2, frame.foot - tall, wide, tall))
        if frame.labelled:
            parts.append(label.format(x, frame.foot + 5, language))
        for row in by_language[language]:
            number, side = systems.index(row.system), frame.sides.index(row.side)
            at = round(x + (number - (len(systems) - 1) / 2) * step, 1)
            hollow = row.direction in small or row.undertrained
            look = " hollow" if hollow else " pale" if row.closely_related else ""
            low, high, y = (frame.y(side, value) for value in (row.low, row.high, row.delta))
            dot = marker(number, radius)
            parts.append(point.format(number % 4, look, at, low, high, at, y, dot))
        parts.append(hit.format(x - frame.slot / 2, _TOP, frame.slot, frame.height - _TOP))
    return parts


def _trends(
    frame: _Frame, side: int, rows: Sequence[Delta], small: Collection[str], window: int
) -> list[Markup]:
    """The mean of a sliding window of languages, a line a system, each with a rim of paper."""
    counted = {row.language for row in rows if row.direction not in small}
    places = [i for i, language in enumerate(frame.languages) if language in counted]
    parts = []
    for number, system in enumerate(dict.fromkeys(row.system for row in rows)):
        at = {row.language: row.delta for row in rows if row.system == system}
        values = [at.get(frame.languages[place], np.nan) for place in places]
        middles, means = trend(values, window_size(len(counted), window))
        if len(middles):
            middles = np.interp(middles, range(len(places)), places)
            points = " ".join(f"{frame.x(x)},{frame.y(side, y)}"
                              for x, y in zip(middles, means, strict=True))  # fmt: skip
            line = Markup(
                '<polyline class="rim" points="{0}"/><polyline class="s{1}" points="{0}"/>'
            )
            parts.append(line.format(points, number % 4))
    return parts


def text_of(rows: Sequence[Delta], about: Sequence[str]) -> str:
    """What shows of one language where the pointer is, in lines: who it is, then its numbers."""
    lines = list(about)
    for side in dict.fromkeys(row.side for row in rows):
        mine = [row for row in rows if row.side == side]
        lines.append(f"{side.replace('->', ' → ')}: {mine[0].baseline} "
                     f"{mine[0].baseline_score:.1f}, {mine[0].sentences} sentences")  # fmt: skip
        for row in mine:
            said = f"{row.delta:+.1f} [{row.low:+.1f}, {row.high:+.1f}]".replace("-", "−")
            said = UNDERTRAINED if row.undertrained else said
            lines.append(f"{row.system} {row.system_score:.1f}  {said}")
    return "\n".join(lines)
