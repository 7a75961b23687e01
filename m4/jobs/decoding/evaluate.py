"""`m4 eval`: scores the test sets, once or checkpoint by checkpoint (--watch, --steps)."""

import contextlib
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from m4.data.sources import SPLITS
from m4.eval.decoding.hypotheses import check_hypotheses, configs_of, other_search, steps_of
from m4.eval.decoding.testsets import Portion, train_pairs
from m4.eval.report import curves
from m4.eval.report.figures import save
from m4.eval.scoring.delta import BILINGUAL
from m4.eval.scoring.score import (
    Scores,
    System,
    document_rows,
    find_decodes,
    measure,
    read_decodes,
    read_scores,
    replace_by_step,
    rows_by_step,
    said_by_step,
    score_rows,
    score_table,
    tried,
)
from m4.experiment import Experiment
from m4.jobs import streams
from m4.jobs.checkpoints.checkpoint import store_of
from m4.jobs.decoding import testsets
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.settings import InputError, first_line
from m4.storage.checkpoints import SCORES_BY_STEP, Removed
from m4.storage.files import write_jsonl
from m4.storage.local_copy import address_of
from m4.storage.objects import Unreachable
from m4.storage.steps import complete_steps, is_removed, latest_step
from m4.train.measuring.watchdog import heartbeat


def evaluate(
    experiment: Experiment, *, split: str = "test", step: int | None = None,
    sentences: int | None = None,
) -> Path:  # fmt: skip
    """Scores the translations of a split; returns the scores' path.

    The file is scores.jsonl, for dev scores.dev.jsonl, for 20 `sentences` per direction
    scores.test20.jsonl, for a separate test set scores.<name>.jsonl. Scores of a step or a trial
    are next to its translations. Several processes translate together; the primary one scores.
    """
    distributed.on_primary_then_broadcast("metrics", lambda: [*tried(experiment.decoding.metrics)])
    testsets.decode(experiment, split=split, step=step, sentences=sentences)
    portion = Portion(split, sentences, test_sentences=experiment.decoding.test_sentences)
    name = "scores.jsonl" if portion.name == "test" else f"scores.{portion.name}.jsonl"
    path = testsets.scores_folder(experiment, step) / name

    def score() -> None:
        cache = testsets.open_for(experiment, split)
        model = system_of(experiment, cache, split=portion.name, step=step)
        systems = [model]
        if portion.name == "test":  # baselines translate only the test split
            systems += _bilingual(experiment, cache)
        measured = measure(systems, experiment.decoding.metrics, portion.name)
        subsets = testsets.subsets(experiment, cache, portion)
        rows = score_rows(measured, train_pairs(cache), subsets)
        write_jsonl(path, rows)
        made = _task_metrics(experiment, cache, model, portion, path)
        if documents := document_rows(measured):
            made.append(path.with_name(path.name.replace("scores", "scores_by_document")))
            write_jsonl(made[-1], documents)
        terminal = streams.console()
        terminal.print(score_table(rows))
        streams.print_files(terminal, [path, *made])

    distributed.on_primary_then_broadcast("scores", score)
    return path


def _bilingual(experiment: Experiment, cache: Cache) -> list[System]:
    """Returns the gathered baselines, if any; warns if they used another search."""
    gathered = testsets.decodes_folder(experiment) / BILINGUAL
    if gathered.is_dir():
        check_hypotheses(gathered, "test", tested(cache), testsets.command_of(experiment, "report"))
        other = other_search(gathered, "test", tested(cache), experiment.decoding.search())
        if other is None:
            return [gathered_baselines(gathered)]
    elif (experiment.folder / "decodes" / BILINGUAL).is_dir():
        other = "not translated with this command's settings"
    else:
        return []
    again = " && ".join(testsets.command_of(experiment, name) for name in ("baselines", "report"))
    print(f"bilingual baselines are left out: {other} ({again})", file=sys.stderr)
    return []


def gathered_baselines(folder: Path) -> System:
    """Returns the bilingual models as one system, with their translations gathered in a folder."""
    configs, steps = configs_of(folder, "test"), steps_of(folder, "test")
    return System(BILINGUAL, folder, config=configs, checkpoint_step=steps)


