"""Models cut to some directions by `m4 extract`: what is left of them, and how well it translates.

experiment.toml has a part of a model each: model, experts (of a layer), whether it is the `whole`
model, parameters in millions, nll and bleu of each direction (bleu may be empty).
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from m4.eval.report.figures import LIGHT, SIZE, blank, legend, save, style
from scripts.results.kept import Asked
from scripts.results.tables import signed, table

Part = dict[str, Any]


def here(asked: Asked) -> str:
    """Returns what the parts that experiment.toml names lose against all experts."""
    said = []
    for model, experts in asked.extraction["named"]:
        parts = [part for part in asked.extraction["part"] if part["model"] == model]
        everything = next(part for part in parts if not part["whole"])
        one = next(part for part in parts if part["experts"] == experts)
        less = {key: [a - b for a, b in zip(one[key], everything[key], strict=True)]
                for key in ("nll", "bleu")}  # fmt: skip
        said.append(
            f"{model}, {experts} kept: nll {_signed(less['nll'], 3)}, BLEU {_signed(less['bleu'])}"
        )
    both = " and ".join(asked.extraction["directions"])
    return f"Less those with all experts, {both}: {'; '.join(said)}."


def _signed(values: Sequence[float], digits: int = 1) -> str:
    return " and ".join(signed(value, digits) for value in values)


def sections(asked: Asked) -> list[str]:
    """Returns the picture and the table."""
    directions, parts = asked.extraction["directions"], asked.extraction["part"]
    head = ["part", "parameters, millions", "share of the whole"]
    head += [f"{at}: {what}" for at in directions for what in ("nll", "BLEU")]
    lines = []
    for model, group in _models(parts):
        whole = group[0]
        for part in group:
            bleu = [f"{score:.1f}" for score in part["bleu"]] or [""] * len(directions)
            lines.append([
                model + ", whole" if part["whole"] else f"{part['experts']} kept",
                f"{part['parameters']:.2f}",
                f"{part['parameters'] / whole['parameters']:.0%}",
                *(cell for nll, score in zip(part["nll"], bleu, strict=True)
                  for cell in (f"{nll:.3f}", score)),
            ])  # fmt: skip
    return [
        f"![Scores of {directions[0]} over parameters, of models and parts](extraction.svg)",
        "A circle is a whole model, a dot a part of it.",
        "## Each part",
        table(head, lines),
    ]


def draw(asked: Asked, folder: Path) -> list[Path]:
    """Draws extraction.svg and .png: nll and BLEU of the first direction over parameters."""
    figure = blank(9.0, 4.0, layout="constrained")
    panels = figure.subplots(1, 2)
    handles = []
    for (model, group), colour in zip(
        _models(asked.extraction["part"]), LIGHT.series, strict=False
    ):
        for panel, key in zip(panels, ("nll", "bleu"), strict=True):
            scored = [part for part in group if part[key]]
            points = [(part["parameters"], part[key][0]) for part in scored]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.2)
            for part, point in zip(scored, points, strict=True):
                filled = LIGHT.paper if part["whole"] else colour
                panel.plot(*point, "o", color=colour, markerfacecolor=filled, markersize=6)
        handles.append(panels[0].plot([], [], "o-", color=colour, label=model)[0])
    for panel, name in zip(panels, ("nll", "BLEU"), strict=True):
        style(panel)
        label = f"{name} of {asked.extraction['directions'][0]}"
        panel.set_ylabel(label, fontsize=SIZE, color=LIGHT.ink)
        panel.set_xlabel("parameters, millions", fontsize=SIZE, color=LIGHT.ink)
    legend(figure, handles, SIZE)
    paths = [folder / "extraction.svg", folder / "extraction.png"]
    save(figure, paths)
    return paths


def _models(parts: Sequence[Part]) -> list[tuple[str, list[Part]]]:
    """Returns the parts by model, the whole model first."""
    return [(model, [*group]) for model, group in groupby(parts, lambda part: part["model"])]
