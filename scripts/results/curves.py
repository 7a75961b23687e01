"""Curves of dev losses: what a loss costs in tokens, FLOPs and hours, and which lead is real.

`keep` thins the rows of `scripts.seeds`, or of kept runs; `sections` and `draw` read nothing else:

  curves/<run>.jsonl   first line: run, width, experts (0: dense), every (n-th feed-forward layer is
                       routed), parameters, flops (model FLOPs of a step), seeds, directions; then
                       rows of an evaluation: step, nll [seed], tokens (of a step: source and
                       target), and at some steps by_direction [seed][direction]
  seconds.json         run -> seconds of a step on one core, of benchmarks/frontier_steps.py or
                       the median of the runs
"""

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
from m4.html import in_markdown
from m4.settings import InputError
from m4.storage.files import read_json, read_jsonl, write_json, write_jsonl
from scripts.results.kept import Asked
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


def keep(folder: Path, asked: Asked, base: Path) -> list[str]:
    """Keeps the curves of runs that came to the step of the comparison; returns a line on each."""
    given, step = asked.curves, asked.curves["step"]
    if "folder" in given:
        found = _of_seeds(folder, base / given["folder"])
    else:
        found = _of_runs(folder, asked)
    lines = [f"{head['run']}: step {rows[-1]['step']:,}" for _, head, rows in found]
    found = [one for one in found if one[2][-1]["step"] >= step]
    apart = {1000, step, *(rows[-1]["step"] for *_, rows in found)}
    for made, head, rows in found:
        thinned = [
            {"step": row["step"], "nll": np.round(row["nll"], 5).tolist(), "tokens": row["tokens"]}
            | ({"by_direction": row["by_direction"]} if row["step"] in apart else {})
            for row in rows
        ]
        path = folder / "curves" / f"{head['run']}.jsonl"
        write_jsonl(path, [head | _sizes(*made), *thinned])
    return lines


# What made a run (gin files, bindings), its first line and its rows.
_Made = tuple[tuple[list[str], list[str]], dict[str, Any], list[dict[str, Any]]]


def _of_seeds(folder: Path, written: Path) -> list[_Made]:
    """Returns what `scripts.seeds` wrote of the runs of runs.toml."""
    found = []
    for run in tomllib.loads((folder / "runs.toml").read_text("utf-8"))["run"]:
        path = written / f"{run['name']}.jsonl"
        head, *rows = read_jsonl(path) if path.is_file() else [{}]
        for row in rows:
            sides = [np.mean(row["train"][f"{side}_tokens"]) for side in ("source", "target")]
            row["tokens"] = round(float(sum(sides)))
        if rows:
            found.append(((run["gin"], run.get("bindings", [])), head, rows))
    return found


def _of_runs(folder: Path, asked: Asked) -> list[_Made]:
    """Returns dev losses of kept runs of `m4 train`; writes the seconds of their steps."""
    found, seconds = [], {}
    for name, runs in asked.seeds.items():
        kept = [read_jsonl(folder / "systems" / run / "metrics.jsonl") for run in runs]
        timed = [row for rows in kept for row in rows if "step_seconds" in row]
        seconds[name] = round(float(np.median([row["step_seconds"] for row in timed])), 4)
        tokens = np.mean([row["tokens_per_second"] * row["step_seconds"] for row in timed])
        dev = [{row["step"]: row for row in rows if "dev/nll" in row} for rows in kept]
        head = "dev/nll/"
        first = next(iter(dev[0].values()))
        names = [key.removeprefix(head) for key in first if "-" in key.removeprefix(head)]
        made = [
            {"step": step, "nll": [rows[step]["dev/nll"] for rows in dev], "tokens": round(tokens),
             "by_direction": [[round(rows[step][head + name], 4) for name in names]
                              for rows in dev]}
            for step in sorted(set.intersection(*map(set, dev)))
        ]  # fmt: skip
        gin = [str(folder / "systems" / runs[0] / "config.gin")]
        about = {"run": name, "seeds": [*range(len(runs))], "directions": names}
        found.append(((gin, []), about, made))
    if measured := asked.curves.get("seconds"):
        seconds = {name: read_json(folder.parent / measured)[name] for name in seconds}
    write_json(folder / "seconds.json", seconds, indent=1)
    return found


def _sizes(gin: list[str], bindings: list[str]) -> dict[str, Any]:
    """Returns sizes of a config's model, and the model FLOPs of a training step."""
    import jax

    from m4 import config
    from m4.build import build
    from m4.model.flops import forward_flops, model_flops
    from m4.model.transformer import abstract_variables

    experiment = config.load(gin, bindings).experiment()
    model, lengths = build(experiment, None).model, experiment.data.corpus.lengths
    rows = experiment.training.batch_size
    forward = forward_flops(model, rows, lengths["inputs"], lengths["targets"])
    experts, shapes = model.encoder_experts, jax.tree.leaves(abstract_variables(model)["params"])
    return {"width": model.width, "experts": experts.num_experts if experts else 0,
            "every": model.moe_every, "flops": model_flops(forward),
            "parameters": sum(int(np.prod(leaf.shape)) for leaf in shapes)}  # fmt: skip


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


