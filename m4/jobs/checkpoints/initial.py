"""The start of a training: from a checkpoint or from a trained model (`m4.train.initial`).

A trained model is a `Source`: a run of m4, a T5X checkpoint, or one in Hugging Face's layout.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m4 import config as configs
from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.cache.tokens import PRETRAINED_VOCABULARIES, pretrained_vocabulary, vocabulary_file
from m4.data.samplers import kept_of
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.experiment import Experiment, changes
from m4.jobs.corpus import open_vocabulary
from m4.model.gates.switch import switch
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.mesh import Layout
from m4.settings import InputError, SettingError, counted
from m4.storage import run_folder, t5x
from m4.storage.checkpoints import Checkpoints, by_path, read_note, shapes
from m4.storage.files import read_json
from m4.storage.local_copy import fetched
from m4.storage.metrics_log import read_metrics
from m4.storage.records import record, text
from m4.storage.safetensors import Weights
from m4.storage.steps import items_of, whole_step
from m4.storage.t5x import T5xCheckpoint
from m4.train import average, hf_layout, initial, t5x_layout
from m4.train.initial import InitialModel, Old, Plan, Shapes, Use
from m4.train.loop import Begin
from m4.train.measuring.routing_counts import Counts
from m4.train.program import TrainProgram
from m4.train.step import TrainState

# Returns the complete step that all processes agree on (`m4.storage.steps.whole_step`).
agreed_step = distributed.by_primary("checkpoints")(whole_step)


class Source:
    """A trained model in a folder."""

    folder: Path
    step: int = 0  # number of steps for which the model was trained
    shapes: Shapes  # shapes of its parameters, by path, with unscanned layers
    computation: Mapping[str, Any]  # settings with which a new model computes the same

    def vocabulary(self, role: str) -> Vocabulary:
        """Returns the vocabulary of sources or targets."""
        raise NotImplementedError

    def check_left(self, left: Sequence[str]) -> None:
        """Checks that a new model may drop these parameters. By default it may drop any."""

    def params(self, layout: Layout) -> tuple[Old, Use]:
        """Returns a reader of parameters, and how often each expert was chosen, if known."""
        raise NotImplementedError

    def learned(self) -> dict[str, Any]:
        """Returns the entries of the last note with which a run continues."""
        return {}

    def last_loss(self) -> str | None:
        """Returns a sentence on the last dev loss, if it is known."""
        return None

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        """Returns the state after the source's step, and a message on the optimizer's state."""
        raise NotImplementedError

    def begin(
        self, program: TrainProgram, plan: Plan, init: Callable[..., Any] | None = None,
        *given: Any, step: int = 0,
    ) -> TrainState:  # fmt: skip
        """Returns a state with the old parameters; `init(params, *given)` makes its optimizer."""
        there, use = self.params(program.layout)
        like = program.abstract_state().params
        fresh = program.new_params(plan.fresh_paths(like))
        with program.axis_rules():
            params = plan.take_over(there, fresh, use, like)
            placed = program.shardings.optimizer
            made = jax.jit(init or program.optimizer.init, out_shardings=placed)
            optimizer = made(params, *given)
        at = jax.device_put(np.asarray(step, np.int32), program.shardings.step)
        return TrainState(at, params, optimizer)


class SourceRun(Source):
    """A run of m4 at a step, with its vocabularies, its experiment and its model."""

    def __init__(self, folder: Path, name: str, rules: InitialModel, step: int | None) -> None:
        """Opens a step. Raises SettingError if there is no such run, or the run has no step."""
        saved = folder / "config.gin"
        if not saved.is_file():
            allowed = "a trained run (no config.gin there), a T5X or a Hugging Face checkpoint"
            raise SettingError("InitialModel.run", rules.run, allowed)
        trained = configs.load([saved], model_dir=name, allowed_modules=rules.allow_modules)
        if step is None:
            raise SettingError("InitialModel.run", rules.run, "a run that has a checkpoint")
        self.folder, self.step, self._rules = folder, step, rules
        self.experiment = trained.experiment()
        self.cache: Cache = open_vocabulary(self.experiment)
        self.model: Transformer = build(self.experiment, self.cache).model
        self.shapes = initial.shapes_of(self.model)
        self.computation = initial.computation(self.model)

    def vocabulary(self, role: str) -> Vocabulary:
        return getattr(self.cache, f"{role}_vocabulary")

    def params(self, layout: Layout, item: str | None = None) -> tuple[initial.Old, Use]:
        # item is "params" or "average". Defaults to the parameters that the step translates with.
        there, vocabulary = self.folder / "checkpoints", self.cache.vocabulary
        params, _, note = restore_params(self.model, there, self.step, vocabulary, layout, item)
        chosen = Counts.from_json(note["assigned"]).layers if "assigned" in note else {}
        use = {layer: assigned_DE.sum(axis=0) for layer, assigned_DE in chosen.items()}
        return initial.unscanned(params), use

    def learned(self) -> dict[str, Any]:
        note = read_note(self.folder, self.step)
        return {"sampling": note["sampling"]} if "sampling" in note else {}

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        # The optimizer's arrays are kept if they fit; otherwise the optimizer begins from zero.
        fresh = program.new_state()
        begun, placed = average.items(fresh), average.items(program.shardings)
        layout = program.layout
        there, use = self.params(layout, "params")
        found, optimizer = {"params": there}, None
        grown = plan.grown_sizes()
        with Checkpoints(self.folder / "checkpoints", read_only=True) as store:
            items = items_of(store.folder / str(self.step))
            saved = _shapes(store.arrays(self.step, "optimizer")) if "optimizer" in items else {}
            same = grown is not None and ("average" in items) == ("average" in begun)
            own = _shapes(by_path(begun["optimizer"]))
            kept = same and initial.fits(saved, own, grown or set())
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
                return average.from_items(fresh, step, begun | made), said

            def init(params: Any) -> Any:
                return initial.at_step(program.optimizer.init(params), self.step)

            optimizer = jax.jit(init, out_shardings=program.shardings.optimizer)(made["params"])
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
    """Returns the directions of each task, for a gate by task."""
    tasks = model.tasks or range(len(cache.directions))
    found: list[set[str]] = [set() for _ in range(max(tasks, default=-1) + 1)]
    for task, name in zip(tasks, cache.directions, strict=True):
        found[task].add(name)
    return found


def _shapes(arrays: Mapping[str, Any]) -> Shapes:
    return {path: tuple(leaf.shape) for path, leaf in arrays.items()}


def _as_saved(tree: Any, saved: Shapes, program: TrainProgram) -> Any:
    """Returns a tree's arrays in the saved shapes; arrays that will grow are replicated."""
    everywhere = NamedSharding(program.mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> Any:
        shape = saved[jax.tree_util.keystr(path, simple=True, separator="/")]
        if shape == leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=everywhere)

    return jax.tree_util.tree_map_with_path(one, shapes(tree))


