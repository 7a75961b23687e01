"""Curves of dev losses: what a loss costs in tokens, FLOPs and hours, and which lead is real.

`keep` thins the rows of `scripts.seeds`; `sections` and `draw` read nothing else:

  curves/<run>.jsonl   first line: run, width, experts (0: dense), every (n-th feed-forward layer is
                       routed), parameters, flops (model FLOPs of a step), seeds, directions; then
                       rows of an evaluation: step, nll [seed], tokens (of a step: source and
                       target), and at some steps by_direction [seed][direction]
  seconds.json         run -> CPU seconds of a step on one core (benchmarks/frontier_steps.py)
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from scipy import stats

from m4.data.inspection.preview import short
from m4.eval.report.figures import LIGHT, SIZE, blank, legend, save, style
from m4.settings import InputError
from m4.storage.files import read_json, read_jsonl, write_jsonl
from scripts.results.tables import signed, table

Values = Sequence[float] | np.ndarray

HALF = 1.96  # half a 95% interval of many values' mean, in standard errors


@dataclasses.dataclass(frozen=True)
class Curve:
    """A config's dev losses by step.

    Attributes:
        experts: Experts of a routed layer; 0 for a dense model.
        every: Every n-th feed-forward layer is routed.
        flops: Model FLOPs of a training step.
        steps: Steps of the evaluations, [evaluation].
        nll: Mean over all dev tokens, in nats: [seed, evaluation].
        tokens: Source and target tokens seen by then, [evaluation].
        by_direction: Step -> nll [seed, direction], of some evaluations.
        seconds: CPU seconds of a step on one core, if they were measured.
    """

    run: str
    width: int
    experts: int
    every: int
    parameters: int
    flops: float
    seeds: list[int]
    steps: np.ndarray
    nll: np.ndarray
    tokens: np.ndarray
    by_direction: dict[int, np.ndarray]
    seconds: float | None = None

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds of nll, [evaluation]."""
        return self.nll.mean(0)

    @property
    def family(self) -> str:
        """Dense, or the number of experts: envelopes are over its widths."""
        return f"{self.experts} experts" if self.experts else "dense"

    @property
    def kind(self) -> str:
        """The family with the layers that are routed."""
        if not self.experts:
            return self.family
        return f"{self.family}, every {'layer' if self.every == 1 else 'other layer'}"


# What a loss may cost: name -> cost of a step of a curve, None where it is not known.
COSTS: dict[str, Callable[[Curve], float | None]] = {
    "steps": lambda curve: 1.0,
    "FLOPs": lambda curve: curve.flops,
    "core-hours": lambda curve: None if curve.seconds is None else curve.seconds / 3600,
}


def keep(folder: Path, asked: Mapping[str, Any], base: Path) -> list[str]:
    """Keeps the curves of runs that came to the step of the comparison; returns a line on each."""
    from m4 import config
    from m4.build import build
    from m4.plan.flops import forward_flops, model_flops

    found, lines = {}, []
    for run in tomllib.loads((folder / "runs.toml").read_text("utf-8"))["run"]:
        path = base / asked["folder"] / f"{run['name']}.jsonl"
        head, *rows = read_jsonl(path) if path.is_file() else [{}]
        last = rows[-1]["step"] if rows else 0
        if last >= asked["step"]:
            experiment = config.load(run["gin"], run.get("bindings", [])).experiment()
            model, lengths = build(experiment, None).model, experiment.data.corpus.lengths
            one = forward_flops(
                model, experiment.training.batch_size, lengths["inputs"], lengths["targets"]
            )
            experts = model.encoder_experts
            about = {"width": model.width, "experts": experts.num_experts if experts else 0,
                     "every": model.moe_every, "flops": model_flops(one)}  # fmt: skip
            found[run["name"]] = (head | about, rows)
        if rows:
            lines.append(f"{run['name']}: step {last:,}" + " (left out)" * (last < asked["step"]))
    apart = {1000, asked["step"], *(rows[-1]["step"] for _, rows in found.values())}
    for name, (head, rows) in found.items():
        thinned = [
            {"step": row["step"], "nll": np.round(row["nll"], 5).tolist(),
             "tokens": round(float(np.mean(np.add(*(row["train"][f"{side}_tokens"]
                                                    for side in ("source", "target"))))))}
            | ({"by_direction": row["by_direction"]} if row["step"] in apart else {})
            for row in rows
        ]  # fmt: skip
        write_jsonl(folder / "curves" / f"{name}.jsonl", [head, *thinned])
    return lines


