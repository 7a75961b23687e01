"""The report on one run or several: scores, differences, rates, the ΔBLEU plot and a page."""

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from m4 import html
from m4.data.cldr import tags
from m4.data.cleaning.language_id import Py3langid, installed
from m4.data.directions import key_of, languages_of, pair_of, split_direction
from m4.data.languages import describe, family_of, title_of
from m4.eval.metrics import Metric, bootstrap
from m4.eval.report import atlas, curves, plot
from m4.eval.report.figures import inline, save
from m4.eval.scoring import rates, score, winners
from m4.eval.scoring.delta import (
    BILINGUAL,
    UNDERTRAINED,
    Average,
    Delta,
    averages,
    deltas,
    plain,
    small_tests,
    small_tests_line,
)
from m4.eval.scoring.levels import DEFAULT_LEVELS, LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.winners import Cost, Winner
from m4.settings import Count
from m4.storage.checkpoints import SCORES_BY_STEP
from m4.storage.files import write_jsonl, write_text
from m4.storage.steps import complete_steps

TEMPLATE = Path(__file__).with_name("report.html.j2")
SCRIPT = Path(__file__).with_name("report.js")
DELTA_TITLE = "ΔBLEU of one multilingual model against bilingual baselines"
# Panels of curves, for those that the metrics have; losses are in nats per piece.
_LABELS = {
    "nll": "training loss",
    **{f"nll/{level}": f"training loss, {level}" for level in LEVELS},
    "dev/nll": "dev loss",
    "auxiliary_loss": "auxiliary loss",
}


class Background(NamedTuple):
    """Facts that the page shows besides scores; empty ones are left out."""

    title: str = DELTA_TITLE
    corpus: str = ""  # description of the text, paragraphs separated by empty lines
    facts: Mapping[str, str] = {}  # name -> value: date, machine, seeds, steps, minutes, ...
    configs: Mapping[str, Path] = {}  # name -> operative gin config, shown whole
    # System -> the rows of its metrics.jsonl.
    curves: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    sampling: Mapping[str, float] = {}  # language -> its share of the training stream
    epochs: Mapping[str, float] = {}  # language -> epochs
    testsets: Mapping[str, str] = {}  # test set -> its page
    costs: Mapping[str, Cost] = {}  # system -> cost of its training; with costs, winners are named
    # Run -> changes in the directions that it keeps from its initial model.
    forgotten: Mapping[str, Sequence[Delta]] = {}
    trained: Sequence[Mapping[str, Any]] = ()  # scores of further directions, for heat maps


class Results(NamedTuple):
    """Files and numbers of a report; without a baseline, `drawn` and `deltas` are None."""

    html: Path
    scores: Path
    drawn: list[Path] | None
    deltas: Path | None
    rows: list[Delta]  # differences, for the terminal's table (`delta.tables`)
    averages: list[Average]
    rates: Path
    rate_rows: list[dict[str, Any]]
    best: list[Winner]
    background: Background


