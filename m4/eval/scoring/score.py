"""From hypotheses to rows of scores.jsonl: every system, direction, metric and subset.

decodes/<split>.<direction>.jsonl[.gz]  ->  Measured  ->  rows of scores.jsonl

It also makes rows of scores_by_step.jsonl from the scores of a run's checkpoints.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from m4.data.directions import key_of, pair_of, split_direction
from m4.data.preprocess import tag_symbol
from m4.eval.metrics import Metric, Statistics, bootstrap, counted
from m4.eval.scoring.levels import LEVELS
from m4.settings import InputError
from m4.storage.files import read_jsonl, write_jsonl
from m4.storage.records import count, flag, listed, number, record, text

COPY = "copy"
ALL = "all"
METRIC_NAMES = {
    "bleu": "BLEU", "chrf": "chrF", "chrfpp": "chrF++", "spbleu": "spBLEU", "ter": "TER",
    "exact_match": "exact match",
}  # fmt: skip

# Language pair or direction -> subset ('seen') -> a mark per sentence, in order.
Subsets = Mapping[str, Mapping[str, Sequence[bool]]]
# Metric -> direction -> score.
Scores = Mapping[str, Mapping[str, float]]


class Decode(NamedTuple):
    """One test sentence: the tagged or plain source, the reference and the translation.

    `references` has all references if there are several, `reference` first; `document` names the
    document of the sentence.
    """

    source: str
    reference: str
    hypothesis: str
    references: Sequence[str] = ()
    document: str | None = None


_DECODE = record(
    {**dict.fromkeys(Decode._fields[:3], text), "references?": listed(text), "document?": text}
)


_SCORE = record(
    {
        **dict.fromkeys(("system", "direction", "metric", "subset", "signature"), text),
        **dict.fromkeys(("score", "low", "high"), number),
        "sentences": count,
        "train_pairs?": count,
    }
)
_BY_STEP = record(
    dict.fromkeys(("split", "metric", "level"), text)
    | {"step": count, "score": number, "best": flag}
)


@dataclass(frozen=True)
class System:
    """A system to score, with its translations."""

    name: str  # 'moe', 'dense', 'bilingual', ...
    decodes: Path
    # Operative gin config and step that its rows name: one for all, or one per direction.
    config: str | Mapping[str, str] | None = None
    checkpoint_step: int | Mapping[str, int] | None = None


@dataclass(frozen=True)
class Measured:
    """Sufficient statistics and hypotheses of all systems on the same test sentences.

    `decodes` has hypotheses by (system, direction), `statistics` by (system, direction, metric).
    Systems and directions are in the given order; the copy baseline comes last.
    """

    split: str
    systems: tuple[System, ...]
    decodes: dict[tuple[str, str], list[Decode]]
    statistics: dict[tuple[str, str, str], Statistics]

    def directions(self, system: str) -> list[str]:
        return [direction for name, direction in self.decodes if name == system]

    def by_direction(self) -> dict[str, dict[str, list[Decode]]]:
        """Returns direction -> system -> hypotheses, without the copy baseline."""
        found: dict[str, dict[str, list[Decode]]] = {}
        for (name, direction), decodes in self.decodes.items():
            if name != COPY:
                found.setdefault(direction, {})[name] = decodes
        return found


def read_decodes(path: Path) -> list[Decode]:
    """Returns the hypotheses of one direction. Raises InputError if damaged or empty."""
    decodes = [
        Decode(row["source"], row["reference"], row["hypothesis"], row.get("references") or (),
               row.get("document"))
        for row in read_jsonl(path, _DECODE)
    ]  # fmt: skip
    if not decodes:
        raise InputError(f"{path}: no sentences")
    return decodes


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a scores.jsonl. Raises InputError if it is damaged."""
    return read_jsonl(path, _SCORE)


def find_decodes(folder: Path, split: str) -> dict[str, Path]:
    """Returns direction -> its file of hypotheses, sorted by direction."""
    # If a direction has two files, the plain one counts.
    found = [*folder.glob(f"{split}.*.jsonl.gz"), *folder.glob(f"{split}.*.jsonl")]
    if not found:
        raise InputError(
            f"no hypotheses in {folder}: they are {split}.<direction>.jsonl or .jsonl.gz"
        )
    return dict(sorted({path.name.split(".")[1]: path for path in found}.items()))


