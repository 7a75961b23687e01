"""The heat map of the cosines between groups' gradients (`m4.train.multitask.cosines`)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from m4.eval.report.figures import LIGHT, blank, colorbar

_NAME = "gradients/cosine/"
_LONGEST = 14  # letters of a label
_FIGURES = 14  # up to so many sets the cells have room for their numbers


class Cosines(NamedTuple):
    """A symmetric matrix [sets, sets], 1 on its diagonal, and the step of its measurement."""

    step: int
    names: list[str]
    matrix: npt.NDArray[np.float64]


def last(rows: Iterable[Mapping[str, Any]]) -> Cosines | None:
    """Returns the last measurement in the rows of a metrics.jsonl, or None if there is none."""
    found: dict[tuple[str, str], float] = {}
    step = 0
    for row in rows:
        named = {name: x for name, x in row.items() if name.startswith(_NAME) and x is not None}
        if named:
            pairs = [name.removeprefix(_NAME).split("/") for name in named]
            step = row["step"]
            found = {(a, b): x for (a, b), x in zip(pairs, named.values(), strict=True)}
    if not found:
        return None
    names = list(dict.fromkeys(name for pair in found for name in pair))
    matrix = np.eye(len(names))
    for (a, b), value in found.items():
        i, j = names.index(a), names.index(b)
        matrix[i, j] = matrix[j, i] = value
    return Cosines(step, names, matrix)


def figure(cosines: Cosines) -> Figure:
    """Returns one square a pair: blue where gradients agree, orange where they conflict.

    The scale is that of the largest cosine outside the diagonal. The figure is for a page, where
    the reader's fonts write names in any script.
    """
    count = len(cosines.names)
    names = [x if len(x) <= _LONGEST else x[: _LONGEST - 1] + "…" for x in cosines.names]
    many, every = count > _FIGURES, -(-count // 20)
    # Inches of a cell, points of a letter: on a phone the page is shrunk to half and less. Of many
    # sets every second one has a label, which is larger.
    cell, size = (0.26, 8 + 5.0 * every) if many else (min(0.62, 5.2 / count), 13.0)
    margin = 0.62 * size / 72 * max(map(len, names)) + 0.25
    page = blank(max(margin + cell * count + 1.1, 4.6), cell * count + margin + 0.3,
                 layout="constrained")  # fmt: skip
    panel = page.add_subplot()
    others = np.where(np.eye(count, dtype=bool), np.nan, cosines.matrix)
    most = max(float(np.nanmax(np.abs(others))), 0.01)
    ends = (LIGHT.series[1], LIGHT.paper, LIGHT.series[0])
    colours = LinearSegmentedColormap.from_list("cosine", list(ends))
    image = panel.imshow(others, cmap=colours, vmin=-most, vmax=most)
    panel.set_xticks(range(0, count, every), names[::every], rotation=90, rotation_mode="anchor",
                     ha="right", va="center")  # fmt: skip
    panel.set_yticks(range(0, count, every), names[::every])
    panel.tick_params(length=0, labelsize=size, colors=LIGHT.ink)
    panel.spines[:].set_visible(False)
    panel.set_facecolor(LIGHT.faint)  # of the diagonal
    if not many:
        for i, j in np.argwhere(~np.eye(count, dtype=bool)):
            strong = abs(others[i, j]) > 0.6 * most
            text = f"{others[i, j]:.2f}".replace("-", "−").replace("0.", ".", 1)
            panel.annotate(text, (j, i), ha="center", va="center", fontsize=0.62 * size,
                           color=LIGHT.paper if strong else LIGHT.ink)  # fmt: skip
    bar = colorbar(page, image, size, ax=panel, shrink=0.9, aspect=25)
    bar.set_ticks([-most, 0.0, most], labels=[f"−{most:.2f}", "0", f"{most:.2f}"])
    return page
