"""Draws size against score of parts of models: `python -m scripts.draw_extraction PART ...`.

A PART is a folder of `m4 extract`, whose run.json has the numbers of the part and of its model. The
scores are means over the directions that all parts have.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from m4.eval.report.figures import LIGHT, SIZE, blank, legend, save, style
from m4.settings import InputError
from m4.storage import run_folder

LABELS = {"nll": "nll, nats a token", "bleu": "BLEU"}


def mean(about: Mapping[str, Any], directions: Sequence[str], metric: str, which: int) -> float:
    """Returns a mean score: of the model (0) or its part (1)."""
    found = [about["scores"][name][metric][which] for name in directions]
    return sum(found) / len(found)


def draw(parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a line for each model, from its smallest part to the whole model (an open circle)."""
    shared = [name for name in parts[0]["scores"] if all(name in one["scores"] for one in parts)]
    if not shared:
        raise InputError("the parts have no scored direction in common")
    figure = blank(7.4, 3.4, layout="constrained")
    panels = figure.subplots(1, len(LABELS), squeeze=False)[0]
    runs = [*dict.fromkeys(one["run"] for one in parts)]
    for panel, (metric, label) in zip(panels, LABELS.items(), strict=True):
        style(panel)
        score = functools.partial(mean, directions=shared, metric=metric)
        for run, colour in zip(runs, LIGHT.series, strict=False):
            mine = sorted(
                (one for one in parts if one["run"] == run), key=lambda x: x["parameters"][1]
            )
            whole = (mine[0]["parameters"][0] / 1e6, score(mine[0], which=0))
            points = [(one["parameters"][1] / 1e6, score(one, which=1)) for one in mine]
            panel.plot(*zip(*points, whole, strict=True), "-", color=colour, linewidth=1.2)
            panel.plot(*zip(*points, strict=True), "o", color=colour, markersize=4)
            panel.plot(*whole, "o", color=colour, markerfacecolor=LIGHT.paper)
            for one, point in zip(mine, points, strict=True):
                panel.annotate(
                    str(one["experts"][1]), point, (0, 5), textcoords="offset points",
                    ha="center", fontsize=0.75 * SIZE, color=colour,
                )  # fmt: skip
        panel.set_xlim(0)
        panel.set_xlabel("parameters, millions", fontsize=SIZE, color=LIGHT.ink)
        panel.set_ylabel(label, fontsize=SIZE, color=LIGHT.ink)
    names = (Path(run).name for run in runs)
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=name)
               for name, colour in zip(names, LIGHT.series, strict=False)]  # fmt: skip
    legend(figure, handles, SIZE)
    save(figure, [path])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path, metavar="PART", help="folder of m4 extract")
    parser.add_argument("--output", type=Path, default=Path("extraction.svg"), metavar="FILE.svg")
    given = parser.parse_args(arguments)
    found = []
    for part in given.parts:
        if (about := run_folder.read(part).get("extracted")) is None:
            raise InputError(f"{part}: m4 extract has not made it")
        found.append(about)
    draw(found, given.output)


if __name__ == "__main__":
    main()
