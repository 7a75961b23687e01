"""Starts of small languages: seeds of each against bilingual models, and what an old model forgets.

`keep` takes the CPU seconds of each command (`scripts.starts`); `rows` are written as starts.jsonl:
start, about ("gain" over bilingual models, "forgotten" of the old model, or a language's code),
metric, languages, mean over languages and seeds, low, high, seeds (mean of each), worst.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from m4.data.languages import describe
from m4.eval.metrics import bootstrap
from m4.eval.report.figures import LIGHT, SIZE, blank, legend, save, style
from m4.eval.scoring.delta import BILINGUAL, METRIC_NAMES, Delta
from m4.storage.files import read_jsonl
from scripts.results.kept import Asked, of
from scripts.results.tables import signed, table

if TYPE_CHECKING:
    from scripts.results.found import Compared


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of a start, by one metric."""

    start: str
    about: str
    metric: str
    languages: int
    mean: float
    low: float
    high: float
    seeds: list[float]
    worst: str = ""


def keep(folder: Path, asked: Asked, base: Path) -> None:
    """Keeps the CPU seconds of the runs' commands."""
    shutil.copyfile(base / asked.starts["cost"], folder / "cost.jsonl")


def baselines(asked: Asked) -> list[str]:
    """Returns what the runs are compared with."""
    return [BILINGUAL, asked.starts["old"]]


def rows(asked: Asked, compared: Sequence[Compared]) -> list[Row]:
    """Returns the rows of starts.jsonl, from differences that have their replicates."""
    found = []
    for one in compared:
        by_run: dict[str, list[Delta]] = {}
        for row in one.rows:
            by_run.setdefault(row.system, []).append(row)
        about = "gain" if one.baseline == BILINGUAL else "forgotten"
        for start, runs in asked.starts["seeds"].items():
            if there := [by_run[run] for run in runs if run in by_run]:
                found += _rows(start, about, one.metric, there)
    return found


def _rows(start: str, about: str, metric: str, runs: Sequence[Sequence[Delta]]) -> list[Row]:
    """Returns the row of all languages, and one of each language that is gained.

    A replicate draws the same sentences for all seeds: an interval is of sentences, not of seeds.
    """
    by_language: dict[str, list[Delta]] = {}
    for row in (row for run in runs for row in run):
        by_language.setdefault(row.language, []).append(row)
    means = {code: float(np.mean([one.delta for one in of])) for code, of in by_language.items()}
    drawn = {code: np.mean([one.replicates for one in of], 0) for code, of in by_language.items()}
    low, high = bootstrap.interval(np.mean([*drawn.values()], axis=0))
    worst = min(means, key=lambda code: means[code])
    seeds = [float(np.mean([row.delta for row in run])) for run in runs]
    all_ = Row(start, about, metric, len(means), float(np.mean([*means.values()])), low, high,
               seeds, f"{describe(worst).name} {signed(means[worst])}")  # fmt: skip
    if about == "forgotten":
        return [all_]
    return [all_] + [
        Row(start, code, metric, 1, mean, *bootstrap.interval(drawn[code]),
            [one.delta for one in by_language[code]])
        for code, mean in means.items()
    ]  # fmt: skip


def read(folder: Path) -> list[Row]:
    """Returns the rows that were drawn; none before."""
    path = folder / "starts.jsonl"
    return [Row(**row) for row in read_jsonl(path)] if path.is_file() else []


def here(found: Sequence[Row], asked: Asked) -> str:
    """Returns gains and losses of the starts that experiment.toml names, in a sentence each."""
    said = []
    for about, text in (
        ("gain", "Mean ΔBLEU of the new languages against bilingual models"),
        ("forgotten", "Mean change of the old languages' BLEU"),
    ):
        each = [f"{row.start} {_interval(row)}" for row in found
                if (row.about, row.metric) == (about, "bleu")
                and row.start in asked.starts["named"]]  # fmt: skip
        said += [f"{text}: {', '.join(each)}."] * bool(each)
    return " ".join(said)


def _interval(row: Row, digits: int = 1) -> str:
    mean, low, high = (signed(value, digits) for value in (row.mean, row.low, row.high))
    return f"{mean} [{low}, {high}]"


