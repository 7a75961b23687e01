"""Scores over a run's steps, by resource level: a panel a metric, the best step marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from m4.eval.report.figures import save
from m4.eval.report.theme import LIGHT, Theme
from m4.eval.scoring.by_step import ALL
from m4.eval.scoring.delta import METRIC_NAMES
from m4.eval.scoring.levels import LEVELS

_SERIES = (ALL, *LEVELS)
_MARKERS = {ALL: "o", "high": "s", "medium": "^", "low": "D"}
_MOST_MARKERS = 30  # more than so many run into each other
_FEW_STEPS = 6  # each has a tick
_SIZE = 11.0

Rows = Sequence[Mapping[str, Any]]


def draw(path: Path, rows: Rows) -> None:
    """Draws the rows of one portion to a .png or .pdf; the same rows give the same bytes."""
    save(figure(rows), [path])


def figure(rows: Rows, theme: Theme = LIGHT) -> Figure:
    """x: steps; y: means over the directions of a level and over all of them, in percent.

    Each panel rings its own highest mean over all directions; the step that is the best one (by the
    first metric, the first panel) has a line through all panels.
    """
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    drawn = Figure((7.0, 2.6 * len(metrics) + 0.9), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.set_facecolor(theme.paper)
    panels = list(drawn.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0])
    best = [row["step"] for row in rows if row["best"]]
    for panel, metric in zip(panels, metrics, strict=True):
        _style(panel, theme)
        for step in best:
            panel.axvline(step, color=theme.bar, linewidth=0.9, linestyle=(0, (2, 3)))
        _lines(panel, [row for row in rows if row["metric"] == metric], theme)
        name = METRIC_NAMES.get(metric, metric)
        panel.set_ylabel(f"{name}, {rows[0]['split']}", fontsize=_SIZE, color=theme.ink)
    if len(steps := sorted({row["step"] for row in rows})) <= _FEW_STEPS:
        panels[-1].set_xticks(steps)
    panels[-1].set_xlabel("training step", fontsize=0.95 * _SIZE, color=theme.ink)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False,
                 fontsize=0.95 * _SIZE, labelcolor=theme.ink, columnspacing=1.2)  # fmt: skip
    return drawn


def _lines(panel: Axes, rows: Rows, theme: Theme) -> None:
    for number, level in enumerate(_SERIES):
        line = [(row["step"], row["score"]) for row in rows if row["level"] == level]
        if not line:
            continue
        steps, scores = zip(*line, strict=True)
        whole = level == ALL
        panel.plot(
            steps, scores, color=theme.ink if whole else theme.series[number - 1],
            linewidth=2.6 if whole else 1.7, label=level, zorder=4 if whole else 3,
            marker=_MARKERS[level] if len(line) <= _MOST_MARKERS else None, markersize=5,
        )  # fmt: skip
        if whole:
            step, score = max(line, key=lambda point: (point[1], -point[0]))
            panel.plot([step], [score], "o", color=theme.ink, markerfacecolor="none",
                       markersize=14, markeredgewidth=1.6, zorder=5)  # fmt: skip
            # Above the panel: within it the text would cover lines.
            panel.set_title(f"highest: {score:.1f} at step {step:,}", loc="right", pad=4,
                            fontsize=0.95 * _SIZE, color=theme.ink)  # fmt: skip


def _style(panel: Axes, theme: Theme) -> None:
    panel.set_facecolor(theme.paper)
    panel.grid(axis="y", color=theme.faint, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(theme.faint)
    panel.tick_params(labelsize=0.9 * _SIZE, colors=theme.ink, length=0)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=5))
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
