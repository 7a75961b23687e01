"""Directions without training pairs: each system against another on the same sentences.

Next to the directions of its corpus a run has systems <run>_zero_shot and <run>_pivot, what
`m4 eval --zero_shot` translated. `rows` are written as zero_shot.jsonl.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.directions import (
    WITHOUT_ENGLISH,
    key_of,
    languages_of,
    pair_of,
    side_of,
    split_direction,
)
from m4.data.languages import describe
from m4.eval.metrics import bootstrap
from m4.eval.report import plot
from m4.eval.report.figures import save
from m4.eval.scoring.delta import METRIC_NAMES, Delta, deltas
from m4.eval.scoring.score import COPY, read_scores
from m4.storage.files import read_jsonl
from scripts.results import kept
from scripts.results.kept import Asked, Kept
from scripts.results.tables import signed, table

PARTS = ("zero_shot", "pivot")
_FIRST = 2  # comparisons that the first lines of the page, and docs/results.md, name


@dataclasses.dataclass(frozen=True)
class Row:
    """A system against another in one direction, or the mean over those of a set."""

    system: str
    against: str
    about: str  # a direction, or "unseen", "trained"
    metric: str
    directions: int
    sentences: int
    score: float
    other: float
    delta: float
    low: float
    high: float
    off_target: float | None = None  # shares of the sentences in another language
    other_off_target: float | None = None


def systems(asked: Asked) -> list[str]:
    """Returns the names of what `m4 eval --zero_shot` translated."""
    return [f"{run}_{part}" for run in asked.runs for part in PARTS] if asked.zero_shot else []


def rows(asked: Asked, found: Sequence[Kept], rates: Sequence[dict[str, Any]]) -> list[Row]:
    """Returns each comparison's mean, then its directions."""
    known = {one.name: one for one in found}
    off = {(row["system"], row["direction"]): row["off_language"] for row in rates}
    result = []
    for system, against, about in asked.zero_shot["compared"]:
        if not {system, against} <= known.keys():
            continue
        of = _directions(asked, known, about)
        measured = kept.measured(
            dataclasses.replace(one, directions={at: one.directions[at] for at in of})
            for one in (known[name] for name in (system, against, COPY))
        )
        for metric in dict.fromkeys(name for *_, name in measured.statistics):
            each = deltas(measured, {key_of(pair_of(at)): 0 for at in of}, metric, against)
            made = [_row(row, off) for row in each]
            result += [_mean(each, made, about), *made]
    return result


def _directions(asked: Asked, known: Mapping[str, Kept], about: str) -> set[str]:
    """Returns the directions without English that the first run is trained on, or all others."""
    first = next(iter(asked.runs))
    parts = {"trained": first, "unseen": f"{first}_zero_shot"}
    there = known[parts[about]].directions if parts[about] in known else {}
    return {name for name in there if side_of(name) == WITHOUT_ENGLISH}


def _row(row: Delta, off: Mapping[tuple[str, str], float | None]) -> Row:
    shares = [off.get((name, row.direction)) for name in (row.system, row.baseline)]
    return Row(row.system, row.baseline, row.direction, row.metric, 1, row.sentences,
               row.system_score, row.baseline_score, row.delta, row.low, row.high,
               *shares)  # fmt: skip


def _mean(each: Sequence[Delta], made: Sequence[Row], about: str) -> Row:
    low, high = bootstrap.interval(np.mean([row.replicates for row in each], axis=0))

    def mean(name: str) -> Any:
        values = [value for row in made if (value := getattr(row, name)) is not None]
        return float(np.mean(values)) if values else None

    return dataclasses.replace(
        made[0], about=about, directions=len(made), sentences=sum(row.sentences for row in made),
        low=low, high=high,
        **{name: mean(name) for name in ("score", "other", "delta", "off_target",
                                         "other_off_target")},
    )  # fmt: skip


def read(folder: Path) -> list[Row]:
    """Returns the rows that were drawn; none before."""
    path = folder / "zero_shot.jsonl"
    return [Row(**row) for row in read_jsonl(path)] if path.is_file() else []


def here(found: Sequence[Row]) -> str:
    """Returns the means of the first comparisons by BLEU."""
    said = [
        f"{row.system} {row.score:.1f}, {row.against} {row.other:.1f}, difference "
        f"{_interval(row)} ({row.directions} {row.about} directions)"
        for row in found
        if row.directions > 1 and row.metric == "bleu"
    ][:_FIRST]
    return f"Mean BLEU: {'; '.join(said)}."


