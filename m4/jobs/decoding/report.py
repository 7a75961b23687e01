"""`m4 report`: scores, ΔBLEU, its plot and report.html from translations; trains nothing.

It reports on one run, or on several from their translations (RUN_A RUN_B --baseline=RUN_C).
"""

import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of
from m4.eval.decoding.hypotheses import (
    check_hypotheses,
    gather,
    hypotheses_path,
    other_search,
    same_sentences,
    search_of,
    steps_of,
)
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.decoding.testsets import Portion, pair_sizes, train_pairs
from m4.eval.metrics import Metric
from m4.eval.report.results import DELTA_TITLE, Background, Results, write_results
from m4.eval.scoring import rates, winners
from m4.eval.scoring.delta import BILINGUAL, Delta, tables
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from m4.eval.scoring.score import (
    COPY,
    System,
    find_decodes,
    read_scores,
    score_table,
    train_pairs_of,
)
from m4.experiment import Experiment
from m4.jobs import streams
from m4.jobs.bilingual import Baseline, find_baselines
from m4.jobs.checkpoints.initial import name_and_step
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decoding.evaluate import gathered_baselines, system_of, tested
from m4.jobs.decoding.testsets import command_of, decodes_folder, scores_folder, trained_step
from m4.settings import InputError, annotations_of, check_name, pasted, some
from m4.storage import run_folder
from m4.storage.checkpoints import read_note
from m4.storage.files import check_tree, read_jsonl
from m4.storage.local_copy import fetched
from m4.storage.metrics_log import read_metrics, warn_if_changed


def report(experiment: Experiment) -> Results:
    """Scores all translations, against bilingual baselines if any, and writes the report."""
    step = trained_step(experiment.folder)
    note, steps = read_note(experiment.folder, step), str(step)
    if (best := note.get("best_step")) is not None:
        steps += f"; parameters of step {best}, dev's best"
    cache = open_corpus(experiment, test_sets)
    model = system_of(experiment, cache)
    remedy, search = command_of(experiment, "decode"), experiment.decoding.search()
    check_hypotheses(model.decodes, "test", tested(cache), remedy, search)
    compared = experiment.baselines is not None
    found = find_baselines(experiment, cache) if compared else {}
    systems = [model, *(_bilingual(experiment, cache, found) if compared else [])]
    shares, epochs = _seen(experiment.folder, note, cache)
    folder, data = scores_folder(experiment), experiment.data
    untrained = sorted(path.parent.name for path in folder.glob("zero_shot*/report.html"))
    pairs, decoding = train_pairs(cache), experiment.decoding
    subsets = Portion("test", test_sentences=decoding.test_sentences).subsets(cache)
    background = Background(
        title=DELTA_TITLE if compared else "Scores of one multilingual model",
        corpus=data.about or "", facts=_facts(experiment, cache, model, found, steps),
        configs={"multilingual": folder / "operative_config.gin"},
        curves={model.name: curve(experiment.folder)}, sampling=shares, epochs=epochs,
        testsets={"test": "report.html"} | {name: f"{name}/report.html" for name in untrained},
        forgotten=forgotten([(experiment.folder, model)], pairs),
    )  # fmt: skip
    baseline = BILINGUAL if compared else None
    given = folder, systems, decoding.metrics, pairs, subsets, background
    return write_results(*given, baseline=baseline, levels=data.levels)


def show(written: Results, levels: ResourceLevels) -> None:
    """Prints the means, the languages if they are few, the rates and the files."""
    terminal = streams.console()
    if written.drawn is not None:
        for table in tables(written.rows, written.averages, terminal.width, levels):
            terminal.print(table)
    else:
        terminal.print(score_table(read_jsonl(written.scores)))
    terminal.print(rates.table(written.rate_rows, levels))
    if written.background.forgotten:
        terminal.print(winners.forgotten_table(written.background.forgotten, levels))
    if written.best:
        costs, metric = written.background.costs, written.rows[0].metric
        terminal.print(winners.table(written.best, costs, metric))
        terminal.print(winners.advice(written.best, costs, metric), soft_wrap=True)
    config = written.html.with_name("operative_config.gin")
    paths = [written.html, *(written.drawn or ()), written.scores]
    streams.print_files(terminal, [*paths, *([config] if config.is_file() else [])])


