"""Curves over training: losses of runs, and scores of a run's checkpoints."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from m4.eval.report.figures import LIGHT, SIZE, blank, legend, style
from m4.eval.scoring.levels import LEVELS
from m4.eval.scoring.score import ALL, METRIC_NAMES

# Axes over which curves are drawn.
AXES = {"steps": "training step", "tokens": "tokens of both sides", "hours": "device hours"}
_TOKENS = ("source_tokens", "target_tokens")
Points = Sequence[tuple[float, float]]
Rows = Sequence[Mapping[str, Any]]

_MARKERS = {ALL: "o", **dict(zip(LEVELS, "s^D", strict=True))}
_MOST_POINTS = 240  # maximum points of a line, which is averaged down to them: more would not show
_MOST_MARKERS = 30  # more labels would run into each other
_FEW_STEPS = 6  # each has a tick


def points(rows: Iterable[Mapping[str, Any]], key: str) -> Points:
    """Returns (step, value) of the rows of a metrics.jsonl with a finite `key`, by step.

    If a resumed run has a step twice, the later row counts.
    """
    values = ((row["step"], row.get(key)) for row in rows)
    finite = {
        step: float(x) for step, x in values if isinstance(x, int | float) and math.isfinite(x)
    }
    return sorted(finite.items())


def over(line: Points, rows: Rows, axis: str) -> Points:
    """Returns points over an axis of `AXES` instead of steps, from its first row on."""
    if axis == "steps":
        return line
    if axis == "tokens":
        some = [row for row in rows if _TOKENS[0] in row]
        counts = points([{**row, "all": sum(row[name] for name in _TOKENS)} for row in some], "all")
        places = np.cumsum([count for _, count in counts])
    else:
        counts = points(rows, "device_seconds")
        places = np.array([seconds / 3600 for _, seconds in counts])
    at = np.searchsorted([step for step, _ in counts], [step for step, _ in line], side="right")
    return [(float(places[i - 1]), value) for i, (_, value) in zip(at, line, strict=True) if i]


def training(lines: Mapping[str, Mapping[str, Points]], axis: str = "steps") -> Figure:
    """Returns a figure with a panel per measure, a line per system: label -> system -> points."""
    drawn, panels = _panels(list(lines), AXES[axis])
    systems = list(dict.fromkeys(name for by_system in lines.values() for name in by_system))
    for panel, by_system in zip(panels, lines.values(), strict=True):
        for system, line in by_system.items():
            values = np.asarray(line, float)
            if len(values) > _MOST_POINTS:
                parts = np.array_split(values, _MOST_POINTS)
                values = np.stack([part.mean(axis=0) for part in parts])
            colour = LIGHT.series[systems.index(system) % len(LIGHT.series)]
            panel.plot(*values.T, color=colour, linewidth=1.8, label=system)
    handles = {line.get_label(): line for panel in panels for line in panel.lines}
    legend(drawn, [handles[system] for system in systems], SIZE)
    return drawn


def by_step(rows: Rows) -> Figure:
    """Returns a figure with a panel per metric from rows of scores_by_step.jsonl of one split.

    Lines are means over the directions of a level and over all. Each panel marks its highest mean
    over all by a ring. A line through all panels marks the best step by the first metric.
    """
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    drawn, panels = _panels([f"{METRIC_NAMES.get(m, m)}, {rows[0]['split']}" for m in metrics])
    for panel, metric in zip(panels, metrics, strict=True):
        for step in (row["step"] for row in rows if row["best"]):
            panel.axvline(step, color=LIGHT.bar, linewidth=0.9, linestyle=(0, (2, 3)))
        _levels(panel, [row for row in rows if row["metric"] == metric])
    if len(steps := sorted({row["step"] for row in rows})) <= _FEW_STEPS:
        panels[-1].set_xticks(steps)
    legend(drawn, panels[0].get_legend_handles_labels()[0], SIZE)
    return drawn


def _panels(labels: Sequence[str], axis: str = AXES["steps"]) -> tuple[Figure, list[Axes]]:
    height = 2.4 if len(labels) < 4 else 1.7
    drawn = blank(7.0, height * len(labels) + 0.9, layout="constrained")
    panels = list(drawn.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for panel, label in zip(panels, labels, strict=True):
        style(panel)
        panel.set_ylabel(label, fontsize=SIZE, color=LIGHT.ink)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=5))
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=axis != AXES["hours"]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    panels[-1].set_xlabel(axis, fontsize=0.95 * SIZE, color=LIGHT.ink)
    return drawn, panels


def _levels(panel: Axes, rows: Rows) -> None:
    for number, level in enumerate((ALL, *LEVELS)):
        line = [(row["step"], row["score"]) for row in rows if row["level"] == level]
        if not line:
            continue
        whole = level == ALL
        panel.plot(
            *zip(*line, strict=True), color=LIGHT.ink if whole else LIGHT.series[number - 1],
            linewidth=2.6 if whole else 1.7, label=level, zorder=4 if whole else 3,
            marker=_MARKERS[level] if len(line) <= _MOST_MARKERS else None, markersize=5,
        )  # fmt: skip
        if whole:
            step, score = max(line, key=lambda point: (point[1], -point[0]))
            panel.plot([step], [score], "o", color=LIGHT.ink, markerfacecolor="none",
                       markersize=14, markeredgewidth=1.6, zorder=5)  # fmt: skip
            # Above the panel, as the text would cover lines within it.
            panel.set_title(f"highest: {score:.1f} at step {step:,}", loc="right", pad=4,
                            fontsize=0.95 * SIZE, color=LIGHT.ink)  # fmt: skip