def _interval(row: Row) -> str:
    return f"{signed(row.delta)} [{signed(row.low)}, {signed(row.high)}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def sections(asked: Asked, found: Sequence[Row]) -> list[str]:
    """Returns the parts of the page: pictures, means, and the unseen directions."""
    pictures = [f"![{title}]({name}.png)" for name, (title, *_) in maps(asked, found).items()]
    means = [
        [row.system, row.against, str(row.directions) + " " + row.about, METRIC_NAMES[row.metric],
         f"{row.score:.1f}", f"{row.other:.1f}", _interval(row),
         _percent(row.off_target), _percent(row.other_off_target)]
        for row in found if row.directions > 1
    ]  # fmt: skip
    head = ["system", "against", "directions", "metric", "score", "against", "difference",
            "wrong language, %", "against, %"]  # fmt: skip
    first = next(iter(asked.runs))
    unseen: dict[str, dict[str, Row]] = {}
    for row in found:
        if (row.system, row.against) == (f"{first}_zero_shot", f"{first}_pivot"):
            unseen.setdefault(row.about, {})[row.metric] = row
    lines = []
    for about, by_metric in unseen.items():
        if about == "unseen":
            continue
        source, target = (describe(code).name for code in split_direction(about))
        row = by_metric["bleu"]
        lines.append([f"{source} → {target}", str(row.sentences)]
                     + [cell for one in by_metric.values()
                        for cell in (f"{one.score:.1f}", f"{one.other:.1f}", _interval(one))]
                     + [_percent(row.off_target), _percent(row.other_off_target)])  # fmt: skip
    columns = ["direction", "sentences"]
    for metric in next(iter(unseen.values()), {}):
        columns += [METRIC_NAMES[metric], "pivot", "difference"]
    return [
        asked.zero_shot["before"],
        "\n\n".join(pictures),
        "## Means over directions",
        "In brackets the 95% interval over sentences (paired bootstrap).\n\n" + table(head, means),
        "## Directions that no model was trained on",
        f"{first}, directly and through English (two passes of it).\n\n"
        + table([*columns, "wrong language, %", "pivot, %"], lines),
    ]


def maps(asked: Asked, found: Sequence[Row]) -> dict[str, tuple[str, dict[str, float], bool]]:
    """Returns name of a picture -> its title, its values by direction, and whether signed."""
    first, second, *_ = (*asked.runs, "")
    one = [row for row in found if row.directions == 1 and row.metric == "bleu"]
    scores = {**_scores(asked, f"{first}_zero_shot"), **_scores(asked, first)}
    change = {row.about: row.delta for row in one
              if (row.system, row.against) == (f"{first}_zero_shot", f"{first}_pivot")}  # fmt: skip
    each = [(row.system, row.off_target, row.about) for row in one]
    each += [(row.against, row.other_off_target, row.about) for row in one]
    off = {about: 100 * share for system, share, about in each
           if system == f"{second}_zero_shot" and share is not None}  # fmt: skip
    made = {
        "zero_shot": (f"BLEU of {first}; a frame: trained on the pair", scores, False),
        "against_pivot": (f"BLEU of {first}, less that of its pivot", change, True),
        "wrong_language": (f"Wrong language of {second}'s zero-shot translations, %", off, False),
    }
    return {name: of for name, of in made.items() if of[1]}


def _scores(asked: Asked, system: str) -> dict[str, float]:
    """Returns BLEU of a system by direction, of the scores that are drawn."""
    wanted = {"system": system, "metric": "bleu", "subset": "all"}
    rows = read_scores(asked.folder / "scores.jsonl")
    return {row["direction"]: row["score"] for row in rows if wanted.items() <= row.items()}


def draw(asked: Asked, found: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the heat maps as .png and .svg."""
    trained, paths = _scores(asked, next(iter(asked.runs))), []
    for name, (_, values, sign) in maps(asked, found).items():
        codes = languages_of(values)
        drawn = plot.heat_map(
            values, {code: describe(code).name for code in codes}, signed=sign,
            framed=trained if name == "zero_shot" else (),
            percent=name == "wrong_language",
        )  # fmt: skip
        paths += [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        save(drawn, paths[-2:])
    return paths
