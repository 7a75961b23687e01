"""The text of report.html: rows of scores and differences, arranged for the template."""

from __future__ import annotations

import base64
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from m4 import html
from m4.data import families
from m4.data.cldr import tags
from m4.data.languages import describe
from m4.data.preprocess import language_of
from m4.eval.metrics import bootstrap
from m4.eval.report import chart, curve, tables
from m4.eval.report.theme import DARK, LIGHT
from m4.eval.scoring import rates
from m4.eval.scoring.delta import (
    METRIC_NAMES,
    Average,
    Delta,
    hollow_means,
    small_tests,
    small_tests_line,
)
from m4.eval.scoring.levels import LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.score import (
    COPY,
    Measured,
    Subsets,
)
from m4.eval.scoring.trend import window_size
from m4.settings import InputError

TEMPLATE = Path(__file__).with_name("report.html.j2")
SCRIPT = Path(__file__).with_name("report.js")
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
    background: Background,
    subsets: Subsets,
    levels: ResourceLevels,
    samples: int,
    rate_rows: Sequence[Mapping[str, Any]],
    experts: Sequence[Mapping[str, Any]] = (),
    by_step: Sequence[Mapping[str, Any]] = (),
    cosines: Sequence[Mapping[str, Any]] = (),
    window: int = 10,
) -> str:
    """The text of report.html, self-contained (`m4.html.render`).

    metric: of the differences from the baseline, and of subsets. rows: none without a baseline.
    experts: {title, images, alarms} of each atlas, images: PNG, 'light' and 'dark'.
    by_step: {split, images, best} of each curve, best: its row.
    cosines: {system, step, images, names} of each heat map of gradients. window: of the plot.
    """
    data = _data_table(train_pairs, background, levels)
    small = small_tests(rows, levels)
    names = [system.name for system in measured.systems]
    return html.render(
        TEMPLATE,
        _FILTERS,
        SCRIPT,
        background=background,
        paragraphs=[text for text in background.corpus.split("\n\n") if text.strip()],
        metric=METRIC_NAMES.get(metric, metric),
        names=METRIC_NAMES,
        baseline=baseline,
        systems=names,
        sides=[side for side in SIDES if any(row.side == side for row in rows)],
        **_levels(rows, levels),
        **_deltas(rows, means, small, data, levels, window),
        metric_key=metric,
        markers=[chart.marker(number, 4) for number in range(4)],
        **_pictures(experts=experts, by_step=by_step, cosines=cosines),
        theme={"light": LIGHT, "dark": DARK},
        subsets=tables.subset_table(scores, metric, baseline),
        scores=tables.score_table(scores),
        **_rates(rate_rows, scores, levels),
        scored=[*names, COPY],
        metrics=[METRIC_NAMES.get(name, name) for name in tables.in_order(scores, "metric")],
        translations=tables.translations(measured, subsets, train_pairs, samples),
        curves=_curves(background),
        **_languages(data),
        signatures=tables.in_order(scores, "signature"),
        resamples=bootstrap.RESAMPLES,
        seed=bootstrap.SEED,
        split=measured.split,
        configs={name: path.read_text("utf-8") for name, path in background.configs.items()},
        versions=_versions(),
    )  # fmt: skip


def language_tag(code: str) -> str:
    """The BCP 47 tag of an m4 or ISO 639-3 code, for lang attributes: 'zh_Hant' -> 'zh-Hant'."""
    return describe(code).code.replace("_", "-")


_FILTERS = {
    "signed": lambda value: f"{value:+.1f}".replace("-", "−"),
    "tag": language_tag,
    "language": language_of,
    "rate": lambda row, name: rates.shown(name, row[name]),
}


def _deltas(
    rows: Sequence[Delta],
    means: Sequence[Average],
    small: Mapping[str, str],
    data: Sequence[Mapping[str, Any]],
    levels: ResourceLevels,
    window: int,
) -> dict[str, Any]:
    """What the template needs of the differences from the baseline: means, plot and table."""
    plotted = {row.language for row in rows if row.direction not in small}
    return {
        "headline": _headline(means),
        "charts": _charts(rows, data, levels, window),
        "hollow": hollow_means(rows, small, levels),
        "window": window_size(len(plotted), window),
        "table": tables.delta_table(rows, means),
        "counts": {name: max(mean.languages for mean in means if mean.level == name)
                   for name in {mean.level for mean in means}},
    }  # fmt: skip