_EMBEDDING = re.compile(r"(source_)?token_embedder/embedding")


class SourceT5x(Source):
    """A T5X checkpoint: its arrays under m4's names, and the vocabulary of its training."""

    def __init__(self, folder: Path, rules: InitialModel) -> None:
        """Opens the folder of one checkpoint."""
        self.folder, self._there = folder, T5xCheckpoint(folder)
        self.step = self._there.step
        try:
            self._sources = t5x_layout.sources(self._there.shapes)
            t5x_layout.check_shared_bias(self._there.shapes, self._there.read)
        except InputError as error:
            raise InputError(f"{self.folder}: {error}") from error
        of = self._there.shapes
        self.shapes = {path: source.shape(of) for path, source in self._sources.items()}
        # T5X has only relative positions, and may have a separate output projection.
        is_t5 = any(source.name.startswith("encoder/") for source in self._sources.values())
        self.computation = {"absolute_positions": False} if is_t5 else {}
        if "logits_dense/kernel" in self.shapes:
            self.computation |= {"tied_logits": False}
        if rules.optimizer and not any(name.startswith(t5x_layout.STATES) for name in of):
            allowed = f"False: {self.folder} has no state of an optimizer"
            raise SettingError("InitialModel.optimizer", True, allowed)
        self._separate = "source_token_embedder/embedding" in self.shapes
        role = "source" if self._separate else None
        self._place = folder.parent if rules.vocabulary is None else Path(rules.vocabulary)
        if not vocabulary_file(self._place, role).is_file():
            allowed = (
                f"the SentencePiece model that {folder} was trained with (FILE.model), or the "
                f"folder that has {vocabulary_file(Path(), role)}"
            )
            raise SettingError("InitialModel.vocabulary", rules.vocabulary, allowed)
        for path, shape in self.shapes.items():
            if match := _EMBEDDING.fullmatch(path):
                vocabulary = self.vocabulary("source" if match[1] else "target")
                if vocabulary.size > shape[0]:
                    has = f"{vocabulary.path} has {vocabulary.size:,} pieces, and the embedding of"
                    other = "rows: another vocabulary (InitialModel.vocabulary)"
                    raise InputError(f"{has} {folder} {shape[0]:,} {other}")

    def vocabulary(self, role: str) -> Vocabulary:
        return Vocabulary(vocabulary_file(self._place, role if self._separate else None))

    def check_left(self, left: Sequence[str]) -> None:
        for path in left:
            # The config's rules may drop layers, experts and gates.
            if not re.match(r"(encoder|decoder)_\d+/", path) or "/wi_" in path:
                said = f"{self.folder}: {path} {list(self.shapes[path])} has no place in the model"
                raise InputError(said)

    def params(self, layout: Layout) -> tuple[Old, Use]:
        return lambda path: t5x_layout.parameter(self._sources[path], self._there.read), {}

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        try:
            of, read = self._there.shapes, self._there.read
            given = {path: t5x_layout.moments(source, of, read)
                     for path, source in self._sources.items()}  # fmt: skip
        except InputError as error:
            said = str(error).removeprefix(f"{self.folder}: ")
            raise InputError(f"{self.folder}: {said}") from error

        def init(params: Any, given: Any) -> Any:
            return initial.at_step(program.optimizer.init(params), self.step, given)

        return self.begin(program, plan, init, given, step=self.step), "kept"


