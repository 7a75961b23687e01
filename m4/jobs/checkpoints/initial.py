"""The trained model that a new one begins from, opened and checked (`m4.train.initial`)."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from m4 import config as configs
from m4.data.cache.cache import Cache
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.checkpoints.chapters import read_note
from m4.jobs.corpus import open_vocabulary
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import InputError, SettingError
from m4.storage import remote, run_folder
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import whole_step
from m4.train import initial
from m4.train.early_stopping import EarlyStopper
from m4.train.initial import InitialModel, Leaf, Rows, Use
from m4.train.loop.program import TrainProgram
from m4.train.loop.resume import restore
from m4.train.measuring.routing_counts import Counts
from m4.train.state import TrainState


class _Old(NamedTuple):
    """The run that is begun from: its folder, the step, its vocabularies and its model."""

    folder: Path
    step: int
    cache: Cache
    model: Transformer


class Beginning:
    """What the model of an experiment takes over from another run's, by `Training.initial`.

    Attributes:
        about: JSON for run.json: the run, its step, and the parameters by rule.
    """

    def __init__(self, experiment: Experiment, model: Transformer, cache: Cache) -> None:
        """Everything is checked; no parameter is read.

        Raises:
            SettingError: there is no such run or step.
            ValueError: the vocabulary is another one; something that no rule takes over.
        """
        rules = experiment.training.initial
        assert rules is not None
        self._run, self._cache = prepare.run_folder(experiment), cache
        self._rules, self._old = rules, _opened(rules, self._run)
        before = initial.shapes_of(abstract_variables(self._old.model)["params"])
        after = initial.shapes_of(abstract_variables(model)["params"])
        self._leaves = initial.plan(before, after, rules.layers)
        self._rows: dict[str, Rows] = {}
        for leaf in self._leaves:
            if leaf.rule == "pieces":
                self._rows[leaf.path] = self._rows_of(leaf)
        unchanged = before == after and not any(rows.spelled for rows in self._rows.values())
        if rules.optimizer and not unchanged:
            raise SettingError(
                "InitialModel.optimizer", True, "False where the model or its vocabulary has grown"
            )
        self.about = self._about(initial.unused(self._leaves, before))

    def _rows_of(self, leaf: Leaf) -> Rows:
        role = "source" if "source_token_embedder" in leaf.path else "target"
        old, new = (
            getattr(cache, f"{role}_vocabulary") for cache in (self._old.cache, self._cache)
        )
        return initial.rows_of(old, new, self._rules.new_pieces)

    def _about(self, left: list[str]) -> dict[str, Any]:
        grown = {path: len(rows.spelled) for path, rows in self._rows.items() if rows.spelled}
        by_rule: dict[str, list[str]] = {}
        for leaf in self._leaves:
            if leaf.rule not in ("taken", "pieces"):
                by_rule.setdefault(leaf.rule, []).append(leaf.path)
        taken = sum(leaf.rule in ("taken", "pieces") for leaf in self._leaves)
        return {
            "run": self._rules.run,
            "step": self._old.step,
            "optimizer": self._rules.optimizer,
            "taken": taken,
            "new_pieces": grown,
            **by_rule,
            "left": left,
        }

    def report(self, folder: Path) -> None:
        """Prints what is taken over, and keeps it in run.json under "initial".

        folder: the model's; of one without experts, for comparison, run.json keeps none where the
        run's own is known.
        """
        if not distributed.is_primary():
            return
        print("\n".join(self._lines()))
        if folder == self._run or _known_step(self._rules, self._run) is None:
            run_folder.note(self._run, initial=self.about)
            remote.push(self._run)

    def _lines(self) -> list[str]:
        """What was taken over, grown and left, for people."""
        rules = Counter(leaf.rule for leaf in self._leaves)
        taken = rules.pop("taken", 0) + rules.pop("pieces", 0)
        found = [
            f"begins from {self._old.folder} at step {self._old.step}: {taken} of "
            f"{len(self._leaves)} arrays of parameters are taken over"
        ]
        for rule, count in sorted(rules.items()):
            example = next(leaf.path for leaf in self._leaves if leaf.rule == rule)
            found.append(f"  {rule}: {count} ({example}{', ...' if count > 1 else ''})")
        for path, pieces in self.about["new_pieces"].items():
            found.append(f"  {path}: {pieces:,} new pieces ({self._rules.new_pieces})")
        if left := self.about["left"]:
            found.append(f"  left: {len(left)} ({left[0]}{', ...' if len(left) > 1 else ''})")
        if (last := self._measured()) is not None:
            found.append(f"  its dev/nll at step {last['step']} was {last['dev/nll']:.4f}")
        return found

    def _measured(self) -> Mapping[str, Any] | None:
        """The last row of the old run's evaluations up to the step whose parameters are used."""
        old = self._old
        note = {} if self._rules.optimizer else read_note(old.folder, old.step)
        used = note.get("best_step") or old.step
        rows = [row for row in read_metrics(old.folder) if row["step"] <= used]
        return next((row for row in reversed(rows) if "dev/nll" in row), None)

    def state(self, program: TrainProgram) -> TrainState:
        """The state before the first step, over the program's mesh."""
        fresh, old = program.new_state(), self._old
        if self._rules.optimizer:
            return self._with_optimizer(fresh)
        layout = Layout(program.mesh, program.fsdp_axes, program.extra_axis_rules)
        there, _, note = restore_params(
            old.model, old.folder / "checkpoints", old.step, old.cache.vocabulary, layout
        )
        use = _use(note)

        def make(there: Mapping[str, Any], start: Mapping[str, Any]) -> tuple[Any, Any]:
            params = initial.take_over(self._leaves, there, start, self._rows.__getitem__, use)
            return params, program.optimizer.init(params)

        placed = (program.shardings.params, program.shardings.optimizer)
        with program.axis_rules():
            params, optimizer = jax.jit(make, out_shardings=placed)(there, fresh.params)
        return TrainState(fresh.step, params, optimizer)

    def _with_optimizer(self, fresh: TrainState) -> TrainState:
        store = Checkpoints(self._old.folder / "checkpoints", read_only=True)
        try:
            note = store.note(self._old.step)
            state = restore(store, self._old.step, note, fresh, EarlyStopper(None), {})
        finally:
            store.close()
        return TrainState(fresh.step, state.params, state.optimizer)