def read(folder: Path) -> list[Curve]:
    """Returns the kept curves, dense models first at each width.

    Raises:
        InputError: A width has no dense model to compare with.
    """
    seconds = read_json(folder / "seconds.json") if (folder / "seconds.json").is_file() else {}
    found = []
    for path in sorted((folder / "curves").glob("*.jsonl")):
        head, *rows = read_jsonl(path)
        steps = np.array([row["step"] for row in rows])
        each = np.array([row["tokens"] for row in rows])
        about = {key: head[key] for key in
                 ("run", "width", "experts", "every", "parameters", "flops", "seeds")}  # fmt: skip
        by = {row["step"]: np.array(row["by_direction"]) for row in rows if "by_direction" in row}
        found.append(
            Curve(
                **about,
                steps=steps,
                nll=np.array([row["nll"] for row in rows]).T,
                tokens=np.cumsum(np.diff(steps, prepend=0) * each),
                by_direction=by,
                seconds=seconds.get(head["run"]),
            )
        )
    found.sort(key=lambda curve: (curve.width, curve.experts, -curve.every))
    for curve in found:
        if dense_of(curve, found) is None:
            raise InputError(f"{folder}/curves: no dense model of width {curve.width}")
    return found


def dense_of(curve: Curve, curves: Iterable[Curve]) -> Curve | None:
    """Returns the dense model of the curve's width."""
    alike = (one for one in curves if not one.experts and one.width == curve.width)
    return next(alike, None)


def steps_to(steps: Values, nll: Values, loss: float) -> float | None:
    """Returns the step at which nll first comes to `loss`, on a line between two evaluations."""
    for i in range(1, len(steps)):
        if nll[i] <= loss < nll[i - 1]:
            share = (nll[i - 1] - loss) / (nll[i - 1] - nll[i])
            return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))
    return None


@dataclasses.dataclass(frozen=True)
class Best:
    """The cheapest config of a family to a loss.

    Attributes:
        cheaper: Cost of the cheapest dense model over this one's; None if none comes there.
    """

    run: str
    cost: float
    cheaper: float | None


def best(curves: Iterable[Curve], loss: float, cost: str) -> dict[str, Best]:
    """Returns the cheapest config of each family that comes to a loss, whatever its width."""
    found: dict[str, tuple[float, str]] = {}
    for curve in sorted(curves, key=lambda curve: curve.experts):
        steps, each = steps_to(curve.steps, curve.mean, loss), COSTS[cost](curve)
        if steps is not None and each is not None:
            one = (steps * each, curve.run)
            found[curve.family] = min(one, found.get(curve.family, one))
    dense = found.get("dense")
    return {
        family: Best(run, spent, dense[0] / spent if dense else None)
        for family, (spent, run) in found.items()
    }


def differences(curve: Curve, dense: Curve, step: int) -> list[tuple[float, float]]:
    """Returns the mean over directions of nll less the dense model's, and its standard error.

    One pair for each seed: the same seed has the same batches in both.
    """
    lead = curve.by_direction[step] - dense.by_direction[step]
    errors = lead.std(1, ddof=1) / np.sqrt(lead.shape[1])
    return list(zip(lead.mean(1).tolist(), errors.tolist(), strict=True))


def last_common(curve: Curve, dense: Curve) -> int:
    """Returns the last step at which both have losses by direction."""
    return max(curve.by_direction.keys() & dense.by_direction.keys())


def here(curves: Sequence[Curve], asked: Mapping[str, Any]) -> str:
    """Returns the lead of each kind at equal steps, and how much cheaper the lowest loss is."""
    step, loss = asked["step"], asked["losses"][-1]
    leads = [
        f"{kind} {signed(mean, 3)} ± {half:.3f}"
        for kind, (_, mean, half) in by_kind(curves, step).items()
    ]
    text = (
        f"Dev nll less dense of the same width after {step:,} steps, over widths and seeds: "
        f"{'; '.join(leads)}."
    )
    found = {cost: best(curves, loss, cost) for cost in COSTS}
    cheaper = [
        f"{cost} "
        + ", ".join(
            f"{one.cheaper:.2f} with {family}" for family, one in each.items() if family != "dense"
        )
        for cost, each in found.items()
        if len(each) > 1 and "dense" in each
    ]
    return text + (
        f" To nll {loss:.2f}, times fewer than the best dense model of any width: "
        f"{'; '.join(cheaper)}."
    ) * bool(cheaper)


