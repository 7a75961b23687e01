"""The text of report.html: rows of scores and differences, arranged for the template."""

from __future__ import annotations

import base64
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from m4 import html
from m4.data.languages import describe
from m4.data.preprocess import language_of, split_direction
from m4.eval.metrics import bootstrap
from m4.eval.report import curve
from m4.eval.report.theme import DARK, LIGHT
from m4.eval.scoring import rates
from m4.eval.scoring.delta import METRIC_NAMES, Average, Delta, small_tests, small_tests_line
from m4.eval.scoring.groups import DIRECTION_GROUPS, LEVELS, ResourceLevels
from m4.eval.scoring.score import (
    COPY,
    Decode,
    Measured,
    Subsets,
    untagged,
    with_complements,
)
from m4.settings import InputError

TEMPLATE = Path(__file__).with_name("report.html.j2")
# Whose versions the page names, where they are installed.
PACKAGES = ("m4", "jax", "flax", "optax", "numpy", "sacrebleu", "sentencepiece", "seqio", "babel")


DELTA_TITLE = "ΔBLEU of one multilingual model against bilingual baselines"
_LABELS = {"nll": "Training loss, nats a piece"}


class Background(NamedTuple):
    """What the page shows in addition to the scores; what is empty is left out.

    corpus: what the text is, paragraphs separated by empty lines.
    facts: name -> value, how the run was made (date, machine, seeds, steps, minutes).
    configs: name -> operative gin config, shown whole.
    curves: system -> the rows of its metrics.jsonl; curve_keys: the values drawn, one plot each.
    sampling: language -> its share of the training stream; epochs: how often it was seen.
    """

    title: str = DELTA_TITLE
    corpus: str = ""
    facts: Mapping[str, str] = {}
    configs: Mapping[str, Path] = {}
    curves: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    curve_keys: Sequence[str] = ("nll",)
    sampling: Mapping[str, float] = {}
    epochs: Mapping[str, float] = {}


def page(
    measured: Measured,
    metric: str,
    baseline: str | None,
    rows: Sequence[Delta],
    means: Sequence[Average],
    scores: Sequence[Mapping[str, Any]],
    train_pairs: Mapping[str, int],
    images: Mapping[str, bytes],
    background: Background,
    subsets: Subsets,
    levels: ResourceLevels,
    samples: int,
    rate_rows: Sequence[Mapping[str, Any]],
    experts: Sequence[Mapping[str, Any]] = (),
    by_step: Sequence[Mapping[str, Any]] = (),
    cosines: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text of report.html, self-contained (`m4.html.render`).

    metric: of the differences from the baseline, and of subsets. rows: none without a baseline.
    images: the plot as PNG, 'light' and 'dark'. experts: {title, images, alarms} of each atlas.
    by_step: {split, images, best} of each curve, best: its row.
    cosines: {system, step, images, names} of each heat map of gradients.
    """
    names = [system.name for system in measured.systems]
    return html.render(
        TEMPLATE,
        _FILTERS,
        background=background,
        paragraphs=[text for text in background.corpus.split("\n\n") if text.strip()],
        metric=METRIC_NAMES.get(metric, metric),
        names=METRIC_NAMES,
        baseline=baseline,
        systems=names,
        sides=[side for side in DIRECTION_GROUPS if any(row.side == side for row in rows)],
        **_levels(rows, levels),
        headline=_headline(means),
        images=data_uris(images),
        experts=[{**one, "images": data_uris(one["images"])} for one in experts],
        by_step=[{**one, "images": data_uris(one["images"])} for one in by_step],
        cosines=[{**one, "images": data_uris(one["images"])} for one in cosines],
        theme={"light": LIGHT, "dark": DARK},
        tables=_delta_tables(rows, means),
        subsets=_subset_table(scores, metric, baseline),
        scores=_score_table(scores),
        **_rates(rate_rows, scores, levels),
        scored=[*names, COPY],
        metrics=[METRIC_NAMES.get(name, name) for name in _in_order(scores, "metric")],
        translations=_translations(measured, subsets, train_pairs, samples),
        curves=_curves(background),
        data=_data_table(train_pairs, background, levels),
        signatures=_in_order(scores, "signature"),
        resamples=bootstrap.RESAMPLES,
        seed=bootstrap.SEED,
        split=measured.split,
        configs={name: Path(path).read_text("utf-8")
                 for name, path in background.configs.items()},
        versions=_versions(),
    )  # fmt: skip


def language_tag(code: str) -> str:
    """The BCP 47 tag of an m4 or ISO 639-3 code, for lang attributes: 'zh_Hant' -> 'zh-Hant'."""
    return describe(code).code.replace("_", "-")


_FILTERS = {
    "signed": lambda value: f"{value:+.1f}".replace("-", "−"),
    "tag": language_tag,
    "rate": lambda row, name: rates.shown(name, row[name]),
}


def _headline(means: Sequence[Average]) -> list[dict]:
    """[{system, side, levels: {level: Average}}]: the averages, a row a system and side."""
    found: dict[tuple[str, str], dict[str, Average]] = {}
    for mean in means:
        found.setdefault((mean.system, mean.side), {})[mean.level] = mean
    return [{"system": key[0], "side": key[1], "levels": at} for key, at in found.items()]


def _delta_tables(rows: Sequence[Delta], means: Sequence[Average]) -> list[dict]:
    """A table a system: its languages with a Delta a side, then its averages."""
    tables = []
    for system in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == system]
        languages = {row.language: row for row in mine}
        tables.append(
            {
                "system": system,
                "languages": [
                    {
                        "row": row,
                        "sides": {r.side: r for r in mine if r.language == language},
                    }
                    for language, row in languages.items()
                ],
                "means": [
                    {
                        "level": name,
                        "sides": {
                            m.side: m for m in means if (m.system, m.level) == (system, name)
                        },
                    }
                    for name in (*LEVELS, "all")
                    if any((m.system, m.level) == (system, name) for m in means)
                ],
            }
        )
    return tables


def _subset_table(
    scores: Sequence[Mapping[str, Any]], metric: str, baseline: str | None
) -> dict[str, Any] | None:
    """Scores by subset, a row a direction; None where there are no subsets."""
    chosen = [row for row in scores if row["metric"] == metric and row["subset"] != "all"]
    if not chosen:
        return None
    systems = [name for name in _in_order(chosen, "system") if name != COPY]
    # The baseline first: the others are read against it.
    systems.sort(key=lambda name: name != baseline)
    lines: dict[str, dict] = {}
    for row in chosen:
        line = lines.setdefault(row["direction"], {})
        line.setdefault(row["subset"], {})[row["system"]] = row
    order = sorted(lines, key=lambda direction: _direction_order(direction, chosen))
    return {
        "subsets": _in_order(chosen, "subset"),
        "systems": systems,
        "lines": [{"direction": direction, "at": lines[direction]} for direction in order],
    }


def _score_table(scores: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Scores of whole test sets, a row a direction: {direction, at: {system: {metric: row}}}."""
    lines: dict[str, dict] = {}
    for row in scores:
        if row["subset"] == "all":
            line = lines.setdefault(row["direction"], {})
            metric = METRIC_NAMES.get(row["metric"], row["metric"])
            line.setdefault(row["system"], {})[metric] = row
    order = sorted(lines, key=lambda direction: _direction_order(direction, scores))
    return [{"direction": direction, "at": lines[direction]} for direction in order]


def _levels(rows: Sequence[Delta], levels: ResourceLevels) -> dict[str, Any]:
    """What the template needs of resource levels, and which languages are marked: those with close
    relatives and with small test sets."""
    small = small_tests(rows, levels)
    related = {
        (r.name, *(describe(c).name for c in r.closely_related)) for r in rows if r.closely_related
    }
    return {
        "levels": LEVELS,
        "thresholds": levels,
        "related": sorted(related),
        "small": set(small.values()),
        "small_line": small_tests_line(small, levels),
    }


def _rates(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]], levels: ResourceLevels
) -> dict[str, Any]:
    """What the template needs of rates.jsonl."""
    return {
        "rates": rates.RATES,
        "rate_means": rates.summary(rows, levels),
        "rate_notes": rates.notes(rows),
        "rate_rows": sorted(rows, key=lambda row: _direction_order(row["direction"], scores)),
    }