def sections(
    folder: Path, asked: Asked, found: Sequence[Row], sizes: Mapping[str, int]
) -> list[str]:
    """Returns the parts of the page: the new languages, the old ones, the cost."""
    parts = [asked.starts["before"], "![ΔBLEU of each new language, and change of the old ones]"
             "(starts.svg)", "A dot is the mean of a start's seeds, a line its 95% interval over "
             "sentences, a short mark a seed."]  # fmt: skip
    starts = [*asked.starts["seeds"]]
    for metric in dict.fromkeys(row.metric for row in found):
        at = {(row.start, row.about): row for row in found if row.metric == metric}
        there = [start for start in starts if (start, "gain") in at]
        mine = [row for row in found if (row.metric, row.start) == (metric, there[0])]
        codes = [row.about for row in mine if row.languages == 1]
        name = f"Δ{METRIC_NAMES[metric]}"
        lines = [[describe(code).name, f"{sizes[code]:,}",
                  *(_interval(at[start, code]) for start in there)] for code in codes]  # fmt: skip
        lines.append(["mean", "", *(_interval(at[start, "gain"]) for start in there)])
        lines.append(["mean of each seed", "", *(_seeds(at[start, "gain"]) for start in there)])
        parts += [f"## {name} of the new languages against bilingual models",
                  "Means over seeds; in brackets the 95% interval over sentences (paired "
                  "bootstrap).\n\n" + table(["language", "pairs", *there], lines)]  # fmt: skip
    lost = [row for row in found if row.about == "forgotten"]
    parts += [
        "## What the old languages lose",
        "Change from the model that was continued; a shared model has never been that one.\n\n"
        + table(
            ["start", "metric", "languages", "mean", "of each seed", "worst language"],
            [
                [
                    row.start,
                    METRIC_NAMES[row.metric],
                    str(row.languages),
                    _interval(row, 2),
                    _seeds(row, 2),
                    row.worst,
                ]
                for row in lost
            ],
        ),
        "## What each start costs",
        _cost(folder, asked),
    ]
    return parts


def _seeds(row: Row, digits: int = 1) -> str:
    return ", ".join(signed(value, digits) for value in row.seeds)


def cpu_seconds(path: Path) -> dict[str, float]:
    """Returns command -> CPU seconds of all its calls (`scripts.starts.run_all`)."""
    spent: dict[str, float] = {}
    for row in read_jsonl(path):
        spent[row["name"]] = spent.get(row["name"], 0.0) + row["cpu_seconds"]
    return spent


def _cost(folder: Path, asked: Asked) -> str:
    spent = {name: each / 60 for name, each in cpu_seconds(folder / "cost.jsonl").items()}
    lines = []
    old = {"the model of the old languages": [asked.starts["old"]]}
    for start, runs in (old | dict(asked.starts["seeds"])).items():
        runs = [run for run in runs if f"{run}:train" in spent]
        steps, tokens = [], []
        for run in runs:
            kept = read_jsonl(of(folder, run) / "metrics.jsonl")
            timed = [row for row in kept if "step_seconds" in row]
            each = np.mean([row["tokens_per_second"] * row["step_seconds"] for row in timed])
            steps.append(kept[-1]["step"])
            tokens.append(steps[-1] * each / 1e6)
        minutes = np.mean([spent[f"{run}:train"] for run in runs])
        lines.append([start, str(len(runs)), ", ".join(f"{step:,}" for step in steps),
                      f"{np.mean(tokens):.1f}", f"{minutes:.1f}"])  # fmt: skip
    bilingual = next(value for name, value in spent.items() if name.endswith(":baselines"))
    lines.append(["bilingual models of all new languages", "1", "", "", f"{bilingual:.1f}"])
    about = "CPU minutes of one core, start-up and compilation included; tokens of both sides."
    head = ["start", "runs", "steps of each", "million tokens", "CPU minutes of a run"]
    return f"{about}\n\n{table(head, lines)}"


def draw(asked: Asked, found: Sequence[Row], folder: Path) -> list[Path]:
    """Draws starts.svg and .png: gains by language, and what is forgotten; a dot is a seed."""
    mine = [row for row in found if row.metric == "bleu"]
    starts = [start for start in asked.starts["seeds"] if any(row.start == start for row in mine)]
    colours = dict(zip(starts, (*LIGHT.series, LIGHT.ink), strict=False))
    codes = [*dict.fromkeys(row.about for row in mine if row.languages == 1)]
    places = {"gain": len(codes) + 0.3} | {code: float(i) for i, code in enumerate(codes)}
    figure = blank(8.0, 4.2, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[len(places) + 0.5, 1.6])
    for panel in (left, right):
        style(panel)
        panel.axhline(0, color=LIGHT.ink, linewidth=0.8)
    for row in mine:
        shift = 0.8 / len(starts) * (starts.index(row.start) - (len(starts) - 1) / 2)
        panel, x = (right, shift) if row.about == "forgotten" else (left, places[row.about] + shift)
        colour: Any = colours[row.start]
        panel.plot([x, x], [row.low, row.high], color=colour, linewidth=1.6)
        panel.plot(x, row.mean, "o", color=colour, markersize=6)
        panel.plot([x] * len(row.seeds), row.seeds, "_", color=colour, markersize=8)
    names = {**{code: describe(code).name for code in codes}, "gain": "mean"}
    left.set_xticks([places[at] for at in names], [*names.values()], fontsize=0.9 * SIZE)
    left.set_ylabel("ΔBLEU against bilingual", fontsize=SIZE, color=LIGHT.ink)
    right.set_xticks([0], ["old languages"], fontsize=0.9 * SIZE)
    right.set_xlim(-0.6, 0.6)
    right.set_ylabel("change of BLEU", fontsize=SIZE, color=LIGHT.ink)
    handles = [Line2D([], [], color=colour, marker="o", linewidth=1.6, label=start)
               for start, colour in colours.items()]  # fmt: skip
    legend(figure, handles, SIZE)
    paths = [folder / "starts.svg", folder / "starts.png"]
    save(figure, paths)
    return paths
