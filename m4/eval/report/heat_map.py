"""Heat maps of values from each source language into each target language."""

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from m4.data.directions import languages_of, split_direction
from m4.eval.report.figures import LIGHT, SEQUENTIAL, SIZE, blank, colorbar, page_size

_DIVERGING = LinearSegmentedColormap.from_list(
    "difference", ["#a03c00", "#f0a070", "#f7f7f7", "#6fb2dc", "#004d7a"]
)
# Up to so many languages cells have room for their numbers.
_NUMBERED = 16


def figure(
    values: Mapping[str, float],
    names: Mapping[str, str],
    *,
    signed: bool = False,
    framed: Collection[str] = (),
    percent: bool = False,
) -> Figure:
    """Draws a value for each direction, sources as rows and targets as columns, English first.

    Args:
        names: Label of each language. Defaults to its code.
        signed: Colours are of two hues, for values below and above 0.
        framed: Directions whose cells have a frame.
        percent: Numbers are whole, and the darkest colour is 100.
    """
    codes = sorted(languages_of(values), key=lambda code: (code != "en", code))
    grid = np.full((len(codes), len(codes)), np.nan)
    for direction, value in values.items():
        row, column = map(codes.index, split_direction(direction))
        grid[row, column] = value
    numbered = len(codes) <= _NUMBERED
    # Narrower than other figures: shrunk to a phone's width, numbers stay legible.
    width, size = (6.0, SIZE) if numbered else page_size(many=True)
    slot = 0.73 * 72 * width / len(codes)  # points of a cell
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
