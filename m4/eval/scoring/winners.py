"""The best of several systems for each language, with their costs and what they forgot.

A system is level with the best one if the interval of the best one's lead, by paired bootstrap,
reaches 0. Among level systems, the cheapest is recommended.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from m4.data.directions import key_of, pair_of
from m4.data.languages import title_of
from m4.eval.metrics import Metric, bootstrap
from m4.eval.scoring.delta import MOST_LINES, UNDERTRAINED, Delta, deltas, small_tests
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import (
    ALL,
    COPY,
    METRIC_NAMES,
    Measured,
    System,
    measure,
    text_table,
)


class Cost(NamedTuple):
    """Cost of training a system; None means that its files do not say it."""

    hours: float | None = None  # hours of training steps on one device, or one core of a CPU
    tokens: int | None = None  # trained tokens of both sides
    flops: float | None = None  # FLOPs of the model's matrix products (docs/performance.md)


def cost_of(rows: Sequence[Mapping[str, Any]]) -> Cost:
    """Returns the cost of a run from the rows of its metrics.jsonl."""
    seconds = [row["device_seconds"] for row in rows if "device_seconds" in row]
    tokens = [row["source_tokens"] + row["target_tokens"] for row in rows if "source_tokens" in row]
    flops = [row["model_flops"] for row in rows if "model_flops" in row]
    return Cost(
        seconds[-1] / 3600 if seconds else None,
        round(sum(tokens)) if tokens else None,
        flops[-1] if flops else None,
    )


def total(costs: Sequence[Cost]) -> Cost:
    """Returns the total cost of several runs; what one of them lacks is None."""
    columns = zip(*costs, strict=True)
    return Cost(*(None if None in column else sum(column) for column in columns))


@dataclass(frozen=True)
class Winner:
    """The best system for a language, or on average."""

    language: str  # its code, or `ALL` for the mean over the languages that count
    train_pairs: int
    sentences: int
    counts: bool  # whether the test sets are large enough to count
    languages: int  # number of languages
    scores: dict[str, float]  # system -> mean over the directions
    best: str  # the system with the highest score
    # Other system -> lead of the best one over it, with its 95% interval.
    leads: dict[str, tuple[float, float, float]]
    level: tuple[str, ...]  # systems level with the best one, itself first
    take: str  # the cheapest of `level`
    undertrained: bool  # whether the source itself is a better translation


def winners(
    measured: Measured,
    metric: str,
    train_pairs: Mapping[str, int],
    costs: Mapping[str, Cost],
    levels: ResourceLevels,
    aside: Collection[str] = (),
) -> list[Winner]:
    """Returns the winners by language, in order of falling training size, and then on average.

    Args:
        measured: Statistics of systems that translated the same directions.
        aside: Directions that do not count: those that a system keeps from an older model.
    """
    systems = [system.name for system in measured.systems]
    by_language: dict[str, list[str]] = {}
    for direction in measured.directions(systems[0]):
        if direction not in aside:
            by_language.setdefault(key_of(pair_of(direction)), []).append(direction)
    first = {d: measured.statistics[systems[0], d, metric] for d in measured.directions(systems[0])}
    sign = -1 if next(iter(first.values())).lower_is_better else 1

    def mean(system: str, directions: Sequence[str]) -> tuple[float, np.ndarray]:
        found = [measured.statistics[system, name, metric] for name in directions]
        scores = [one.value() for one in found]
        return float(np.mean(scores)), np.mean([bootstrap.resample(one) for one in found], axis=0)

    def winner(
        about: tuple[str, int, int, bool, int], scores: Mapping[str, tuple[float, np.ndarray]]
    ) -> Winner:
        values = {name: scores[name][0] for name in systems}
        best = max(systems, key=lambda name: sign * values[name])
        leads = {}
        for name in (name for name in systems if name != best):
            low, high = bootstrap.interval(sign * (scores[best][1] - scores[name][1]))
            leads[name] = sign * (values[best] - values[name]), low, high
        level = [best, *(name for name, (_, low, _) in leads.items() if low <= 0)]
        hours = [costs[name].hours for name in level]
        take = best if None in hours else min(level, key=lambda name: costs[name].hours or 0.0)
        undertrained = sign * (values[best] - scores[COPY][0]) < 0
        return Winner(*about, values, best, leads, tuple(level), take, undertrained)

    rows, kept = [], []
    for language, directions in by_language.items():
        scores = {name: mean(name, directions) for name in (*systems, COPY)}
        sentences = min(first[name].sentences for name in directions)
        counts = sentences >= levels.min_test_sentences
        about = (language, train_pairs.get(language, 0), sentences, counts, 1)
        rows.append(winner(about, scores))
        kept += [(scores, rows[-1])] if counts else []
    rows.sort(key=lambda row: (-row.train_pairs, row.language))
    if not kept:
        return rows
    everywhere = {}
    for name in (*systems, COPY):
        values, replicates = zip(*(scores[name] for scores, _ in kept), strict=True)
        everywhere[name] = float(np.mean(values)), np.mean(replicates, axis=0)
    pairs = sum(row.train_pairs for _, row in kept)
    sentences = sum(row.sentences for _, row in kept)
    return [*rows, winner((ALL, pairs, sentences, True, len(kept)), everywhere)]


def advice(rows: Sequence[Winner], costs: Mapping[str, Cost], metric: str) -> str:
    """Returns a sentence on which system to take, or '' if no test set is large enough."""
    counted = [row for row in rows if row.counts and row.language != ALL]
    if not counted:
        return ""
    whole = next(row for row in rows if row.language == ALL)
    named, others = METRIC_NAMES.get(metric, metric), [n for n in whole.level if n != whole.take]
    on_average = "on average" if len(counted) > 1 else f"for {counted[0].language}"
    if whole.undertrained:
        return f"None: {on_average} the source itself is a better translation. Train longer."
    if others:
        known = None not in (costs[name].hours for name in whole.level)
        why = f"level {on_average} with {', '.join(others)}"
        why += ", and the cheapest" if known else " (hours are not known of all)"
    elif whole.leads:
        second = min(whole.leads, key=lambda name: whole.leads[name])
        lead, low, high = whole.leads[second]
        why = f"{lead:+.1f} {named} [{low:+.1f}, {high:+.1f}] {on_average} to {second}, the next"
    else:
        why = "there is no other"
    parts = [f"Take {whole.take}: {why}"]
    if len(counted) > 1:
        good = sum(whole.take in row.level for row in counted)
        parts.append(f"best or level in {good} of {len(counted)} languages")
        better: dict[str, list[str]] = {}
        for row in (row for row in counted if whole.take not in row.level):
            better.setdefault(row.take, []).append(row.language)
        parts += [f"{name} for {', '.join(codes)}" for name, codes in better.items()]
    if bad := [row.language for row in counted if row.undertrained]:
        parts.append(f"{UNDERTRAINED}: {', '.join(bad)}")
    return "; ".join(parts) + "."


def lead_of(row: Winner) -> str:
    """Returns the best system's lead over the next one with its interval, or ''."""
    if not row.leads:
        return ""
    lead, low, high = min(row.leads.values())
    return f"{lead:+.1f} [{low:+.1f}, {high:+.1f}]"


