"""The atlas of experts: which language goes to which expert, as a picture and as tables.

It shows the files of `m4.train.measuring.routing_counts`. A share is that of a direction's assigned
choices, first and second ones alike: those of a direction sum to 1 over the E experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from m4.data.preprocess import language_of
from m4.eval.report.figures import FEW, page_size, png
from m4.eval.report.theme import DARK, LIGHT, Theme
from m4.eval.scoring.levels import SIDES, side_of
from m4.settings import InputError
from m4.storage.files import keep_result
from m4.train.measuring import routing_counts

# An expert with less than this part of an even share of all choices is dead; a language with more
# than this multiple of it has a specialist.
DEAD, SPECIAL = 0.1, 2.0

_MOST_LINES, _MOST_NAMES = 64, 12  # experts of a table, languages of an expert
_TALLEST = 60.0  # inches
_MOST_COLUMNS = 256  # of a panel


@dataclass(frozen=True)
class Atlas:
    """Counts by layer, int64 [directions, E]: the encoder's layers first, by depth.

    directions: into English first, each group by falling training size; those without any count
        are left out. languages: of each direction, the one that is not English.
    """

    split: str
    directions: list[str]
    languages: list[str]
    layers: dict[str, npt.NDArray[np.int64]]

    def groups(self) -> list[str]:
        """The group of each direction, of `SIDES`."""
        return [side_of(direction) for direction in self.directions]


def path_of(folder: Path, split: str) -> Path:
    """Where a split's counts are: training's in MODEL_DIR, those of test sets with the decodes."""
    place = folder if split == "train" else folder / "decodes"
    return place / f"atlas.{split}.json"


def load(folder: Path, split: str = "train") -> Atlas:
    """The atlas of a MODEL_DIR. ValueError: no run folder, or nothing is counted there."""
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: not a run folder (no run.json); train first")
    path = path_of(folder, split)
    if not path.is_file():
        job = "train" if split == "train" else "decode"
        raise InputError(f"{path}: no such file; `m4 {job}` of a model with experts writes it")
    return read(path)


def read(path: Path) -> Atlas:
    """The atlas of a file. ValueError: it is damaged, or has no counts."""
    found, saved = routing_counts.read(path)
    pairs: Mapping[str, int] = saved.get("train_pairs", {})
    kept = sorted(
        (i for i in range(len(found.directions)) if any(x[i].any() for x in found.layers.values())),
        key=lambda i: (
            SIDES.index(side_of(found.directions[i])),
            -pairs.get(language_of(found.directions[i]), 0),
            language_of(found.directions[i]),
        ),
    )
    if not kept:
        raise InputError(f"{path}: nothing is counted yet")
    directions = [found.directions[i] for i in kept]
    order = sorted(found.layers, key=lambda name: (_stack(name) != "encoder", _depth(name), name))
    return Atlas(
        saved.get("split", ""),
        directions,
        [language_of(direction) for direction in directions],
        {name: found.layers[name][kept] for name in order},
    )


def _stack(layer: str) -> str:
    return layer.rpartition("_")[0]


def _depth(layer: str) -> int:
    number = layer.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


# ------------------------------------------------------------------------------------- numbers


def shares(count_DE: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of each direction's choices, by expert; 0 for a direction that has none."""
    return count_DE / np.maximum(count_DE.sum(axis=1, keepdims=True), 1)


