"""The atlas of experts: which language goes to which expert, as a picture and as tables.

It shows files of `m4.train.measuring.routing_counts`. Shares are of a direction's assigned choices,
first and second ones alike, and sum to 1 over the E experts of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from m4.data.directions import key_of, label_of, pair_of, side_of
from m4.eval.report.figures import FEW, LIGHT, SEQUENTIAL, blank, colorbar, page_size, png
from m4.eval.scoring.levels import SIDES
from m4.settings import InputError, pasted, some
from m4.storage.files import keep_result
from m4.train.measuring import routing_counts

# An expert with less than DEAD times an even share of all choices is dead; one with more than
# SPECIAL times an even share of a language's choices is its specialist.
DEAD, SPECIAL = 0.1, 2.0

_MOST_LINES, _MOST_NAMES = 64, 12  # maximum experts in a table, and languages of an expert
_TALLEST = 60.0  # inches
_MOST_COLUMNS = 256  # of a panel


@dataclass(frozen=True)
class Atlas:
    """Counts of the assigned choices of experts."""

    directions: list[str]  # directions with any count, into English first, by falling training size
    languages: list[str]  # `label_of` each direction
    # Name of a layer -> counts, int64 [directions, E]; the encoder's first, by depth.
    layers: dict[str, npt.NDArray[np.int64]]

    def blocks(self) -> dict[str, list[int]]:
        """Returns side -> the rows of its directions, for sides with directions."""
        rows = [(side_of(direction), row) for row, direction in enumerate(self.directions)]
        found = {side: [row for here, row in rows if here == side] for side in SIDES}
        return {side: block for side, block in found.items() if block}


def path_of(folder: Path, split: str) -> Path:
    """Returns the file of counts: training's in MODEL_DIR, a split's with its translations."""
    place = folder if split == "train" else folder / "decodes"
    return place / f"atlas.{split}.json"


def load(folder: Path, split: str = "train") -> Atlas:
    """Reads the atlas of a MODEL_DIR. Raises InputError if it is not a run or has no counts."""
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: not a run folder (no run.json); train first")
    path = path_of(folder, split)
    if not path.is_file():
        job = pasted("train" if split == "train" else "decode", f"--model_dir={folder}")
        raise InputError(f"{path}: no such file; `{job}` of a model with experts writes it")
    return read(path)


def read(path: Path) -> Atlas:
    """Reads the atlas of a file. Raises InputError if it is damaged or has no counts."""
    found, saved = routing_counts.read(path)
    pairs: Mapping[str, int] = saved.get("train_pairs", {})
    languages = [label_of(direction) for direction in found.directions]
    sizes = [pairs.get(key_of(pair_of(direction)), 0) for direction in found.directions]
    kept = sorted(
        (i for i in range(len(languages)) if any(x[i].any() for x in found.layers.values())),
        key=lambda i: (SIDES.index(side_of(found.directions[i])), -sizes[i], languages[i]),
    )
    if not kept:
        raise InputError(f"{path}: nothing is counted yet")
    return Atlas(
        [found.directions[i] for i in kept],
        [languages[i] for i in kept],
        {name: found.layers[name][kept] for name in sorted(found.layers, key=_place)},
    )


def _place(layer: str) -> tuple[bool, int, str]:
    """Sorts "encoder_2" before "encoder_11" before "decoder_1"."""
    stack, _, number = layer.rpartition("_")
    return stack != "encoder", int(number) if number.isdecimal() else 0, layer


def shares(count_DE: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns each expert's share of a direction's choices, or 0 without any."""
    return count_DE / np.maximum(count_DE.sum(axis=1, keepdims=True), 1)


