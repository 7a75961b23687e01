"""Results of an experiment in results/<experiment>/: scores without the corpus.

experiment.toml says what was asked; `keep` fills systems/<system>/, `draw` makes the rest again:

  languages.json          language -> its training pairs; all that the experiment has
  rates.jsonl             how translations fail, as `m4 report` writes it
  curves/, seconds.json   of many configs (`scripts.results.curves`)
  systems/<system>/
    directions.jsonl      what each test set is and what translated it
    statistics.npz        counts a sentence (`m4.eval.metrics.Statistics`), "<direction>/<metric>"
    hypotheses.jsonl.gz   the translations, in the order of the test set
    about.json            of a trained run: machine, command, hours, resource levels; config.gin and
                          metrics.jsonl (every n-th row) stand next to it
    baselines.jsonl       of bilingual models: result.json and the note of the translations of each

No sentence of the corpus is here: counts have no words, and references are read while `keep` runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from m4.eval.decoding.settings import DEFAULTS
from m4.eval.metrics import Statistics
from m4.eval.scoring.delta import BILINGUAL
from m4.eval.scoring.score import COPY, Measured, System, tried
from m4.settings import InputError
from m4.storage.files import read_json, read_jsonl, whole, write_json, write_jsonl

RESULTS = Path(__file__).resolve().parents[2] / "results"
SPLIT = "test"
_ASKED = (
    "number",
    "title",
    "claim",
    "paper",
    "paper_result",
    "verdict",
    "why",
    "corpus",
    "machine",
)
_ASKED += ("command", "baselines", "runs")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The content of experiment.toml, which a person writes.

    Attributes:
        runs: System -> its run folder, in the order of the tables: each is also compared with those
            before it.
        command: Command that made a run; "{}" stands for its name.
        baselines: Folder of bilingual models.
        notes: Paragraphs for the end of the page.
        curves: `losses` whose cost is shown, the `step` of the comparison, and the `folder` with
            rows of `scripts.seeds`. Without a folder the curves are those of the runs, with the
            `seconds` of their steps or those of that file in results/; `seeds`: config -> its runs
            (default: one each). Runs are then compared with those of their seed.
        zero_shot: the systems that are `compared` ([system, other, "unseen" or "trained"], of the
            directions without English that the first run is not trained on, or is), and what was
            said `before` the runs.
        ablation: the `run`s, each with `name`, `label`, number of `seeds`, `settings` (of gin, with
            which `scripts.ablations` makes them); what was said `before` the runs.
        starts: `old`, the run that others continue; `seeds`, start -> its runs; the file of `cost`;
            what was said `before` the runs; those `named` in the summary.
        speedrun: `rules`, the `loss`, the `reference`'s curve, its date and what is said `about`
            it, the `pieces` of the dev targets in its vocabulary, each `record` (name, date, seeds,
            about) and `pilot` (name, about; the recipe that it is `timed` as), and what the pilots
            `tried`.
        extraction: each `part` of a model (`scripts.results.extraction`), the `directions` that it
            translates, and those `named` in the summary (model, experts).
    """

    folder: Path
    number: str
    title: str
    claim: str
    paper: str
    paper_result: str
    verdict: str
    why: str
    corpus: str
    machine: str
    command: str
    baselines: str
    runs: Mapping[str, str]
    notes: str = ""
    curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ablation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero_shot: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    speedrun: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extraction: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seeds(self) -> Mapping[str, list[str]]:
        """Config -> its runs, by seed."""
        return self.curves.get("seeds") or {run: [run] for run in self.runs}


@dataclasses.dataclass
class Kept:
    """One system's translations and counts.

    directions: direction -> {sentences, test_sha256, step, signatures}; statistics: (direction,
    metric) -> counts [sentences, counts]; hypotheses: direction -> translations.
    """

    name: str
    directions: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    statistics: dict[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)
    hypotheses: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, other: Kept) -> None:
        """Takes over the other's directions, in place of those it had of these names."""
        self.directions |= other.directions
        self.statistics |= other.statistics
        self.hypotheses |= other.hypotheses


def asked(folder: Path) -> Asked:
    """Reads experiment.toml. InputError: it is missing, or lacks a line."""
    path = folder / "experiment.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing; it says what is asked ({', '.join(_ASKED)})") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: {error}") from error
    known = {field.name for field in dataclasses.fields(Asked)} - {"folder"}
    if lacking := [name for name in _ASKED if name not in found]:
        raise InputError(f"{path}: no {', '.join(lacking)}")
    if more := sorted(found.keys() - known):
        raise InputError(f"{path}: {', '.join(more)}: not one of {', '.join(sorted(known))}")
    if wrong := {BILINGUAL, COPY} & found["runs"].keys():
        raise InputError(f"{path}: a run called {', '.join(wrong)}: this name is taken")
    return Asked(folder, **found)


