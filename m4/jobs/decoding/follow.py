"""`m4 eval --watch` and `--steps`: the checkpoints of a run, each scored once, and their curve."""

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.build import build
from m4.eval.decoding.testsets import Portion
from m4.eval.report import curves
from m4.eval.report.figures import save
from m4.eval.scoring.by_step import Scores, direction_scores, replace_rows, rows_by_step, said
from m4.eval.scoring.score import measure, read_scores, tried
from m4.experiment import Experiment
from m4.jobs.decoding.evaluate import scored, system, system_name
from m4.jobs.decoding.testsets import PortionDecoder, decodes_folder, scores_folder, trained_step
from m4.parallel import distributed
from m4.settings import InputError, first_line
from m4.storage.checkpoints import SCORES_BY_STEP, Checkpoints, Removed
from m4.storage.files import write_jsonl
from m4.storage.local_copy import address_of
from m4.storage.objects import Unreachable
from m4.storage.steps import complete_steps, is_removed, latest_step
from m4.train.measuring.watchdog import heartbeat

_sleep = time.sleep


def follow(
    experiment: Experiment,
    *,
    split: str = "dev",
    sentences: int | None = None,
    directions: Sequence[str] = (),
    steps: Sequence[int] | None = None,
    seconds: float | None = None,
) -> Path:
    """Scores checkpoints in the order of their steps; returns the path of scores_by_step.jsonl.

    A step that is scored already is not scored again. Several processes translate together; the
    primary one scores. By default it is all sentences, directions and steps that there are.

    Args:
        seconds: Time between two looks for new checkpoints, until training has ended. Defaults to
            a single look.
    """
    folder, portion = experiment.folder, Portion(split, sentences, tuple(directions))
    written = scores_folder(experiment) / SCORES_BY_STEP
    build(experiment, None).check_decoding()
    if seconds is None:
        distributed.on_primary_then_broadcast(
            "checkpoints", lambda: [trained_step(folder, step) for step in steps or (None,)]
        )
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
            _say(str(written))
            return written
        else:
            if silent and not done:
                _say(f"{folder}: no checkpoint yet; waiting for the first")
            silent = False
            _sleep(seconds)


def _look(folder: Path, before: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Returns the complete steps, or `before`, and whether training has ended."""
    try:
        ended = _has_ended(folder)  # first: what is saved meanwhile is in the list
        return complete_steps(folder / "checkpoints"), ended
    except (OSError, Unreachable) as error:
        _say(f"{folder}: will look again ({first_line(error)})")
        return before, False


def _has_ended(folder: Path) -> bool:
    latest = latest_step(folder / "checkpoints")
    if latest is None or not _is_last(folder / "checkpoints", latest):
        return False
    beat = heartbeat(address_of(folder))
    return beat is None or beat.ended(time.time())  # else it was made longer, and trains


@functools.cache
def _is_last(checkpoints: Path, step: int) -> bool:
    """Returns whether training had finished at a step, by its steps or early stopping."""
    store = Checkpoints(checkpoints, read_only=True)
    try:
        return store.note(step).get("finished", False)
    except Removed:
        return False
    finally:
        store.close()


def _say(line: str) -> None:
    if distributed.is_primary():
        print(line, flush=True)


class _Scorer:
    """Scores steps, with one program for all of them, and keeps their curve."""

    def __init__(self, experiment: Experiment, portion: Portion) -> None:
        self._decoder = PortionDecoder(experiment, portion)
        self._experiment, self._portion = experiment, portion
        self._folder = experiment.folder
        self._system = system_name(self._decoder.parts.model)
        found = tried(experiment.decoding.metrics)
        self._metrics = [*found]
        self._lower_is_better = found[self._metrics[0]].lower_is_better
        self._levels = self._decoder.parts.directions.levels
        self._scores: dict[int, Scores] = {}  # of the primary process
        self.failed: InputError | None = None  # of a step that is damaged, or another model's
        distributed.on_primary_then_broadcast("scores", self._read)

    def score(self, step: int) -> None:
        """Translates with a step's checkpoint and scores, unless that was done before."""
        if distributed.on_primary_then_broadcast("scores", lambda: step in self._scores):
            return
        if distributed.is_primary():
            self._path(step).unlink(missing_ok=True)  # never old scores of new translations
        try:
            self._decoder.decode(step, self._path(step).parent)
        except InputError as error:
            _say(f"step {step}: {error}")
            if not is_removed(self._folder / "checkpoints", step, seconds=1.0):
                self.failed = self.failed or error
            return
        distributed.on_primary_then_broadcast("scores", lambda: self._write(step))

    def _path(self, step: int) -> Path:
        folder = decodes_folder(self._experiment, step=step)
        return folder / f"scores.{self._portion.name}.jsonl"

    def _read(self) -> None:
        """Reads the steps that were scored before with the same settings and sentences."""
        for folder in decodes_folder(self._experiment).glob("*"):
            if folder.name.isdecimal() and self._path(int(folder.name)).is_file():
                step, path = int(folder.name), self._path(int(folder.name))
                if not self._decoder.missing(step, path.parent):
                    self._add(step, read_scores(path))

    def _write(self, step: int) -> None:
        path, portion = self._path(step), self._portion
        steps = dict.fromkeys(self._decoder.pairs, step)
        found = system(self._experiment, self._system, path.parent, steps)
        measured = measure([found], self._experiment.decoding.metrics, portion.name)
        rows = scored(self._experiment, self._decoder.cache, measured, portion)
        write_jsonl(path, rows)
        self._add(step, rows)
        kept = complete_steps(self._folder / "checkpoints")
        curve = rows_by_step(
            self._scores, portion.name, self._metrics[0], self._levels, kept,
            lower_is_better=self._lower_is_better,
        )  # fmt: skip
        folder = scores_folder(self._experiment)
        replace_rows(folder / SCORES_BY_STEP, portion.name, curve)
        save(curves.by_step(curve), [folder / f"scores_by_step.{portion.name}.png"])
        _say(said(curve, step))

    def _add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the scores of a step, if they are of all sentences and metrics."""
        found = direction_scores(rows, self._system)
        counts = {row["direction"]: row["sentences"] for row in rows if row["subset"] == "all"}
        wanted = {direction: len(pairs) for direction, pairs in self._decoder.pairs.items()}
        if {**counts, **wanted} == counts and {*self._metrics} <= {*found}:
            self._scores[step] = {
                metric: {direction: found[metric][direction] for direction in wanted}
                for metric in self._metrics
            }