def _chosen(folder: Path, step: int | None) -> str:
    if t5x.is_checkpoint(folder):
        if step is not None and (found := T5xCheckpoint(folder).step) != step:
            raise InputError(f"{folder}: is of step {found}, not {step}")
        return str(folder)
    known = t5x.steps(folder)
    if step is None:
        return str(known[max(known)])
    if step not in known:
        listed = ", ".join(map(str, sorted(known)))
        raise InputError(f"{folder}: no checkpoint of step {step}; there are {listed}")
    return str(known[step])


# Returns the checkpoint of a step, by default the latest, that all processes agree on.
agreed_checkpoint = distributed.by_primary("checkpoints")(_chosen)


CONFIG = "config.json"
_CONFIG = record({"model_type": text, "feed_forward_proj?": text, "dense_act_fn?": text})


def is_hf(folder: Path) -> bool:
    """Returns whether a folder has a model in Hugging Face's layout and is not a run of m4."""
    return (folder / CONFIG).is_file() and not (folder / "config.gin").is_file()


class SourceHf(Source):
    """A model in Hugging Face's layout: its arrays under m4's names and in m4's ids.

    `model`, made with `settings` and `experts`, computes the same. `ids` are pad, eos and start.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder without reading any array."""
        self.folder, self.config = folder, read_json(folder / CONFIG, _CONFIG)
        self.weights = Weights(folder)
        try:
            self.family = hf_layout.family_of(self.config)
            self.settings = hf_layout.settings_of(self.config)
            self.experts = hf_layout.experts_of(self.config)
            self.ids = hf_layout.ids_of(self.config)
            self._check_sizes()
            experts = {}
            if (given := self.experts) is not None:
                make = functools.partial(MoeLayer, num_experts=given["num_experts"], gate=switch)
                experts = {"moe": make, "moe_every": given["moe_every"]}
            self.model = Transformer(**self.settings, **experts)
        except InputError as error:
            raise InputError(f"{folder / CONFIG}: {error}") from error
        self.shapes = initial.shapes_of(self.model)
        self.computation = {**initial.computation(self.model), "source_vocab_size": None}
        self._places = {path: self._place(path, shape) for path, shape in self.shapes.items()}
        self._check_names()
        self._vocabulary = self._opened_vocabulary()

    def _check_sizes(self) -> None:
        """Checks that no size exceeds the whole files, before a model of it is made."""
        has = self.weights.shapes
        most = max(len(has), *(size for shape in has.values() for size in shape))
        asked = {key: self.settings[name] for name, key in hf_layout.SIZES.items()}
        asked |= self.experts or {}
        for key, size in asked.items():
            if size > most and key != hf_layout.SIZES["relative_distance"]:
                raise InputError(f"{key} = {size}: the files are smaller")

    def _place(self, path: str, shape: tuple[int, ...]) -> hf_layout.HfParameter:
        found = hf_layout.place(path, shape, self.model)
        assert found is not None, path
        has, first = self.weights.shapes, found.names[0]
        if path == hf_layout.EMBEDDING:
            first = next((name for name in hf_layout.TABLES if name in has), first)
            found = found._replace(names=(first,))
        if path == hf_layout.LOGITS and first not in has:
            raise InputError(
                f"{self.folder}: tie_word_embeddings is false in {CONFIG}, and the files have no "
                f"{first}: must be true, or the files complete"
            )
        for name in found.names:
            if name not in has:
                raise InputError(f"{self.folder}: the files have no {name}, as {CONFIG} asks for")
            if has[name] != (wanted := found.shape(shape)):
                said = f"{self.folder}: {name} is {[*has[name]]}, and {CONFIG} asks for {[*wanted]}"
                raise InputError(said)
        return found

    def _check_names(self) -> None:
        """Checks that m4's model has a place for every array, except copies of the table."""
        used = {name for place in self._places.values() for name in place.names}
        table = self._places[hf_layout.EMBEDDING].names[0]
        for name, shape in self.weights.shapes.items():
            if name in used or hf_layout.UNREAD.fullmatch(name):
                continue
            copy = name in (*hf_layout.TABLES, "lm_head.weight")
            if copy and np.array_equal(self.weights.read(name), self.weights.read(table)):
                continue
            if name == "lm_head.weight":
                raise InputError(
                    f"{self.folder}: tie_word_embeddings is true in {CONFIG}, and the files have "
                    f"an lm_head.weight that is not {table}: must be false"
                )
            raise InputError(f"{self.folder}: {name} {[*shape]} is none that m4's model has")

    def _opened_vocabulary(self) -> Vocabulary:
        path = pretrained_vocabulary(self.folder)
        if path is None:
            fast = (self.folder / "tokenizer.json").is_file()
            raise InputError(
                f"{self.folder}: has no SentencePiece model ({', '.join(PRETRAINED_VOCABULARIES)})"
                + (", and tokenizer.json alone is none; take the file from its hub" if fast else "")
            )
        found, rows = Vocabulary(path), self.settings["vocab_size"]
        pad, eos, start = self.ids
        if [pad, eos] != found.old_ids[:2] or max(self.ids) >= found.size:
            there = f"{found.old_ids[0]}, {found.old_ids[1]} in {path.name}, start is {start}"
            raise InputError(f"{self.folder}: pad and eos are {pad}, {eos} in {CONFIG} and {there}")
        if found.size > rows:
            said = f"has {found.size:,} pieces, and the embedding {rows:,} rows"
            raise InputError(f"{path}: {said}: another vocabulary")
        return found

    def vocabulary(self, role: str = "target") -> Vocabulary:
        return self._vocabulary

    def check_left(self, left: Sequence[str]) -> None:
        for path in left:
            # The config's rules may drop experts and layers.
            if "/moe/" not in path and not path.startswith(("encoder_", "decoder_")):
                raise InputError(f"{self.folder}: {path} has no place in the model")

    def params(self, layout: Layout) -> tuple[Old, Use]:
        return self.read, {}

    def read(self, path: str) -> np.ndarray:
        """Returns a parameter of m4 in float32, with rows in the order of m4's vocabulary."""
        made = self._places[path].read(self.weights.read)
        if path not in (hf_layout.EMBEDDING, hf_layout.LOGITS):
            return made
        # Only the first pieces change their order, so the table is not copied.
        old_ids = np.asarray(self._vocabulary.old_ids)
        moved = 1 + max(np.flatnonzero(old_ids != np.arange(len(old_ids))), default=-1)
        rows_VM = made.T if path == hf_layout.LOGITS else made
        pad, _, start = self.ids
        start_M = rows_VM[start].copy()
        rows_VM[:moved] = rows_VM[old_ids[:moved]]
        if path == hf_layout.EMBEDDING and start != pad:
            rows_VM[0] = start_M
        return made