def write_results(
    folder: Path,
    systems: Sequence[score.System],
    metrics: Sequence[Metric],
    train_pairs: Mapping[str, int],
    subsets: score.Subsets | None = None,
    background: Background | None = None,
    baseline: str | None = BILINGUAL,
    split: str = "test",
    levels: ResourceLevels = DEFAULT_LEVELS,
    samples: Count = 3,
    directions: Collection[str] | None = None,
) -> Results:
    """Scores all systems from their files of hypotheses, and writes the report.

    No run folder is needed: a `System` is a name and a folder of hypotheses, plain or gzipped;
    `score.train_pairs_of` takes the training sizes from rows of a scores.jsonl.

    The page, report.html, is self-contained (`m4.html.render`).

    Args:
        metrics: Metrics of the scores; tables and plot show the first one.
        baseline: System to compare with. Defaults to none, without differences and plot.
        directions: Directions to score. Defaults to all.
    """
    folder, background = Path(folder), background or Background()
    measured = score.measure(systems, metrics, split, directions=directions)
    of_metrics = dict.fromkeys(name for *_, name in measured.statistics)
    metric = next(iter(of_metrics))
    metric_name = score.METRIC_NAMES.get(metric, metric)
    scores = score.score_rows(measured, train_pairs, subsets)
    differences = [deltas(measured, train_pairs, name, baseline) for name in of_metrics if baseline]
    rows = differences[0] if differences else []
    files = ("report.html", "scores.jsonl", "deltas.jsonl", "rates.jsonl")
    page, scored, different, counted = (folder / name for name in files)
    write_jsonl(scored, scores)
    identifier = Py3langid() if installed() else None
    rate_rows = rates.rates(measured, identifier, rates.read_rates(counted))
    write_jsonl(counted, rate_rows)
    drawn = None
    if rows:
        write_jsonl(different, plain(chain(*differences)))
        drawn = plot.draw(rows, folder, levels)
    changed, best = background.forgotten, []
    if background.costs:
        kept = {row.direction for rows in changed.values() for row in rows}
        best = winners.winners(measured, metric, train_pairs, background.costs, levels, kept)
    if best:
        write_jsonl(folder / "winners.jsonl", map(asdict, best))
    if changed:
        kept_rows = ({"run": run, **row} for run in changed for row in plain(changed[run]))
        write_jsonl(folder / "forgotten.jsonl", kept_rows)
    summaries = {run: one for run in changed if (one := winners.forgotten(changed[run], levels))}
    trade = None
    if summaries and best and best[-1].language == score.ALL:
        trade = plot.trade_off(best[-1], summaries, metric_name)
        save(trade, [folder / f"forgotten.{kind}" for kind in ("png", "svg")])
    found = Results(
        page, scored, drawn, different if rows else None, rows, averages(rows, levels), counted,
        rate_rows, best, background,
    )  # fmt: skip
    label = f"Δ{metric_name} of {len(_by(rows, 'language'))} languages by training size"
    data = _data_table(train_pairs, background, levels, rows)
    facts = {row["code"]: row for row in data}
    small = small_tests(rows, levels)
    names = [system.name for system in measured.systems]
    whole = [row for row in scores if row["subset"] == "all"]
    order = sorted(_by(whole, "direction"), key=lambda direction: _order(direction, train_pairs))
    text = html.render(
        TEMPLATE,
        _FILTERS,
        SCRIPT,
        background=background,
        paragraphs=[text for text in background.corpus.split("\n\n") if text.strip()],
        metric=metric_name,
        names=score.METRIC_NAMES,
        baseline=baseline,
        systems=names,
        compared=list(_by(rows, "system")),
        sides=[side for side in SIDES if any(row.side == side for row in rows)],
        levels=[*LEVELS, "all"],
        thresholds=levels,
        related=_related(rows),
        small=set(small.values()),
        small_line=small_tests_line(small, levels),
        means=_by(found.averages, "level", "side", "system"),
        headline=_by(found.averages, "system", "side", "level"),
        differences=_by(rows, "language", "side", "system"),
        charts=[inline(plot.figure(rows, levels, kind), f"{label}, {kind}", f"chart {kind}")
                for kind in plot.WIDTHS if rows],
        experts=_experts(folder, split),
        by_step=_by_step(folder),
        best=best,
        trade=inline(trade, "What each run keeps and what it costs") if trade else None,
        advice=winners.advice(best, background.costs, metric),
        costs=background.costs,
        cost_rows=winners.cost_rows(background.costs),
        forgotten={run: (summaries.get(run), of) for run, of in changed.items()},
        subsets=_subsets(scores, metric, baseline, order),
        scores={direction: _by(whole, "direction", "system", "metric")[direction]
                for direction in order},
        heat_maps=_heat_maps(whole, metric, found),
        rates={key: name for key, name in rates.RATES.items()
               if any(row[key] is not None for row in rate_rows)},
        rate_means=rates.summary(rate_rows, levels),
        rate_notes=rates.notes(rate_rows),
        rate_rows=sorted(rate_rows, key=lambda row: _order(row["direction"], train_pairs)),
        scored=[*names, score.COPY],
        metrics=[*_by(scores, "metric")],
        translations=_translations(measured, subsets or {}, train_pairs, samples),
        curves=_curves(background),
        data=data,
        # Differences name directions, "wo-fr", and data name pairs, "fr-wo".
        facts=facts | {row.language: facts[key_of(pair_of(row.direction))] for row in rows},
        chips=dict(plot.family_colours([row["code"] for row in data]).values()),
        families=sorted({row["family"] for row in data}),
        signatures=[*_by(scores, "signature")],
        resamples=bootstrap.RESAMPLES,
        seed=bootstrap.SEED,
        split=split,
        configs={name: path.read_text("utf-8") for name, path in background.configs.items()},
    )  # fmt: skip
    write_text(page, text)
    return found