def differences(curve: Curve, dense: Curve, step: int) -> dict[int, tuple[float, float]]:
    """Returns seed -> mean over directions of nll less the dense model's, and its standard error.

    A seed that both have has the same batches in both.
    """
    both = [seed for seed in curve.seeds if seed in dense.seeds]
    mine, others = (of.by_direction[step][[of.seeds.index(seed) for seed in both]]
                    for of in (curve, dense))  # fmt: skip
    return dict(zip(both, _over_directions(mine - others), strict=True))


def between_seeds(curve: Curve, step: int) -> list[tuple[float, float]]:
    """Returns the same of each other seed of a config less its first."""
    return _over_directions(curve.by_direction[step][1:] - curve.by_direction[step][:1])


def _over_directions(lead_SD: np.ndarray) -> list[tuple[float, float]]:
    errors = lead_SD.std(1, ddof=1) / np.sqrt(lead_SD.shape[1])
    return list(zip(lead_SD.mean(1).tolist(), errors.tolist(), strict=True))


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
    ) * bool(leads)
    found = {cost: best(curves, loss, cost) for cost in COSTS}
    known = {cost: each for cost, each in found.items() if len(each) > 1 and "dense" in each}
    cheaper = [
        f"{family} " + ", ".join(f"{each[family].cheaper:.2f}" for each in known.values())
        for family in found["steps"]
        if family != "dense" and known and all(family in each for each in known.values())
    ]
    many = f"the best dense model of {_widths(curves)} widths" if _widths(curves) > 1 else "dense"
    said = f"To nll {loss:.2f}, times fewer {', '.join(known)} than {many}: "
    return " ".join(filter(None, [text, f"{said}{'; '.join(cheaper)}." * bool(cheaper)]))


def _widths(curves: Sequence[Curve]) -> int:
    return len({curve.width for curve in curves})


def by_kind(curves: Sequence[Curve], step: int) -> dict[str, tuple[int, float, float]]:
    """Returns kind -> number of pairs (width, seed), mean lead over dense, half its interval.

    The pairs are what is random here: the interval has the noise of seeds, which the one over
    languages has not. Two pairs are too few for one.
    """
    leads: dict[str, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: (curve.experts, -curve.every)):
        dense = dense_of(curve, curves)
        if curve.experts and dense is not None:
            found = [mean for mean, _ in differences(curve, dense, step).values()]
            leads.setdefault(curve.kind, []).extend(found)
    return {
        kind: (
            len(each),
            float(np.mean(each)),
            float(stats.t.ppf(0.975, len(each) - 1) * stats.sem(each)),
        )
        for kind, each in leads.items()
        if len(each) > 2
    }


def sections(curves: Sequence[Curve], asked: Mapping[str, Any]) -> list[str]:
    """Returns the paragraphs of the page."""
    losses, step = asked["losses"], asked["step"]
    parts = [
        "## What a loss costs",
        "![Dev loss over tokens, FLOPs and core-hours: single configs and the best of each family]"
        "(frontier.svg)",
        "Pale: a config, mean over seeds (dashed: every other layer is routed). Strong: the best "
        "of all widths, up to the end of the config that leads."
        if _widths(curves) > 1
        else "All configs have one width: the envelope over widths is results/frontier's.",
        "Steps, which are tokens, to a dev nll; in brackets how many times fewer than the dense "
        f"model of the same width. Empty: not reached.\n\n{_steps(curves, losses)}",
        "The cheapest config of each family for each loss, whatever its width, and in brackets "
        "how many times cheaper than the cheapest dense model. FLOPs are model FLOPs of training "
        "steps; core-hours are the median seconds of a step on one core times the steps.\n\n"
        + _families(curves, losses),
        "## Losses at equal steps",
        "Dev nll less that of the dense model of the same width, seed and batches: mean over "
        'directions ± half the 95% interval, and in standard errors; "seeds": the dense model\'s '
        f"second seed less its first.\n\n{_differences(curves, step)}",
    ]
    if kinds := by_kind(curves, step):
        lines = [[kind, str(pairs), f"{signed(mean, 3)} ± {half:.3f}"]
                 for kind, (pairs, mean, half) in kinds.items()]  # fmt: skip
        head = ["", "pairs", f"nll against dense, {step:,} steps"]
        parts.append(
            "Over widths and seeds, where a seed's luck counts as noise (Student's t):\n\n"
            + table(head, lines)
        )
    return parts


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
                if (one := found[cost].get(family)) is None:  # its seconds are not known
                    cells.append("")
                    continue
                many = "" if family == "dense" or not one.cheaper else f" ({one.cheaper:.2f})"
                cells.append(f"{shown[cost](one.cost)}{many} {in_markdown(one.run)}")
            lines.append(cells)
    return table(["nll", "family", *known], lines)


def _cell(lead: float, error: float) -> str:
    return f"{signed(lead, 3)} ± {HALF * error:.3f}, {lead / error:.1f}".replace("-", "−")


