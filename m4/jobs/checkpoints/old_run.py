"""A run of m4 that a new model begins from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m4 import config as configs
from m4.data.cache.cache import Cache
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.jobs import prepare
from m4.jobs.checkpoints.chapters import read_note
from m4.jobs.corpus import open_vocabulary
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import InputError, SettingError
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import whole_step
from m4.train import initial
from m4.train.early_stopping import EarlyStopper
from m4.train.initial import InitialModel, Use
from m4.train.loop.program import TrainProgram
from m4.train.loop.resume import restore
from m4.train.measuring.routing_counts import Counts
from m4.train.state import TrainState


class OldRun:
    """Its checkpoint of a step, its vocabularies and its model.

    Attributes:
        shapes: of the parameters, by path among unscanned layers.
    """

    def __init__(
        self, folder: Path, name: str, rules: InitialModel, step: int | None, known: int | None
    ) -> None:
        """step: None: `known`, the one that the new run began from before, or the latest.

        SettingError: there is no such run or step.
        """
        saved = folder / "config.gin"
        if not saved.is_file():
            allowed = "the folder of a trained run (no config.gin), or a checkpoint of T5X"
            raise SettingError("InitialModel.run", rules.run, allowed)
        trained = configs.load([saved], model_dir=name, allowed_modules=rules.allow_modules)
        experiment = trained.experiment()

        def chosen() -> int | None:
            try:
                used = not rules.optimizer
                return whole_step(
                    folder / "checkpoints", known if step is None else step, used=used
                )
            except InputError as error:
                if known is None:
                    raise
                raise InputError(
                    f"{error}; this run began from it (run.json): start over with --fresh"
                ) from error

        found = distributed.on_primary_then_broadcast("checkpoints", chosen)
        if found is None:
            raise SettingError("InitialModel.run", rules.run, "a run that has a checkpoint")
        self.folder, self.step, self._rules = folder, found, rules
        self._cache: Cache = open_vocabulary(experiment, found)
        self._model: Transformer = prepare.model_for(experiment, self._cache)
        self.shapes = initial.shapes_of(abstract_variables(self._model)["params"])

    def vocabulary(self, role: str) -> Vocabulary:
        """Of sources or targets."""
        return getattr(self._cache, f"{role}_vocabulary")

    def check(self, model: Transformer, left: list[str]) -> None:
        """Its own model has what it has: nothing that is left behind is wrong."""

    def params(self, layout: Layout) -> tuple[Any, Use]:
        """The parameters that the step is used with, and how often each expert was chosen."""
        params, _, note = restore_params(
            self._model, self.folder / "checkpoints", self.step, self._cache.vocabulary, layout
        )
        return params, _use(note)

    def with_optimizer(self, program: TrainProgram, fresh: TrainState) -> TrainState:
        """Parameters and optimizer of a step, for a model of equal shapes."""
        store = Checkpoints(self.folder / "checkpoints", read_only=True)
        try:
            note = store.note(self.step)
            state = restore(store, self.step, note, fresh, EarlyStopper(None), {})
        finally:
            store.close()
        return TrainState(fresh.step, state.params, state.optimizer)

    def last_loss(self) -> str | None:
        """Its last loss on dev up to the step whose parameters are used, for people."""
        note = {} if self._rules.optimizer else read_note(self.folder, self.step)
        used = note.get("best_step") or self.step
        rows = [row for row in read_metrics(self.folder) if row["step"] <= used]
        last = next((row for row in reversed(rows) if "dev/nll" in row), None)
        if last is None:
            return None
        return f"its dev/nll at step {last['step']} was {last['dev/nll']:.4f}"


def _use(note: Mapping[str, Any]) -> Use:
    """How often each expert was chosen in training, by layer."""
    if "assigned" not in note:
        return {}
    counts = Counts.from_json(note["assigned"])
    return {layer: assigned_DE.sum(axis=0) for layer, assigned_DE in counts.layers.items()}
