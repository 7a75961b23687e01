"""An experiment with all of its numbers, from what is kept of it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.eval.scoring.delta import BILINGUAL, Average, Delta, averages, deltas, from_plain
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import COPY
from m4.storage.files import read_json, read_jsonl
from scripts.results import ablations, curves, kept, speedrun, starts, zero_shot
from scripts.results.kept import Asked, Kept

METRICS = ("bleu", "chrf")


class Compared(NamedTuple):
    """Differences from one baseline by one metric, and their means."""

    baseline: str
    metric: str
    rows: list[Delta]
    means: list[Average]


@dataclasses.dataclass(frozen=True)
class Found:
    """An experiment with all of its numbers.

    Attributes:
        compared: Differences from the bilingual models, then from each run, by BLEU and chrF.
        about: System -> about.json, of those that have begun.
        curves: Dev losses of many configs, where there are such.
    """

    asked: Asked
    levels: ResourceLevels
    sizes: dict[str, int]
    systems: list[Kept]
    compared: list[Compared]
    rates: list[dict[str, Any]]
    about: dict[str, dict[str, Any]]
    baselines: list[dict[str, Any]]
    curves: list[curves.Curve]
    starts: list[starts.Row]
    zero_shot: list[zero_shot.Row]
    ablation: list[ablations.Run]
    speedrun: speedrun.Speedrun | None

    def of(self, name: str) -> Kept | None:
        return next((one for one in self.systems if one.name == name), None)


def read(folder: Path, again: bool = True) -> Found:
    """Returns all that is kept, with the numbers that follow from it.

    These take a minute for 102 languages. Without `again` they are those of deltas.jsonl and
    means.jsonl.
    """
    asked = kept.asked(folder)
    systems = [
        kept.read(folder, name)
        for name in (*asked.runs, *zero_shot.systems(asked), BILINGUAL, COPY)
    ]
    systems = [one for one in systems if one.directions]
    about = {name: read_json(path) for name in asked.runs
             if (path := kept.of(folder, name) / "about.json").is_file()}  # fmt: skip
    levels = ResourceLevels(**next((one["levels"] for one in about.values()), {}))
    sizes = kept.languages(folder)
    compared = computed(asked, systems, sizes, levels) if again else stored(folder)
    rates = folder / "rates.jsonl"
    counted = read_jsonl(rates) if rates.is_file() else []
    lines, baselines = curves.read(folder), kept.baselines(folder)
    rows = starts.rows(asked, compared) if asked.starts and again else starts.read(folder)
    untrained = (zero_shot.rows(asked, systems, counted) if asked.zero_shot and again
                 else zero_shot.read(folder))  # fmt: skip
    changed, fastest = ablations.read(folder, asked), speedrun.read(folder, asked)
    return Found(asked, levels, sizes, systems, compared, counted, about, baselines, lines, rows,
                 untrained, changed, fastest)  # fmt: skip


def computed(
    asked: Asked, systems: Sequence[Kept], sizes: dict[str, int], levels: ResourceLevels
) -> list[Compared]:
    """Returns differences from the bilingual models, and from each run of those after it."""
    if asked.zero_shot:  # compared by `zero_shot.rows`
        return []
    names = [one.name for one in systems]
    found = [
        compare(asked, systems, sizes, levels, baseline, metric)
        for baseline in (starts.baselines(asked) if asked.starts else (BILINGUAL, *asked.runs))
        for metric in METRICS
        if baseline in names
    ]
    return [one for one in found if one is not None]


def stored(folder: Path) -> list[Compared]:
    """Returns the differences that `draw` wrote, without replicates."""
    if not (folder / "means.jsonl").is_file():
        return []
    rows = from_plain(read_jsonl(folder / "deltas.jsonl"))
    means: dict[tuple[str, str], list[Average]] = {}
    for row in read_jsonl(folder / "means.jsonl"):
        means.setdefault((row.pop("baseline"), row.pop("metric")), []).append(Average(**row))
    return [
        Compared(*at, [row for row in rows if (row.baseline, row.metric) == at], of)
        for at, of in means.items()
    ]


def compare(
    asked: Asked,
    systems: Sequence[Kept],
    sizes: dict[str, int],
    levels: ResourceLevels,
    baseline: str,
    metric: str,
) -> Compared | None:
    """Returns the runs against the bilingual models, or those after a run against it, if any.

    Runs of another seed are not compared with a run.
    """
    runs = [*asked.runs]
    if baseline in runs:
        seed = {run: n for each in asked.seeds.values() for n, run in enumerate(each)}
        later = runs[runs.index(baseline) + 1 :]
        later = [run for run in later if seed.get(run) == seed.get(baseline)]
    else:
        later = runs
    chosen = [one for one in systems if one.name in (*later, baseline, COPY)]
    if not any(one.name in later for one in chosen):
        return None
    rows = deltas(kept.measured(chosen), sizes, metric, baseline)
    rows = [row for row in rows if row.system != COPY]
    return Compared(baseline, metric, rows, averages(rows, levels))