def by_kind(curves: Sequence[Curve], step: int) -> dict[str, tuple[int, float, float]]:
    """Returns kind -> number of pairs (width, seed), mean lead over dense, half its interval.

    The pairs are what is random here: the interval has the noise of seeds, which the one over
    languages has not.
    """
    leads: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: (curve.experts, -curve.every)):
        dense = dense_of(curve, curves)
        if curve.experts and dense is not None:
            found = [mean for mean, _ in differences(curve, dense, step)]
            leads.setdefault(curve.kind, []).extend(found)
    return {
        kind: (
            len(each),
            float(np.mean(each)),
            float(stats.t.ppf(0.975, len(each) - 1) * stats.sem(each)),
        )
        for kind, each in leads.items()
        if len(each) > 1
    }


def sections(curves: Sequence[Curve], asked: Mapping[str, Any]) -> list[str]:
    """Returns the paragraphs of the page."""
    every, step = asked["losses"], asked["step"]
    return [
        "![Dev loss over tokens, FLOPs and core-hours: single configs and the best of each family]"
        "(frontier.svg)",
        "Pale: a config, mean over seeds (dashed: every other layer is routed). Strong: the best "
        "of all widths.",
        "## What a loss costs",
        "Steps, which are tokens, to a dev nll; in brackets how many times fewer than the dense "
        "model of the same width. Empty: not reached.\n\n" + _steps(curves, every),
        "The same over widths: the cheapest config of each family for each loss, and in brackets "
        "how many times cheaper than the cheapest dense model. FLOPs are model FLOPs of training "
        "steps; core-hours are CPU seconds of a step on one core times the steps.\n\n"
        + _families(curves, every),
        "## At equal steps",
        f"Dev nll less that of the dense model of the same width, seed and batches: mean over "
        f"directions ± half the 95% interval, z. Last row of a width: the dense model's second "
        f"seed less its first.\n\n{_differences(curves, step)}",
        "Over widths and seeds together, where a seed's luck counts as noise (Student's t):\n\n"
        + _kinds(curves, step),
    ]


def _steps(curves: Sequence[Curve], losses: Sequence[float]) -> str:
    lines = []
    for curve in curves:
        dense = dense_of(curve, curves)
        assert dense is not None
        cells = [curve.run, short(curve.parameters), f"{curve.flops / 1e9:.1f}",
                 "" if curve.seconds is None else f"{curve.seconds:.3f}",
                 f"{curve.steps[-1]:,}"]  # fmt: skip
        for loss in losses:
            found = steps_to(curve.steps, curve.mean, loss)
            against = steps_to(dense.steps, dense.mean, loss)
            cell = "" if found is None else f"{found:,.0f}"
            if found is not None and curve.experts:
                cell += f" ({against / found:.2f})" if against else " (dense: not reached)"
            cells.append(cell)
        lines.append(cells)
    head = ["config", "parameters", "GFLOPs a step", "s a step", "steps"]
    return table([*head, *(f"{loss:.2f}" for loss in losses)], lines)


def _families(curves: Sequence[Curve], losses: Sequence[float]) -> str:
    shown = {"steps": lambda n: f"{n:,.0f}", "FLOPs": lambda n: f"{n / 1e12:.0f} T",
             "core-hours": lambda n: f"{n:.2f}"}  # fmt: skip
    known = [cost for cost in COSTS if any(COSTS[cost](curve) for curve in curves)]
    lines = []
    for loss in losses:
        found = {cost: best(curves, loss, cost) for cost in known}
        for family in found["steps"]:
            cells = [f"{loss:.2f}", family]
            for cost in known:
                one = found[cost][family]
                many = "" if family == "dense" or not one.cheaper else f" ({one.cheaper:.2f})"
                cells.append(f"{shown[cost](one.cost)}{many} {one.run}")
            lines.append(cells)
    return table(["nll", "family", *known], lines)


def _cell(lead: float, error: float) -> str:
    return f"{signed(lead, 3)} ± {HALF * error:.3f}, {lead / error:.1f}".replace("-", "−")