def of(folder: Path, system: str) -> Path:
    """Returns the folder of a system."""
    return folder / "systems" / system


def read(folder: Path, system: str) -> Kept:
    """Returns a kept system, maybe without directions. Raises InputError for damaged files."""
    place = of(folder, system)
    found = Kept(system)
    if not (place / "directions.jsonl").is_file():
        return found
    rows = read_jsonl(place / "directions.jsonl")
    found.directions = {row.pop("direction"): row for row in rows}
    with np.load(place / "statistics.npz", allow_pickle=False) as arrays:
        for name in arrays.files:
            direction, metric = name.rsplit("/", 1)
            found.statistics[direction, metric] = arrays[name]
    if (texts := place / "hypotheses.jsonl.gz").is_file():
        for row in read_jsonl(texts):
            found.hypotheses.setdefault(row["direction"], []).append(row["hypothesis"])
    for (direction, metric), counts in found.statistics.items():
        if len(counts) != found.directions.get(direction, {}).get("sentences"):
            raise InputError(
                f"{place}/statistics.npz: {direction}/{metric}: not of directions.jsonl"
            )
    return found


def write(folder: Path, kept: Kept) -> None:
    """Writes the kept files of a system; equal content gives equal bytes."""
    place = of(folder, kept.name)
    names = sorted(kept.directions)
    write_jsonl(
        place / "directions.jsonl", ({"direction": at, **kept.directions[at]} for at in names)
    )
    arrays = {"/".join(at): _narrow(kept.statistics[at]) for at in sorted(kept.statistics)}
    with whole(place / "statistics.npz") as unfinished:
        np.savez_compressed(unfinished, **arrays)  # type: ignore[arg-type]
    if kept.hypotheses:
        lines = [
            json.dumps({"direction": at, "hypothesis": text}, ensure_ascii=False)
            for at in sorted(kept.hypotheses)
            for text in kept.hypotheses[at]
        ]
        with whole(place / "hypotheses.jsonl.gz") as unfinished:
            unfinished.write_bytes(
                gzip.compress("".join(f"{x}\n" for x in lines).encode(), 9, mtime=0)
            )


def _narrow(counts: np.ndarray) -> np.ndarray:
    """Converts counts to the smallest type that holds them."""
    most = int(counts.max(initial=0))
    kind = next(k for k in (np.uint8, np.uint16, np.uint32, np.int64) if most <= np.iinfo(k).max)
    return counts.astype(kind)


def baselines(folder: Path) -> list[dict[str, Any]]:
    """Returns the kept bilingual models: direction, folder (<language>.<hash>), result, note."""
    path = of(folder, BILINGUAL) / "baselines.jsonl"
    return read_jsonl(path) if path.is_file() else []


def languages(folder: Path) -> dict[str, int]:
    """Returns language -> training pairs, or {} before anything is kept."""
    path = folder / "languages.json"
    return read_json(path) if path.is_file() else {}


def write_languages(folder: Path, found: Mapping[str, int]) -> None:
    write_json(folder / "languages.json", {code: found[code] for code in sorted(found)}, indent=0)


def measured(systems: Iterable[Kept]) -> Measured:
    """Returns the systems in the form of `m4.eval.scoring`, as if translations were read now.

    Raises:
        InputError: two systems have translated other test sentences of one direction.
    """
    formulas = tried(DEFAULTS.metrics)
    systems, first = list(systems), {}
    statistics: dict[tuple[str, str, str], Statistics] = {}
    for kept in systems:
        for direction, about in kept.directions.items():
            other, expected = first.setdefault(direction, (kept.name, about["test_sha256"]))
            if about["test_sha256"] != expected:
                raise InputError(
                    f"{kept.name} and {other} have translated other test sentences of {direction}"
                )
            for metric, signature in about["signatures"].items():
                counts = kept.statistics[direction, metric].astype(np.int64)
                formula = formulas[metric].formula
                one = Statistics(metric, counts, formula, signature)
                statistics[kept.name, direction, metric] = one
    shown = tuple(
        System(
            one.name,
            Path(one.name),
            checkpoint_step={at: row["step"] for at, row in one.directions.items()},
        )
        for one in systems
        if one.name != COPY
    )
    decodes = {(one.name, direction): [] for one in systems for direction in one.directions}
    return Measured(SPLIT, shown, decodes, statistics)
