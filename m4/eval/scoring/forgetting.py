"""Forgetting: the change of kept directions from the model that a run begins from."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from m4.eval.metrics import Metric, bootstrap
from m4.eval.scoring.delta import METRIC_NAMES, Delta, deltas, small_tests
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System, measure, text_table


class Forgotten(NamedTuple):
    """Mean change over the kept directions with its 95% interval, and the worst one."""

    directions: int
    mean: float
    low: float
    high: float
    worst: Delta


def changes(
    old: System,
    new: System,
    directions: Collection[str],
    metric: Metric,
    train_pairs: Mapping[str, int],
) -> list[Delta]:
    """Returns the differences of the new model from the old one, on the same test sentences.

    Raises:
        InputError: They have translated other sentences.
    """
    measured = measure([new, old], [metric], directions=directions)
    name = next(iter(measured.statistics))[2]
    return deltas(measured, train_pairs, name, old.name)


def summary(rows: Sequence[Delta], levels: ResourceLevels) -> Forgotten | None:
    """Returns mean and worst; test sets that are too small do not count. None: all are."""
    small = small_tests(rows, levels)
    rows = [row for row in rows if row.direction not in small]
    if not rows:
        return None
    low, high = bootstrap.interval(np.mean([row.replicates for row in rows], axis=0))
    mean, sign = float(np.mean([row.delta for row in rows])), -1 if rows[0].lower_is_better else 1
    worst = min(rows, key=lambda row: sign * row.delta)
    return Forgotten(len(rows), mean, low, high, worst)


def table(forgotten: Mapping[str, Sequence[Delta]], levels: ResourceLevels) -> Table:
    """Returns a line for each run, for a terminal."""
    named = {
        METRIC_NAMES.get(row.metric, row.metric) for rows in forgotten.values() for row in rows
    }
    made = text_table(
        "What is forgotten",
        f"change of {'/'.join(named)} of kept directions from the model that the run begins from; "
        "[95% interval, paired bootstrap]",
    )
    for title in ("run", "from", "directions", "mean", "worst"):
        made.add_column(title, justify="right" if title == "directions" else "left")
    for run, rows in forgotten.items():
        found = summary(rows, levels)
        if found is None:
            made.add_row(run, rows[0].baseline, "0")
            continue
        worst = found.worst
        made.add_row(
            run,
            rows[0].baseline,
            str(found.directions),
            f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]",
            f"{worst.direction} {worst.delta:+.1f} [{worst.low:+.1f}, {worst.high:+.1f}]",
        )
    return made
