"""The ΔBLEU plot: Figure 6 of the GShard paper (arXiv 2006.16668), for any number of languages."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from m4.eval.report.theme import LIGHT, Theme
from m4.eval.scoring.delta import METRIC_NAMES, Delta
from m4.eval.scoring.groups import DEFAULT_LEVELS, DIRECTION_GROUPS, LEVELS, ResourceLevels
from m4.storage.files import whole

_POINTS = 72  # an inch
_DPI = 200
_FEW = 40  # up to so many languages fit a page's width with labels of full size
# Without dates and versions: the same rows give the same bytes.
METADATA: Mapping[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


_MARKERS = ("o", "s", "^", "D")


def window_size(languages: int, window: int = 10) -> int:
    """The sliding window for so many languages: `window`, but at most a quarter of them (12
    languages: 3, 24: 6, from 40 on: 10), so that the trend keeps both ends of the range apart.
    Fewer than 8 languages have no trend (a window of 1)."""
    return max(1, min(window, languages // 4))


def trend(values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of every `window` consecutive values and the middle of each window: only windows
    that lie wholly inside, so no end is a mean of fewer. NaN marks what is missing."""
    if window < 2 or len(values) < window:
        return np.zeros(0), np.zeros(0)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), window)
    there = ~np.isnan(windows)
    kept = there.any(axis=1)
    means = np.where(there, windows, 0).sum(axis=1)[kept] / there.sum(axis=1)[kept]
    return (np.arange(len(windows)) + (window - 1) / 2)[kept], means


def plot(
    rows: Sequence[Delta],
    paths: Sequence[Path],
    window: int = 10,
    levels: ResourceLevels = DEFAULT_LEVELS,
    names: bool = False,
    theme: Theme = LIGHT,
) -> None:
    """Draws to every path (.png, .pdf); the same rows give the same bytes.

    x: languages by falling training size; y: Δ with its 95% interval, the bilingual baseline at 0;
    one panel into English, one out of it, and below them the training pairs on a log scale. A
    series a system, each with a trend line, the mean of a sliding window (`window_size`). Hollow
    points have a closely related language in the run.

    names: label with the English names in place of the codes. Both are drawn in DejaVu Sans, which
    comes with matplotlib and has every letter of them; languages' own names (Arabic, CJK) would
    need fonts that a machine may lack, so they are never drawn.
    """
    drawn = figure(rows, window, levels, names, theme)
    for path in paths:
        if path.suffix not in METADATA:
            raise ValueError(f"{path}: a plot is .png or .pdf")
        with whole(path) as unfinished:
            drawn.savefig(unfinished, dpi=_DPI, metadata=METADATA[path.suffix])


def png(drawn: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI, metadata=METADATA[".png"])
    return buffer.getvalue()


