"""The fastest recipes to one dev loss: records, the pilots that led to them, and a picture.

`keep` gathers runs of `m4 train`; `sections` and `draw` read nothing else:

  runs.toml     the recipes, the reference first: name, gin, bindings, corpus (a folder in that of
                the corpora), seeds
  runs.jsonl    a row of each run: run, seed, steps and nll (of dev evaluations, in nats a reference
                piece), by_language (the mean over languages at the end)
  seconds.json  recipe -> CPU seconds of a step on one core (benchmarks/frontier_steps.py)

The reference's own curve is that of another experiment.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from m4.eval.report.figures import LIGHT, SIZE, blank, save, style
from m4.settings import InputError
from m4.storage.files import read_json, read_jsonl, write_jsonl
from scripts.results.curves import steps_to
from scripts.results.kept import Asked
from scripts.results.tables import signed, table

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Speedrun:
    """The kept files of a speedrun.

    Attributes:
        steps, nll: The reference's curve, the mean over its seeds.
        seconds: Recipe -> CPU seconds of a step, the reference's too.
        rows: Those of runs.jsonl.
    """

    steps: np.ndarray
    nll: np.ndarray
    seconds: dict[str, float]
    rows: list[Row]

    def of(self, run: str) -> list[Row]:
        return [row for row in self.rows if row["run"] == run]

    def to(self, loss: float, record: str | None = None) -> tuple[float, float]:
        """Returns steps and seconds after which the mean over seeds comes to a loss.

        Args:
            record: Defaults to the reference.

        Raises:
            InputError: It does not come there.
        """
        steps, nll = self.steps, self.nll
        if record is not None:
            rows = self.of(record)
            steps = np.array(sorted(set.intersection(*(set(row["steps"]) for row in rows))))
            curves = [dict(zip(row["steps"], row["nll"], strict=True)) for row in rows]
            nll = np.array([np.mean([curve[step] for curve in curves]) for step in steps])
        if (found := steps_to(steps, nll, loss)) is None:
            raise InputError(f"{record or 'the reference'} does not come to {loss}")
        return found, found * self.seconds[record or "reference"]


def keep(folder: Path, asked: Asked, base: Path) -> list[str]:
    """Keeps the runs of all records and pilots that are there; returns a line on the others."""
    given, rows, missing = asked.speedrun, [], []
    names = [(one["name"], seed) for one in given["record"] for seed in range(one["seeds"])]
    for name, seed in [*names, *((one["name"], None) for one in given["pilot"])]:
        at = base / given["folder"] / (name if seed is None else f"{name}_{seed}")
        if (at / "metrics.jsonl").is_file():
            rows.append({"run": name, "seed": seed or 0, **_row(at, given["pieces"])})
        else:
            missing.append(at.name)
    write_jsonl(folder / "runs.jsonl", rows)
    return [f"{len(rows)} runs; not trained: {', '.join(missing) or 'none'}"]


def _row(run: Path, pieces: int) -> Row:
    dev = [row for row in read_jsonl(run / "metrics.jsonl") if "dev/nll" in row]
    share = dev_pieces(read_json(run / "vocabulary" / "manifest.json")) / pieces
    names = [key for key in dev[-1] if key.startswith("dev/nll/") and key.endswith("-en")]
    return {
        "steps": [row["step"] for row in dev],
        "nll": [round(share * row["dev/nll"], 5) for row in dev],
        "by_language": round(share * float(np.mean([dev[-1][name] for name in names])), 5),
    }


def dev_pieces(manifest: dict[str, Any]) -> int:
    """Returns the pieces of all dev targets of a corpus into English, their ends included."""
    counts = [of["dev"] for of in manifest["language_pairs"].values()]
    return round(sum(one["pairs"] * (one["mean_pieces"]["first.target"] + 1) for one in counts))


def read(folder: Path, asked: Asked) -> Speedrun | None:
    """Returns what was kept; None before that."""
    if not (folder / "runs.jsonl").is_file():
        return None
    _, *curve = read_jsonl(folder / asked.speedrun["reference"])
    return Speedrun(
        np.array([row["step"] for row in curve]),
        np.array([row["nll"] for row in curve]).mean(1),
        read_json(folder / "seconds.json"),
        read_jsonl(folder / "runs.jsonl"),
    )


def here(found: Speedrun, asked: Asked) -> str:
    """Returns the ratio of each record."""
    loss = asked.speedrun["loss"]
    said = []
    for one in asked.speedrun["record"]:
        rows = found.of(one["name"])
        share = found.to(loss, one["name"])[1] / found.to(loss)[1]
        said.append(f"{one['name']} {share:.2f} ({len(rows)} seeds)")
    return f"Seconds to nll {loss:.2f} over the reference's: {', '.join(said)}."


def sections(found: Speedrun, asked: Asked) -> list[str]:
    """Returns the rules, the table of records, the picture and the pilots."""
    given = asked.speedrun
    loss = given["loss"]
    steps, whole = found.to(loss)
    lines = [["reference", given["date"], f"{steps:,.0f}", f"{found.seconds['reference']:.3f}",
              "1.00", "", "", given["about"]]]  # fmt: skip
    for one in given["record"]:
        rows = found.of(one["name"])
        steps, seconds = found.to(loss, one["name"])
        lines.append([
            one["name"], one["date"], f"{steps:,.0f}", f"{found.seconds[one['name']]:.3f}",
            f"{seconds / whole:.2f}",
            ", ".join(f"{row['nll'][-1]:.3f}" for row in rows) + f" at {rows[0]['steps'][-1]:,}",
            ", ".join(f"{row['by_language']:.3f}" for row in rows), one["about"],
        ])  # fmt: skip
    head = ["record", "date", f"steps to {loss:.2f}", "s a step", "ratio", "nll at the end"]
    head += ["mean over languages"]
    first, tried = found.of(given["pilot"][0]["name"])[0], []
    for one in given["pilot"]:
        for row in found.of(one["name"]):
            each = found.seconds[one.get("timed", one["name"])] / found.seconds[first["run"]]
            share = each * row["steps"][-1] / first["steps"][-1]
            less = signed(row["nll"][-1] - first["nll"][-1], 3)
            tried.append([one["about"], f"{row['steps'][-1]:,}", f"{share:.2f}",
                          f"{row['nll'][-1]:.3f}", less if row is not first else ""])  # fmt: skip
    return [
        "## Rules",
        "\n".join(f"- {rule}" for rule in given["rules"]),
        "## Records",
        table([*head, "what made it faster"], lines),
        "![Dev loss over seconds, as a share of the reference's](speedrun.svg)",
        "## What was tried",
        f"{given['tried']}\n\n"
        + table(["pilot", "steps", "seconds over the first's", "dev nll", "less the first"], tried),
    ]


def draw(found: Speedrun, asked: Asked, folder: Path) -> list[Path]:
    """Draws speedrun.svg and .png: dev nll over seconds, in turns, over the reference's."""
    given, figure = asked.speedrun, blank(6.0, 3.8, layout="constrained")
    panel, loss = figure.subplots(), given["loss"]
    style(panel)
    panel.axhline(loss, color=LIGHT.bar, linewidth=0.8)
    _, whole = found.to(loss)
    panel.plot(found.steps * found.seconds["reference"] / whole, found.nll, color=LIGHT.ink)
    panel.annotate("reference", (0.62, 2.42), color=LIGHT.ink, fontsize=SIZE)
    for one, colour in zip(given["record"], LIGHT.series, strict=False):
        for row in found.of(one["name"]):
            x = np.array(row["steps"]) * found.seconds[one["name"]] / whole
            panel.plot(x, row["nll"], "o-", color=colour, markersize=3)
        middle = len(x) // 2
        panel.annotate(one["name"], (x[middle], row["nll"][middle]), (-6, -6), ha="right",
                       textcoords="offset points", color=colour, fontsize=SIZE)  # fmt: skip
    panel.set(xlim=(0, 1.25), ylim=(loss - 0.1, loss + 0.9))
    panel.set_xlabel("seconds over the reference's", fontsize=SIZE, color=LIGHT.ink)
    panel.set_ylabel("dev nll, nats a reference piece", fontsize=SIZE, color=LIGHT.ink)
    paths = [folder / "speedrun.svg", folder / "speedrun.png"]
    save(figure, paths)
    return paths
