"""The ΔBLEU plot: Figure 6 of the GShard paper (arXiv 2006.16668), for any number of languages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from m4.data.families import OTHER, shown
from m4.eval.report.figures import FEW, Sheet, save
from m4.eval.report.theme import LIGHT, Theme
from m4.eval.scoring.delta import METRIC_NAMES, Delta, hollow_means, small_tests
from m4.eval.scoring.levels import DEFAULT_LEVELS, LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.trend import trend, window_size
from m4.settings import InputError

_MARKERS = ("o", "s", "^", "D")


def plot(
    rows: Sequence[Delta],
    paths: Sequence[Path],
    window: int = 10,
    levels: ResourceLevels = DEFAULT_LEVELS,
    names: bool = False,
    theme: Theme = LIGHT,
) -> None:
    """Draws to every path (.png, .pdf, .svg); the same rows give the same bytes.

    x: languages by falling training size; y: Δ with its 95% interval, the bilingual baseline at 0;
    one panel into English, one out of it, and below them the training pairs on a log scale. A
    series a system, each with a trend line, the mean of a sliding window (`window_size`). Of many
    languages the bars of training pairs have the colours of families. Pale points have a closely
    related language in the run. Hollow ones are undertrained, or have test sets of fewer than
    `levels.min_test_sentences`: these decide neither axis nor trend, and one that lies beyond the
    axis is at its edge.

    names: label with the English names in place of the codes. Both are drawn in DejaVu Sans, which
    comes with matplotlib and has every letter of them; languages' own names (Arabic, CJK) would
    need fonts that a machine may lack, so they are never drawn.
    """
    save(figure(rows, window, levels, names, theme), paths)


def figure(
    rows: Sequence[Delta],
    window: int = 10,
    levels: ResourceLevels = DEFAULT_LEVELS,
    names: bool = False,
    theme: Theme = LIGHT,
) -> Figure:
    """The plot as a figure, without pyplot and its global state."""
    if not rows:
        raise InputError("nothing to plot: no direction is decoded by a system and its baseline")
    pairs = {row.language: row.train_pairs for row in rows}
    languages = sorted(pairs, key=lambda language: (-pairs[language], language))
    sides = [side for side in SIDES if any(row.side == side for row in rows)]
    name_of = {row.language: row.name for row in rows}
    labels = [name_of[language] if names else language for language in languages]
    ratios = [1.0] * len(sides) + [0.27]
    sheet = Sheet.make(labels, ratios, 2.7 * len(sides) + 1.1, theme)
    systems = list(dict.fromkeys(row.system for row in rows))
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    small = small_tests(rows, levels)
    # Where all test sets are small, they rule.
    ruling = [row for row in rows if row.direction not in small] or rows
    edges = [bound for row in ruling for bound in (row.low, row.high, row.delta, 0.0)]
    margin = 0.06 * max(max(edges) - min(edges), 1.0)
    for panel, side in zip(sheet.panels, sides, strict=False):
        sheet.style(panel)
        panel.set_ylim(min(edges) - margin, max(edges) + 2 * margin)
        mine = [row for row in rows if row.side == side]
        _panel(sheet, panel, mine, languages, systems, window, small)
        arrow = side.replace("->", " → ")
        panel.set_ylabel(f"Δ{metric}, {arrow}", fontsize=sheet.size, color=theme.ink)
    sizes = [pairs[language] for language in languages]
    _levels(sheet, sizes, levels)
    counted = {row.language for row in rows if row.direction not in small}
    taken = window_size(len(counted), window)
    note = f"; line: mean of {taken}" if taken > 1 else ""
    sheet.size_bars(sizes, note, _families(sheet, languages))
    _legend(sheet, rows, small, levels)
    return sheet.figure


def _families(sheet: Sheet, languages: Sequence[str]) -> list[str] | None:
    """The colour of each language's family, and the legend of them; None of a few languages, which
    readers know by name."""
    if len(languages) <= FEW:
        return None
    colours = sheet.theme.families
    families = shown(languages, len(colours) - 1)
    names = list(dict.fromkeys(families.values()))
    colour_of = {name: colours[-1] if name == OTHER else colours[rank]
                 for rank, name in enumerate(names)}  # fmt: skip
    chips = [Patch(color=colour_of[name], label=name) for name in names]
    sheet.legend(5, chips, below=True)
    return [colour_of[families[language]] for language in languages]


def _panel(
    sheet: Sheet,
    panel: Axes,
    rows: Sequence[Delta],
    languages: Sequence[str],
    systems: Sequence[str],
    window: int,
    small: Collection[str],
) -> None:
    """Points, whiskers and trend of every system. small: directions that are drawn hollow."""
    theme, size, slot = sheet.theme, sheet.size, sheet.slot
    panel.axhline(0, color=theme.ink, linewidth=1.2, zorder=2)
    dot = min(0.6 * size, 0.34 * slot + 1.2)
    step = min(0.24, 0.8 / len(systems)) if len(systems) > 1 else 0.0
    counted = {row.language for row in rows if row.direction not in small}
    for number, system in enumerate(systems):
        colour = theme.series[number % len(theme.series)]
        pale = _between(colour, theme.paper)
        at = {row.language: row for row in rows if row.system == system}
        here = [(i, at[language]) for i, language in enumerate(languages) if language in at]
        x = np.array([i for i, _ in here]) + (number - (len(systems) - 1) / 2) * step
        # Not errorbar(): a percentile interval of a few sentences need not hold the point.
        lows, highs = [row.low for _, row in here], [row.high for _, row in here]
        thin = min(1.4, 0.16 * slot)
        hollow = [row.direction in small or row.undertrained for _, row in here]
        faint = [0.2 if empty else 0.55 for empty in hollow]
        panel.vlines(x, lows, highs, color=[to_rgba(colour, alpha) for alpha in faint],
                     linewidth=thin, zorder=3)  # fmt: skip
        panel.scatter(
            x,
            np.clip([row.delta for _, row in here], *panel.get_ylim()),
            s=dot**2,
            marker=_MARKERS[number % len(_MARKERS)],
            facecolors=[
                theme.paper if empty else pale if row.closely_related else colour
                for empty, (_, row) in zip(hollow, here, strict=True)
            ],
            edgecolors=colour,
            linewidths=1.1,
            zorder=5,
            clip_on=False,
        )
        # Of the languages that count, so that each mean is of as many.
        places = [i for i, language in enumerate(languages) if language in counted]
        values = [at[languages[i]].delta if languages[i] in at else np.nan for i in places]
        middles, means = trend(values, window_size(len(counted), window))
        middles = np.interp(middles, range(len(places)), places) if places else middles
        # Few points are read one by one, and the line keeps behind them; of many, the line is what
        # is read: it runs before them with a rim of paper.
        lines = [(colour, 2.2, 0.5, 4)]
        if len(languages) > FEW:
            lines = [(theme.paper, 4.5, 0.9, 6), (colour, 2.8, 1.0, 7)]
        for line, thickness, alpha, order in lines:
            panel.plot(middles, means, color=line, linewidth=thickness, alpha=alpha, zorder=order,
                       solid_capstyle="round", solid_joinstyle="round")  # fmt: skip


def _between(colour: str, paper: str) -> str:
    """The colour half-way to the paper's."""
    return to_hex(tuple((np.array(to_rgb(colour)) + np.array(to_rgb(paper))) / 2))


