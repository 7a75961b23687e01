"""One setting changed at a time: dev losses, routing and BLEU of each run against the first one.

`keep` gathers runs of `scripts.ablations`; `sections` and `draw` read nothing else:

  ablation.jsonl   a row of a run and seed: run, seed, steps and nll (of dev evaluations, the mean
                   over languages), by_language (nll at the end), routing (means over the second
                   half of training), bleu (language -> score of the test sentences, if
                   they were translated)
  languages.json   language -> its training pairs
  seconds.json     run -> CPU seconds of a step on one core (benchmarks/frontier_steps.py)
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from m4.data.cache.cache import Cache
from m4.data.directions import split_direction
from m4.eval.decoding.testsets import train_pairs
from m4.eval.report.figures import LIGHT, SIZE, blank, legend, save, style
from m4.eval.scoring.score import COPY, read_scores
from m4.storage.files import read_json, read_jsonl, write_jsonl
from scripts.ablations import GIN, SETTINGS
from scripts.results.curves import steps_to
from scripts.results.kept import Asked, languages, write_languages
from scripts.results.tables import signed, table

# Column of the tables -> key in metrics.jsonl, and what it is multiplied by.
ROUTING = {
    "first choice full, %": ("first_overflow", 100),
    "second choice not sent, %": ("second_dropped", 100),
    "second choice full, %": ("second_overflow", 100),
    "tokens left behind, %": ("fraction_tokens_left_behind", 100),
    "dead experts": ("dead_experts", 1),  # a mean over layers
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Seeds of one setting. Losses are in nats a token.

    Attributes:
        seeds: Numbers of the seeds.
        nll: Dev losses at the end, [seed, language], languages from many pairs to few.
        steps: Steps of the evaluations.
        curve: Mean over languages and seeds, [evaluation].
        bleu: Scores of test sentences, [seed, language], for translated seeds.
        seconds: CPU seconds of a step, if they were measured.
    """

    name: str
    label: str
    seeds: list[int]
    nll: np.ndarray
    steps: np.ndarray
    curve: np.ndarray
    routing: dict[str, float]
    bleu: np.ndarray | None
    seconds: float | None


def keep(folder: Path, asked: Asked, base: Path) -> list[str]:
    """Keeps the runs that came to the last step, beside kept ones that are not here.

    Returns:
        A line on what is missing.
    """
    rows, missing, out = [], [], base / asked.ablation["folder"]
    target = folder / "ablation.jsonl"
    kept = read_jsonl(target) if target.is_file() else []
    before = {(row["run"], row["seed"]): row for row in kept}
    for run in asked.ablation["run"]:
        for seed in range(run["seeds"]):
            at = out / f"{run['name']}_{seed}"
            path = at / "metrics.jsonl"
            found = read_jsonl(path) if path.is_file() else []
            dev = [row for row in found if "dev/nll" in row]
            if dev and dev[-1]["step"] == asked.ablation["steps"]:
                rows.append({"run": run["name"], "seed": seed, **_row(found, dev, at)})
            elif (run["name"], seed) in before:  # trained on another machine
                rows.append(before[run["name"], seed])
            else:
                missing.append(at.name)
    here = (out / f"{row['run']}_{row['seed']}" for row in rows)
    if run := next((run for run in here if run.is_dir()), None):
        write_languages(folder, sizes_of(run))
    write_jsonl(target, rows)
    return [f"{len(rows)} runs; not trained: {', '.join(missing) or 'none'}"]


def sizes_of(run: Path) -> dict[str, int]:
    """Returns language -> training pairs of a run's corpus."""
    return train_pairs(Cache(run / "vocabulary"))


