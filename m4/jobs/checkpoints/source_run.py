"""A run of m4 that a new model begins from."""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m4 import config as configs
from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.jobs.checkpoints.source import Source
from m4.jobs.corpus import open_vocabulary
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import InputError, SettingError
from m4.storage import manifest
from m4.storage.checkpoints import Checkpoints, by_path, read_note, shapes
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import whole_step
from m4.train import average, initial
from m4.train.initial import InitialModel, Plan, Shapes, Use
from m4.train.measuring.routing_counts import Counts
from m4.train.program import TrainProgram
from m4.train.state import TrainState


class SourceRun(Source):
    """Its checkpoint of a step, its vocabularies, its experiment and the model of it."""

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

        def chosen() -> int | None:
            asked = known if step is None else step
            try:
                return whole_step(folder / "checkpoints", asked, used=not rules.optimizer)
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
        self.experiment = trained.experiment()
        self._cache: Cache = open_vocabulary(self.experiment)
        self.model: Transformer = build(self.experiment, self._cache).model
        self.shapes = initial.shapes_of(abstract_variables(self.model)["params"])

    def vocabulary(self, role: str) -> Vocabulary:
        return getattr(self._cache, f"{role}_vocabulary")

    def check_model(self, model: Transformer, left: list[str]) -> None:
        initial.check_computation(model, initial.computation(self.model), self.folder)

    def tasks(self) -> list[set[str]]:
        """Returns the directions of each task of a gate by task."""
        return tasks_of(self.model, self._cache)

    def params(self, layout: Layout, item: str | None = None) -> tuple[initial.Old, Use]:
        # item: "params" or "average". Defaults to what the step is used with.
        there, vocabulary = self.folder / "checkpoints", self._cache.vocabulary
        params, _, note = restore_params(self.model, there, self.step, vocabulary, layout, item)
        chosen = Counts.from_json(note["assigned"]).layers if "assigned" in note else {}
        use = {layer: assigned_DE.sum(axis=0) for layer, assigned_DE in chosen.items()}
        return initial.unscanned(params), use

    def learned(self) -> dict[str, Any]:
        note = read_note(self.folder, self.step)
        return {name: note[name] for name in ("sampling",) if name in note}

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        # The optimizer's arrays are kept where they fit, else it begins from zero.
        fresh = program.new_state()
        begun, placed = average.items(fresh), average.items(program.shardings)
        layout = program.layout
        there, use = self.params(layout, "params")
        found, optimizer = {"params": there}, None
        grown = plan.grown_sizes(initial.shapes_of(begun["params"]))
        with contextlib.closing(Checkpoints(self.folder / "checkpoints", read_only=True)) as store:
            items = manifest.items_of(store.folder / str(self.step))
            saved = _shapes(store.arrays(self.step, "optimizer")) if "optimizer" in items else {}
            kept = (
                grown is not None
                and ("average" in items) == ("average" in begun)
                and initial.fits(saved, _shapes(by_path(begun["optimizer"])), grown)
            )
            if kept:
                wanted = _as_saved(begun["optimizer"], saved, program)
                optimizer = store.restore(self.step, {"optimizer": wanted})["optimizer"]
        if kept and "average" in begun:
            found["average"], _ = self.params(layout, "average")

        start, like = by_path(begun["params"]), program.abstract_state().params
        step = jax.device_put(np.asarray(self.step, np.int32), program.shardings.step)
        with program.axis_rules():
            made = {name: plan.take_over(old, {**start}, use, like) for name, old in found.items()}
            if kept:
                pad = functools.partial(jax.tree.map, initial.padded)
                grow = jax.jit(pad, out_shardings=placed["optimizer"])
                made["optimizer"] = grow(optimizer, begun["optimizer"])
                said = "kept, grown" if grown else "kept"
                return average.from_items(step, made, fresh.optimizer), said
            begin = jax.jit(program.optimizer.init, out_shardings=program.shardings.optimizer)
            optimizer = initial.at_step(begin(made["params"]), self.step)
        return TrainState(step, made["params"], optimizer), "from zero: it has other arrays"

    def last_loss(self) -> str | None:
        note = {} if self._rules.optimizer else read_note(self.folder, self.step)
        used = note.get("best_step") or self.step
        rows = [row for row in read_metrics(self.folder) if row["step"] <= used]
        last = next((row for row in reversed(rows) if "dev/nll" in row), None)
        if last is None:
            return None
        return f"its dev/nll at step {last['step']} was {last['dev/nll']:.4f}"


def tasks_of(model: Transformer, cache: Cache) -> list[set[str]]:
    """Returns the directions of each task of a gate by task."""
    tasks = model.tasks or range(len(cache.directions))
    found: list[set[str]] = [set() for _ in range(max(tasks, default=-1) + 1)]
    for task, name in zip(tasks, cache.directions, strict=True):
        found[task].add(name)
    return found


def _shapes(arrays: Mapping[str, Any]) -> Shapes:
    return {path: tuple(leaf.shape) for path, leaf in arrays.items()}


def _as_saved(tree: Any, saved: Shapes, program: TrainProgram) -> Any:
    """Returns a tree's arrays in the shapes that were saved, those that grew on every device."""
    everywhere = NamedSharding(program.mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> Any:
        shape = saved[jax.tree_util.keystr(path, simple=True, separator="/")]
        if shape == leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=everywhere)

    return jax.tree_util.tree_map_with_path(one, shapes(tree))