def _levels(sheet: Sheet, sizes: Sequence[int], levels: ResourceLevels) -> None:
    """Where a resource level ends, and its name where there is room for it."""
    theme, size, slot = sheet.theme, sheet.size, sheet.slot
    start = 0
    for name in LEVELS:
        count = sum(levels.of(pairs) == name for pairs in sizes)
        for panel in sheet.panels[:-1]:
            if count and start:
                panel.axvline(start - 0.5, color=theme.bar, linewidth=0.9, linestyle=(0, (2, 3)))
            if count * slot > 0.6 * 0.85 * size * len(name):
                panel.annotate(
                    name, ((start + (count - 1) / 2), 1.0), xycoords=("data", "axes fraction"),
                    va="bottom", ha="center", fontsize=0.85 * size, color=theme.ink, alpha=0.75,
                )  # fmt: skip
        start += count


def _legend(
    sheet: Sheet, rows: Sequence[Delta], small: Mapping[str, str], levels: ResourceLevels
) -> None:
    """Above the panels: what the colours are, the baseline at 0, and what pale and hollow points
    are if there are any."""
    panel, theme = sheet.panels[0], sheet.theme
    systems = list(dict.fromkeys(row.system for row in rows))
    entries = []
    for number, system in enumerate(systems):
        colour = theme.series[number % len(theme.series)]
        marker = _MARKERS[number % len(_MARKERS)]
        entries += panel.plot([], [], color=colour, marker=marker, linewidth=2.2, label=system)
    if any(row.closely_related for row in rows):
        entries += panel.plot([], [], "o", label="closely related", color=theme.ink,
                              markerfacecolor=_between(theme.ink, theme.paper))  # fmt: skip
    if label := hollow_means(rows, small, levels):
        entries += panel.plot([], [], "o", label=label, color=theme.ink,
                              markerfacecolor=theme.paper)  # fmt: skip
    entries += panel.plot([], [], color=theme.ink, linewidth=1.2, label=f"{rows[0].baseline} = 0")
    # More would be wider than the page.
    columns = len(entries) if len(entries) < 6 else (len(entries) + 1) // 2
    sheet.legend(columns, entries)