def figure(
    rows: Sequence[Delta],
    window: int = 10,
    levels: ResourceLevels = DEFAULT_LEVELS,
    names: bool = False,
    theme: Theme = LIGHT,
) -> Figure:
    """The plot as a figure, without pyplot and its global state."""
    if not rows:
        raise ValueError("nothing to plot: no direction is decoded by a system and its baseline")
    pairs = {row.language: row.train_pairs for row in rows}
    languages = sorted(pairs, key=lambda language: (-pairs[language], language))
    sides = [side for side in DIRECTION_GROUPS if any(row.side == side for row in rows)]
    wide = len(languages) > _FEW
    # Letters grow with the page: shrunk to a phone's width, the axes stay legible either way.
    width, size = (10.0, 15.0) if wide else (7.0, 11.0)
    slot = 0.87 * width * _POINTS / len(languages)  # points that a language has
    name_of = {row.language: row.name for row in rows}
    labels = [name_of[language] if names else language for language in languages]
    letters, upright = label_letters(labels, size, slot)
    below = 0.6 * letters * max(map(len, labels)) / _POINTS if upright else 0.0
    height = (2.7 * len(sides) + 1.1) * width / 7.0 + below
    page = Figure((width, height), layout="constrained")
    FigureCanvasAgg(page)
    page.set_facecolor(theme.paper)
    heights = [1] * len(sides) + [0.27]
    grid = page.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    panels: list[Axes] = list(grid[:, 0])
    systems = list(dict.fromkeys(row.system for row in rows))
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    edges = [bound for row in rows for bound in (row.low, row.high, row.delta, 0.0)]
    margin = 0.06 * max(max(edges) - min(edges), 1.0)
    for panel, side in zip(panels, sides, strict=False):
        style_panel(panel, theme, size)
        _panel(panel, [row for row in rows if row.side == side], languages, systems, window,
               theme, size, slot)  # fmt: skip
        panel.set_ylim(min(edges) - margin, max(edges) + 2 * margin)
        arrow = side.replace("->", " → ")
        panel.set_ylabel(f"Δ{metric}, {arrow}", fontsize=size, color=theme.ink)
    _levels(panels[:-1], [pairs[language] for language in languages], levels, theme, size, slot)
    size_bars(panels[-1], [pairs[language] for language in languages], theme, size, slot)
    panels[-1].set_xticks(range(len(labels)), labels, fontsize=letters, color=theme.ink,
                          rotation=90 if upright else 0)  # fmt: skip
    taken = window_size(len(languages), window)
    panels[-1].set_xlabel(
        "languages, by falling number of training pairs"
        + (f"; line: mean of {taken}" if taken > 1 else ""),
        fontsize=0.95 * size,
        color=theme.ink,
    )
    _legend(page, panels[0], rows, theme, size)
    return page


def _panel(
    panel: Axes,
    rows: Sequence[Delta],
    languages: Sequence[str],
    systems: Sequence[str],
    window: int,
    theme: Theme,
    size: float,
    slot: float,
) -> None:
    """Points, whiskers and trend of every system; the languages' middles are 0, 1, 2, ..."""
    panel.axhline(0, color=theme.ink, linewidth=1.2, zorder=2)
    dot = min(0.6 * size, 0.34 * slot + 1.2)
    step = min(0.24, 0.8 / len(systems)) if len(systems) > 1 else 0.0
    for number, system in enumerate(systems):
        colour = theme.series[number % len(theme.series)]
        at = {row.language: row for row in rows if row.system == system}
        here = [(i, at[language]) for i, language in enumerate(languages) if language in at]
        x = np.array([i for i, _ in here]) + (number - (len(systems) - 1) / 2) * step
        # Not errorbar(): a percentile interval of a few sentences need not hold the point.
        lows, highs = [row.low for _, row in here], [row.high for _, row in here]
        thin = min(1.4, 0.16 * slot)
        panel.vlines(x, lows, highs, color=colour, alpha=0.55, linewidth=thin, zorder=3)
        panel.scatter(
            x,
            [row.delta for _, row in here],
            s=dot**2,
            marker=_MARKERS[number % len(_MARKERS)],
            facecolors=[theme.paper if row.near_clones else colour for _, row in here],
            edgecolors=colour,
            linewidths=1.1,
            zorder=5,
        )
        values = [at[language].delta if language in at else np.nan for language in languages]
        middles, means = trend(values, window_size(len(languages), window))
        # Few points are read one by one, and the line keeps behind them; of many, the line is what
        # is read: it runs before them with a rim of paper.
        lines = [(colour, 2.2, 0.5, 4)]
        if len(languages) > _FEW:
            lines = [(theme.paper, 4.5, 0.9, 6), (colour, 2.8, 1.0, 7)]
        for line, thickness, alpha, order in lines:
            panel.plot(middles, means, color=line, linewidth=thickness, alpha=alpha, zorder=order,
                       solid_capstyle="round", solid_joinstyle="round")  # fmt: skip


def style_panel(panel: Axes, theme: Theme, size: float) -> None:
    panel.set_facecolor(theme.paper)
    panel.grid(axis="y", color=theme.faint, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(theme.faint)
    panel.tick_params(labelsize=0.9 * size, colors=theme.ink, length=0, bottom=False)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _signed(y)))