def _direction_order(direction: str, scores: Sequence[Mapping[str, Any]]) -> tuple:
    """By falling training size, both directions of a language together, into English first."""
    pairs = next(row["train_pairs"] for row in scores if row["direction"] == direction)
    return -(pairs or 0), language_of(direction), direction.startswith("en-")


def _translations(
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


def _curves(background: Background) -> list[dict]:
    """One drawing a key of the metrics: {label, svg, names}."""
    rows = background.curves
    known = sorted({key for lines in rows.values() for line in lines for key in line})
    drawn = []
    for key in background.curve_keys:
        if known and key not in known:
            raise InputError(f"no {key!r} in the metrics to draw; they have {', '.join(known)}")
        series = {name: curve.points(lines, key) for name, lines in rows.items()}
        series = {name: line for name, line in series.items() if len(line) > 1}
        if series:
            label = _LABELS.get(key, key)
            drawn.append({"label": label, "svg": curve.svg(series, label), "names": list(series)})
    return drawn


def _data_table(
    train_pairs: Mapping[str, int], background: Background, levels: ResourceLevels
) -> list[dict]:
    """A row a language, by falling size: pairs, their share, share of the stream, epochs."""
    total = sum(train_pairs.values())
    return [
        {
            "code": code,
            "language": describe(code),
            "pairs": pairs,
            "share": pairs / total if total else 0.0,
            "level": levels.of(pairs),
            "sampling": background.sampling.get(code),
            "epochs": background.epochs.get(code),
        }
        for code, pairs in sorted(train_pairs.items(), key=lambda item: (-item[1], item[0]))
    ]


def _in_order(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The distinct values, in the order of their coming."""
    return list(dict.fromkeys(row[key] for row in rows))


def data_uris(images: Mapping[str, bytes]) -> dict[str, str]:
    return {
        name: "data:image/png;base64," + base64.b64encode(image).decode("ascii")
        for name, image in images.items()
    }


def _versions() -> dict[str, str]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    found = {name: installed[name] for name in PACKAGES if name in installed}
    return {"Python": platform.python_version(), **found}
