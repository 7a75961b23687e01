"""The best of several systems for each language, what each cost, and what follows.

A system is level with the best one where the interval of the best one's lead, by paired bootstrap,
reaches 0. Of level systems the cheapest is taken.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from m4.data.directions import key_of, pair_of
from m4.data.languages import title_of
from m4.eval.metrics import bootstrap
from m4.eval.scoring.delta import METRIC_NAMES, MOST_LINES, UNDERTRAINED
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import COPY, Measured, text_table

ALL = "all"


class Cost(NamedTuple):
    """Cost of training a system; None where its files do not say it."""

    hours: float | None = None  # of one device, on CPUs of one core, in training steps
    tokens: int | None = None  # of both sides that were trained on
    flops: float | None = None  # of the model's matrix products (docs/performance.md)


def cost_of(rows: Sequence[Mapping[str, Any]]) -> Cost:
    """Returns the cost of a run by the rows of its metrics.jsonl."""
    seconds = [row["device_seconds"] for row in rows if "device_seconds" in row]
    tokens = [row["source_tokens"] + row["target_tokens"] for row in rows if "source_tokens" in row]
    flops = [row["model_flops"] for row in rows if "model_flops" in row]
    return Cost(
        seconds[-1] / 3600 if seconds else None,
        round(sum(tokens)) if tokens else None,
        flops[-1] if flops else None,
    )


def total(costs: Sequence[Cost]) -> Cost:
    """Returns the cost of several runs together; what one of them does not say is None."""
    columns = zip(*costs, strict=True)
    return Cost(*(None if None in column else sum(column) for column in columns))


@dataclass(frozen=True)
class Winner:
    """The best system for a language, or on average."""

    language: str  # its code, or `ALL`, the mean over the languages that count
    train_pairs: int
    sentences: int
    counts: bool  # whether its test sets are large enough to count
    languages: int  # number of languages
    scores: dict[str, float]  # system -> mean over the directions
    best: str  # the system of the highest score
    # Other system -> how far the best one is above it, and the 95% interval of that.
    leads: dict[str, tuple[float, float, float]]
    level: tuple[str, ...]  # the systems that are level with the best one, itself first
    take: str  # the cheapest of them
    undertrained: bool  # whether the source itself is a better translation


def winners(
    measured: Measured,
    metric: str,
    train_pairs: Mapping[str, int],
    costs: Mapping[str, Cost],
    levels: ResourceLevels,
    aside: Collection[str] = (),
) -> list[Winner]:
    """Returns the winner of each language by falling training size, then the one on average.

    Args:
        measured: Statistics of systems that have all translated the same directions.
        aside: Directions that do not count: of languages that a system keeps from an older one.
    """
    systems = [system.name for system in measured.systems]
    by_language: dict[str, list[str]] = {}
    for direction in measured.directions(systems[0]):
        if direction in aside:
            continue
        by_language.setdefault(key_of(pair_of(direction)), []).append(direction)

    def mean(system: str, directions: Sequence[str]) -> tuple[float, np.ndarray]:
        found = [measured.statistics[system, name, metric] for name in directions]
        scores = [one.value() for one in found]
        return float(np.mean(scores)), np.mean([bootstrap.resample(one) for one in found], axis=0)

    first = measured.statistics[systems[0], measured.directions(systems[0])[0], metric]
    sign = -1 if first.lower_is_better else 1
    rows, kept = [], []
    for language, directions in by_language.items():
        scores = {name: mean(name, directions) for name in systems}
        sentences = min(
            measured.statistics[systems[0], name, metric].sentences for name in directions
        )
        copy = mean(COPY, directions)[0]
        counts = sentences >= levels.min_test_sentences
        about = (language, train_pairs.get(language, 0), sentences, counts, 1)
        rows.append(_winner(about, scores, costs, copy, sign))
        kept += [(scores, copy, rows[-1])] if counts else []
    rows.sort(key=lambda row: (-row.train_pairs, row.language))
    if not kept:
        return rows
    everywhere = {}
    for name in systems:
        values, replicates = zip(*(scores[name] for scores, *_ in kept), strict=True)
        everywhere[name] = float(np.mean(values)), np.mean(replicates, axis=0)
    pairs, sentences = (sum(getattr(row, name) for *_, row in kept)
                        for name in ("train_pairs", "sentences"))  # fmt: skip
    copy = float(np.mean([copy for _, copy, _ in kept]))
    about = (ALL, pairs, sentences, True, len(kept))
    return [*rows, _winner(about, everywhere, costs, copy, sign)]


def _winner(
    about: tuple[str, int, int, bool, int],
    scores: Mapping[str, tuple[float, np.ndarray]],
    costs: Mapping[str, Cost],
    copy: float,
    sign: int,
) -> Winner:
    best = max(scores, key=lambda name: sign * scores[name][0])
    ahead, resampled = scores[best]
    leads = {
        name: (sign * (ahead - value), *bootstrap.interval(sign * (resampled - replicates)))
        for name, (value, replicates) in scores.items()
        if name != best
    }
    level = [best, *(name for name, (_, low, _) in leads.items() if low <= 0)]
    hours = {name: costs[name].hours for name in level}
    known = [name for name in level if hours[name] is not None]
    take = min(known, key=lambda name: hours[name] or 0.0) if len(known) == len(level) else best
    values = {name: value for name, (value, _) in scores.items()}
    undertrained = sign * (values[best] - copy) < 0
    return Winner(*about, values, best, leads, tuple(level), take, undertrained)


def advice(rows: Sequence[Winner], costs: Mapping[str, Cost], metric: str) -> str:
    """Returns a sentence on which system to take; '' where no test set is large enough."""
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
    for row in counted:
        if whole.take not in row.level:
            better.setdefault(row.take, []).append(row.language)
    parts += [f"{name} for {', '.join(codes)}" for name, codes in better.items()] if (
        len(counted) > 1) else []  # fmt: skip
    if bad := [row.language for row in counted if row.undertrained]:
        parts.append(f"{UNDERTRAINED}: {', '.join(bad)}")
    return "; ".join(parts) + "."


def lead_of(row: Winner) -> str:
    """Returns the lead of the best system over the next one with its interval, or ''."""
    if not row.leads:
        return ""
    lead, low, high = min(row.leads.values())
    return f"{lead:+.1f} [{low:+.1f}, {high:+.1f}]"


def table(rows: Sequence[Winner], costs: Mapping[str, Cost], metric: str) -> Table:
    """Returns the scores, winners and costs for a terminal; of many languages the mean alone."""
    named = METRIC_NAMES.get(metric, metric)
    made = text_table(
        "The best for each language",
        f"{named}, mean of both directions; [95% interval of the lead over the next, paired "
        "bootstrap]; ○ too few test sentences to count; hours of a device, on CPUs of a core",
    )
    for title in ("language", "pairs", *costs, "best", "lead", "take"):
        right = title in ("pairs", "lead") or title in costs
        made.add_column(title, justify="right" if right else "left", no_wrap=True)
    shown = rows if len(rows) <= MOST_LINES else [row for row in rows if row.language == ALL]
    for row in shown:
        name = title_of(row.language) if row.language != ALL else f"all ({row.languages})"
        if row.language == ALL:
            made.add_section()
        made.add_row(
            name if row.counts else f"{name} ○",
            f"{row.train_pairs:,}",
            *(f"{row.scores[system]:.1f}" for system in costs),
            UNDERTRAINED if row.undertrained else row.best,
            lead_of(row),
            row.take,
        )
    made.add_section()
    for title, cells in cost_rows(costs).items():
        made.add_row(title, "", *cells)
    return made


def cost_rows(costs: Mapping[str, Cost]) -> dict[str, list[str]]:
    """Returns title -> a cell for each system; of what no system's files say there is no row."""
    made = {
        "hours": ["" if one.hours is None else f"{one.hours:.2f}" for one in costs.values()],
        "tokens": ["" if one.tokens is None else f"{one.tokens:,}" for one in costs.values()],
        "PFLOPs": ["" if one.flops is None else f"{one.flops / 1e15:.3g}"
                   for one in costs.values()],
    }  # fmt: skip
    return {title: cells for title, cells in made.items() if any(cells)}