def _differences(curves: Sequence[Curve], step: int) -> str:
    """Returns a line a run, also at its last step where a run has gone on after `step`."""
    rows, numbers = [], max((curve.seeds for curve in curves), key=len)
    for curve in curves:
        dense = dense_of(curve, curves)
        assert dense is not None
        last = last_common(curve, dense)
        if curve.experts:
            found = [differences(curve, dense, at) for at in (step, last)]
            cells = [[_cell(*each[seed]) if seed in each else "" for seed in numbers]
                     for each in found]  # fmt: skip
            rows.append((curve.run, last, cells))
        elif len(curve.seeds) > 1:
            cells = [["", *(_cell(*pair) for pair in between_seeds(curve, at))]
                     for at in (step, last)]  # fmt: skip
            rows.append((f"{curve.run}, seeds", last, cells))
    seeds = [f"seed {seed}" for seed in numbers]
    head = ["config", *(f"{step:,} steps, {seed}" for seed in seeds)]
    if all(last == step for _, last, _ in rows):
        return table(head, [[name, *cells[0]] for name, _, cells in rows])
    lines = [[name, *cells[0], f"{last:,}", *cells[1]] for name, last, cells in rows]
    return table([*head, "last step", *seeds], lines)


def draw(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draws frontier.svg and .png: nll over tokens, FLOPs and, if known, core-hours."""
    axes: dict[str, Callable[[Curve], np.ndarray]] = {
        "tokens": lambda curve: curve.tokens,
        "model FLOPs": lambda curve: curve.steps * curve.flops,
    }
    if all(curve.seconds is not None for curve in curves):
        axes["hours of one core"] = lambda curve: curve.steps * (curve.seconds or 0.0) / 3600
    width = 2.4 + 2.5 * len(axes)
    size = SIZE * width / 7.4  # letters grow with the figure, which readers see at one width
    figure = blank(width, 0.6 * width, layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    families = dict.fromkeys(
        curve.family for curve in sorted(curves, key=lambda curve: curve.experts)
    )
    colours = dict(zip(families, LIGHT.series, strict=False))
    for panel, (label, x_of) in zip(panels, axes.items(), strict=True):
        style(panel, size)
        for curve in curves:
            dashes = "--" if curve.experts and curve.every > 1 else "-"
            panel.plot(x_of(curve), curve.mean, color=colours[curve.family], alpha=0.35,
                       linewidth=1, linestyle=dashes)  # fmt: skip
        for family, colour in colours.items():
            mine = [(x_of(curve), curve.mean) for curve in curves if curve.family == family]
            panel.plot(*envelope(mine), color=colour, linewidth=2.4)
        for curve in curves:
            if not curve.experts and panel is panels[0]:
                end = (x_of(curve)[-1], curve.mean[-1])
                panel.annotate(f"width {curve.width}", end, (4, 0), va="center", color=LIGHT.ink,
                               textcoords="offset points", fontsize=0.8 * size)  # fmt: skip
        _axis(panel, label, [x_of(curve) for curve in curves], size)
    panels[0].set_ylabel("dev nll, nats", fontsize=size, color=LIGHT.ink)
    low = min(curve.mean.min() for curve in curves)
    panels[0].set_ylim(low - 0.03, low + 0.95)
    handles = [Line2D([], [], color=colour, linewidth=2.4, label=family)
               for family, colour in colours.items()]  # fmt: skip
    legend(figure, handles, size)
    paths = [folder / "frontier.svg", folder / "frontier.png"]
    save(figure, paths)
    return paths


def _axis(panel: Axes, label: str, xs: Sequence[np.ndarray], size: float) -> None:
    """Makes the axis logarithmic, over what the first evaluations leave of it."""
    low, high = min(x[1] for x in xs), max(x[-1] for x in xs)
    panel.set_xscale("log")
    panel.set_xlim(low, high * (2.6 if label == "tokens" else 1.1))  # tokens: widths' labels
    ends = np.log10([low, high])
    mantissas = (1, 3) if ends[1] - ends[0] > 1 else (1, 2, 5)
    ticks = [mantissa * 10.0**n for n in range(int(ends[0]) - 1, int(ends[1]) + 2)
             for mantissa in mantissas if low <= mantissa * 10.0**n <= high]  # fmt: skip
    panel.set_xticks(ticks)
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
    panel.set_xlabel(label, fontsize=size, color=LIGHT.ink)


def _tick(x: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if x >= size:
            return f"{x / size:g} {letter}"
    return f"{x:g}"


def envelope(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points at which the lowest of falling lines is lower than any before.

    It stops where the line ends that is lowest: worse ones may go on.
    """
    xs = np.unique(np.concatenate([x for x, _ in lines]))
    each = np.array([np.interp(xs, x, y, left=np.inf, right=np.inf) for x, y in lines])
    ends = np.array([x[-1] for x, _ in lines])[each.argmin(axis=0)]
    xs, lows = xs[: (stop := int((xs >= ends).argmax()) + 1)], each.min(axis=0)[:stop]
    ahead = lows == np.minimum.accumulate(lows)
    return xs[ahead], lows[ahead]
