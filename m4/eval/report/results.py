"""The report of one run or several: scores, differences, rates, the ΔBLEU plot, a page with all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from m4.data.cleaning.language_id import Py3langid, installed
from m4.eval.metrics import Metric
from m4.eval.report.figures import save
from m4.eval.report.page import Background, Results, page
from m4.eval.report.plot import figure, trade_off
from m4.eval.scoring.delta import BILINGUAL, METRIC_NAMES, Delta, averages, deltas, plain
from m4.eval.scoring.forgetting import summary
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from m4.eval.scoring.rates import rates, read_rates
from m4.eval.scoring.score import Subsets, System, measure, score_rows
from m4.eval.scoring.winners import ALL, winners
from m4.settings import Count
from m4.storage.files import write_jsonl, write_text


def draw(
    rows: Sequence[Delta], folder: Path, levels: ResourceLevels = DEFAULT_LEVELS
) -> list[Path]:
    """Draws differences of one metric from one baseline as delta_<metric>.png and .svg.

    The same rows give the same bytes. No run is needed: `delta.from_plain` reads a deltas.jsonl.
    """
    stem = Path(folder) / f"delta_{rows[0].metric}"
    pictures = [stem.with_suffix(f".{kind}") for kind in ("png", "svg")]
    save(figure(rows, levels), pictures)
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
        trade = trade_off(best[-1], summaries, METRIC_NAMES.get(metric, metric))
        save(trade, [folder / f"forgotten.{kind}" for kind in ("png", "svg")])
    found = Results(
        html, scored, drawn, different if rows else None, rows, averages(rows, levels), counted,
        rate_rows, best, background,
    )  # fmt: skip
    text = page(
        found, measured, metric, baseline, scores, train_pairs, subsets or {}, levels, samples,
        trade,
    )  # fmt: skip
    write_text(html, text)
    return found