def train_pairs_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns `key_of` a language pair -> its training pairs, from rows of scores.jsonl."""
    return {key_of(pair_of(row["direction"])): row["train_pairs"]
            for row in rows if row.get("train_pairs") is not None}  # fmt: skip


def untagged(source: str, direction: str) -> str:
    """Returns the source text without its target-language tag."""
    return source.removeprefix(tag_symbol(split_direction(direction)[1])).strip()


def measure(
    systems: Iterable[System],
    metrics: Sequence[Metric],
    split: str = "test",
    directions: Collection[str] | None = None,
) -> Measured:
    """Reads all systems' hypotheses, adds the copy baseline, and counts the statistics.

    Raises:
        InputError: Systems disagree on the test set (differences on different sentences would mean
            nothing), hypotheses are missing or damaged, two metrics have one name, or a metric does
            not count every sentence.
    """
    systems = tuple(systems)
    decodes: dict[tuple[str, str], list[Decode]] = {}
    first: dict[str, tuple[System, list[Decode]]] = {}
    for system in systems:
        if [COPY, *(other.name for other in systems)].count(system.name) > 1:
            raise InputError(f"system {system.name!r}: names are unique and not {COPY!r}")
        for direction, path in find_decodes(system.decodes, split).items():
            if directions is not None and direction not in directions:
                continue
            rows = read_decodes(path)
            other, expected = first.setdefault(direction, (system, rows))
            ours, theirs = ([row._replace(source="", hypothesis="") for row in each]
                            for each in (rows, expected))  # fmt: skip
            if ours != theirs:
                raise InputError(
                    f"{path}: other test sentences than those of {other.name} in {other.decodes}"
                )
            decodes[system.name, direction] = rows
    return measured_of(systems, decodes, metrics, split)


def measured_of(
    systems: Iterable[System],
    decodes: Mapping[tuple[str, str], list[Decode]],
    metrics: Sequence[Metric],
    split: str = "test",
) -> Measured:
    """Adds the copy baseline to hypotheses by (system, direction), and counts like `measure`.

    A copy has the source, without its tag, as the hypothesis.
    """
    copies: dict[tuple[str, str], list[Decode]] = {}
    for (_, direction), rows in decodes.items():
        copied = [row._replace(hypothesis=untagged(row.source, direction)) for row in rows]
        copies.setdefault((COPY, direction), copied)
    decodes = {**decodes, **copies}
    # All systems of a direction in turn, as metrics cache the counts of its references.
    found = {
        at: _counted(decodes[at], at[1], metrics) for at in sorted(decodes, key=lambda x: x[1])
    }
    statistics = {(*at, metric): one for at in decodes for metric, one in found[at].items()}
    return Measured(split, tuple(systems), decodes, statistics)


def _counted(
    rows: Sequence[Decode], direction: str, metrics: Sequence[Metric]
) -> dict[str, Statistics]:
    """Returns metric -> counts for one system's hypotheses."""
    target = split_direction(direction)[1]
    hypotheses = [row.hypothesis for row in rows]
    references = [row.references or row.reference for row in rows]
    sources = [untagged(row.source, direction) for row in rows]
    found: dict[str, Statistics] = {}
    for metric in metrics:
        made = counted(metric, hypotheses, references, target, sources)
        if made.metric in found:
            raise InputError(f"two metrics are called {made.metric!r}")
        found[made.metric] = made
    return found


def tried(metrics: Sequence[Metric]) -> dict[str, Statistics]:
    """Tries each metric on one sentence; returns name in rows of scores -> statistics."""
    found = [counted(metric, ["a"], ["a"], "en", ["a"]) for metric in metrics]
    return {one.metric: one for one in found}


def with_complements(marks: Mapping[str, Sequence[bool]]) -> dict[str, list[bool]]:
    """Adds the subset 'unseen', the complement of 'seen', if only that is marked."""
    subsets = {name: list(keep) for name, keep in marks.items()}
    if "seen" in subsets and "unseen" not in subsets:
        subsets["unseen"] = [not mark for mark in subsets["seen"]]
    return subsets