def load_of(count_DE: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of all choices, by expert."""
    return count_DE.sum(axis=0) / max(count_DE.sum(), 1)


def entropy(count_DE: npt.NDArray[np.int64]) -> float:
    """Of the load, as a part of its most, log E: 1 is even, 0 all in one expert."""
    load_E = load_of(count_DE)
    there = load_E[load_E > 0]
    return float(-(there * np.log(there)).sum() / np.log(max(len(load_E), 2)))


def dead(count_DE: npt.NDArray[np.int64]) -> list[int]:
    """Experts with less than a tenth of an even share of all choices."""
    load_E = load_of(count_DE)
    return np.flatnonzero(load_E < DEAD / len(load_E)).tolist()


def specialists(count_DE: npt.NDArray[np.int64]) -> dict[int, list[int]]:
    """Expert -> the directions (rows) that give it more than twice an even share of their choices,
    the largest share first."""
    share_DE = shares(count_DE)
    found: dict[int, list[int]] = {}
    for row, expert in np.argwhere(share_DE > SPECIAL / share_DE.shape[1]).tolist():
        found.setdefault(expert, []).append(row)
    return {
        expert: sorted(found[expert], key=lambda row: -share_DE[row, expert])
        for expert in sorted(found)
    }


def alarms(atlas: Atlas) -> list[str]:
    """A line for every layer with dead experts."""
    lines = []
    for layer, count_DE in atlas.layers.items():
        experts = count_DE.shape[1]
        if gone := dead(count_DE):
            named = _first(map(str, gone), 24)
            lines.append(
                f"ALARM {layer}: {len(gone)} of {experts} experts "
                f"{'is' if len(gone) == 1 else 'are'} dead (under {100 * DEAD / experts:.3g}% of "
                f"the choices, a tenth of an even share): {named}"
            )
    return lines


def _first(names, most: int) -> str:
    """The first `most`, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _arrow(group: str) -> str:
    return group.replace("->", " → ")


# ------------------------------------------------------------------------------------- tables


def tables(atlas: Atlas) -> dict[str, Table]:
    """Heading -> table, one a layer: every expert (of many, those with languages), its load, and
    its languages, those that give it more than twice an even share of their choices."""
    made = {}
    groups = atlas.groups()
    for layer, count_DE in atlas.layers.items():
        experts = count_DE.shape[1]
        load_E, share_DE, gone = load_of(count_DE), shares(count_DE), set(dead(count_DE))
        special = specialists(count_DE)
        table = Table(box=SIMPLE_HEAD)
        table.add_column("expert", justify="right")
        table.add_column("load", justify="right")
        for group in SIDES:
            table.add_column(f"{_arrow(group)}, over {100 * SPECIAL / experts:.3g}%")
        shown = range(experts) if experts <= _MOST_LINES else list(special)[:_MOST_LINES]
        for expert in shown:
            cells = []
            for group in SIDES:
                rows = [row for row in special.get(expert, []) if groups[row] == group]
                cells.append(
                    _first(
                        (f"{atlas.languages[r]} {100 * share_DE[r, expert]:.0f}%" for r in rows),
                        _MOST_NAMES,
                    )
                )
            mark = " dead" if expert in gone else ""
            table.add_row(f"{expert}", f"{100 * load_E[expert]:.2f}%{mark}", *cells)
        heading = f"{layer}: {experts} experts, {count_DE.sum():,} choices, "
        made[heading + f"entropy of the load {entropy(count_DE):.3f} (even: 1)"] = table
    return made


def show(folder: Path, split: str, console: Console, output: Path | None = None) -> None:
    """Prints tables and alarms, and draws the picture.

    output: its file; None: atlas.png next to the counts, if it can be written.
    """
    atlas = load(folder, split)
    for heading, table in tables(atlas).items():
        console.print(heading, style="bold", highlight=False, soft_wrap=True)
        console.print(table)
    for line in alarms(atlas) or ["No dead experts."]:
        console.print(line, style="bold red" if line.startswith("ALARM") else "", soft_wrap=True)
    keep_result(png(figure(atlas)), output, path_of(folder, split).with_name("atlas.png"))


# ------------------------------------------------------------------------------------- picture


def figure(atlas: Atlas, theme: Theme = LIGHT) -> Figure:
    """A panel a layer, the encoder's in the left column: languages by falling training size, a
    block a group; columns are experts; one scale for all. A cross marks a dead expert.

    Languages are labelled with their codes, which every font has.
    """
    stacks = list(dict.fromkeys(_stack(layer) for layer in atlas.layers))
    columns = [[layer for layer in atlas.layers if _stack(layer) == stack] for stack in stacks]
    deep = max(map(len, columns))
    groups = atlas.groups()
    blocks = [[i for i, here in enumerate(groups) if here == group] for group in SIDES]
    wide = max(map(len, blocks)) > FEW
    width, size = page_size(wide)
    line = 1.3 * size / 72  # inches of a line of text
    tall = min(0.055 if wide else line, _TALLEST / (deep * (len(groups) + 1)))
    rows, names = _rows(blocks, max(round(line / tall), 1))
    chosen = [row for block in blocks for row in block[:: math.ceil(0.95 * line / tall)]]

    # The layout, in inches.
    left = 0.6 * size / 72 * max(map(len, atlas.languages)) + 0.1
    across = (width - left - 0.15 - 0.2 * (len(columns) - 1)) / len(columns)
    high, below = len(rows) * tall, 2.2 * line
    height = deep * (1.3 * line + high + below) + 3.6 * line
    page = Figure((width, height))
    FigureCanvasAgg(page)
    page.set_facecolor(theme.paper)

    def axes(x: float, y: float, w: float, h: float) -> Axes:
        return page.add_axes((x / width, y / height, w / width, h / height))

    experts = max(x.shape[1] for x in atlas.layers.values())
    most = max(SPECIAL / experts, *(shares(x).max() for x in atlas.layers.values()))
    # With many experts an even share is small next to the largest: its root is visible.
    norm = PowerNorm(1.0 if experts <= 16 else 0.5, 0, most)
    colours = _colours(theme)
    for column, layers in enumerate(columns):
        for depth, layer in enumerate(layers):
            top = height - depth * (1.3 * line + high + below) - 1.3 * line
            panel = axes(left + column * (across + 0.2), top - high, across, high)
            _panel(panel, layer, atlas.layers[layer], rows, colours, norm, theme, size)
            for y, name in names.items():
                panel.annotate(name, (-0.5, y), va="center", fontsize=0.9 * size, color=theme.ink)
            labels = [atlas.languages[row] for row in chosen] if column == 0 else []
            panel.set_yticks([rows.index(row) for row in chosen] if labels else [], labels)
    bar = page.colorbar(
        ScalarMappable(norm, colours),
        axes(left, 2.4 * line, width - left - 0.4, 0.6 * line),
        orientation="horizontal",
    )
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1.0, 0 if most > 0.1 else None))
    bar.set_label(f"share of a language's choices; even: {100 / experts:.3g}%", size=0.95 * size,
                  color=theme.ink)  # fmt: skip
    bar.ax.tick_params(labelsize=0.9 * size, colors=theme.ink)
    bar.outline.set_visible(False)
    return page


