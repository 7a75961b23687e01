"""Scores of a run's checkpoints by step: means over the directions of a resource level."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from m4.eval.scoring.delta import METRIC_NAMES
from m4.eval.scoring.levels import LEVELS
from m4.storage.files import read_jsonl, write_jsonl
from m4.storage.records import count, flag, number, record, text

ALL = "all"
# Metric -> direction -> score.
Scores = Mapping[str, Mapping[str, float]]


_NAMES = dict.fromkeys(("split", "metric", "level"), text)
_ROW = record({**_NAMES, "step": count, "score": number, "best": flag})


def direction_scores(rows: Iterable[Mapping[str, Any]], system: str) -> dict[str, dict[str, float]]:
    """Returns metric -> direction -> score of whole test sets, from rows of scores.jsonl."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["system"] == system and row["subset"] == "all":
            found.setdefault(row["metric"], {})[row["direction"]] = row["score"]
    return found


def rows_by_step(
    scores: Mapping[int, Scores],
    portion: str,
    metric: str,
    levels: Mapping[str, Sequence[str]],
    kept: Collection[int],
    *,
    lower_is_better: bool = False,
) -> list[dict[str, Any]]:
    """Returns the rows of scores_by_step.jsonl: a step, metric and level each, and `ALL` levels.

    `best` is true for one row: that of the step whose mean over all directions is highest in
    `metric`, or lowest; of equal ones the first. Steps that are not `kept` are not compared.
    """
    rows = []
    compared = [step for step in sorted(scores) if step in kept]
    choose = min if lower_is_better else max
    best = choose(compared, key=lambda step: fmean(scores[step][metric].values()), default=None)
    for step in sorted(scores):
        for name, by_direction in scores[step].items():
            for level in (*LEVELS, ALL):
                chosen = [score for direction, score in by_direction.items()
                          if level == ALL or direction in levels[level]]  # fmt: skip
                if chosen:
                    rows.append(
                        {
                            "split": portion,
                            "step": step,
                            "metric": name,
                            "level": level,
                            "score": round(fmean(chosen), 6),
                            "directions": len(chosen),
                            "best": (step, name, level) == (best, metric, ALL),
                        }
                    )
    return rows


def said(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """Returns a line on a step: its scores over all directions and by resource level."""
    here = [row for row in rows if row["step"] == step]
    here.sort(key=lambda row: row["level"] != ALL)  # the order of the levels stays
    parts: dict[str, str] = {}
    for row in here:
        name = METRIC_NAMES.get(row["metric"]) or str(row["metric"])
        level = "" if row["level"] == ALL else f"{row['level']} "
        parts[name] = f"{parts.get(name, name)} {level}{row['score']:.1f}"
    best = next((row["step"] for row in rows if row["best"]), None)
    mark = (
        "the best" if best == step else f"best: step {best}" if best else "its checkpoint is gone"
    )
    return f"step {step} {here[0]['split']}: {' · '.join(parts.values())} ({mark})"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a scores_by_step.jsonl, none where there is no file."""
    return read_jsonl(path, _ROW) if path.is_file() else []


def replace_rows(path: Path, portion: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a portion's rows; those of other portions stay."""
    write_jsonl(path, [*(row for row in read_rows(path) if row["split"] != portion), *rows])