def _by_step(folder: Path) -> list[dict[str, Any]]:
    """Returns the curves of `m4 eval --watch`, one for each split that it scored."""
    kept = complete_steps(folder / "checkpoints")  # the other metrics mark no best step
    rows = score.read_by_step(folder / SCORES_BY_STEP)
    rows = [{**row, "best": row["best"] and row["step"] in kept} for row in rows]
    found = []
    for split in _by(rows, "split"):
        mine = [row for row in rows if row["split"] == split]
        drawn = inline(curves.by_step(mine), f"Scores on {split} by step and resource level")
        best = next((row for row in mine if row["best"]), None)
        found.append({"split": split, "figure": drawn, "best": best})
    return found


def _experts(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the atlases of training and of the test sets, as far as there are counts."""
    found = []
    for name, title in (("train", "In training"), (split, f"On the {split} sets")):
        path = atlas.path_of(folder, name)
        if path.is_file():
            one = atlas.read(path)
            drawn = inline(atlas.figure(one), f"Choices of experts by language, {title.lower()}")
            found.append({"title": title, "figure": drawn, "alarms": atlas.alarms(one)})
    return found


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


_FILTERS = {
    "signed": _signed,
    "tag": lambda code: describe(code).code.replace("_", "-"),  # BCP 47 code, such as zh-Hant
    "language": lambda direction: key_of(pair_of(direction)),
    "languages": lambda at: max(one.languages for side in at.values() for one in side.values()),
    "arrow": lambda text: text.replace("->", "-").replace("-", "\u2009→\u2009"),
    "rate": lambda row, name: rates.shown(name, row[name]),
    "lead": winners.lead_of,
}


def _by(rows: Iterable[Any], *names: str) -> dict[str, Any]:
    """Nests rows by some of their fields, one level per field."""
    found: dict[str, Any] = {}
    for row in rows:
        *outer, last = (row[n] if isinstance(row, Mapping) else getattr(row, n) for n in names)
        functools.reduce(lambda at, key: at.setdefault(key, {}), outer, found)[last] = row
    return found


def _order(direction: str, train_pairs: Mapping[str, int]) -> tuple[int, str, bool]:
    """Sorts by falling training size, both directions of a pair together."""
    pair = pair_of(direction)
    return -train_pairs.get(key_of(pair), 0), key_of(pair), direction == pair


def _subsets(
    scores: Sequence[Mapping[str, Any]], metric: str, baseline: str | None, order: Sequence[str]
) -> dict[str, Any] | None:
    """Returns scores by direction, subset and system, or None without subsets."""
    chosen = [row for row in scores if row["metric"] == metric and row["subset"] != "all"]
    if not chosen:
        return None
    systems = [name for name in _by(chosen, "system") if name != score.COPY]
    # The baseline comes first, as the others are compared with it.
    systems.sort(key=lambda name: name != baseline)
    at = _by(chosen, "direction", "subset", "system")
    lines = {direction: at[direction] for direction in order if direction in at}
    return {"names": [*_by(chosen, "subset")], "systems": systems, "lines": lines}


def _translations(
    measured: score.Measured, subsets: score.Subsets, train_pairs: Mapping[str, int], samples: int
) -> list[dict[str, Any]]:
    """Returns evenly spaced sentences of each test set, with each system's translation."""
    by_direction = measured.by_direction()
    languages: dict[str, dict[str, Any]] = {}
    for direction in sorted(by_direction, key=lambda one: _order(one, train_pairs)):
        at, code = by_direction[direction], key_of(pair_of(direction))
        first = next(iter(at.values()))
        marks = score.with_complements(subsets.get(pair_of(direction), {}))
        count = min(samples, len(first))
        source, target = split_direction(direction)
        sentences = [
            {
                "source": score.untagged(first[i].source, direction),
                "reference": first[i].reference,
                "marks": [name for name, keep in marks.items() if keep[i]],
                "hypotheses": {name: decodes[i].hypothesis for name, decodes in at.items()},
            }
            for i in ((2 * number + 1) * len(first) // (2 * count) for number in range(count))
        ]
        one = languages.setdefault(code, {"name": title_of(code), "parts": []})
        one["parts"].append({"source": source, "target": target, "sentences": sentences})
    return [{"code": code, **one} for code, one in languages.items()]


def _about(row: Mapping[str, Any], deltas: Sequence[Delta]) -> str:
    """Returns a language's tooltip in the plot: its names, then its numbers."""
    names = " · ".join(dict.fromkeys(filter(None, (row["name"], row["own_name"]))))
    lines = [f"{names} ({row['code']})",
             f"{row['family']}, {row['level']}: {row['pairs']:,} pairs"]  # fmt: skip
    for side in dict.fromkeys(delta.side for delta in deltas):
        mine = [delta for delta in deltas if delta.side == side]
        lines.append(f"{side.replace('->', ' → ')}: {mine[0].baseline} "
                     f"{mine[0].baseline_score:.1f}, {mine[0].sentences} sentences")  # fmt: skip
        for one in mine:
            said = f"{_signed(one.delta)} [{_signed(one.low)}, {_signed(one.high)}]"
            said = UNDERTRAINED if one.undertrained else said
            lines.append(f"{one.system} {one.system_score:.1f}  {said}")
    return "\n".join(lines)


def _related(rows: Sequence[Delta]) -> list[tuple[str, ...]]:
    """Returns each language with close relatives in the run, with these, by name."""
    name = {row.language: row.name for row in rows}
    named = Counter(name.values())  # one language may have two codes
    name = {code: f"{one} ({code})" if named[one] > 1 else one for code, one in name.items()}
    return sorted(
        {
            (name[row.language], *(name[code] for code in row.closely_related if code in name))
            for row in rows
            if row.closely_related
        }
    )


def _heat_maps(
    scores: Sequence[Mapping[str, Any]], metric: str, found: Results
) -> dict[str, Markup]:
    """Returns title -> heat map of all directions, unless all have English."""
    scores = [row for row in scores if row["metric"] == metric and row["system"] != score.COPY]
    if all("en" in split_direction(row["direction"]) for row in scores):
        return {}
    metric_name = score.METRIC_NAMES.get(metric, metric)
    values: dict[str, dict[str, float]] = {}
    for row in scores:
        title = f"{metric_name} of {row['system']}"
        values.setdefault(title, {})[row["direction"]] = row["score"]
    # Trained directions have a frame in the first system's map.
    framed = {row["direction"]: row["score"] for row in found.background.trained
              if (row["metric"], row["subset"]) == (metric, "all")}  # fmt: skip
    first, signed, whole = next(iter(values)), set(), set()
    values[first] |= framed
    for one in found.rows:
        signed.add(title := f"Δ{metric_name} of {one.system} against {one.baseline}")
        values.setdefault(title, {})[one.direction] = one.delta
    for row in found.rate_rows:
        if row["off_language"] is not None and row["system"] != rates.REFERENCE:
            title = f"{rates.RATES['off_language'].capitalize()}, {row['system']}, %"
            whole.add(title)
            values.setdefault(title, {})[row["direction"]] = 100 * row["off_language"]
    codes = languages_of(direction for of in values.values() for direction in of)
    names = {code: " ".join(dict.fromkeys([code, _own_name(code)])).strip() for code in codes}
    return {
        title: inline(
            plot.heat_map(of, names, signed=title in signed, percent=title in whole,
                          framed=framed if title == first else ()), title)
        for title, of in values.items()
    }  # fmt: skip


def _own_name(code: str) -> str:
    """Returns the language's own name, or '' if unknown."""
    return tags.own_name(tag) if (tag := tags.parse(describe(code).code)) else ""


def _curves(background: Background) -> dict[str, Markup]:
    """Returns the training curves of all systems, over each of `curves.AXES` in their rows."""
    found = {}
    for axis in curves.AXES:
        drawn: dict[str, dict[str, curves.Points]] = {}
        for key, label in _LABELS.items():
            for name, rows in background.curves.items():
                line = curves.over(curves.points(rows, key), rows, axis)
                if len(line) > 1:
                    drawn.setdefault(label, {})[name] = line
        if drawn:
            found[axis] = inline(curves.training(drawn, axis), f"Training curves over {axis}")
    return found


def _data_table(
    train_pairs: Mapping[str, int],
    background: Background,
    levels: ResourceLevels,
    deltas: Sequence[Delta],
) -> list[dict[str, Any]]:
    """Returns a row for each language pair, by falling training size.

    The page's filter searches `search`, and its plot shows `about` as a tooltip.
    """
    total = sum(train_pairs.values())
    by_language: dict[str, list[Delta]] = {}
    for delta in deltas:
        by_language.setdefault(key_of(pair_of(delta.direction)), []).append(delta)
    rows = []
    for code, pairs in sorted(train_pairs.items(), key=lambda item: (-item[1], item[0])):
        name, own_name = title_of(code), _own_name(code) if "-" not in code else ""
        row = {"code": code, "name": name, "own_name": own_name, "family": family_of(code)}
        row |= {"search": f"{code} {name} {own_name}".lower(), "pairs": pairs}
        row |= {"share": pairs / total if total else 0.0, "level": levels.of(pairs)}
        row |= {"sampling": background.sampling.get(code), "epochs": background.epochs.get(code)}
        rows.append({**row, "about": _about(row, by_language.get(code, []))})
    return rows
