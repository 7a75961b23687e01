"""The start of a training: at a checkpoint, or from a trained model (`m4.train.initial`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.samplers.kept import kept_of
from m4.experiment import Experiment, changes
from m4.jobs.checkpoints.source import Source
from m4.jobs.checkpoints.source_hf import is_hf, opened
from m4.jobs.checkpoints.source_run import SourceRun, tasks_of
from m4.jobs.checkpoints.source_t5x import SourceT5x, is_t5x
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.settings import SettingError, counted
from m4.storage import run_folder
from m4.storage.local_copy import fetched
from m4.storage.steps import latest_step, whole_step
from m4.train import initial
from m4.train.initial import InitialModel, check_adafactor
from m4.train.loop import Begin
from m4.train.program import TrainProgram
from m4.train.state import TrainState


def begin(experiment: Experiment, source: Source, model: Transformer, cache: Cache) -> Begin:
    """Returns what makes the state of a model that begins from another one.

    All is checked and no parameter is read. What is taken over is printed, and run.json has it
    under "initial".
    """
    rules = experiment.training.initial
    assert rules is not None

    def rows(path: str) -> initial.Rows:
        if path.endswith("tasks/kernel"):
            assert isinstance(source, SourceRun)
            return initial.task_rows(source.tasks(), tasks_of(model, cache))
        role = "source" if "source_token_embedder" in path else "target"
        new = getattr(cache, f"{role}_vocabulary")
        return initial.rows_of(source.vocabulary(role), new, rules.new_pieces)

    after = initial.shapes_of(abstract_variables(model)["params"])
    plan = initial.plan(source.shapes, after, rules.layers, rows)
    grown = source.shapes != after or any(one.spelled for one in plan.rows.values())
    if rules.optimizer and grown and isinstance(source, SourceT5x):
        allowed = "False where a model of T5X or its vocabulary has grown"
        raise SettingError("InitialModel.optimizer", True, allowed)
    source.check_model(model, plan.unused())
    changed = changes(source.experiment, experiment) if isinstance(source, SourceRun) else {}
    own = "training.initial"  # which says that a run begins from another one
    changed = {name: values for name, values in changed.items() if not name.startswith(own)}
    by_rule: dict[str, list[str]] = {"taken": []}
    for leaf in plan.leaves:
        rule = "taken" if leaf.rule == "pieces" else leaf.rule
        by_rule.setdefault(rule, []).append(leaf.path)
    about = {
        "run": rules.run,
        "step": source.step,
        "optimizer": rules.optimizer,
        "changes": changed,
        **by_rule,
        "taken": len(by_rule.pop("taken")),
        "new_pieces": {path: len(one.spelled) for path, one in plan.rows.items() if one.spelled},
        "left": plan.unused(),
        "kept": kept_of(experiment.data.keep, cache.directions),
    }
    if distributed.is_primary():
        print("\n".join(_lines(about, by_rule, rules.new_pieces, source)))
        run_folder.note(experiment.folder, initial=about)

    def state(program: TrainProgram) -> tuple[TrainState, dict[str, Any]]:
        if not rules.optimizer:
            return source.begin(program, plan), {}
        found, said = source.with_optimizer(program, plan)
        if distributed.is_primary():
            print(f"  the optimizer's state: {said}")
        return found, source.learned()

    return state


def _lines(
    about: Mapping[str, Any], by_rule: Mapping[str, list[str]], pieces_by: str, source: Source
) -> list[str]:
    """Returns lines for people: what was taken over, grown and left."""
    found = [
        f"begins from {source.folder} at step {source.step}: {about['taken']} of "
        f"{about['taken'] + sum(map(len, by_rule.values()))} arrays of parameters are taken over"
    ]
    for rule, paths in [*sorted(by_rule.items()), ("left", about["left"])]:
        if paths:
            found.append(f"  {rule}: {len(paths)} ({paths[0]}{', ...' * (len(paths) > 1)})")
    for path, pieces in about["new_pieces"].items():
        found.append(f"  {path}: {counted(pieces, 'new piece')} ({pieces_by})")
    for name, (before, now) in about["changes"].items():
        found.append(f"  {name}: {before} -> {now}")
    loss = source.last_loss()
    return found if loss is None else [*found, f"  {loss}"]


def _opened(rules: InitialModel, run: Path) -> Source:
    name, step = name_and_step(rules.run)
    folder, known = fetched(name), None
    if step is None and (run / "run.json").is_file():  # not there of --dry_run
        begun = run_folder.read(run).get("initial") or {}
        known = begun.get("step") if begun.get("run") == rules.run else None
    if is_hf(folder):
        return opened(folder, rules, step)
    if is_t5x(folder):
        return SourceT5x(folder, rules, step, known)
    return SourceRun(folder, name, rules, step, known)


def name_and_step(run: str) -> tuple[str, int | None]:
    """RUN@STEP -> RUN, STEP. What follows an @ and is no number belongs to the name."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def check_start(experiment: Experiment, *, writes: bool = True) -> tuple[int | None, Source | None]:
    """Returns the step that a training resumes from, or else the model that it begins from, if any.

    All is checked that is known before the corpus is built. Damaged checkpoints are moved aside if
    the job `writes`.
    """
    model, training = (parts := build(experiment, None)).model, experiment.training
    parts.check_training()
    checkpoints, rules = experiment.folder / "checkpoints", training.initial
    step = distributed.on_primary_then_broadcast(
        "checkpoints",
        lambda: whole_step(checkpoints, move_aside=True) if writes else latest_step(checkpoints),
    )
    if step is not None or rules is None:
        return step, None
    source = _opened(rules, experiment.folder)
    after = initial.shapes_of(abstract_variables(model)["params"])
    source.check_model(model, initial.plan(source.shapes, after, rules.layers).unused())
    total = training.total_steps
    if rules.optimizer and total < source.step:
        allowed = f"{source.step} or more, where the run continues"
        raise SettingError("Training.total_steps", total, allowed)
    if rules.optimizer and isinstance(source, SourceT5x):
        check_adafactor(training.optimizer(total))
    return None, source
