"""Plots over languages: ΔBLEU, gains against forgetting, heat maps of directions.

The first is Figure 6 of the GShard paper (arXiv 2006.16668), for any number of languages.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from m4.data.directions import key_of, languages_of, pair_of, split_direction
from m4.data.inspection.preview import short
from m4.data.languages import OTHER, shown_families
from m4.eval.report.figures import (
    FEW,
    LIGHT,
    POINTS,
    SEQUENTIAL,
    SIZE,
    blank,
    colorbar,
    halfway,
    legend,
    page_size,
    save,
    style,
)
from m4.eval.scoring.delta import UNDERTRAINED, Delta, small_tests
from m4.eval.scoring.levels import DEFAULT_LEVELS, LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.score import METRIC_NAMES
from m4.eval.scoring.winners import Forgotten, Winner
from m4.settings import InputError

# Widths of the figure in a page, in inches of 72 pixels, for a screen and a phone.
WIDTHS = {"wide": 1180 / POINTS, "narrow": 390 / POINTS}
_MARKERS = ("o", "s", "^", "D")
_SMALLEST = 4.0  # in points; smaller language labels are left out
_DIVERGING = LinearSegmentedColormap.from_list(
    "difference", ["#a03c00", "#f0a070", "#f7f7f7", "#6fb2dc", "#004d7a"]
)
# Maximum number of languages for which cells show their numbers.
_NUMBERED = 16


class _Sheet(NamedTuple):
    """A figure of panels one above the other, with languages at x = 0, 1, 2, ..."""

    figure: Figure
    panels: list[Axes]
    labels: Sequence[str]
    size: float  # font size in points
    slot: float  # width of a language in points
    letters: float  # font size of labels in points
    upright: bool  # whether labels are turned


def _sheet(
    labels: Sequence[str], ratios: Sequence[float], inches: float, width: float | None
) -> _Sheet:
    """Returns an empty sheet with a panel per height ratio and a label per language.

    `inches` is the height of all panels on a page of `width` inches (default: by `page_size`).
    """
    size = SIZE
    if width is None:
        width, size = page_size(len(labels) > FEW)
        inches *= width / 7.0
    slot, longest = 0.87 * width * POINTS / len(labels), max(map(len, labels))
    letters = 0.95 * size
    if upright := 0.62 * letters * longest >= slot:
        letters = min(letters, 0.92 * slot)
        inches += 0.6 * letters * longest / POINTS
    drawn = blank(width, inches, layout="constrained")
    grid = drawn.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)
    for panel in grid[:, 0]:
        style(panel, size)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _signed(y)))
    return _Sheet(drawn, list(grid[:, 0]), labels, size, slot, letters, upright)


def _signed(y: float) -> str:
    return f"{y:+.0f}".replace("-", "−") if round(y) else "0"


def _size_bars(
    sheet: _Sheet, sizes: Sequence[int], note: str, colours: Sequence[str] | None
) -> None:
    """Draws the last panel: training pairs as bars on a log scale, and labels of languages."""
    panel, size = sheet.panels[-1], sheet.size
    floor = max(min(sizes), 1) / 2  # sizes of the bars; unknown without a corpus
    panel.bar(range(len(sizes)), [n - floor for n in sizes], 0.72, floor,
              color=colours or LIGHT.bar)  # fmt: skip
    panel.set_yscale("log")
    panel.set_ylim(floor, max(sizes) * 1.3)
    panel.set_ylabel("training\npairs", fontsize=0.85 * size, color=LIGHT.ink)
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlim(-0.7, len(sizes) - 0.3)
    texts = [short(n) for n in sizes]
    if 0.6 * 0.8 * size * max(map(len, texts)) < sheet.slot:
        panel.set_yticks([])
        panel.spines[["left"]].set_visible(False)
        for i, text in enumerate(texts):
            panel.annotate(text, (i, sizes[i]), va="bottom", ha="center", fontsize=0.8 * size,
                           color=LIGHT.ink)  # fmt: skip
    else:
        ends = sorted({max(sizes), min(sizes)})
        panel.set_yticks(ends, [short(n) for n in ends])
    panel.minorticks_off()
    shown, turned = sheet.labels if sheet.letters >= _SMALLEST else [], {}
    if sheet.upright:
        turned = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    panel.set_xticks(range(len(shown)), shown, fontsize=sheet.letters, color=LIGHT.ink, **turned)
    text = "languages, by falling number of training pairs" + note
    if 0.5 * 0.95 * size * len(text) > sheet.figure.get_figwidth() * POINTS:
        text = text.replace(note, note.replace("; ", "\n"))
    panel.set_xlabel(text, fontsize=0.95 * size, color=LIGHT.ink)


def draw(
    rows: Sequence[Delta], folder: Path, levels: ResourceLevels = DEFAULT_LEVELS
) -> list[Path]:
    """Draws differences of one metric from one baseline as delta_<metric>.png and .svg.

    It needs no run: `delta.from_plain` reads a deltas.jsonl.
    """
    pictures = [Path(folder) / f"delta_{rows[0].metric}.{kind}" for kind in ("png", "svg")]
    save(figure(rows, levels), pictures)
    return pictures


def figure(
    rows: Sequence[Delta], levels: ResourceLevels = DEFAULT_LEVELS, page: str | None = None
) -> Figure:
    """Returns the plot of differences of one metric from one baseline over languages.

    x has languages by falling training size, y has Δ with its 95% interval and the baseline at 0.
    One panel is into English, one out of it, and below them are the training pairs on a log scale.
    Each system has a trend line, the mean of a sliding window (`window_size`). With many languages,
    bars have the colours of families. Pale points have a closely related language in the run.
    Hollow ones are undertrained, or have test sets of fewer than `levels.min_test_sentences`; these
    decide neither axis nor trend, and those beyond the axis are drawn at its edge.

    Args:
        page: Width of `WIDTHS` for a figure in a page, where the script finds each language's area
            (gid "language:gl"). Defaults to a figure for files.
    """
    if not rows:
        raise InputError("nothing to plot: no direction is decoded by a system and its baseline")
    pairs = {row.language: row.train_pairs for row in rows}
    languages = sorted(pairs, key=lambda language: (-pairs[language], language))
    sides = [side for side in SIDES if any(row.side == side for row in rows)]
    ratios = [1.0] * len(sides) + [0.27]
    inches = 2.7 * len(sides) + (1.1 if page is None else 1.6)
    sheet = _sheet(languages, ratios, inches, None if page is None else WIDTHS[page])
    systems = list(dict.fromkeys(row.system for row in rows))
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    small = small_tests(rows, levels)
    # If all test sets are small, they decide the axis.
    ruling = [row for row in rows if row.direction not in small] or rows
    edges = [bound for row in ruling for bound in (row.low, row.high, row.delta, 0.0)]
    margin = 0.06 * max(max(edges) - min(edges), 1.0)
    for panel, side in zip(sheet.panels, sides, strict=False):
        panel.set_ylim(min(edges) - margin, max(edges) + 2 * margin)
        mine = [row for row in rows if row.side == side]
        _panel(sheet, panel, mine, systems, small)
        arrow = side.replace("->", " → ")
        panel.set_ylabel(f"Δ{metric}, {arrow}", fontsize=sheet.size, color=LIGHT.ink)
    sizes = [pairs[language] for language in languages]
    _levels(sheet, sizes, levels)
    counted = {row.language for row in rows if row.direction not in small}
    taken = window_size(len(counted))
    note = f"; line: mean of {taken}" if taken > 1 else ""
    colours = family_colours(languages) if page or len(languages) > FEW else {}
    bars = [colours[one][1] for one in languages] if colours else None
    _size_bars(sheet, sizes, note, bars)
    if colours and page is None:
        chips = [
            Patch(color=colour, label=name) for name, colour in dict.fromkeys(colours.values())
        ]
        legend(sheet.figure, chips, sheet.size, below=True)
    _legend(sheet, rows, small, levels)
    if page is not None:
        for i, language in enumerate(languages):
            for panel in sheet.panels:
                area = panel.axvspan(i - 0.5, i + 0.5, facecolor="none", zorder=10)
                area.set_gid(f"language:{key_of(pair_of(language))}")
    return sheet.figure


def family_colours(languages: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns each language's family, 'other' for small ones, and the colours of families."""
    colours = LIGHT.families
    families = shown_families(languages, len(colours) - 1)
    names = list(dict.fromkeys(families.values()))
    of = {name: colours[-1] if name == OTHER else colours[rank] for rank, name in enumerate(names)}
    return {language: (family, of[family]) for language, family in families.items()}


