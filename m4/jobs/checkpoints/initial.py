"""The start of a training: at a checkpoint, or from a trained model (`m4.train.initial`)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.experiment import Experiment, Training, changes
from m4.jobs.checkpoints.source_hf import is_hf, opened
from m4.jobs.checkpoints.source_run import SourceRun, tasks_of
from m4.jobs.checkpoints.source_t5x import SourceT5x, is_t5x
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import SettingError, counted
from m4.storage import run_folder
from m4.storage.local_copy import fetched
from m4.storage.steps import latest_step, whole_step
from m4.train import initial
from m4.train.initial import InitialModel, Leaf, Rows, Shapes, Use, check_adafactor
from m4.train.program import TrainProgram
from m4.train.state import TrainState


class Source(Protocol):
    """The model that a run begins from: of m4, of T5X, or in Hugging Face's layout."""

    @property
    def folder(self) -> Path: ...
    @property
    def step(self) -> int: ...
    @property
    def shapes(self) -> Shapes: ...
    def vocabulary(self, role: str) -> Vocabulary: ...
    def check(self, model: Transformer, left: list[str]) -> None: ...
    def params(self, layout: Layout) -> tuple[initial.Old, Use]: ...
    def learned(self) -> dict[str, Any]: ...
    def with_optimizer(
        self, program: TrainProgram, leaves: Sequence[Leaf], rows: Callable[[str], Rows]
    ) -> tuple[TrainState, str]: ...
    def last_loss(self) -> str | None: ...


