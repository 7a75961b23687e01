"""`m4 report`: scores, ΔBLEU, its plot and report.html, of what is decoded; nothing is trained."""

import datetime
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of
from m4.eval.decoding.hypotheses import (
    check_hypotheses,
    hypotheses_path,
    other_search,
    same_sentences,
    search_of,
    steps_of,
)
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.decoding.testsets import Portion, train_pairs
from m4.eval.report.page import DELTA_TITLE, Background, Results
from m4.eval.report.results import write_results
from m4.eval.scoring import forgetting, rates, winners
from m4.eval.scoring.delta import BILINGUAL, Delta, tables
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System, score_table
from m4.experiment import Experiment
from m4.jobs import streams
from m4.jobs.bilingual.baselines import Finished, find_baselines
from m4.jobs.checkpoints.initial import name_and_step
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decoding.evaluate import system_of, tested
from m4.jobs.decoding.testsets import command_of, decodes_folder, scores_folder, trained_step
from m4.settings import pasted
from m4.storage import run_folder
from m4.storage.checkpoints import read_note
from m4.storage.files import read_jsonl, whole_folder
from m4.storage.local_copy import fetched
from m4.storage.metrics_log import read_metrics, warn_if_changed


def report(experiment: Experiment) -> Results:
    """Scores everything that is decoded against the bilingual baselines; writes the report.

    An experiment that names no baselines has no ΔBLEU.
    """
    step = trained_step(experiment.folder)
    note, steps = read_note(experiment.folder, step), str(step)
    if (best := note.get("best_step")) is not None:
        steps += f"; parameters of step {best}, dev's best"
    cache = open_corpus(experiment, test_sets)
    model = system_of(experiment, cache)
    check_hypotheses(
        model.decodes,
        "test",
        tested(cache),
        command_of(experiment, "decode"),
        experiment.decoding.search(),
    )
    compared = experiment.baselines is not None
    found = find_baselines(experiment, cache) if compared else {}
    systems = [model, *(_bilingual(experiment, cache, found) if compared else [])]
    shares, epochs = _seen(experiment.folder, note, cache)
    folder, data = scores_folder(experiment), experiment.data
    untrained = sorted(path.parent.name for path in folder.glob("zero_shot*/report.html"))
    return write_results(
        folder=folder,
        systems=systems,
        train_pairs=train_pairs(cache),
        subsets=Portion("test", test_sentences=experiment.decoding.test_sentences).subsets(cache),
        background=Background(
            title=DELTA_TITLE if compared else "Scores of one multilingual model",
            corpus=data.about or "",
            facts=_facts(experiment, cache, found, steps),
            configs={"multilingual": folder / "operative_config.gin"},
            curves={model.name: curve(experiment.folder)},
            sampling=shares,
            epochs=epochs,
            testsets={"test": "report.html"} | {name: f"{name}/report.html" for name in untrained},
            forgotten=forgotten([(experiment.folder, model)], train_pairs(cache)),
        ),
        metrics=experiment.decoding.metrics,
        levels=data.levels,
        baseline=BILINGUAL if compared else None,
    )


def show(written: Results, levels: ResourceLevels) -> None:
    """Prints the means, the languages where they are few, the rates and the files."""
    terminal = streams.console()
    if written.drawn is not None:
        for table in tables(written.rows, written.averages, terminal.width, levels):
            terminal.print(table)
    else:
        terminal.print(score_table(read_jsonl(written.scores)))
    terminal.print(rates.table(written.rate_rows, levels))
    if written.background.forgotten:
        terminal.print(forgetting.table(written.background.forgotten, levels))
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
    """Returns the share of the pairs and the epochs by language, of the model's training."""
    warn_if_changed(folder, note)
    counts = folder / "atlas.train.json"
    if "assigned" in note and not counts.is_file():
        print(
            f"{counts}: missing; the report does not show which experts training chose. Training "
            "writes it with every checkpoint",
            file=sys.stderr,
        )
    seen = note.get("seen")
    if seen is None or seen["from_step"]:  # trained before this was counted
        return {}, {}
    total = sum(count["pairs"] for count in seen["languages"].values()) or 1  # of no steps
    shares = {name: count["pairs"] / total for name, count in seen["languages"].items()}
    epochs: dict[str, float] = {}
    for direction, count in seen["directions"].items():  # a pair is seen in each of its directions
        pair = pair_of(direction)
        times = count["pairs"] / cache.size(pair, "train")
        epochs[key_of(pair)] = max(times, epochs.get(key_of(pair), 0.0))
    return shares, epochs


def _bilingual(experiment: Experiment, cache: Cache, found: Mapping[str, Finished]) -> list[System]:
    """Returns the bilingual models as one system, with hypotheses gathered in one folder."""
    gathered = decodes_folder(experiment) / BILINGUAL
    configs, steps = {}, {}
    paths: list[Path] = []
    for direction in tested(cache):
        baseline = found[key_of(pair_of(direction))]
        check_hypotheses(
            baseline.decodes,
            "test",
            [direction],
            f"{command_of(experiment, 'baselines')}, after removing {baseline.decodes}",
            experiment.decoding.search(),
        )
        path = hypotheses_path(baseline.decodes, "test", direction)
        paths += [path, path.with_suffix(".json")]
        configs[direction] = str(baseline.folder / "result.json")
        steps[direction] = baseline.result["note"]["best_step"]
    with whole_folder(gathered) as unfinished:
        for path in paths:
            shutil.copyfile(path, unfinished / path.name)
    return [System(BILINGUAL, gathered, config=configs, checkpoint_step=steps)]


def curve(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics of a run, after those of the runs that it continues."""
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
    experiment: Experiment, cache: Cache, found: Mapping[str, Finished], steps: str
) -> dict[str, str]:
    about = run_folder.read(experiment.folder)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
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
    """Returns run -> changes of the directions that it keeps; runs that keep none are left out.

    Where the old model has not translated them with the run's settings, a line on stderr says which
    command does.
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
        found[system.name] = forgetting.changes(before, system, kept, DEFAULTS.metrics[0], pairs)
    return found


def _fits(folder: Path, decodes: Path, directions: Sequence[str], step: int) -> bool:
    """Returns whether a step has translated the sentences of `decodes` with the same search."""
    steps = steps_of(folder, "test") if folder.is_dir() else {}
    return (
        all(steps.get(name) == step for name in directions)
        and same_sentences(folder, decodes, "test", directions)
        and all(
            other_search(folder, "test", [name], search) is None
            for name in directions
            if (search := search_of(hypotheses_path(decodes, "test", name))) is not None
        )
    )