def _task_metrics(
    experiment: Experiment, cache: Cache, system: System, portion: Portion, scores: Path
) -> list[Path]:
    """Writes the source's own metrics by direction, next to the scores; returns the files."""
    source: Any = experiment.data.corpus.opened_source
    if portion.split not in SPLITS or not hasattr(source, "task_metrics"):
        return []
    rows, split, found = [], portion.split, find_decodes(system.decodes, portion.name)
    for direction in [name for name in found if name in cache.directions]:
        path, size = found[direction], cache.size(pair_of(direction), split)
        texts = [row.hypothesis for row in read_decodes(path)]
        predictions = dict(zip(portion.chosen(range(size)), texts, strict=True))
        if measured := source.task_metrics(direction, split, size, predictions):
            step = system.checkpoint_step
            step = step[direction] if isinstance(step, Mapping) else step
            of = {"direction": direction, "split": split, "checkpoint_step": step}
            rows.append({**of, **measured})
    path = scores.with_name(scores.name.replace("scores", "task_metrics"))
    if not rows:
        print(f"no {path.name}: cleaning left out examples that the tasks' metrics need")
        path.unlink(missing_ok=True)
        return []
    write_jsonl(path, rows)
    return [path]


def tested(cache: Cache) -> list[str]:
    """Returns the directions with test sentences."""
    return [d for d in cache.directions if cache.size(pair_of(d), "test")]


def system_of(
    experiment: Experiment, cache: Cache, *, split: str = "test", step: int | None = None
) -> System:
    """Returns the trained model as a system to score, with the step of each translation."""
    decodes = testsets.decodes_folder(experiment, step)
    name = system_name(build(experiment, cache).model)
    return system(experiment, name, decodes, steps_of(decodes, split))


def system(experiment: Experiment, name: str, decodes: Path, steps: Mapping[str, int]) -> System:
    """Returns a model's translations as a system; `steps` has their checkpoints by direction."""
    config = address_of(testsets.scores_folder(experiment) / "operative_config.gin")
    return System(name, decodes, config=str(config), checkpoint_step=steps)


def system_name(model: Transformer) -> str:
    """Returns the name under which scores list a model."""
    return "dense" if model.moe is None else "moe"


_sleep = time.sleep


def follow(
    experiment: Experiment, *, split: str = "dev", sentences: int | None = None,
    directions: Sequence[str] = (), steps: Sequence[int] | None = None,
    seconds: float | None = None,
) -> None:  # fmt: skip
    """Scores checkpoints in the order of steps, into scores_by_step.jsonl.

    Steps that have scores are skipped. Several processes translate together; the primary one
    scores. With `seconds`, it looks for new checkpoints at this interval until training has ended;
    otherwise it looks once.
    """
    folder, portion = experiment.folder, Portion(split, sentences, tuple(directions))
    build(experiment, None).placed_params()  # refuses impossible sizes
    if seconds is None:
        for step in steps or (None,):
            testsets.trained_step(folder, step)
    scorer: _Scorer | None = None
    done: set[int] = set()  # or given up
    waiting: list[int] = []
    silent = seconds is not None  # until something was said
    while True:
        found, ended = distributed.on_primary_then_broadcast(
            "checkpoints", lambda before=waiting: _look(folder, before)
        )
        there = [step for step in found if steps is None or step in steps]
        for step in waiting:
            if step not in {*there, *done}:
                _say(f"step {step}: deleted before it was scored (Training.keep_checkpoints)")
        waiting = [step for step in there if step not in done]
        if waiting:
            scorer = scorer or _Scorer(experiment, portion)
            scorer.score(waiting[0])
            done.add(waiting[0])
        elif seconds is None or ended:
            if scorer is not None and scorer.failed is not None:
                raise scorer.failed
            _say(str(testsets.scores_folder(experiment) / SCORES_BY_STEP))
            return
        else:
            if silent and not done:
                _say(f"{folder}: no checkpoint yet; waiting for the first")
            silent = False
            _sleep(seconds)