def _seen(
    folder: Path, note: Mapping[str, Any], cache: Cache
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns each language's share of the training pairs and its epochs."""
    warn_if_changed(folder, note)
    counts = folder / "atlas.train.json"
    if "assigned" in note and not counts.is_file():
        said = "missing; the report does not show which experts training chose, which writes it"
        print(f"{counts}: {said}", file=sys.stderr)
    seen = note.get("seen")
    if seen is None or seen["from_step"]:  # the checkpoint has no counts
        return {}, {}
    total = sum(count["pairs"] for count in seen["languages"].values()) or 1  # no step was taken
    shares = {name: count["pairs"] / total for name, count in seen["languages"].items()}
    epochs: dict[str, float] = {}
    for direction, count in seen["directions"].items():  # a pair is seen in each of its directions
        pair = pair_of(direction)
        times = count["pairs"] / cache.size(pair, "train")
        epochs[key_of(pair)] = max(times, epochs.get(key_of(pair), 0.0))
    return shares, epochs


def _bilingual(experiment: Experiment, cache: Cache, found: Mapping[str, Baseline]) -> list[System]:
    """Returns the bilingual models as one system, with their translations in one folder."""
    gathered, search = decodes_folder(experiment) / BILINGUAL, experiment.decoding.search()
    made = {}
    for direction in tested(cache):
        baseline = found[key_of(pair_of(direction))]
        remedy = f"{command_of(experiment, 'baselines')}, after removing {baseline.decodes}"
        check_hypotheses(baseline.decodes, "test", [direction], remedy, search)
        made[direction] = baseline.decodes, str(baseline.folder / "result.json")
    gather(made, gathered, "test")
    return [gathered_baselines(gathered)]


def curve(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's rows of metrics, preceded by those of the runs that it continues."""
    rows = read_metrics(folder)
    if not (folder / "run.json").is_file():
        return rows
    about = run_folder.read(folder).get("initial") or {}
    if not about.get("optimizer"):
        return rows
    parent = fetched(name_and_step(about["run"])[0], ["metrics.jsonl", "run.json"].__contains__)
    before = curve(parent) if (parent / "metrics.jsonl").is_file() else []
    return [*(row for row in before if row["step"] <= about["step"]), *rows]


def _facts(
    experiment: Experiment, cache: Cache, model: System, found: Mapping[str, Baseline], steps: str
) -> dict[str, str]:
    about = run_folder.read(experiment.folder)
    paths = (hypotheses_path(model.decodes, "test", direction) for direction in tested(cache))
    # The date is that of the translations, so a report does not depend on when it is made.
    translated = max(path.stat().st_mtime for path in paths)
    facts = {
        "date": datetime.datetime.fromtimestamp(translated, datetime.UTC).date().isoformat(),
        "machine": about.get("machine", ""),
        "versions": ", ".join(f"{k} {v}" for k, v in about["versions"].items()),
        "steps": steps,
        "seed": str(experiment.training.seed),
        "corpus": f"{cache.fingerprint[:16]}, {json.dumps(cache.manifest['identity']['source'])}",
    }
    if (parent := about.get("initial")) is not None:
        changes = [f"{name} {was} -> {now}" for name, (was, now) in parent["changes"].items()]
        facts["begun from"] = "; ".join([f"{parent['run']}, step {parent['step']}", *changes])
    if found:
        latest = max(found.values(), key=lambda one: one.result["gain_last_quarter"])
        cut = [one.language for one in found.values() if not one.result["stopped_early"]]
        facts["bilingual models"] = (
            "one a language pair (both directions), trained until dev chrF stopped rising"
            + (f" (ended at the most steps: {', '.join(cut)})" if cut else "")
            + "; in the last quarter of the steps it rose by at most "
            f"{latest.result['gain_last_quarter']:.1f} ({latest.language})"
        )
    return facts


def forgotten(
    runs: Sequence[tuple[Path, System]], train_pairs: Mapping[str, int]
) -> dict[str, list[Delta]]:
    """Returns run -> changes in scores of the kept directions, for runs that keep any.

    If the old model has not translated the same sentences, stderr shows the command for that.
    """
    found = {}
    for folder, system in runs:
        record = run_folder.read(folder) if (folder / "run.json").is_file() else {}
        about = record.get("initial") or {}
        if not (kept := about.get("kept")):
            continue
        name, step = name_and_step(about["run"])[0], about["step"]
        old = fetched(name, lambda file: file.startswith(("decodes/", "run.json")))
        places = [old / "decodes", *sorted((old / "decodes").glob("**/"))]
        at = next((place for place in places if _fits(place, system.decodes, kept, step)), None)
        if at is None:
            flags = [
                f"--gin.experiment.Decoding.{setting}={value!r}"
                for setting, value in record["decoding"].items()
                if value != run_folder.decoding_of(old).get(setting) and setting != "batch_rows"
            ]
            remedy = pasted("decode", f"--model_dir={name}", f"--step={step}", *flags)
            print(
                f"what {system.name} forgets is not known: {name} has not translated the test sets "
                f"of {', '.join(kept[:3])} as it has; `{remedy}` does (docs/initial.md)",
                file=sys.stderr,
            )
            continue
        pairs = {key: train_pairs.get(key, 0) for key in (key_of(pair_of(one)) for one in kept)}
        before = System(Path(name).name, at)
        found[system.name] = winners.changes(before, system, kept, DEFAULTS.metrics[0], pairs)
    return found


def _fits(folder: Path, decodes: Path, directions: Sequence[str], step: int) -> bool:
    """Returns whether a step translated the sentences of `decodes` with the same search."""
    steps = steps_of(folder, "test") if folder.is_dir() else {}
    if not all(steps.get(name) == step for name in directions):
        return False
    searches = {name: search_of(hypotheses_path(decodes, "test", name)) for name in directions}
    return same_sentences(folder, decodes, "test", directions) and not any(
        search is not None and other_search(folder, "test", [name], search)
        for name, search in searches.items()
    )


class ComparedRun(NamedTuple):
    """A system of the report."""

    name: str
    folder: Path  # as given
    decodes: Path  # its translations: the folder, its decodes/ or decodes/bilingual/

    @property
    def bilingual(self) -> bool:
        """True for a run's gathered baselines, whose config is not the run's."""
        return self.decodes.name == BILINGUAL and self.decodes.parent.name == "decodes"

    @property
    def config(self) -> Path | None:
        """Its operative config, if that is next to the translations."""
        return None if self.bilingual else self.above("operative_config.gin")

    def above(self, name: str) -> Path | None:
        """Returns a file of the run: from the translations' folder or the two above it."""
        # Rows of scores name the path as given, on any machine.
        places = (Path(os.path.normpath(self.decodes / up / name)) for up in ("", "..", "../.."))
        return next((path for path in places if path.is_file()), None)


def compare(
    runs: Sequence[str], baseline: str | None, output: Path, levels: ResourceLevels | None = None,
    testsets: Sequence[str] = ("test",), metrics: Sequence[Metric] = DEFAULTS.metrics,
) -> Results:  # fmt: skip
    """Scores the translations of all runs and of the baseline, and writes a report.

    Several `testsets` make several linked pages, all but the first in folders of their names; the
    first is returned. No config is read and nothing is translated. Runs are folders of runs or of
    translations, named by their last part or NAME=FOLDER. The baseline is a run (by default the
    first one), and a run with bilingual baselines stands for these. Levels default to those of the
    first run that has a config.
    """
    if (output / "run.json").is_file():
        raise InputError(f"--output={output}: a run's folder, whose own report is there")
    folders = [output if name == testsets[0] else output / name for name in testsets]
    pages = []
    for split, here in zip(testsets, folders, strict=True):
        links = {name: os.path.relpath(folder / "report.html", here)
                 for name, folder in zip(testsets, folders, strict=True)}  # fmt: skip
        sources = _opened(runs, baseline, split)
        directions = _common(sources, split)
        sizes: dict[str, int] = {}
        for one in sources:  # the baseline's come last and win
            sizes |= _sizes(one)
        sizes |= pair_sizes(sizes, directions)
        languages = {key_of(pair_of(direction)) for direction in directions}
        # Labels include the steps of the translations if their notes name them.
        systems = [System(one.name, one.decodes, one.config and str(one.config),
                          steps_of(one.decodes, split) or None) for one in sources]  # fmt: skip
        *others, against = sources
        began = [(run.parent, system) for one, system in zip(sources, systems, strict=True)
                 if split == "test" and not one.bilingual
                 and (run := one.above("run.json"))]  # fmt: skip
        background = Background(
            title=f"{', '.join(one.name for one in others)} against {against.name}",
            facts={one.name: str(one.folder) for one in sources},
            testsets=links,
            configs={one.name: path for one in sources if (path := one.config) is not None},
            curves={one.name: curve(path.parent) for one in others
                    if not one.bilingual and (path := one.above("metrics.jsonl"))},
            costs={one.name: _cost(one) for one in sources},
            forgotten=forgotten(began, sizes),
        )  # fmt: skip
        found = levels or next(filter(None, map(_levels, sources)), DEFAULT_LEVELS)
        sizes = {code: pairs for code, pairs in sizes.items() if code in languages}
        pages.append(
            write_results(
                here, systems, metrics, sizes, background=background, baseline=against.name,
                split=split, levels=found, directions=directions,
            )
        )  # fmt: skip
        show(pages[-1], found)
    return pages[0]


def _opened(runs: Sequence[str], baseline: str | None, split: str) -> list[ComparedRun]:
    """Returns the runs, the baseline last; checks names and that translations are complete."""
    sources = [_source(text, split) for text in runs]
    against = sources[0]
    if baseline is not None:
        named = {one.name: str(one.folder) for one in sources}
        against = _source(named.get(baseline, baseline), split, as_baseline=True)
    # If the baseline is one of the runs, it keeps the name that it has there.
    against = next((one for one in sources if one.decodes == against.decodes), against)
    sources = [*(one for one in sources if one is not against), against]
    if len(sources) == 1:
        raise InputError(f"{against.folder}: is compared with itself; give another run, too")
    names = [one.name for one in sources]
    for one in sources:
        if names.count(one.name) > 1 or one.name in (COPY, rates.REFERENCE):
            raise InputError(f"{one.folder}: the name {one.name!r} is taken; give NAME=FOLDER")
        # Translations are verified by their notes, if any: kept results have none.
        if any(one.decodes.glob(f"{split}.*.json")):
            remedy = pasted("report" if one.bilingual else "decode", f"--model_dir={one.folder}")
            check_hypotheses(one.decodes, split, find_decodes(one.decodes, split), remedy)
    return sources


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
            return ComparedRun(name or default, folder, place)
    more = [] if split == "test" else [f"--testset={split}"]
    remedy = pasted("decode", f"--model_dir={folder}", *more)
    raise InputError(f"{folder}: no translations of {split}; make them with {remedy}")


def _common(sources: Sequence[ComparedRun], split: str) -> list[str]:
    """Returns the directions that all runs translated, over which means are comparable.

    Raises InputError if there is none or two searches differ; kept results do not record theirs.
    """
    found = [set(find_decodes(one.decodes, split)) for one in sources]
    common = sorted(set.intersection(*found))
    if not common:
        names = ", ".join(one.name for one in sources)
        raise InputError(f"no direction is translated by all of {names}")
    if left := sorted(set.union(*found).difference(common)):
        print(f"left out, not translated by all: {some(left, 12)}", file=sys.stderr)
    searches = (search_of(hypotheses_path(one.decodes, split, common[0])) for one in sources)
    first = next(filter(None, searches), {})
    for one in sources:
        if other := other_search(one.decodes, split, common, first):
            raise InputError(f"{other} as others are; make it again with {pasted('decode')}")
    return common


def _sizes(source: ComparedRun) -> dict[str, int]:
    """Returns `key_of` a language pair -> training pairs, from the run's scores or corpus."""
    if (scores := source.above("scores.jsonl")) is not None:
        return train_pairs_of(read_scores(scores))
    if (manifest := source.above("vocabulary/manifest.json")) is not None:
        return train_pairs(Cache(manifest.parent))
    return {}


def _levels(source: ComparedRun) -> ResourceLevels | None:
    """Returns the levels of the run's config, if that is next to the translations."""
    if (path := source.above("run.json")) is None:
        return None
    config, found = run_folder.read(path.parent)["config"], dict[str, int]()
    for name in annotations_of(ResourceLevels):
        full = f"experiment.ResourceLevels.{name}"
        if (size := run_folder.whole_setting(path.parent, config, full)) is not None:
            found[name] = size
    return ResourceLevels(**found)


def _cost(source: ComparedRun) -> winners.Cost:
    """Returns the cost of a run's training; that of all bilingual models if scores name them."""
    if not source.bilingual:
        path = source.above("metrics.jsonl")
        return winners.cost_of(read_metrics(path.parent) if path else [])
    scores = source.above("scores.jsonl")
    rows = [row for row in (read_scores(scores) if scores else []) if row["system"] == BILINGUAL]
    folders = {Path(row["config"]).parent for row in rows if row.get("config")}
    return winners.total([winners.cost_of(read_metrics(folder)) for folder in sorted(folders)])