def _signed(y: float) -> str:
    return f"{y:+.0f}".replace("-", "−") if round(y) else "0"


def _levels(
    panels: Sequence[Axes],
    sizes: Sequence[int],
    levels: ResourceLevels,
    theme: Theme,
    size: float,
    slot: float,
) -> None:
    """Where a resource level ends, and its name where there is room for it."""
    start = 0
    for name in LEVELS:
        count = sum(levels.of(pairs) == name for pairs in sizes)
        for panel in panels:
            if count and start:
                panel.axvline(start - 0.5, color=theme.bar, linewidth=0.9, linestyle=(0, (2, 3)))
            if count * slot > 0.6 * 0.85 * size * len(name):
                panel.annotate(
                    name, ((start + (count - 1) / 2), 1.0), xycoords=("data", "axes fraction"),
                    va="bottom", ha="center", fontsize=0.85 * size, color=theme.ink, alpha=0.75,
                )  # fmt: skip
        start += count


def size_bars(panel: Axes, sizes: Sequence[int], theme: Theme, size: float, slot: float) -> None:
    """The training pairs of every language, as bars on a log scale (their foot is half of the
    smallest), with figures where they fit."""
    style_panel(panel, theme, size)
    floor = min(sizes) / 2
    panel.bar(range(len(sizes)), [n - floor for n in sizes], 0.72, floor, color=theme.bar)
    panel.set_yscale("log")
    panel.set_ylim(floor, max(sizes) * 1.3)
    panel.set_ylabel("training\npairs", fontsize=0.85 * size, color=theme.ink)
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlim(-0.7, len(sizes) - 0.3)
    texts = [_short(n) for n in sizes]
    if 0.6 * 0.8 * size * max(map(len, texts)) < slot:
        panel.set_yticks([])
        panel.spines[["left"]].set_visible(False)
        for i, text in enumerate(texts):
            panel.annotate(text, (i, sizes[i]), va="bottom", ha="center", fontsize=0.8 * size,
                           color=theme.ink)  # fmt: skip
    else:
        ends = sorted({max(sizes), min(sizes)})
        panel.set_yticks(ends, [_short(n) for n in ends])
    panel.minorticks_off()


def _short(pairs: int) -> str:
    """1234567 -> '1.2M', 6000 -> '6k', 250 -> '250'."""
    for unit, letter in ((10**6, "M"), (10**3, "k")):
        if pairs >= unit:
            return f"{pairs / unit:.1f}".removesuffix(".0") + letter
    return str(pairs)


def label_letters(labels: Sequence[str], size: float, slot: float) -> tuple[float, bool]:
    """The size of the letters in points, and whether the labels are upright."""
    letters = 0.95 * size
    if 0.62 * letters * max(map(len, labels)) < slot:
        return letters, False
    return min(letters, 0.92 * slot), True


def _legend(page: Figure, panel: Axes, rows: Sequence[Delta], theme: Theme, size: float) -> None:
    """Above the panels: what the colours are, the baseline at 0, and hollow points if there are."""
    systems = list(dict.fromkeys(row.system for row in rows))
    entries = []
    for number, system in enumerate(systems):
        colour = theme.series[number % len(theme.series)]
        marker = _MARKERS[number % len(_MARKERS)]
        entries += panel.plot([], [], color=colour, marker=marker, linewidth=2.2, label=system)
    if any(row.near_clones for row in rows):
        entries += panel.plot([], [], "o", label="closely related", color=theme.ink,
                              markerfacecolor=theme.paper)  # fmt: skip
    entries += panel.plot([], [], color=theme.ink, linewidth=1.2, label=f"{rows[0].baseline} = 0")
    page.legend(handles=entries, loc="outside upper center", ncols=len(entries), frameon=False,
                fontsize=0.95 * size, labelcolor=theme.ink, columnspacing=1.2,
                handlelength=1.4)  # fmt: skip