def _look(folder: Path, before: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Returns the complete steps, or `before`, and whether training has ended."""
    try:
        latest, ended = latest_step(folder / "checkpoints"), False
        if latest is not None and _is_last(folder, latest):
            beat = heartbeat(address_of(folder))
            ended = beat is None or beat.ended(time.time())  # otherwise it trains on
        return complete_steps(folder / "checkpoints"), ended  # including steps saved meanwhile
    except (OSError, Unreachable) as error:
        _say(f"{folder}: will look again ({first_line(error)})")
        return before, False


@functools.cache
def _is_last(folder: Path, step: int) -> bool:
    """Returns whether training had finished at a step, by its steps or early stopping."""
    with store_of(folder) as store, contextlib.suppress(Removed):
        return store.note(step).get("finished", False)
    return False


def _say(line: str) -> None:
    if distributed.is_primary():
        print(line, flush=True)


class _Scorer:
    """Scores steps with one compiled program, and keeps their curve."""

    def __init__(self, experiment: Experiment, portion: Portion) -> None:
        self._decoder = testsets.PortionDecoder(experiment, portion)
        self._experiment, self._portion = experiment, portion
        self._system = system_name(self._decoder.parts.model)
        self._metrics = tried(experiment.decoding.metrics)
        self._scores: dict[int, Scores] = {}  # set in the primary process
        self.failed: InputError | None = None  # the step is damaged, or another model's
        distributed.on_primary_then_broadcast("scores", self._read)

    def score(self, step: int) -> None:
        """Translates with a step's checkpoint and scores, unless that is done."""
        if distributed.on_primary_then_broadcast("scores", lambda: step in self._scores):
            return
        if distributed.is_primary():
            self._path(step).unlink(missing_ok=True)  # scores of older translations must not remain
        try:
            self._decoder.decode(step, self._path(step).parent)
        except InputError as error:
            _say(f"step {step}: {error}")
            if not is_removed(self._experiment.folder / "checkpoints", step, seconds=1.0):
                self.failed = self.failed or error
            return
        distributed.on_primary_then_broadcast("scores", lambda: self._write(step))

    def _path(self, step: int) -> Path:
        folder = testsets.decodes_folder(self._experiment, step=step)
        return folder / f"scores.{self._portion.name}.jsonl"

    def _read(self) -> None:
        """Reads the steps that have scores with the same settings and sentences."""
        for folder in testsets.decodes_folder(self._experiment).glob("*"):
            if folder.name.isdecimal() and self._path(int(folder.name)).is_file():
                step, path = int(folder.name), self._path(int(folder.name))
                if not self._decoder.missing(step, path.parent):
                    self._add(step, read_scores(path))

    def _write(self, step: int) -> None:
        path, portion, decoder = self._path(step), self._portion, self._decoder
        steps = dict.fromkeys(decoder.pairs, step)
        model = system(self._experiment, self._system, path.parent, steps)
        measured = measure([model], self._experiment.decoding.metrics, portion.name)
        subsets = testsets.subsets(self._experiment, decoder.cache, portion)
        rows = score_rows(measured, train_pairs(decoder.cache), subsets)
        write_jsonl(path, rows)
        self._add(step, rows)
        kept = complete_steps(self._experiment.folder / "checkpoints")
        metric, found = next(iter(self._metrics.items()))
        curve = rows_by_step(
            self._scores, portion.name, metric, decoder.parts.directions.levels, kept,
            lower_is_better=found.lower_is_better,
        )  # fmt: skip
        folder = testsets.scores_folder(self._experiment)
        replace_by_step(folder / SCORES_BY_STEP, portion.name, curve)
        save(curves.by_step(curve), [folder / f"scores_by_step.{portion.name}.png"])
        _say(said_by_step(curve, step))

    def _add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the scores of a step if they cover all sentences and metrics."""
        pairs = self._decoder.pairs
        whole = [row for row in rows if (row["system"], row["subset"]) == (self._system, "all")
                 and row["sentences"] == len(pairs.get(row["direction"], ()))]  # fmt: skip
        scores = {
            metric: {row["direction"]: row["score"] for row in whole if row["metric"] == metric}
            for metric in self._metrics
        }
        if all(found.keys() == pairs.keys() for found in scores.values()):
            self._scores[step] = scores
