"""Rows of report.html's tables of scores and differences, and the translations that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m4.data.languages import describe
from m4.data.preprocess import language_of, split_direction
from m4.eval.scoring.delta import METRIC_NAMES, Average, Delta
from m4.eval.scoring.levels import LEVELS
from m4.eval.scoring.score import COPY, Decode, Measured, Subsets, untagged, with_complements


def delta_table(rows: Sequence[Delta], means: Sequence[Average]) -> dict[str, Any] | None:
    """One table of all systems: a line a language with the Deltas at [side][system], by falling
    training size, then a line a resource level with its Averages. None without differences."""
    if not rows:
        return None
    languages: dict[str, dict] = {}
    for row in rows:
        line = languages.setdefault(row.language, {"row": row, "at": {}})
        line["at"].setdefault(row.side, {})[row.system] = row
    found: dict[str, dict] = {name: {} for name in (*LEVELS, "all")}
    for mean in means:
        found[mean.level].setdefault(mean.side, {})[mean.system] = mean
    return {
        "systems": list(dict.fromkeys(row.system for row in rows)),
        "languages": list(languages.values()),
        "means": [{"level": name, "at": at} for name, at in found.items() if at],
    }


def subset_table(
    scores: Sequence[Mapping[str, Any]], metric: str, baseline: str | None
) -> dict[str, Any] | None:
    """Scores by subset, a row a direction; None where there are no subsets."""
    chosen = [row for row in scores if row["metric"] == metric and row["subset"] != "all"]
    if not chosen:
        return None
    systems = [name for name in in_order(chosen, "system") if name != COPY]
    # The baseline first: the others are read against it.
    systems.sort(key=lambda name: name != baseline)
    lines: dict[str, dict] = {}
    for row in chosen:
        line = lines.setdefault(row["direction"], {})
        line.setdefault(row["subset"], {})[row["system"]] = row
    order = sorted(lines, key=lambda direction: direction_order(direction, chosen))
    return {
        "subsets": in_order(chosen, "subset"),
        "systems": systems,
        "lines": [{"direction": direction, "at": lines[direction]} for direction in order],
    }


def score_table(scores: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Scores of whole test sets, a row a direction: {direction, at: {system: {metric: row}}}."""
    lines: dict[str, dict] = {}
    for row in scores:
        if row["subset"] == "all":
            line = lines.setdefault(row["direction"], {})
            metric = METRIC_NAMES.get(row["metric"], row["metric"])
            line.setdefault(row["system"], {})[metric] = row
    order = sorted(lines, key=lambda direction: direction_order(direction, scores))
    return [{"direction": direction, "at": lines[direction]} for direction in order]


def direction_order(direction: str, scores: Sequence[Mapping[str, Any]]) -> tuple:
    """By falling training size, both directions of a language together, into English first."""
    pairs = next(row["train_pairs"] for row in scores if row["direction"] == direction)
    return -(pairs or 0), language_of(direction), direction.startswith("en-")


def translations(
    measured: Measured, subsets: Subsets, train_pairs: Mapping[str, int], samples: int
) -> list[dict]:
    """Sentences spread evenly over every test set, with what each system made of them."""
    names = [system.name for system in measured.systems]
    by_direction: dict[str, dict[str, list[Decode]]] = {}
    for (name, direction), decodes in measured.decodes.items():
        if name in names:
            by_direction.setdefault(direction, {})[name] = decodes
    languages: dict[str, list[dict]] = {}
    for direction, at in sorted(by_direction.items()):
        language = language_of(direction)
        source, target = split_direction(direction)
        first = next(iter(at.values()))
        marks = with_complements(subsets.get(language, {}))
        count = min(samples, len(first))
        chosen = [(2 * number + 1) * len(first) // (2 * count) for number in range(count)]
        languages.setdefault(language, []).append(
            {
                "source": source,
                "target": target,
                "sentences": [
                    {
                        "source": untagged(first[i].source, direction),
                        "reference": first[i].reference,
                        "marks": [name for name, keep in marks.items() if keep[i]],
                        "hypotheses": {name: decodes[i].hypothesis for name, decodes in at.items()},
                    }
                    for i in chosen
                ],
            }
        )
    order = sorted(languages, key=lambda code: (-train_pairs.get(code, 0), code))
    return [
        {
            "language": describe(code).name,
            "code": code,
            "directions": sorted(languages[code], key=lambda part: part["source"] == "en"),
        }
        for code in order
    ]


def in_order(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The distinct values, in the order of their coming."""
    return list(dict.fromkeys(row[key] for row in rows))
