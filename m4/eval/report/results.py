"""The report of one run or several: scores, differences, rates, the ΔBLEU plot, a page with all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from m4.data.cleaning.language_id import Py3langid, installed
from m4.eval.metrics import Metric
from m4.eval.report import atlas, curves, remedies
from m4.eval.report.figures import inline, save
from m4.eval.report.page import Background, page
from m4.eval.report.plot import plot
from m4.eval.scoring.by_step import read_rows
from m4.eval.scoring.delta import BILINGUAL, METRIC_NAMES, Average, Delta, averages, deltas, plain
from m4.eval.scoring.forgetting import summary
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from m4.eval.scoring.rates import rates, read_rates
from m4.eval.scoring.score import Subsets, System, measure, score_rows
from m4.eval.scoring.winners import ALL, Winner, winners
from m4.settings import Count
from m4.storage.checkpoints import SCORES_BY_STEP
from m4.storage.files import write_jsonl, write_text
from m4.storage.steps import complete_steps


class Results(NamedTuple):
    """The files of a report, and its numbers. Without a baseline drawn and deltas are None."""

    html: Path
    scores: Path
    drawn: list[Path] | None
    deltas: Path | None
    rows: list[Delta]  # differences, for the terminal's table (`delta.tables`)
    averages: list[Average]
    rates: Path
    rate_rows: list[dict[str, Any]]
    best: list[Winner]
    background: Background


def draw(
    rows: Sequence[Delta], folder: Path, levels: ResourceLevels = DEFAULT_LEVELS
) -> list[Path]:
    """Draws differences as delta_<metric>.png, .pdf and .svg; the same rows give the same bytes.

    No run is needed: `delta.from_plain` reads the rows of a deltas.jsonl.

    Args:
        rows: Differences of one metric from one baseline (`delta.deltas`).
    """
    stem = Path(folder) / f"delta_{rows[0].metric}"
    pictures = [stem.with_suffix(f".{kind}") for kind in ("png", "pdf", "svg")]
    plot(rows, pictures, levels)
    return pictures


def write_results(
    folder: Path,
    systems: Sequence[System],
    metrics: Sequence[Metric],
    train_pairs: Mapping[str, int],
    subsets: Subsets | None = None,
    background: Background | None = None,
    baseline: str | None = BILINGUAL,
    split: str = "test",
    levels: ResourceLevels = DEFAULT_LEVELS,
    samples: Count = 3,
    directions: Collection[str] | None = None,
) -> Results:
    """Scores all systems from their files of hypotheses, and writes the report's files.

    No run folder is needed: a `System` is a name and a folder of hypotheses, plain or gzipped;
    `score.train_pairs_of` takes the training sizes from rows of a scores.jsonl.

    Args:
        metrics: Metrics of the scores. The first one is that of the tables and the plot.
        baseline: System to compare with; None makes no differences and no plot.
        directions: Directions that are scored. Defaults to all.

    Raises:
        InputError: Hypotheses are missing or damaged, or none are of the baseline.
    """
    folder = Path(folder)
    measured = measure(systems, metrics, split, directions=directions)
    names = dict.fromkeys(name for *_, name in measured.statistics)
    metric = next(iter(names))
    scores = score_rows(measured, train_pairs, subsets)
    differences = [deltas(measured, train_pairs, name, baseline) for name in names if baseline]
    rows = differences[0] if differences else []
    means = averages(rows, levels)
    files = ("report.html", "scores.jsonl", "deltas.jsonl", "rates.jsonl")
    html, scored, different, counted = (folder / name for name in files)
    write_jsonl(scored, scores)
    rate_rows = rates(measured, Py3langid() if installed() else None, read_rates(counted))
    write_jsonl(counted, rate_rows)
    drawn = None
    if rows:
        write_jsonl(different, plain(chain(*differences)))
        drawn = draw(rows, folder, levels)
    background = background or Background()
    changed = background.forgotten
    kept = {row.direction for rows in changed.values() for row in rows}
    best = winners(measured, metric, train_pairs, background.costs, levels, kept) if (
        background.costs) else []  # fmt: skip
    for name, facts in (
        ("winners", map(asdict, best)),
        ("forgotten", ({"run": run, **row} for run in changed for row in plain(changed[run]))),
    ):
        if listed := list(facts):
            write_jsonl(folder / f"{name}.jsonl", listed)
    summaries = {run: one for run in changed if (one := summary(changed[run], levels))}
    trade = None
    if summaries and best and best[-1].language == ALL:
        shown = METRIC_NAMES.get(metric, metric)
        trade = remedies.figure(best[-1], summaries, shown)
        save(trade, [folder / f"forgotten.{kind}" for kind in ("png", "svg")])
    text = page(
        measured, metric, baseline, rows, means, scores, train_pairs, background, subsets or {},
        levels, samples, rate_rows, _experts(folder, split), _by_step(folder), best,
        inline(trade, "What each run keeps and what it costs") if trade else None,
    )  # fmt: skip
    write_text(html, text)
    found = different if rows else None
    return Results(html, scored, drawn, found, rows, means, counted, rate_rows, best, background)


def _by_step(folder: Path) -> list[dict[str, Any]]:
    """Returns the curves of `m4 eval --watch` for the page, one for each split that it scored.

    The best step is marked while its checkpoint is there.
    """
    kept = complete_steps(folder / "checkpoints")
    rows = read_rows(folder / SCORES_BY_STEP)
    rows = [{**row, "best": row["best"] and row["step"] in kept} for row in rows]
    found = []
    for split in dict.fromkeys(row["split"] for row in rows):
        mine = [row for row in rows if row["split"] == split]
        label = f"Scores of each checkpoint on {split} by resource level"
        best = next((row for row in mine if row["best"]), None)
        found.append({"split": split, "figure": inline(curves.by_step(mine), label), "best": best})
    return found


def _experts(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the atlas of training and that of the test sets, where there are counts."""
    found = []
    for name, title in (("train", "In training"), (split, f"On the {split} sets")):
        path = atlas.path_of(folder, name)
        if path.is_file():
            one = atlas.read(path)
            label = f"Shares of each expert in every language's choices, {title.lower()}"
            drawn = inline(atlas.figure(one), label)
            found.append({"title": title, "figure": drawn, "alarms": atlas.alarms(one)})
    return found
