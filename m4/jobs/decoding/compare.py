"""`m4 report RUN_A RUN_B --baseline=RUN_C`: one report of several runs, from their translations."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of
from m4.eval.decoding.hypotheses import (
    check_hypotheses,
    hypotheses_path,
    other_search,
    search_of,
    steps_of,
)
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.decoding.testsets import pair_sizes, train_pairs
from m4.eval.metrics import Metric
from m4.eval.report.page import Background, Results
from m4.eval.report.results import write_results
from m4.eval.scoring.delta import BILINGUAL
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from m4.eval.scoring.rates import REFERENCE
from m4.eval.scoring.score import COPY, System, find_decodes, read_scores, train_pairs_of
from m4.eval.scoring.winners import Cost, cost_of, total
from m4.jobs.decoding.report import curve, forgotten, show
from m4.settings import InputError, annotations_of, check_name, pasted
from m4.storage import run_folder
from m4.storage.files import check_tree
from m4.storage.metrics_log import read_metrics

_LEVELS = "experiment.ResourceLevels."


class ComparedRun(NamedTuple):
    """A system of the report."""

    name: str
    folder: Path  # the one that was given
    decodes: Path  # its translations: itself, its decodes/, or decodes/bilingual/
    split: str  # the test set

    @property
    def bilingual(self) -> bool:
        """True for a run's gathered baselines: the run's config is not theirs."""
        return self.decodes.name == BILINGUAL and self.decodes.parent.name == "decodes"

    @property
    def config(self) -> Path | None:
        """Its operative config, if it is kept with the translations."""
        return None if self.bilingual else self.above("operative_config.gin")

    def above(self, name: str) -> Path | None:
        """Returns a file of the translations' run: in their folder or the two above it."""
        # As the folder was given: rows of scores name the path, on any machine.
        places = (Path(os.path.normpath(self.decodes / up / name)) for up in ("", "..", "../.."))
        return next((path for path in places if path.is_file()), None)


def compare(
    runs: Sequence[str],
    baseline: str | None,
    output: Path,
    levels: ResourceLevels | None = None,
    testsets: Sequence[str] = ("test",),
    metrics: Sequence[Metric] = DEFAULTS.metrics,
) -> Results:
    """Scores the translations of all runs and the baseline's, and writes the files of a report.

    Of several test sets there are several pages, which lead to each other, those after the first
    one in folders of their names; the first is returned. No config is read, nothing is translated.

    Args:
        runs: Run folders, or folders of translations (<split>.<direction>.jsonl, plain or .gz),
            named by their last part, or NAME=FOLDER.
        baseline: Another one, or the name or folder of one of them. A run folder with bilingual
            baselines stands for these. Defaults to the first of the runs, itself.
        output: Folder of the report.
        levels: Defaults to those of the first run that has a config.
        testsets: "test", or names of test sets of their own.
        metrics: Metrics of the scores; the differences of the first one are drawn.
    """
    if (output / "run.json").is_file():
        raise InputError(f"--output={output}: a run's folder, whose own report is there")
    folders = [output if name == testsets[0] else output / name for name in testsets]
    pages = {}
    for here in folders:
        links = {name: os.path.relpath(folder / "report.html", here)
                 for name, folder in zip(testsets, folders, strict=True)}  # fmt: skip
        split = testsets[len(pages)]
        pages[split] = _compare(runs, baseline, here, levels, metrics, split, links)
    return pages[testsets[0]]


def _compare(
    runs: Sequence[str],
    baseline: str | None,
    output: Path,
    levels: ResourceLevels | None,
    metrics: Sequence[Metric],
    split: str,
    links: Mapping[str, str],
) -> Results:
    sources = [_source(text, split) for text in runs]
    against = sources[0]
    if baseline is not None:
        named = {one.name: str(one.folder) for one in sources}
        against = _source(named.get(baseline, baseline), split, as_baseline=True)
    # One of the runs, where the baseline is their folder, by the name that it has there.
    against = next((one for one in sources if one.decodes == against.decodes), against)
    sources = [*(one for one in sources if one is not against), against]
    if len(sources) == 1:
        raise InputError(f"{against.folder}: is compared with itself; give another run, too")
    for one in sources:
        if [other.name for other in sources].count(one.name) > 1 or one.name in (COPY, REFERENCE):
            raise InputError(f"{one.folder}: the name {one.name!r} is taken; give NAME=FOLDER")
        _check(one)
    directions = _common(sources)
    _check_signatures(sources)
    _check_searches(sources, directions)
    sizes: dict[str, int] = {}
    for one in sources:  # the baseline's come last, and count
        sizes |= _sizes(one)
    sizes |= pair_sizes(sizes, directions)
    languages = {key_of(pair_of(direction)) for direction in directions}
    systems = [_system(one) for one in sources]
    background = Background(
        title=f"{', '.join(one.name for one in sources[:-1])} against {against.name}",
        facts={one.name: str(one.folder) for one in sources},
        testsets=links,
        configs={one.name: path for one in sources if (path := one.config) is not None},
        curves={one.name: curve(path.parent) for one in sources
                if one is not against and not one.bilingual
                and (path := one.above("metrics.jsonl"))},
        costs={one.name: _cost(one) for one in sources},
        forgotten=forgotten(
            [(run.parent, system) for one, system in zip(sources, systems, strict=True)
             if split == "test" and not one.bilingual and (run := one.above("run.json"))], sizes),
    )  # fmt: skip
    found = levels or next(filter(None, map(_levels, sources)), DEFAULT_LEVELS)
    written = write_results(
        output,
        systems,
        metrics,
        {code: pairs for code, pairs in sizes.items() if code in languages},
        background=background,
        baseline=against.name,
        split=split,
        levels=found,
        directions=directions,
    )
    show(written, found)
    return written


