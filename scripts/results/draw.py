"""Redraws the figure, tables and page of kept results: `make results`.

No run and no corpus is read.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m4.eval.report import plot
from m4.eval.scoring.delta import BILINGUAL, plain
from m4.eval.scoring.score import score_rows
from m4.settings import InputError
from m4.storage.files import write_jsonl, write_text
from scripts.results import (
    ablations,
    curves,
    extraction,
    kept,
    page,
    speedrun,
    starts,
    summary,
    zero_shot,
)
from scripts.results.found import Compared, read


def draw(folder: Path) -> list[Path]:
    """Writes all drawn files of an experiment, and returns them."""
    found = read(folder)
    written = [folder / "README.md"]
    if found.systems:
        rows = score_rows(kept.measured(found.systems), found.sizes)
        write_jsonl(folder / "scores.jsonl", rows)
        written.append(folder / "scores.jsonl")
    if found.compared:
        all_rows = [row for one in found.compared for row in one.rows]
        write_jsonl(folder / "deltas.jsonl", plain(all_rows))
        write_jsonl(folder / "means.jsonl", mean_rows(found.compared))
        written += [folder / "deltas.jsonl", folder / "means.jsonl"]
    if found.curves:
        written += curves.draw(found.curves, folder)
    first = found.compared[0] if found.compared else None
    if found.ablation:
        written += ablations.draw(found.ablation, found.asked, folder)
    elif found.speedrun:
        written += speedrun.draw(found.speedrun, found.asked, folder)
    elif found.starts:
        write_jsonl(folder / "starts.jsonl", map(dataclasses.asdict, found.starts))
        written += [folder / "starts.jsonl", *starts.draw(found.asked, found.starts, folder)]
    elif found.asked.extraction:
        written += extraction.draw(found.asked, folder)
    elif found.zero_shot:
        write_jsonl(folder / "zero_shot.jsonl", map(dataclasses.asdict, found.zero_shot))
        drawn = zero_shot.draw(found.asked, found.zero_shot, folder)
        written += [folder / "zero_shot.jsonl", *drawn]
    elif first is not None and first.baseline == BILINGUAL:
        written += plot.draw(first.rows, folder, found.levels)
    write_text(folder / "README.md", page.text(found))
    return written


def mean_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    return [
        {"metric": one.metric, "baseline": one.baseline, **dataclasses.asdict(mean)}
        for one in compared
        for mean in one.means
    ]


def draw_all(results: Path = kept.RESULTS) -> list[Path]:
    """Draws every experiment, then `table`."""
    written = [path for folder in experiments(results) for path in draw(folder)]
    return [*written, table(results)]


def table(results: Path) -> Path:
    """Writes the table of docs/results.md, from drawn results."""
    path = results.parent / "docs" / "results.md"
    write_text(path, summary.with_table(path.read_text("utf-8"), experiments(results)))
    return path


def experiments(results: Path) -> list[Path]:
    found = sorted(path.parent for path in results.glob("*/experiment.toml"))
    if not found:
        raise InputError(f"{results}: no folder with an experiment.toml")
    return found