def opened_hf(folder: Path, rules: InitialModel, step: int | None) -> SourceHf:
    """Opens a folder for a run. Raises SettingError if it lacks what the run asks for."""
    for name, given, allowed in (
        ("optimizer", rules.optimizer, f"False: {folder} has no state of an optimizer"),
        ("vocabulary", rules.vocabulary, f"None: {folder} has its own"),
        ("run", None if step is None else rules.run, f"{folder}, which has no steps"),
    ):
        if given:
            raise SettingError(f"InitialModel.{name}", given, allowed)
    return SourceHf(folder)


def begin(experiment: Experiment, source: Source, model: Transformer, cache: Cache) -> Begin:
    """Returns a function that makes the initial state from another model, without reading it yet.

    A summary of the parameters taken over is printed, and recorded in run.json under "initial".
    """
    rules = experiment.training.initial
    assert rules is not None

    def rows(path: str) -> initial.Rows:
        if path.endswith("tasks/kernel"):
            assert isinstance(source, SourceRun)
            return initial.task_rows(tasks_of(source.model, source.cache), tasks_of(model, cache))
        role = "source" if "source_token_embedder" in path else "target"
        new = getattr(cache, f"{role}_vocabulary")
        return initial.rows_of(source.vocabulary(role), new, rules.new_pieces)

    plan = initial.plan(source.shapes, model, rules.layers, rows)
    grown = source.shapes != plan.new or any(one.spelled for one in plan.rows.values())
    if rules.optimizer and grown and isinstance(source, SourceT5x):
        allowed = "False where a model of T5X or its vocabulary has grown"
        raise SettingError("InitialModel.optimizer", True, allowed)
    changed = changes(source.experiment, experiment) if isinstance(source, SourceRun) else {}
    own = "training.initial"  # differs in any case, as only this run began from another one
    changed = {name: values for name, values in changed.items() if not name.startswith(own)}
    by_rule: dict[str, list[str]] = {"taken": []}
    for leaf in plan.leaves:
        rule = "taken" if leaf.rule == "pieces" else leaf.rule
        by_rule.setdefault(rule, []).append(leaf.path)
    about = {
        "run": rules.run, "step": source.step, "optimizer": rules.optimizer, "changes": changed,
        **by_rule, "taken": len(by_rule.pop("taken")),
        "new_pieces": {path: len(one.spelled) for path, one in plan.rows.items() if one.spelled},
        "left": plan.unused(), "kept": kept_of(experiment.data.keep, cache.directions),
    }  # fmt: skip
    if distributed.is_primary():
        taken = about["taken"]
        count = taken + sum(map(len, by_rule.values()))
        said = f"{taken} of {count} arrays of parameters are taken over"
        print(f"begins from {source.folder} at step {source.step}: {said}")
        for rule, paths in [*sorted(by_rule.items()), ("left", about["left"])]:
            if paths:
                print(f"  {rule}: {len(paths)} ({paths[0]}{', ...' * (len(paths) > 1)})")
        for path, pieces in about["new_pieces"].items():
            print(f"  {path}: {counted(pieces, 'new piece')} ({rules.new_pieces})")
        for name, (before, now) in about["changes"].items():
            print(f"  {name}: {before} -> {now}")
        if (loss := source.last_loss()) is not None:
            print(f"  {loss}")
        run_folder.note(experiment.folder, initial=about)

    def state(program: TrainProgram) -> tuple[TrainState, dict[str, Any]]:
        if not rules.optimizer:
            return source.begin(program, plan), {}
        found, said = source.with_optimizer(program, plan)
        if distributed.is_primary():
            print(f"  the optimizer's state: {said}")
        return found, source.learned()

    return state