def _headline(means: Sequence[Average]) -> list[dict]:
    """[{system, side, levels: {level: Average}}]: the averages, a row a system and side."""
    found: dict[tuple[str, str], dict[str, Average]] = {}
    for mean in means:
        found.setdefault((mean.system, mean.side), {})[mean.level] = mean
    return [{"system": key[0], "side": key[1], "levels": at} for key, at in found.items()]


def _languages(data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the template needs of the rows of the data table."""
    return {
        "data": data,
        "facts": {row["code"]: row for row in data},
        "chips": _chips(data),
        "families": sorted({row["family"] for row in data}),
    }


def _chips(data: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Family -> the number of its colour: 0 of the largest one; 'other' has the last colour."""
    last = len(LIGHT.families) - 1
    names = dict.fromkeys(families.shown([row["code"] for row in data], last).values())
    return {name: last if name == families.OTHER else rank for rank, name in enumerate(names)}


def _charts(
    rows: Sequence[Delta], data: Sequence[Mapping[str, Any]], levels: ResourceLevels, window: int
) -> list[str]:
    """The plot in both widths; none without differences."""
    if not rows:
        return []
    chips = _chips(data)
    colours = {row["code"]: chips[row["shown_family"]] for row in data}
    texts = {}
    for row in data:
        names = " · ".join(dict.fromkeys(filter(None, (row["language"].name, row["own_name"]))))
        about = [f"{names} ({row['code']})",
                 f"{row['family']}, {row['level']}: {row['pairs']:,} pairs"]  # fmt: skip
        mine = [delta for delta in rows if delta.language == row["code"]]
        texts[row["code"]] = chart.text_of(mine, about)
    return [chart.svg(rows, kind, levels, colours, texts, window) for kind in chart.WIDTHS]


def _levels(rows: Sequence[Delta], levels: ResourceLevels) -> dict[str, Any]:
    """What the template needs of resource levels, and which languages are marked: those with close
    relatives and with small test sets."""
    small = small_tests(rows, levels)
    name = {row.language: row.name for row in rows}
    named = Counter(name.values())  # two codes may be one language's
    name = {code: f"{one} ({code})" if named[one] > 1 else one for code, one in name.items()}
    related = {
        (name[r.language], *(name[code] for code in r.closely_related if code in name))
        for r in rows
        if r.closely_related
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
        "rate_rows": sorted(rows, key=lambda row: tables.direction_order(row["direction"], scores)),
    }


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
    """A row a language, by falling size: who it is, pairs, their share, share of the stream,
    epochs. search: what the filter looks in; shown_family: its family where that has a colour."""
    total = sum(train_pairs.values())
    coloured = families.shown(train_pairs, len(LIGHT.families) - 1)
    rows = []
    for code, pairs in sorted(train_pairs.items(), key=lambda item: (-item[1], item[0])):
        language, tag = describe(code), tags.parse(describe(code).code)
        own_name = tags.own_name(tag) if tag else ""
        rows.append(
            {
                "code": code,
                "language": language,
                "own_name": own_name,
                "family": families.family_of(code),
                "shown_family": coloured[code],
                "search": f"{code} {language.name} {own_name}".lower(),
                "pairs": pairs,
                "share": pairs / total if total else 0.0,
                "level": levels.of(pairs),
                "sampling": background.sampling.get(code),
                "epochs": background.epochs.get(code),
            }
        )
    return rows


def data_uris(images: Mapping[str, bytes]) -> dict[str, str]:
    return {
        name: "data:image/png;base64," + base64.b64encode(image).decode("ascii")
        for name, image in images.items()
    }


def _pictures(**by_kind: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {
        kind: [{**one, "images": data_uris(one["images"])} for one in pictures]
        for kind, pictures in by_kind.items()
    }


def _versions() -> dict[str, str]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    found = {name: installed[name] for name in PACKAGES if name in installed}
    return {"Python": platform.python_version(), **found}