def _source(text: str, split: str, as_baseline: bool = False) -> ComparedRun:
    name, equals, given = text.partition("=")
    if not equals or Path(text).exists():
        name, given = "", text
    folder = Path(given)
    if "://" in given:
        raise InputError(f"{given}: a report of several runs reads folders on this machine")
    check_name(name or given)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    check_tree(folder)
    gathered = folder / "decodes" / "bilingual"
    places = [folder, *([gathered] if as_baseline else []), folder / "decodes"]
    for place in places:
        if [*place.glob(f"{split}.*.jsonl"), *place.glob(f"{split}.*.jsonl.gz")]:
            default = BILINGUAL if place == gathered else folder.resolve().name
            return ComparedRun(name or default, folder, place, split)
    more = [] if split == "test" else [f"--testset={split}"]
    remedy = pasted("decode", f"--model_dir={folder}", *more)
    raise InputError(f"{folder}: no translations of {split}; make them with {remedy}")


def _check(source: ComparedRun) -> None:
    """Compares translations with their notes, where they have them: kept results have none."""
    if any(source.decodes.glob(f"{source.split}.*.json")):
        command = "report" if source.bilingual else "decode"
        remedy = pasted(command, f"--model_dir={source.folder}")
        check_hypotheses(
            source.decodes, source.split, find_decodes(source.decodes, source.split), remedy
        )


def _common(sources: Sequence[ComparedRun]) -> list[str]:
    """Returns the directions that all have translated: a mean over others would not compare."""
    found = [set(find_decodes(one.decodes, one.split)) for one in sources]
    common = set.intersection(*found)
    if not common:
        names = ", ".join(one.name for one in sources)
        raise InputError(f"no direction is translated by all of {names}")
    if left := sorted(set.union(*found) - common):
        more = f" and {len(left) - 12} more" if len(left) > 12 else ""
        print(f"left out, not translated by all: {', '.join(left[:12])}{more}", file=sys.stderr)
    return sorted(common)


def _check_signatures(sources: Sequence[ComparedRun]) -> None:
    """Raises InputError if two runs scored a direction by the same metric in two ways."""
    first: dict[tuple[str, str], tuple[Path, str]] = {}
    for path in dict.fromkeys(filter(None, (one.above("scores.jsonl") for one in sources))):
        for row in read_scores(path):
            fields = [field for field in row["signature"].split("|") if "version:" not in field]
            at, said = (row["metric"], row["direction"]), "|".join(fields)
            other, expected = first.setdefault(at, (path, said))
            if said != expected:
                raise InputError(
                    f"{path}: {at[0]} of {at[1]} is {said}, and {expected} in {other}; "
                    f"score both with one version of m4 ({pasted('eval')})"
                )


def _check_searches(sources: Sequence[ComparedRun], directions: Sequence[str]) -> None:
    """Raises InputError if two runs searched otherwise; kept results do not say how."""
    searches = (
        search_of(hypotheses_path(one.decodes, one.split, directions[0])) for one in sources
    )
    first = next(filter(None, searches), {})
    for one in sources:
        if other := other_search(one.decodes, one.split, directions, first):
            raise InputError(f"{other} as others are; make it again with {pasted('decode')}")


def _sizes(source: ComparedRun) -> dict[str, int]:
    """Returns `key_of` a pair of languages -> training pairs, by the run's scores or its corpus."""
    if (scores := source.above("scores.jsonl")) is not None:
        return train_pairs_of(read_scores(scores))
    if (manifest := source.above("vocabulary/manifest.json")) is not None:
        return train_pairs(Cache(manifest.parent))
    return {}


def _levels(source: ComparedRun) -> ResourceLevels | None:
    """Returns the levels of the run's config, if it is kept with the translations."""
    if (path := source.above("run.json")) is None:
        return None
    config: dict[str, Any] = run_folder.read(path.parent)["config"]
    found = {
        name: run_folder.whole_setting(path.parent, config, f"{_LEVELS}{name}")
        for name in annotations_of(ResourceLevels)
    }
    return ResourceLevels(**{name: size for name, size in found.items() if size is not None})


def _cost(source: ComparedRun) -> Cost:
    """Returns what a run's training took; of bilingual models together, where scores name them."""
    if not source.bilingual:
        path = source.above("metrics.jsonl")
        return cost_of(read_metrics(path.parent) if path else [])
    scores = source.above("scores.jsonl")
    rows = [row for row in (read_scores(scores) if scores else []) if row["system"] == BILINGUAL]
    folders = {Path(row["config"]).parent for row in rows if row.get("config")}
    return total([cost_of(read_metrics(folder)) for folder in sorted(folders)])


def _system(source: ComparedRun) -> System:
    """Returns a run as a system, with the steps of its translations where their notes name them."""
    config = source.config and str(source.config)
    steps = steps_of(source.decodes, source.split) or None
    return System(source.name, source.decodes, config, steps)