def table(rows: Sequence[Winner], costs: Mapping[str, Cost], metric: str) -> Table:
    """Returns scores, winners and costs for a terminal; for many languages only the mean."""
    named = METRIC_NAMES.get(metric, metric)
    made = text_table(
        "The best for each language",
        f"{named}, mean of both directions; [95% interval of the lead over the next, paired "
        "bootstrap]; ○ too few test sentences to count; hours of a device, on CPUs of a core",
    )
    for title in ("language", "pairs", *costs, "best", "lead", "take"):
        right = title in ("pairs", "lead", *costs)
        made.add_column(title, justify="right" if right else "left", no_wrap=True)
    shown = rows if len(rows) <= MOST_LINES else [row for row in rows if row.language == ALL]
    for row in shown:
        name = title_of(row.language) if row.language != ALL else f"all ({row.languages})"
        if row.language == ALL:
            made.add_section()
        scores = [f"{row.scores[system]:.1f}" for system in costs]
        best = UNDERTRAINED if row.undertrained else row.best
        name += " ○" * (not row.counts)
        made.add_row(name, f"{row.train_pairs:,}", *scores, best, lead_of(row), row.take)
    made.add_section()
    for title, cells in cost_rows(costs).items():
        made.add_row(title, "", *cells)
    return made


def cost_rows(costs: Mapping[str, Cost]) -> dict[str, list[str]]:
    """Returns title -> a cell per system, for costs that any system's files say."""
    made = {
        "hours": [f"{one.hours:.2f}" if one.hours is not None else "" for one in costs.values()],
        "tokens": [f"{one.tokens:,}" if one.tokens is not None else "" for one in costs.values()],
        "PFLOPs": [f"{one.flops / 1e15:.3g}" if one.flops else "" for one in costs.values()],
    }
    return {title: cells for title, cells in made.items() if any(cells)}


class Forgotten(NamedTuple):
    """Mean change of a run's kept directions with its 95% interval, and the worst direction."""

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
    """Returns a model's differences from its initial model, on the same sentences."""
    measured = measure([new, old], [metric], directions=directions)
    name = next(iter(measured.statistics))[2]
    return deltas(measured, train_pairs, name, old.name)


def forgotten(rows: Sequence[Delta], levels: ResourceLevels) -> Forgotten | None:
    """Returns mean and worst over large enough test sets, or None without any."""
    small = small_tests(rows, levels)
    rows = [row for row in rows if row.direction not in small]
    if not rows:
        return None
    low, high = bootstrap.interval(np.mean([row.replicates for row in rows], axis=0))
    mean, sign = float(np.mean([row.delta for row in rows])), -1 if rows[0].lower_is_better else 1
    worst = min(rows, key=lambda row: sign * row.delta)
    return Forgotten(len(rows), mean, low, high, worst)


def forgotten_table(changed: Mapping[str, Sequence[Delta]], levels: ResourceLevels) -> Table:
    """Returns a table with a line per run, for a terminal."""
    named = {METRIC_NAMES.get(row.metric, row.metric) for rows in changed.values() for row in rows}
    made = text_table(
        "What is forgotten",
        f"change of {'/'.join(named)} of kept directions from the model that the run begins from; "
        "[95% interval, paired bootstrap]",
        *("run", "from", "directions", "mean", "worst"),
    )
    for run, rows in changed.items():
        cells = ["0"]
        if found := forgotten(rows, levels):
            worst = found.worst
            cells = [
                str(found.directions),
                f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]",
                f"{worst.direction} {worst.delta:+.1f} [{worst.low:+.1f}, {worst.high:+.1f}]",
            ]
        made.add_row(run, rows[0].baseline, *cells)
    return made