def window_size(languages: int) -> int:
    """Returns the sliding window's size: 10 as in the paper, but at most a quarter of languages.

    Thus the trend keeps both ends of the range apart. Fewer than 8 languages give a window of 1.
    """
    return max(1, min(10, languages // 4))


def trend(values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the middle of every `window` consecutive values, and their mean; skips NaN."""
    if window < 2 or len(values) < window:
        return np.zeros(0), np.zeros(0)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), window)
    there = ~np.isnan(windows)
    kept = there.any(axis=1)
    means = np.where(there, windows, 0).sum(axis=1)[kept] / there.sum(axis=1)[kept]
    return (np.arange(len(windows)) + (window - 1) / 2)[kept], means


def _panel(
    sheet: _Sheet,
    panel: Axes,
    rows: Sequence[Delta],
    systems: Sequence[str],
    small: Collection[str],
) -> None:
    """Draws points, whiskers and trend of every system; directions in `small` are hollow."""
    languages = sheet.labels
    panel.axhline(0, color=LIGHT.ink, linewidth=1.2, zorder=2)
    dot = min(0.6 * sheet.size, 0.34 * sheet.slot + 1.2)
    step = min(0.24, 0.8 / len(systems)) if len(systems) > 1 else 0.0
    counted = {row.language for row in rows if row.direction not in small}
    for number, system in enumerate(systems):
        colour = LIGHT.series[number % len(LIGHT.series)]
        at = {row.language: row for row in rows if row.system == system}
        here = [(i, at[language]) for i, language in enumerate(languages) if language in at]
        x = np.array([i for i, _ in here]) + (number - (len(systems) - 1) / 2) * step
        hollow = [row.direction in small or row.undertrained for _, row in here]
        # Not errorbar(): the percentile interval of few sentences need not contain the point.
        panel.vlines(x, [row.low for _, row in here], [row.high for _, row in here],
                     color=[to_rgba(colour, 0.2 if empty else 0.55) for empty in hollow],
                     linewidth=min(1.4, 0.16 * sheet.slot), zorder=3)  # fmt: skip
        faces = [LIGHT.paper if empty else halfway(colour) if row.closely_related else colour
                 for empty, (_, row) in zip(hollow, here, strict=True)]  # fmt: skip
        inside = np.clip([row.delta for _, row in here], *panel.get_ylim())
        panel.scatter(x, inside, s=dot**2, marker=_MARKERS[number % len(_MARKERS)],
                      facecolors=faces, edgecolors=colour, linewidths=1.1, zorder=5,
                      clip_on=False)  # fmt: skip
        # Only languages that count, so that each mean is over equally many.
        places = [i for i, language in enumerate(languages) if language in counted]
        values = [at[languages[i]].delta if languages[i] in at else np.nan for i in places]
        middles, means = trend(values, window_size(len(counted)))
        middles = np.interp(middles, range(len(places)), places) if places else middles
        # Few points are read one by one, so the line is behind them. With many, the line is read,
        # so it is in front, with a rim in the background colour.
        lines = [(colour, 2.2, 0.5, 4)]
        if len(languages) > FEW:
            lines = [(LIGHT.paper, 4.5, 0.9, 6), (colour, 2.8, 1.0, 7)]
        for line, thickness, alpha, order in lines:
            panel.plot(middles, means, color=line, linewidth=thickness, alpha=alpha, zorder=order,
                       solid_capstyle="round", solid_joinstyle="round")  # fmt: skip


def _levels(sheet: _Sheet, sizes: Sequence[int], levels: ResourceLevels) -> None:
    """Marks the ends of resource levels, with their names if there is room."""
    start = 0
    for name in LEVELS:
        count = sum(levels.of(pairs) == name for pairs in sizes)
        for panel in sheet.panels[:-1]:
            if count and start:
                panel.axvline(start - 0.5, color=LIGHT.bar, linewidth=0.9, linestyle=(0, (2, 3)))
            if count * sheet.slot > 0.6 * 0.85 * sheet.size * len(name):
                panel.annotate(
                    name, ((start + (count - 1) / 2), 1.0), xycoords=("data", "axes fraction"),
                    va="bottom", ha="center", fontsize=0.85 * sheet.size, color=LIGHT.ink,
                    alpha=0.75,
                )  # fmt: skip
        start += count


def _legend(
    sheet: _Sheet, rows: Sequence[Delta], small: Mapping[str, str], levels: ResourceLevels
) -> None:
    """Explains the colours, and pale and hollow points if there are any."""
    panel, entries = sheet.panels[0], []
    for number, system in enumerate(dict.fromkeys(row.system for row in rows)):
        entries += panel.plot([], [], color=LIGHT.series[number % len(LIGHT.series)], linewidth=2.2,
                              marker=_MARKERS[number % len(_MARKERS)], label=system)  # fmt: skip
    if any(row.closely_related for row in rows):
        entries += panel.plot([], [], "o", label="closely related", color=LIGHT.ink,
                              markerfacecolor=halfway(LIGHT.ink))  # fmt: skip
    hollow = [f"under {levels.min_test_sentences} test sentences"] * bool(small)
    hollow += [UNDERTRAINED] * any(row.undertrained for row in rows)
    if hollow:
        entries += panel.plot([], [], "o", label=" or ".join(hollow), color=LIGHT.ink,
                              markerfacecolor=LIGHT.paper)  # fmt: skip
    entries += panel.plot([], [], color=LIGHT.ink, linewidth=1.2, label=f"{rows[0].baseline} = 0")
    legend(sheet.figure, entries, sheet.size)


def trade_off(new: Winner, forgotten: Mapping[str, Forgotten], metric: str) -> Figure:
    """Returns a plot of runs, with 95% intervals: change of kept against loss on new languages.

    x is the mean change of the kept directions. y is how far the run is below the best system on
    the new languages (`new`, the winner on average).
    """
    drawn = blank(7.0, 4.2, layout="constrained")
    panel = drawn.subplots()
    style(panel)
    for number, (run, kept) in enumerate(forgotten.items()):
        lead, low, high = new.leads.get(run, (0.0, 0.0, 0.0))
        colour = LIGHT.series[number % len(LIGHT.series)]
        panel.errorbar(
            kept.mean, -lead, fmt="o", color=colour, markersize=6, elinewidth=1.4,
            xerr=[[max(kept.mean - kept.low, 0.0)], [max(kept.high - kept.mean, 0.0)]],
            yerr=[[max(high - lead, 0.0)], [max(lead - low, 0.0)]],
        )  # fmt: skip
        panel.annotate(run, (kept.mean, -lead), (6, 6), textcoords="offset points",
                       fontsize=0.95 * SIZE, color=LIGHT.ink)  # fmt: skip
    panel.axvline(0.0, color=LIGHT.bar, linewidth=0.9, linestyle=(0, (2, 3)))
    panel.set_xlabel(f"change of kept directions, {metric}", fontsize=SIZE, color=LIGHT.ink)
    panel.set_ylabel(f"below the best on new languages, {metric}", fontsize=SIZE, color=LIGHT.ink)
    return drawn


def heat_map(
    values: Mapping[str, float],
    names: Mapping[str, str],
    *,
    signed: bool = False,
    framed: Collection[str] = (),
    percent: bool = False,
) -> Figure:
    """Returns a heat map of directions: sources as rows, targets as columns, English first.

    Args:
        names: Label of each language. Defaults to its code.
        signed: Whether to use two hues, for values below and above 0.
        framed: Directions whose cells get a frame.
        percent: Whether to show whole numbers, with 100 as the darkest colour.
    """
    codes = sorted(languages_of(values), key=lambda code: (code != "en", code))
    grid = np.full((len(codes), len(codes)), np.nan)
    for direction, value in values.items():
        row, column = map(codes.index, split_direction(direction))
        grid[row, column] = value
    numbered = len(codes) <= _NUMBERED
    # Narrower than other figures, so that numbers stay legible on a phone.
    width, size = (6.0, SIZE) if numbered else page_size(many=True)
    slot = 0.73 * 72 * width / len(codes)  # size of a cell in points
    labels = [names.get(code, code) for code in codes]
    letters = min(0.95 * size, 0.9 * slot)
    drawn = blank(width, width, layout="constrained")
    panel = drawn.subplots()
    most = 100.0 if percent else float(np.nanmax(np.abs(grid))) or 1.0
    low, colours = (-most, _DIVERGING) if signed else (min(0.0, float(np.nanmin(grid))), SEQUENTIAL)
    image = panel.imshow(grid, cmap=colours, vmin=low, vmax=most, aspect="auto")
    cells = np.argwhere(np.isfinite(grid)) if numbered else []
    texts = [f"{grid[*at]:{'+' * signed}.{0 if percent else 1}f}".replace("-", "−") for at in cells]
    for (row, column), text in zip(cells, texts, strict=True):
        dark = abs(grid[row, column]) / most > 0.6
        panel.text(column, row, text, ha="center", va="center",
                   fontsize=min(0.9 * size, 0.95 * slot / (0.6 * max(map(len, texts)))),
                   color=LIGHT.paper if dark else LIGHT.ink)  # fmt: skip
    for row, column in (map(codes.index, split_direction(each)) for each in framed):
        panel.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False,
                                  edgecolor=LIGHT.series[1], linewidth=1.2))  # fmt: skip
    if not numbered:
        colorbar(drawn, image, size, ax=panel, fraction=0.03, pad=0.01)
    panel.set_facecolor(LIGHT.paper)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, colors=LIGHT.ink, top=True, bottom=False, labeltop=True,
                      labelbottom=False)  # fmt: skip
    panel.set_xticks(range(len(codes)), labels, fontsize=letters, rotation=90)
    panel.set_yticks(range(len(codes)), labels, fontsize=letters)
    panel.set_xlabel("into", fontsize=0.95 * size, color=LIGHT.ink)
    panel.xaxis.set_label_position("top")
    panel.set_ylabel("from", fontsize=0.95 * size, color=LIGHT.ink)
    return drawn