def score_rows(
    measured: Measured, train_pairs: Mapping[str, int], subsets: Subsets | None = None
) -> list[dict]:
    """Returns the rows of scores.jsonl, by system, direction, metric and subset.

    A subset without sentences has no row. `low` and `high` are the 95% interval by bootstrap.
    """
    about = {system.name: system for system in measured.systems}
    rows = []
    for (name, direction, metric), statistics in measured.statistics.items():
        pair, known = pair_of(direction), subsets or {}
        marks = with_complements(known.get(direction) or known.get(pair, {}))
        everything: dict[str, list[bool]] = {"all": [True] * statistics.sentences}
        for subset, keep in (everything | marks).items():
            if len(keep) != statistics.sentences:
                raise InputError(
                    f"subset {subset!r} of {pair} marks {len(keep)} sentences, "
                    f"{name} has decoded {statistics.sentences} of {direction}"
                )
            part = statistics.select(keep)
            if not part.sentences:
                continue
            score = bootstrap.score(part)
            if not all(map(math.isfinite, (score.value, score.low, score.high))):
                raise InputError(f"{metric} of {name}, {direction}, {subset} is {score.value}")
            system = about.get(name, System(name, Path()))
            head = {"system": name, "direction": direction, "split": measured.split}
            head |= {"subset": subset, "metric": metric}
            values = {"score": score.value, "low": score.low, "high": score.high}
            rows.append(
                head
                # Rounded to 1e-6, as later digits depend on the platform's summation order.
                | {key: round(value, 6) for key, value in values.items()}
                | {"signature": score.signature, "sentences": score.sentences}
                | {"config": _of(system.config, direction)}
                | {"checkpoint_step": _of(system.checkpoint_step, direction)}
                | {"train_pairs": train_pairs.get(key_of(pair))}
            )
    return rows


def document_rows(measured: Measured) -> list[dict]:
    """Returns the score of each document, in order, for test sets that name documents."""
    rows = []
    for (name, direction, metric), statistics in measured.statistics.items():
        names = [row.document for row in measured.decodes[name, direction]]
        for document in filter(None, dict.fromkeys(names)):
            part = statistics.select([one == document for one in names])
            head = {"system": name, "direction": direction, "split": measured.split}
            score = {"metric": metric, "score": round(part.value(), 6)}
            rows.append({**head, "document": document, **score, "sentences": part.sentences})
    return rows


def rows_by_step(
    scores: Mapping[int, Scores],
    portion: str,
    metric: str,
    levels: Mapping[str, Sequence[str]],
    kept: Collection[int],
    *,
    lower_is_better: bool = False,
) -> list[dict[str, Any]]:
    """Returns the rows of scores_by_step.jsonl: one per step, metric and level, and `ALL` levels.

    `best` is true for one row: that of the first step whose mean of `metric` over all directions is
    the highest, or the lowest if that is better. Only `kept` steps are compared.
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
                head = {"split": portion, "step": step, "metric": name, "level": level}
                is_best = (step, name, level) == (best, metric, ALL)
                if chosen:
                    means = {"score": round(fmean(chosen), 6), "directions": len(chosen)}
                    rows.append({**head, **means, "best": is_best})
    return rows


def said_by_step(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """Returns a line with a step's scores over all directions and by resource level."""
    # `ALL` comes first; the order of levels stays.
    here = sorted((row for row in rows if row["step"] == step), key=lambda row: row["level"] != ALL)
    parts: dict[str, str] = {}
    for row in here:
        name = METRIC_NAMES.get(row["metric"]) or str(row["metric"])
        level = "" if row["level"] == ALL else f"{row['level']} "
        parts[name] = f"{parts.get(name, name)} {level}{row['score']:.1f}"
    best = next((row["step"] for row in rows if row["best"]), None)
    mark = f"best: step {best}" if best else "its checkpoint is gone"
    mark = "the best" if best == step else mark
    return f"step {step} {here[0]['split']}: {' · '.join(parts.values())} ({mark})"


def read_by_step(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a scores_by_step.jsonl, or none without a file."""
    return read_jsonl(path, _BY_STEP) if path.is_file() else []


def replace_by_step(path: Path, portion: str, rows: Sequence[dict[str, Any]]) -> None:
    """Replaces a portion's rows and keeps those of others."""
    write_jsonl(path, [*(row for row in read_by_step(path) if row["split"] != portion), *rows])


def text_table(title: str, caption: str | Text, *columns: str) -> Table:
    """Returns an empty table for a report on a terminal."""
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    space: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False}
    return Table(*columns, title=title, caption=caption, box=SIMPLE_HEAD, **left, **space)


def score_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Returns a table of scores of whole test sets, with intervals, for a terminal."""
    rows = [row for row in rows if row["subset"] == "all"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table = Table("system", "direction", box=SIMPLE_HEAD)
    for metric in metrics:
        table.add_column(metric, justify="right")
    cells: dict[tuple[str, str], dict[str, Text]] = {}
    for row in rows:
        text = Text(f"{row['score']:.1f}").append(f" {row['low']:.1f}..{row['high']:.1f}", "dim")
        cells.setdefault((row["system"], row["direction"]), {})[row["metric"]] = text
    for names, by_metric in cells.items():
        table.add_row(*names, *(by_metric.get(metric, "") for metric in metrics))
    return table


def _of(value: object, direction: str) -> object:
    """Returns the value, or the direction's if there is one per direction."""
    return value.get(direction) if isinstance(value, Mapping) else value