def check_beginning(experiment: Experiment) -> None:
    """What is known before the corpus is built.

    Raises:
        SettingError: no run is there to begin from.
        InputError: no rule takes over a parameter, or the layers.
    """
    if (rules := experiment.training.initial) is not None:
        old = _opened(rules, prepare.run_folder(experiment))
        # The old vocabulary stands in for one that may have to be built.
        models = (old.model, prepare.model_for(experiment, old.cache))
        before, after = (initial.shapes_of(abstract_variables(one)["params"]) for one in models)
        initial.plan(before, after, rules.layers)


def beginning(experiment: Experiment, model: Transformer, cache: Cache) -> Beginning | None:
    """What a new run takes over; None: nothing. It is the same each time: once run.json has the
    step that a run without @STEP began from, it is that one."""
    return None if experiment.training.initial is None else Beginning(experiment, model, cache)


def _opened(rules: InitialModel, run: Path) -> _Old:
    """run: the folder of the run that begins."""
    name, step = _name_and_step(rules.run)
    folder = remote.local(name)
    remote.fetch(folder)
    saved = folder / "config.gin"
    if not saved.is_file():
        allowed = "the folder of a trained run (no config.gin)"
        raise SettingError("InitialModel.run", rules.run, allowed)
    trained = configs.load([saved], model_dir=name, allowed_modules=rules.allow_modules)
    experiment = trained.experiment()

    def chosen() -> int | None:
        known = _known_step(rules, run) if step is None else None
        try:
            used = not rules.optimizer
            return whole_step(folder / "checkpoints", known if step is None else step, used=used)
        except InputError as error:
            if known is None:
                raise
            raise InputError(
                f"{error}; this run began from it (run.json): start over with --fresh"
            ) from error

    found = distributed.on_primary_then_broadcast("checkpoints", chosen)
    if found is None:
        raise SettingError("InitialModel.run", rules.run, "a run that has a checkpoint")
    cache = open_vocabulary(experiment, found)
    return _Old(folder, found, cache, prepare.model_for(experiment, cache))


def _name_and_step(run: str) -> tuple[str, int | None]:
    """RUN@STEP -> RUN, STEP. What follows an @ and is no number belongs to the name."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def _known_step(rules: InitialModel, run: Path) -> int | None:
    """The step that a run began from, as run.json has it; None: it has not begun."""
    match run_folder.read(run).get("initial"):
        case {"run": rules.run, "step": int() as step}:
            return step
    return None


def _use(note: Mapping[str, Any]) -> Use:
    """How often each expert was chosen in training, by layer."""
    if "assigned" not in note:
        return {}
    counts = Counts.from_json(note["assigned"])
    return {layer: assigned_DE.sum(axis=0) for layer, assigned_DE in counts.layers.items()}