def _colours(theme: Theme) -> LinearSegmentedColormap:
    """From the paper to the ink through one hue, evenly in lightness: no colours to confuse."""
    if theme.paper == DARK.paper:
        steps = ["#1d2530", "#0b65a3", "#7cc0ec", "#ffffff"]
    else:
        steps = ["#f4f7fa", "#8fc4e8", "#1a73b4", "#06203f"]
    return LinearSegmentedColormap.from_list("share", steps)


def _rows(blocks: Sequence[Sequence[int]], gap: int) -> tuple[list[int | None], dict[float, str]]:
    """The picture's rows (a direction, or None in a gap), and where the names of groups are."""
    rows: list[int | None] = []
    names = {}
    for group, block in zip(SIDES, blocks, strict=True):
        if block:
            names[len(rows) + (gap - 1) / 2] = _arrow(group)
            rows += [None] * gap + list(block)
    return [*rows, *([None] * max(gap // 2, 1))], names


def _panel(
    panel: Axes,
    layer: str,
    count_DE: npt.NDArray[np.int64],
    rows: Sequence[int | None],
    colours: Colormap,
    norm: Normalize,
    theme: Theme,
    size: float,
) -> None:
    """One layer's heat map; crosses at the foot of the columns of dead experts."""
    share_DE = shares(count_DE)
    experts = share_DE.shape[1]
    nothing = np.full(experts, np.nan)
    drawn = np.stack([nothing if row is None else share_DE[row] for row in rows])
    # More than the picture has points for: of some adjacent ones the most.
    together = -(-experts // _MOST_COLUMNS)
    drawn = np.pad(drawn, ((0, 0), (0, -experts % together)), mode="edge")
    drawn = drawn.reshape(len(rows), -1, together).max(axis=2)
    edges = (-0.5, drawn.shape[1] * together - 0.5, len(rows) - 0.5, -0.5)
    panel.imshow(drawn, aspect="auto", cmap=colours, norm=norm, extent=edges)
    panel.set_facecolor(theme.paper)
    panel.set_title(layer, fontsize=size, color=theme.ink, fontweight="bold", loc="left", pad=2)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, colors=theme.ink, labelsize=0.9 * size)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if experts <= 8:
        panel.set_xticks(range(experts))
    gone = dead(count_DE)
    named = "expert" + (f" (most of {together})" if together > 1 else "")
    named += ", × dead" if gone else ""
    panel.set_xlabel(named, fontsize=0.95 * size, color=theme.ink, labelpad=1)
    cross = min(0.6 * size, max(180 / experts, 0.4 * size))
    panel.plot(gone, [len(rows) - 1] * len(gone), "x", color=theme.series[1], markersize=cross,
               markeredgewidth=1.5, clip_on=False)  # fmt: skip
    panel.set_xlim(-0.5, experts - 0.5)
    panel.set_ylim(len(rows) - 0.5, -0.5)