def load_of(count_DE: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns each expert's share of all choices."""
    return count_DE.sum(axis=0) / max(count_DE.sum(), 1)


def entropy(count_DE: npt.NDArray[np.int64]) -> float:
    """Returns the entropy of the load divided by log E: 1 is even, 0 is all in one expert."""
    load_E = load_of(count_DE)
    there = load_E[load_E > 0]
    return float(-(there * np.log(there)).sum() / np.log(max(len(load_E), 2)))


def dead(count_DE: npt.NDArray[np.int64]) -> list[int]:
    """Returns the experts with less than a tenth of an even share of all choices."""
    load_E = load_of(count_DE)
    return np.flatnonzero(load_E < DEAD / len(load_E)).tolist()


def specialists(count_DE: npt.NDArray[np.int64]) -> dict[int, list[int]]:
    """Returns expert -> the rows that give it over twice an even share, the largest first."""
    share_DE = shares(count_DE)
    found: dict[int, list[int]] = {}
    for row, expert in np.argwhere(share_DE > SPECIAL / share_DE.shape[1]).tolist():
        found.setdefault(expert, []).append(row)
    return {expert: sorted(found[expert], key=lambda row: -share_DE[row, expert])
            for expert in sorted(found)}  # fmt: skip


def alarms(atlas: Atlas) -> list[str]:
    """Returns a warning line for each layer with dead experts."""
    return [
        f"ALARM {layer}: {len(gone)} of {count_DE.shape[1]} experts "
        f"{'is' if len(gone) == 1 else 'are'} dead (under {100 * DEAD / count_DE.shape[1]:.3g}% of "
        f"the choices, a tenth of an even share): {some([*map(str, gone)], 24)}"
        for layer, count_DE in atlas.layers.items()
        if (gone := dead(count_DE))
    ]


def tables(atlas: Atlas) -> dict[str, Table]:
    """Returns heading -> table, one per layer, with each expert's load and `specialists`.

    With many experts, the table has only those that are specialists.
    """
    made, blocks = {}, atlas.blocks()
    for layer, count_DE in atlas.layers.items():
        experts = count_DE.shape[1]
        load_E, share_DE, gone = load_of(count_DE), shares(count_DE), set(dead(count_DE))
        special = specialists(count_DE)
        over = f"over {100 * SPECIAL / experts:.3g}%"
        sides = [f"{side.replace('->', ' → ')}, {over}" for side in blocks]
        table = Table("expert", "load", *sides, box=SIMPLE_HEAD)
        for column in table.columns[:2]:
            column.justify = "right"
        for expert in range(experts) if experts <= _MOST_LINES else list(special)[:_MOST_LINES]:
            cells = [
                some([f"{atlas.languages[r]} {100 * share_DE[r, expert]:.0f}%"
                      for r in special.get(expert, []) if r in block], _MOST_NAMES)
                for block in blocks.values()
            ]  # fmt: skip
            mark = " dead" if expert in gone else ""
            table.add_row(f"{expert}", f"{100 * load_E[expert]:.2f}%{mark}", *cells)
        heading = f"{layer}: {experts} experts, {count_DE.sum():,} choices, "
        made[heading + f"entropy of the load {entropy(count_DE):.3f} (even: 1)"] = table
    return made


def show(folder: Path, split: str, console: Console, output: Path | None = None) -> None:
    """Prints tables and alarms of "train" or a test set's split, and draws the picture.

    `output` is the picture's file. Defaults to atlas.png next to the counts, if that is writable.
    """
    atlas = load(folder, split)
    for heading, table in tables(atlas).items():
        console.print(heading, style="bold", highlight=False, soft_wrap=True)
        console.print(table)
    for line in alarms(atlas) or ["No dead experts."]:
        console.print(line, style="bold red" if line.startswith("ALARM") else "", soft_wrap=True)
    keep_result(png(figure(atlas)), output, path_of(folder, split).with_name("atlas.png"))


def figure(atlas: Atlas) -> Figure:
    """Returns a figure with a panel per layer, the encoder's in the left column, on one scale.

    Rows are languages by falling training size, in a block into English and one out of it. Columns
    are experts. A cross marks a dead expert.
    """
    stacks: dict[str, list[str]] = {}
    for layer in atlas.layers:
        stacks.setdefault(layer.rpartition("_")[0], []).append(layer)
    columns, blocks = [*stacks.values()], atlas.blocks()
    deep, wide = max(map(len, columns)), max(map(len, blocks.values())) > FEW
    width, size = page_size(wide)
    line = 1.3 * size / 72  # height of a line of text in inches
    tall = min(0.055 if wide else line, _TALLEST / (deep * (len(atlas.directions) + 1)))
    rows, names = _rows(blocks, max(round(line / tall), 1))
    chosen = [row for block in blocks.values() for row in block[:: math.ceil(0.95 * line / tall)]]
    page = blank(width, deep * (len(rows) * tall + 3.5 * line) + 3.8 * line, layout="constrained")
    experts = max(x.shape[1] for x in atlas.layers.values())
    most = max(SPECIAL / experts, *(shares(x).max() for x in atlas.layers.values()))
    # With many experts, an even share is small next to the largest: the root makes it visible.
    norm = PowerNorm(1.0 if experts <= 16 else 0.5, 0, most)

    def draw(panel: Axes, layer: str) -> None:
        """Draws one layer's heat map, with crosses at the foot of the columns of dead experts."""
        count_DE = atlas.layers[layer]
        share_DE = shares(count_DE)
        experts = share_DE.shape[1]
        nothing = np.full(experts, np.nan)
        drawn = np.stack([nothing if row is None else share_DE[row] for row in rows])
        # More experts than pixels: adjacent ones show their maximum.
        together = -(-experts // _MOST_COLUMNS)
        drawn = np.pad(drawn, ((0, 0), (0, -experts % together)), mode="edge")
        drawn = drawn.reshape(len(rows), -1, together).max(axis=2)
        edges = (-0.5, drawn.shape[1] * together - 0.5, len(rows) - 0.5, -0.5)
        panel.imshow(drawn, aspect="auto", cmap=SEQUENTIAL, norm=norm, extent=edges)
        panel.set_facecolor(LIGHT.paper)
        panel.set_title(layer, fontsize=size, color=LIGHT.ink, fontweight="bold", loc="left", pad=2)
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0, colors=LIGHT.ink, labelsize=0.9 * size)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        if experts <= 8:
            panel.set_xticks(range(experts))
        gone = dead(count_DE)
        named = f"expert (most of {together})" if together > 1 else "expert"
        panel.set_xlabel(named + ", × dead" * bool(gone), fontsize=0.95 * size, color=LIGHT.ink,
                         labelpad=1)  # fmt: skip
        cross = min(0.6 * size, max(180 / experts, 0.4 * size))
        if gone:  # the layout fails for an empty line
            panel.plot(gone, [len(rows) - 1] * len(gone), "x", color=LIGHT.series[1],
                       markersize=cross, markeredgewidth=1.5, clip_on=False)  # fmt: skip
        panel.set_xlim(-0.5, experts - 0.5)
        panel.set_ylim(len(rows) - 0.5, -0.5)

    panels = []
    for (depth, column), panel in np.ndenumerate(page.subplots(deep, len(columns), squeeze=False)):
        if depth >= len(columns[column]):
            panel.remove()
            continue
        panels.append(panel)
        draw(panel, columns[column][depth])
        for y, name in names.items():
            panel.annotate(name, (-0.5, y), va="center", fontsize=0.9 * size, color=LIGHT.ink)
        labels = [atlas.languages[row] for row in chosen] if column == 0 else []
        panel.set_yticks([rows.index(row) for row in chosen] if labels else [], labels)
    shown = ScalarMappable(norm, SEQUENTIAL)
    bar = colorbar(page, shown, size, ax=panels, orientation="horizontal", pad=0.01,
                   ticks=MaxNLocator(6), aspect=60,
                   fraction=0.6 * line / page.get_figheight())  # fmt: skip
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1.0, 0 if most > 0.1 else None))
    bar.set_label(f"share of a language's choices; even: {100 / experts:.3g}%",
                  fontsize=0.95 * size, color=LIGHT.ink)  # fmt: skip
    return page


def _rows(
    blocks: Mapping[str, Sequence[int]], gap: int
) -> tuple[list[int | None], dict[float, str]]:
    """Returns the picture's rows (a direction, or None in a gap), and positions of side names."""
    rows: list[int | None] = []
    names = {}
    for side, block in blocks.items():
        names[len(rows) + (gap - 1) / 2] = side.replace("->", " → ")
        rows += [None] * gap + list(block)
    return [*rows, *([None] * max(gap // 2, 1))], names