def _row(
    found: Sequence[dict[str, Any]], dev: Sequence[dict[str, Any]], at: Path
) -> dict[str, Any]:
    """Returns what is kept of a run folder."""
    names = [key for key in dev[-1] if key.startswith("dev/nll/") and key.endswith("-en")]
    late = [row for row in found if "nll" in row and row["step"] > dev[-1]["step"] / 2]
    scores = at / "scores.jsonl"
    bleu = {
        split_direction(row["direction"])[0]: round(row["score"], 2)
        for row in (read_scores(scores) if scores.is_file() else [])
        if (row["metric"], row["subset"]) == ("bleu", "all") and row["system"] != COPY
    }
    return {
        "steps": [row["step"] for row in dev],
        "nll": [round(float(np.mean([row[name] for name in names])), 5) for row in dev],
        "by_language": {split_direction(name.removeprefix("dev/nll/"))[0]: round(dev[-1][name], 5)
                        for name in names},
        "routing": {key: round(float(np.mean([row[key] for row in late])), 5)
                    for key, _ in ROUTING.values() if key in late[-1]},
        "bleu": bleu,
    }  # fmt: skip


def read(folder: Path, asked: Asked) -> list[Run]:
    """Returns the runs that were kept, in the order of experiment.toml."""
    path, seconds = folder / "ablation.jsonl", folder / "seconds.json"
    rows = read_jsonl(path) if path.is_file() else []
    timed = read_json(seconds) if seconds.is_file() else {}
    sizes = languages(folder)
    codes = sorted(sizes, key=lambda code: -sizes[code])
    made = []
    for run in asked.ablation.get("run", []):
        mine = [row for row in rows if row["run"] == run["name"]]
        if not mine:
            continue
        translated = [[row["bleu"][code] for code in codes] for row in mine if row["bleu"]]
        made.append(Run(
            run["name"],
            run["label"],
            [row["seed"] for row in mine],
            np.array([[row["by_language"][code] for code in codes] for row in mine]),
            np.array(mine[0]["steps"]),
            np.mean([row["nll"] for row in mine], axis=0),
            {key: float(np.mean([row["routing"][key] for row in mine]))
             for key in mine[0]["routing"]},
            np.array(translated) if translated else None,
            timed.get(run["name"]),
        ))  # fmt: skip
    return made


def made(asked: Asked) -> str:
    """Returns the command of the first run, and the settings that all runs have."""
    first = asked.ablation["run"][0]["name"]
    settings = ", ".join(f"`{one}`" for one in SETTINGS)
    return (
        f"`{asked.command.format(f'{first}_0')}` makes the first seed of the first setting; the "
        f"others are NAME_SEED, with the names and settings of experiment.toml. All have `{GIN}`, "
        f"where experiment.toml has no other, with {settings}."
    )


def differences(runs: Sequence[Run], languages: slice = slice(None)) -> list[tuple[float, float]]:
    """Returns of each run its dev nll less the first run's, and half the 95% interval.

    A seed is paired with the first run's of the same number: they have the same batches. How much
    such differences scatter between seeds is pooled over all runs, as one run has few (Student's t
    with the degrees of freedom of all).
    """
    found = [_paired(run, runs[0], languages) for run in runs]
    freedom = sum(len(each) - 1 for each in found[1:])
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in found[1:])
    error = float(stats.t.ppf(0.975, freedom)) * (squares / freedom) ** 0.5 if freedom else np.nan
    return [(float(each.mean()), error / len(each) ** 0.5) for each in found]


def _paired(run: Run, first: Run, languages: slice = slice(None)) -> np.ndarray:
    """Returns [seed] the run's dev nll less the first run's, of the seeds that both have."""
    both = [seed for seed in run.seeds if seed in first.seeds]
    mine, others = (one.nll[[one.seeds.index(seed) for seed in both], languages].mean(1)
                    for one in (run, first))  # fmt: skip
    return mine - others


def here(runs: Sequence[Run], asked: Asked) -> str:
    """Returns the differences of the runs that experiment.toml names (default: all)."""
    names = asked.ablation.get("named") or [run.name for run in runs[1:]]
    both = zip(runs, differences(runs), strict=True)
    said = [f"{run.label} {_plus_minus(*found)}" for run, found in both if run.name in names]
    return f"Dev nll less that of {runs[0].label}: {'; '.join(said)}."