def name_and_step(run: str) -> tuple[str, int | None]:
    """Splits RUN@STEP into RUN and STEP; only a number after the @ is a step."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def check_start(experiment: Experiment, *, writes: bool = True) -> tuple[int | None, Source | None]:
    """Returns the step that a training resumes from, or the model that it begins from, if any.

    Everything known before the corpus is built is checked. If the job `writes`, damaged checkpoints
    are moved aside.
    """
    model, training = (parts := build(experiment, None)).model, experiment.training
    parts.check_training()
    step = agreed_step(experiment.folder / "checkpoints", move_aside=writes)
    if step is not None or (rules := training.initial) is None:
        return step, None
    name, asked = name_and_step(rules.run)
    folder, run, step = fetched(name), experiment.folder, asked
    if asked is None and (run / "run.json").is_file():  # missing with --dry_run
        begun = run_folder.read(run).get("initial") or {}
        step = begun.get("step") if begun.get("run") == rules.run else None
    if is_hf(folder):
        source = opened_hf(folder, rules, asked)
    elif t5x.is_checkpoint(folder) or t5x.steps(folder):
        chosen = agreed_checkpoint(folder, step)
        source = SourceT5x(Path(chosen), rules)
    else:
        try:
            found = agreed_step(folder / "checkpoints", step, used=not rules.optimizer)
        except InputError as error:
            if step == asked:
                raise
            said = f"{error}; this run began from it (run.json): start over with --fresh"
            raise InputError(said) from error
        source = SourceRun(folder, name, rules, found)
    initial.check_computation(model, source.computation, source.folder)
    source.check_left(initial.plan(source.shapes, model, rules.layers).unused())
    total = training.total_steps
    if rules.optimizer and total < source.step:
        allowed = f"{source.step} or more, where the run continues"
        raise SettingError("Training.total_steps", total, allowed)
    if rules.optimizer and isinstance(source, SourceT5x):
        initial.check_adafactor(training.optimizer(total))
    return None, source
