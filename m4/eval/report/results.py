"""The report of a run: scores, differences, rates, the ΔBLEU plot, and a page with all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.data.cleaning.language_id import for_reports
from m4.eval.metrics import Metric
from m4.eval.report.page import Background, page
from m4.eval.report.theme import DARK
from m4.eval.scoring.by_step import read_rows
from m4.eval.scoring.delta import BILINGUAL, Average, Delta, averages, deltas, plain
from m4.eval.scoring.groups import DEFAULT_LEVELS, ResourceLevels
from m4.eval.scoring.rates import rates, read_rates
from m4.eval.scoring.score import Subsets, System, measure, score_rows, write_scores
from m4.settings import Count, Size
from m4.storage.checkpoints import SCORES_BY_STEP
from m4.storage.files import whole, write_jsonl
from m4.storage.steps import complete_steps


class Results(NamedTuple):
    """What was written, and the numbers in it for the terminal's table (delta.tables). Without a
    baseline png, pdf and deltas are None."""

    html: Path
    scores: Path
    png: Path | None
    pdf: Path | None
    deltas: Path | None
    rows: list[Delta]
    averages: list[Average]
    rates: Path
    rate_rows: list[dict[str, Any]]


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
    window: Size = 10,
    samples: Count = 3,
) -> Results:
    """Scores all systems from their files of hypotheses and writes the report's files to `folder`.

    Args:
        metrics: the first one is the one of the differences and the plot.
        baseline: the system to compare with; None: there are no differences, and no plot.
        window: languages of the trend line. samples: sentences shown a direction.

    Raises:
        ValueError: hypotheses are missing or damaged, or none are of the baseline.
    """
    # Not before there is something to draw: every job imports this file, and matplotlib takes long.
    from m4.eval.report.figures import png
    from m4.eval.report.plot import figure, plot

    folder = Path(folder)
    measured = measure(systems, metrics, split)
    metric = next(iter(measured.statistics))[2]
    scores = score_rows(measured, train_pairs, subsets)
    rows = deltas(measured, train_pairs, metric, baseline) if baseline else []
    means = averages(rows, levels)
    files = ("report.html", "scores.jsonl", "deltas.jsonl", "rates.jsonl", f"delta_{metric}.png")
    html, scored, different, counted, plotted = (folder / name for name in files)
    write_scores(scored, scores)
    rate_rows = rates(measured, for_reports(), read_rates(counted))
    write_jsonl(counted, rate_rows)
    images, pdf = {}, plotted.with_suffix(".pdf")
    if rows:
        write_jsonl(different, plain(rows))
        plot(rows, [plotted, pdf], window, levels)
        dark = png(figure(rows, window, levels, theme=DARK))
        images = {"light": plotted.read_bytes(), "dark": dark}
    background, experts = background or Background(), _experts(folder, split)
    text = page(
        measured, metric, baseline, rows, means, scores, train_pairs, images, background,
        subsets or {}, levels, samples, rate_rows, experts, _by_step(folder), _cosines(background),
    )  # fmt: skip
    with whole(html) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    drawn = (plotted, pdf, different) if rows else (None, None, None)
    return Results(html, scored, *drawn, rows, means, counted, rate_rows)


def _by_step(folder: Path) -> list[dict[str, Any]]:
    """The curves of `m4 eval --watch`, one for each split that it scored, for the page. The best
    step is marked while its checkpoint is there."""
    from m4.eval.report import by_step
    from m4.eval.report.figures import png

    kept = complete_steps(folder / "checkpoints")
    rows = read_rows(folder / SCORES_BY_STEP)
    rows = [{**row, "best": row["best"] and row["step"] in kept} for row in rows]
    found = []
    for split in dict.fromkeys(row["split"] for row in rows):
        mine = [row for row in rows if row["split"] == split]
        images = {"light": png(by_step.figure(mine)), "dark": png(by_step.figure(mine, DARK))}
        best = next((row for row in mine if row["best"]), None)
        found.append({"split": split, "images": images, "best": best})
    return found


def _cosines(background: Background) -> list[dict[str, Any]]:
    """The last cosines of each system's training, for the page; of systems that measured them."""
    from m4.eval.report import cosines
    from m4.eval.report.figures import png

    found = []
    for system, rows in background.curves.items():
        if (one := cosines.last(rows)) is not None:
            images = {"light": png(cosines.figure(one)), "dark": png(cosines.figure(one, DARK))}
            shown = zip(cosines.labels(one.names), one.names, strict=True)
            longer = [(label, name) for label, name in shown if label != name]
            found.append({"system": system, "step": one.step, "images": images, "names": longer})
    return found


def _experts(folder: Path, split: str) -> list[dict[str, Any]]:
    """The atlas of training and that of the test sets, for the page; where there are counts."""
    from m4.eval.report import atlas
    from m4.eval.report.figures import png

    found = []
    for name, title in (("train", "In training"), (split, f"On the {split} sets")):
        path = atlas.path_of(folder, name)
        if path.is_file():
            one = atlas.read(path)
            images = {"light": png(atlas.figure(one)), "dark": png(atlas.figure(one, DARK))}
            found.append({"title": title, "images": images, "alarms": atlas.alarms(one)})
    return found