def _plus_minus(mean: float, half: float) -> str:
    return signed(mean, 3) + ("" if np.isnan(half) else f" ± {half:.3f}")


def sections(runs: Sequence[Run], asked: Asked) -> list[str]:
    """Returns the parts of the page: what was expected, the picture and the table."""
    third = max(1, runs[0].nll.shape[1] // 3)
    parts = {"largest": slice(0, third), "smallest": slice(-third, None)}
    by_part = {name: differences(runs, part) for name, part in parts.items()}
    losses = asked.ablation.get("losses", [])
    reached = [[steps_to(run.steps, run.curve, loss) for loss in losses] for run in runs]
    routed = {name: of for name, of in ROUTING.items() if any(of[0] in run.routing for run in runs)}
    routed = routed if asked.ablation.get("routing") else {}
    translated = any(run.bleu is not None for run in runs)
    timed = any(run.seconds is not None for run in runs)
    head = ["setting", "seeds", "dev nll, first seed", "less the first"]
    head += [f"the {third} {name}" for name in parts]
    head += [f"steps to {loss:.2f}" for loss in losses] + [*routed]
    head += ["BLEU"] * translated + ["CPU s a step"] * timed
    lines = []
    for at, (run, (mean, half)) in enumerate(zip(runs, differences(runs), strict=True)):
        cells = [run.label, str(len(run.nll)), f"{run.nll[0].mean():.3f}"]
        cells.append(_plus_minus(mean, half) if at else "")
        cells += [_plus_minus(*found[at]) if at else "" for found in by_part.values()]
        for steps, of_first in zip(reached[at], reached[0], strict=True):
            times = f" ({of_first / steps:.2f})" if at and steps and of_first else ""
            cells.append(f"{steps:,.0f}{times}" if steps else "")
        cells += [f"{times * run.routing[key]:.1f}" if key in run.routing else ""
                  for key, times in routed.values()]  # fmt: skip
        cells += ["" if run.bleu is None else f"{run.bleu.mean():.1f}"] * translated
        cells += ["" if run.seconds is None else f"{run.seconds:.3f}"] * timed
        lines.append(cells)
    about = (
        f"Dev nll after {asked.ablation['steps']:,} steps, in nats a token, mean over "
        f"{runs[0].nll.shape[1]} languages. ± is half the 95% interval of a difference between "
        "seeds that are paired by their batches; its width is pooled over all runs, so that it "
        "stands where there is one seed too."
    )
    about += " Steps are of the seeds' mean; in brackets how many times fewer." * bool(losses)
    drawn = "A dot is the mean of a setting's seeds, a line its 95% interval, a short mark a seed."
    drawn = [] if asked.ablation.get("picture") == "curves" else [drawn]
    return [asked.ablation["before"], f"![{asked.title}](ablation.svg)", *drawn, "## Each setting",
            f"{about}\n\n{table(head, lines)}"]  # fmt: skip


def draw(runs: Sequence[Run], asked: Asked, folder: Path) -> list[Path]:
    """Draws ablation.svg and .png: differences by setting, or curves; and a plane, if asked."""
    kind = asked.ablation.get("picture", "dots")
    if kind == "curves":
        figure = _curves(runs)
    else:
        figure = blank(
            8.0 if kind == "dots" else 11.0, 1.4 + 0.34 * len(runs), layout="constrained"
        )
        panels = figure.subplots(1, 1 if kind == "dots" else 2, squeeze=False)[0]
        _dots(panels[0], runs, numbered=kind != "dots")
        if kind != "dots":
            _plane(panels[1], runs, kind)
    paths = [folder / "ablation.svg", folder / "ablation.png"]
    save(figure, paths)
    return paths


def _dots(panel: Axes, runs: Sequence[Run], numbered: bool) -> None:
    """Draws a line a setting: the mean with its interval, and a mark for each seed."""
    style(panel)
    panel.grid(axis="x", color=LIGHT.faint, linewidth=0.7)
    panel.axvline(0, color=LIGHT.ink, linewidth=0.8)
    for at, (run, (mean, half)) in enumerate(zip(runs, differences(runs), strict=True)):
        each = _paired(run, runs[0])
        if at:
            panel.plot([mean - half, mean + half], [at, at], color=LIGHT.series[0], linewidth=1.6)
        panel.plot(mean, at, "o", color=LIGHT.series[0], markersize=6)
        panel.plot(each, [at] * len(each), "|", color=LIGHT.ink, markersize=8)
    labels = [f"{run.label}  ({at})" if numbered else run.label for at, run in enumerate(runs, 1)]
    panel.set_yticks(range(len(runs)), labels, fontsize=0.9 * SIZE)
    panel.invert_yaxis()
    panel.set_xlabel(f"dev nll less that of: {runs[0].label}", fontsize=SIZE, color=LIGHT.ink)


def _plane(panel: Axes, runs: Sequence[Run], kind: str) -> None:
    """Draws the settings over two values: losses of two "levels", or "seconds" and the loss.

    A loss is the first run's, mean of its seeds, and the mean difference from it of paired seeds.
    """
    style(panel)
    third = max(1, runs[0].nll.shape[1] // 3)

    def nll(run: Run, part: slice = slice(None)) -> float:
        return float(runs[0].nll[:, part].mean() + _paired(run, runs[0], part).mean())

    points: dict[int, tuple[float, float]] = {}
    for at, run in enumerate(runs, 1):
        if kind == "levels":
            points[at] = nll(run, slice(0, third)), nll(run, slice(-third, None))
        elif run.seconds is not None:
            points[at] = run.seconds, nll(run)
    places = np.array([*points.values()], dtype=float)
    for (at, point), apart in zip(points.items(), _away(places), strict=True):
        panel.plot(*point, "o", color=LIGHT.series[0], markersize=6)
        panel.annotate(f"({at})", point, 9 * apart, textcoords="offset points", ha="center",
                       va="center", fontsize=0.8 * SIZE, color=LIGHT.ink)  # fmt: skip
    names = ((f"dev nll of the {third} largest languages", f"of the {third} smallest")
             if kind == "levels" else ("CPU seconds a step", "dev nll"))  # fmt: skip
    panel.set_xlabel(names[0], fontsize=SIZE, color=LIGHT.ink)
    panel.set_ylabel(names[1], fontsize=SIZE, color=LIGHT.ink)
    panel.margins(0.1)


def _away(places: np.ndarray) -> np.ndarray:
    """Returns [point, 2] the corner of each point that is farthest from its nearest neighbour."""
    scaled = (places - places.min(0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    between = scaled[None] - scaled[:, None]
    far = np.linalg.norm(between, axis=-1) + 9 * np.eye(len(places))
    return np.where(between[np.arange(len(places)), far.argmin(axis=1)] > 0, -1.0, 1.0)


def _curves(runs: Sequence[Run]) -> Figure:
    """Draws dev losses over steps, and over CPU minutes where steps were timed."""
    timed = any(run.seconds is not None for run in runs)
    figure = blank(9.0 if timed else 5.0, 4.0, layout="constrained")
    panels = figure.subplots(1, 1 + timed, sharey=True, squeeze=False)[0]
    colours = (*LIGHT.series, LIGHT.ink)
    for run, colour in zip(runs, colours, strict=False):
        for panel, step in zip(panels, (1.0, (run.seconds or np.nan) / 60), strict=False):
            panel.plot(run.steps * step, run.curve, "o-", color=colour, markersize=3)
    for panel, name in zip(panels, ("steps", "CPU minutes in steps"), strict=False):
        style(panel)
        panel.set_xlabel(name, fontsize=SIZE, color=LIGHT.ink)
    panels[0].set_ylabel("dev nll", fontsize=SIZE, color=LIGHT.ink)
    handles = [Line2D([], [], color=colour, label=run.label)
               for run, colour in zip(runs, colours, strict=False)]  # fmt: skip
    legend(figure, handles, SIZE)
    return figure