class Beginning:
    """The beginning of a model: what it takes over from another run, by `Training.initial`.

    Attributes:
        about: JSON for run.json: the run, its step, the settings that changed, and the parameters
            by rule.
    """

    def __init__(
        self, experiment: Experiment, source: Source, model: Transformer, cache: Cache
    ) -> None:
        """Checks everything; no parameter is read."""
        rules = experiment.training.initial
        assert rules is not None
        self._run, self._cache = experiment.folder, cache
        self._kept = experiment.data.kept(cache.directions)
        self._rules, self._source = rules, source
        before = self._source.shapes
        after = initial.shapes_of(abstract_variables(model)["params"])
        self._leaves = initial.plan(before, after, rules.layers)
        self._rows: dict[str, Rows] = {}
        for at, leaf in enumerate(self._leaves):
            if leaf.rule == "pieces":
                self._rows[leaf.path] = self._rows_of(leaf)
            elif leaf.rule == "directions":
                assert isinstance(source, SourceRun)
                tasks = initial.task_rows(source.tasks(), tasks_of(model, cache))
                self._rows[leaf.path] = tasks
                if np.array_equal(tasks.old_V, np.arange(before[leaf.source or ""][0])):
                    self._leaves[at] = leaf._replace(rule="taken")
        unchanged = before == after and not any(rows.spelled for rows in self._rows.values())
        if rules.optimizer and not unchanged and isinstance(self._source, SourceT5x):
            allowed = "False where a model of T5X or its vocabulary has grown"
            raise SettingError("InitialModel.optimizer", True, allowed)
        left = initial.unused(self._leaves, before)
        self._source.check(model, left)
        changed = changes(source.experiment, experiment) if isinstance(source, SourceRun) else {}
        own = "training.initial"  # which says that a run begins from another one
        self.about = self._about(
            left, {name: values for name, values in changed.items() if not name.startswith(own)}
        )

    def _rows_of(self, leaf: Leaf) -> Rows:
        role = "source" if "source_token_embedder" in leaf.path else "target"
        new = getattr(self._cache, f"{role}_vocabulary")
        return initial.rows_of(self._source.vocabulary(role), new, self._rules.new_pieces)

    def _about(self, left: list[str], changes: Mapping[str, list[str]]) -> dict[str, Any]:
        grown = {path: len(rows.spelled) for path, rows in self._rows.items() if rows.spelled}
        by_rule: dict[str, list[str]] = {}
        for leaf in self._leaves:
            if leaf.rule not in ("taken", "pieces"):
                by_rule.setdefault(leaf.rule, []).append(leaf.path)
        taken = sum(leaf.rule in ("taken", "pieces") for leaf in self._leaves)
        return {
            "run": self._rules.run,
            "step": self._source.step,
            "optimizer": self._rules.optimizer,
            "changes": changes,
            "taken": taken,
            "new_pieces": grown,
            **by_rule,
            "left": left,
            "kept": self._kept,
        }

    def report(self) -> None:
        """Prints what is taken over, and keeps it in run.json under "initial"."""
        if distributed.is_primary():
            print("\n".join(self._lines()))
            run_folder.note(self._run, initial=self.about)

    def _lines(self) -> list[str]:
        """Returns lines for people: what was taken over, grown and left."""
        rules = Counter(leaf.rule for leaf in self._leaves)
        taken = rules.pop("taken", 0) + rules.pop("pieces", 0)
        found = [
            f"begins from {self._source.folder} at step {self._source.step}: {taken} of "
            f"{len(self._leaves)} arrays of parameters are taken over"
        ]
        for rule, count in sorted(rules.items()):
            example = next(leaf.path for leaf in self._leaves if leaf.rule == rule)
            found.append(f"  {rule}: {count} ({example}{', ...' if count > 1 else ''})")
        for path, pieces in self.about["new_pieces"].items():
            found.append(f"  {path}: {counted(pieces, 'new piece')} ({self._rules.new_pieces})")
        for name, (before, now) in self.about["changes"].items():
            found.append(f"  {name}: {before} -> {now}")
        if left := self.about["left"]:
            found.append(f"  left: {len(left)} ({left[0]}{', ...' if len(left) > 1 else ''})")
        if (loss := self._source.last_loss()) is not None:
            found.append(f"  {loss}")
        return found

    def state(self, program: TrainProgram) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state before the first step, and what the run continues with.

        The state is over the program's mesh; the rest is from the note of the other run.
        """
        if self._rules.optimizer:
            state, said = self._source.with_optimizer(program, self._leaves, self._rows.__getitem__)
            if distributed.is_primary():
                print(f"  the optimizer's state: {said}")
            return state, self._source.learned()
        return begin(self._source, self._leaves, self._rows.__getitem__, program), {}


def begin(
    source: Source, leaves: Sequence[Leaf], rows: Callable[[str], Rows], program: TrainProgram
) -> TrainState:
    """Returns the state before the first step, with parameters that are taken over."""
    layout = Layout(program.mesh, program.fsdp_axes, program.extra_axis_rules)
    there, use = source.params(layout)
    like = program.abstract_state().params
    fresh = program.new_params(initial.fresh_paths(leaves, source.shapes, rows, like))
    with program.axis_rules():
        params = initial.take_over(leaves, there, fresh, rows, use, like)
        make = jax.jit(program.optimizer.init, out_shardings=program.shardings.optimizer)
        optimizer = make(params)
    step = jax.device_put(np.asarray(0, np.int32), program.shardings.step)
    return TrainState(step, params, optimizer)


def check_beginning(
    rules: InitialModel, run: Path, model: Transformer, training: Training
) -> Source:
    """Opens the model to begin from, and checks what is known before the corpus is built."""
    total = training.total_steps
    old = _opened(rules, run)
    after = initial.shapes_of(abstract_variables(model)["params"])
    leaves = initial.plan(old.shapes, after, rules.layers)
    old.check(model, initial.unused(leaves, old.shapes))
    if rules.optimizer and total < old.step:
        allowed = f"{old.step} or more, where the run continues"
        raise SettingError("Training.total_steps", total, allowed)
    if rules.optimizer and isinstance(old, SourceT5x):
        check_adafactor(training.optimizer(total))
    return old


def _opened(rules: InitialModel, run: Path) -> Source:
    """Opens the other run. Without @STEP it is at the step that run.json of `run` names, if any."""
    name, step = name_and_step(rules.run)
    folder = fetched(name)
    known = _known_step(rules, run) if step is None else None
    if is_hf(folder):
        return opened(folder, rules, step)
    if is_t5x(folder):
        return SourceT5x(folder, rules, step, known)
    return SourceRun(folder, name, rules, step, known)


def name_and_step(run: str) -> tuple[str, int | None]:
    """RUN@STEP -> RUN, STEP. What follows an @ and is no number belongs to the name."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def _known_step(rules: InitialModel, run: Path) -> int | None:
    """The step that a run began from, as run.json has it; None: it has not begun."""
    if not (run / "run.json").is_file():  # of --dry_run
        return None
    match run_folder.read(run).get("initial"):
        case {"run": rules.run, "step": int() as step}:
            return step
    return None


class Start(NamedTuple):
    """A training that can begin."""

    experiment: Experiment
    step: int | None  # The step that training resumes from; None where it begins.
    source: Source | None  # The model that it begins from. Defaults to none.


def check_start(experiment: Experiment, *, writes: bool = True) -> Start:
    """Checks all of a training that is known before the corpus is built."""
    expected, training = build(experiment, None), experiment.training
    expected.check_training()
    checkpoints = experiment.folder / "checkpoints"
    step = distributed.on_primary_then_broadcast(
        "checkpoints",
        lambda: whole_step(checkpoints, move_aside=True) if writes else latest_step(checkpoints),
    )
    source = None
    if step is None and training.initial is not None:
        source = check_beginning(training.initial, experiment.folder, expected.model, training)
    return Start(experiment, step, source)