def _differences(curves: Sequence[Curve], step: int) -> str:
    lines = []
    for width in dict.fromkeys(curve.width for curve in curves):
        mine = [curve for curve in curves if curve.width == width]
        dense = dense_of(mine[0], curves)
        assert dense is not None
        for curve in mine:
            if curve.experts:
                last = last_common(curve, dense)
                cells = [_cell(*pair) for at in (step, last)
                         for pair in differences(curve, dense, at)]  # fmt: skip
                half = len(cells) // 2
                lines.append([curve.run, *cells[:half], f"{last:,}", *cells[half:]])
        last = max(dense.by_direction)
        noise = []
        for at in (step, last):
            between = dense.by_direction[at][1:] - dense.by_direction[at][:1]
            for one in between[:1]:
                noise.append(_cell(one.mean(), one.std(ddof=1) / np.sqrt(len(one))))
        if noise:
            gap = [""] * (len(dense.seeds) - 1)
            lines.append([f"{dense.run}, seeds", noise[0], *gap, f"{last:,}", noise[1], *gap])
    seeds = [f"seed {seed}" for seed in curves[0].seeds]
    head = ["config", *(f"{step:,} steps, {seed}" for seed in seeds), "last step", *seeds]
    return table(head, lines)


def _kinds(curves: Sequence[Curve], step: int) -> str:
    lines = [
        [kind, str(pairs), f"{signed(mean, 3)} ± {half:.3f}"]
        for kind, (pairs, mean, half) in by_kind(curves, step).items()
    ]
    return table(["", "pairs", f"nll against dense, {step:,} steps"], lines)


def draw(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draws frontier.svg and .png: nll over tokens, FLOPs and, if known, core-hours."""
    axes: dict[str, Callable[[Curve], np.ndarray]] = {
        "tokens": lambda curve: curve.tokens,
        "model FLOPs": lambda curve: curve.steps * curve.flops,
    }
    if all(curve.seconds is not None for curve in curves):
        axes["hours of one core"] = lambda curve: curve.steps * (curve.seconds or 0.0) / 3600
    figure = blank(3.7 * len(axes), 4.4, layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    families = dict.fromkeys(
        curve.family for curve in sorted(curves, key=lambda curve: curve.experts)
    )
    colours = dict(zip(families, LIGHT.series, strict=False))
    for panel, (label, x_of) in zip(panels, axes.items(), strict=True):
        style(panel)
        for curve in curves:
            dashes = "--" if curve.experts and curve.every > 1 else "-"
            panel.plot(x_of(curve), curve.mean, color=colours[curve.family], alpha=0.35,
                       linewidth=1, linestyle=dashes)  # fmt: skip
        for family, colour in colours.items():
            mine = [(x_of(curve), curve.mean) for curve in curves if curve.family == family]
            panel.plot(*envelope(mine), color=colour, linewidth=2.4)
        for curve in curves:
            if not curve.experts:
                end = (x_of(curve)[-1], curve.mean[-1])
                panel.annotate(f"width {curve.width}", end, (4, 0), va="center", color=LIGHT.ink,
                               textcoords="offset points", fontsize=0.8 * SIZE)  # fmt: skip
        _axis(panel, label, [x_of(curve) for curve in curves])
    panels[0].set_ylabel("dev nll, nats", fontsize=SIZE, color=LIGHT.ink)
    low = min(curve.mean.min() for curve in curves)
    panels[0].set_ylim(low - 0.03, low + 0.95)
    handles = [Line2D([], [], color=colour, linewidth=2.4, label=family)
               for family, colour in colours.items()]  # fmt: skip
    legend(figure, handles, SIZE)
    paths = [folder / "frontier.svg", folder / "frontier.png"]
    save(figure, paths)
    return paths


def _axis(panel: Axes, label: str, xs: Sequence[np.ndarray]) -> None:
    """Makes the axis logarithmic, over what the first evaluations leave of it."""
    low, high = min(x[1] for x in xs), max(x[-1] for x in xs)
    panel.set_xscale("log")
    panel.set_xlim(low, high * 1.6)
    ends = np.log10([low, high])
    ticks = [mantissa * 10.0**n for n in range(int(ends[0]) - 1, int(ends[1]) + 2)
             for mantissa in (1, 2, 5) if low <= mantissa * 10.0**n <= high]  # fmt: skip
    panel.set_xticks(ticks)
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
    panel.set_xlabel(label, fontsize=SIZE, color=LIGHT.ink)


def _tick(x: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if x >= size:
            return f"{x / size:g} {letter}"
    return f"{x:g}"


def envelope(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points at which the lowest of falling lines is lower than any before."""
    xs = np.unique(np.concatenate([x for x, _ in lines]))
    lows = np.min([np.interp(xs, x, y, left=np.inf, right=np.inf) for x, y in lines], axis=0)
    ahead = lows == np.minimum.accumulate(lows)  # not where the best line has ended
    return xs[ahead], lows[ahead]
