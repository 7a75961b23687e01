"""The training loop: batches by number, metrics, evaluations, checkpoints, resume."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from m4.model import pipeline
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.host_batches import host_batch, host_shards, to_global
from m4.parallel.mesh import Rules, axis_rules_context, check_divides
from m4.progress import ProgressBar
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.metrics_log import Metrics
from m4.train import average
from m4.train.early_stopping import EarlyStopping, Progress
from m4.train.metric_window import Window
from m4.train.preemption import ASKED, flags, signals, with_flags
from m4.train.sampling import LearnedSampling
from m4.train.state import TrainState, create
from m4.train.step import check_parts, make_train_step
from m4.train.training_counts import Seated, Seen


class BatchStream(Protocol):
    """batch(step) is a pure function of the step: nothing but the step is needed to resume."""

    directions: list[str]

    @property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """Rows, source and target length that a batch can have."""
        ...

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Mapping[str, np.ndarray]: ...
    def fingerprint(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What is measured every `period` steps and at the end: run(params) -> {name: number}."""

    period: int
    run: Callable[[Any], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came out: the parameters to use (the best ones where there is early stopping, averages
    where the optimizer makes them) and what is known."""

    params: Any
    note: dict[str, Any]


class Program(NamedTuple):
    """What a step is compiled from: `jit_step` makes the program."""

    step: Callable[..., Any]
    optimizer: optax.GradientTransformation
    zero: Sequence[str]
    rules: Rules


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during training; `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted at step {step}, which is saved; the same command goes on")
        self.step = step


def train(
    folder: Path | str,
    model: Transformer,
    stream: BatchStream,
    optimizer: Callable[[int], optax.GradientTransformation],
    mesh: Mesh,
    *,
    total_steps: int,
    seed: int = 0,
    label_smoothing: float = 0.1,
    z_loss: float = 1e-4,
    aux_loss_factor: float = 0.01,
    router_z_loss_factor: float = 0.0,
    rng: str = "unsafe_rbg",
    accumulate: int = 1,
    checkpoint_period: int = 500,
    keep: int = 3,
    zero: Sequence[str] = ("fsdp",),
    rules: Rules = (),
    log_period: int = 25,
    evaluators: Sequence[Evaluator] = (),
    early_stopping: EarlyStopping | None = None,
    sampling: LearnedSampling | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    note: Mapping[str, Any] | None = None,
    tensorboard: bool = True,
    stage: ProgressBar | None = None,
    instead: Callable[[Program], Any] | None = None,
) -> Trained:
    """Trains to `total_steps`, from the latest checkpoint of `folder` or from the beginning.

    Writes folder/checkpoints/<step> every `checkpoint_period` steps and at the end,
    folder/metrics.jsonl and folder/tensorboard every `log_period` steps; with a model that counts
    directions, folder/atlas.train.json with every checkpoint (`m4.train.routing_counts`). A run
    that was killed and started again makes the same steps as one that was not: batches, dropout and
    routing are functions of (seed, step).

    With several processes each gives its own rows and saves its own parts; the first one writes the
    other files.

    Args:
        folder: the model's folder. model, optimizer: what and how; the latter by total steps.
        stream: the batches. mesh: the devices.
        label_smoothing, z_loss, aux_loss_factor, router_z_loss_factor, rng, accumulate: see
            `make_train_step`.
        zero: mesh axes over which weights and their statistics are split, see
            `m4.parallel.mesh.shard_further`.
        rules: (logical axis, mesh axis or axes), further ones than those of `m4.parallel.axes`, for
            what the table leaves whole, such as ("embed", "model") or ("length", "model").
        keep: checkpoints that stay. evaluators, early_stopping: see there.
        sampling: learns from evaluations how often directions are drawn.
        groups: resource level -> directions, for the loss that is shown.
        note: JSON that goes into every checkpoint (fingerprints of data, vocabulary, config).
        stage: where progress is shown.
        instead: called with the program of a step in the place of everything else; its result is
            this function's.

    Raises:
        ValueError: sizes that do not divide over the mesh; a checkpoint of another stream; a
            step whose loss or gradient is not finite.
        Interrupted: Ctrl-C or SIGTERM, in any process; the step is saved first.
    """
    folder = Path(folder)
    with axis_rules_context(mesh, rules):
        _check_divides(mesh, model, stream, accumulate)
    tx = optimizer(total_steps)
    step_fn = make_train_step(
        model,
        tx,
        directions=len(stream.directions),
        seed=seed,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        aux_loss_factor=aux_loss_factor,
        router_z_loss_factor=router_z_loss_factor,
        rng=rng,
        accumulate=accumulate,
    )
    if instead is not None:
        with axis_rules_context(mesh, rules):
            return instead(Program(step_fn, tx, zero, rules))
    about = {**(note or {}), "stream": stream.fingerprint(), "directions": stream.directions}
    if stages := pipeline.about(mesh, model):
        about["pipeline"] = stages
        _tell_of_stages(stages)
    checkpoints = Checkpoints(folder / "checkpoints", keep=keep)
    try:
        latest = distributed.on_primary_then_broadcast(
            "latest checkpoint", lambda: checkpoints.latest
        )
        saved = {} if latest is None else checkpoints.note(latest)
        if latest is not None:
            _check_same(f"{checkpoints.folder}/{latest}", saved, about)
        if sampling is not None:
            sampling.resume(saved.get("sampling"))
        with axis_rules_context(mesh, rules):
            state, shardings = create(mesh, model, tx, seed, zero)
        progress = Progress(early_stopping)
        if latest is not None:
            state = _restore(checkpoints, latest, saved, state, progress)
        start = int(state.step)
        seated = Seated(stream.directions, saved.get("seated"), start)
        seen = Seen(stream.directions, saved.get("seen"), start)

        def save(**more: Any) -> dict[str, Any]:
            counted = {**seated.note(), **seen.note()}
            learned = {} if sampling is None else sampling.note()
            written = _save(checkpoints, state, progress, {**about, **more, **counted, **learned})
            if distributed.is_primary():
                seated.write(folder, written)
            return written

        together = distributed.is_distributed()
        jitted = jit_step(with_flags(step_fn) if together else step_fn, shardings)
        compiled = distributed.SynchronizedProgram(jitted, "the step's program")
        window = Window(stream.directions, groups or {})
        step = start
        with (
            axis_rules_context(mesh, rules),
            Metrics(
                folder if distributed.is_primary() else None,
                resume_step=start,
                tensorboard=tensorboard,
            ) as metrics,
            contextlib.closing(_batches(mesh, stream, start)) as batches,
            signals() as asked,
        ):
            while step < total_steps and not progress.stopped:
                batch = next(batches)
                if together:
                    batch[ASKED] = flags(mesh, bool(asked))
                state, step_metrics = compiled(state, batch)
                # One step at a time: on few cores, more than two steps with collectives in
                # flight deadlock in XLA's thread pool.
                step_metrics = jax.block_until_ready(step_metrics)
                stop = int(step_metrics.pop(ASKED)) if together else asked
                seated.add(step_metrics.pop("seated"))
                seen.add(step_metrics.pop("seen"))
                window.add(step + 1, step_metrics)
                step += 1
                last = step == total_steps
                if step % log_period == 0 or last:
                    metrics.write(step, {**window.flush(), **seen.flush()})
                    seated.flush()
                if stage is not None:
                    stage.update(step, window.text)
                measured = _evaluate(evaluators, step, last, average.used(state), metrics, progress)
                if sampling is not None and measured:
                    metrics.write(step, sampling.evaluated(step, measured))
                if stop:
                    save()
                    checkpoints.wait()
                    raise Interrupted(step)
                if step % checkpoint_period == 0 and not last:
                    save()
        written = save(finished=True)
        checkpoints.wait()
        return Trained(average.used(state) if progress.best is None else progress.best, written)
    finally:
        checkpoints.close()


def jit_step(step: Callable[..., Any], shardings: TrainState) -> Any:
    """The step as one program: the state takes the place of its argument, in these shardings.

    Metrics come whole, so that every process can read them.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))


def check_model_divides(mesh: Mesh, model: Transformer) -> None:
    """Raises a ValueError where the model does not split evenly over the mesh."""
    name = "transformer.Transformer"
    width = model.heads * model.head_width
    check_divides(mesh, "width", model.width, "embed", f"{name}.width")
    check_divides(mesh, "attention", model.heads, "heads", f"{name}.heads")
    check_divides(mesh, "attention", width, "joined_kv", f"{name}.heads * {name}.head_width")
    check_divides(mesh, "attention", model.head_width, "kv", f"{name}.head_width")
    check_divides(mesh, "feed-forward", model.mlp_width, "mlp", f"{name}.mlp_width")
    shared = model.source_vocab_size is None
    vocabularies = {("" if shared else "target_") + "vocabulary_size": model.vocab_size}
    if model.source_vocab_size is not None:
        vocabularies["vocabulary_size"] = model.source_vocab_size
    for setting, size in vocabularies.items():
        check_divides(mesh, "embedding", size, "vocab", f"cache.prepare.{setting}, rounded,")
    if model.num_experts:
        check_divides(mesh, "experts", model.num_experts, "expert", f"{name}.num_experts")
        check_divides(mesh, "experts", model.mlp_width, "expert_mlp", f"{name}.mlp_width")


def _check_divides(mesh: Mesh, model: Transformer, stream: BatchStream, accumulate: int) -> None:
    """ValueError: batches or the model do not split evenly over the mesh, or into parts."""
    for rows, source_length, target_length in stream.shapes:
        check_divides(mesh, "batch", rows, "batch", "BATCH_SIZE")
        for length in (source_length, target_length):
            check_divides(mesh, "batch", length, "length", "TASK_FEATURE_LENGTHS")
        check_parts(mesh, rows, accumulate)
        of = "BATCH_SIZE / loop.train.accumulate" if accumulate > 1 else "BATCH_SIZE"
        pipeline.check(mesh, model, rows // accumulate, of)
    check_model_divides(mesh, model)


def _tell_of_stages(stages: Mapping[str, Any]) -> None:
    if distributed.is_primary():
        print(
            f"pipeline: {stages['stages']} stages, {stages['microbatches']} microbatches; "
            f"each stack's stages are idle for {stages['bubble']:.1%} of its ticks"
        )


def _batches(
    mesh: Mesh, stream: BatchStream, start: int
) -> Generator[dict[str, jax.Array], None, None]:
    """The batches from step `start` on, over the mesh; the next one is made meanwhile."""
    parts = host_shards(mesh)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(host_batch, stream.batch, start, parts)
        for step in itertools.count(start + 1):
            batch = to_global(mesh, coming.result())
            coming = ahead.submit(host_batch, stream.batch, step, parts)
            yield batch


def _evaluate(
    evaluators: Sequence[Evaluator],
    step: int,
    last: bool,
    params: Any,
    metrics: Metrics,
    progress: Progress,
) -> dict[str, float]:
    """Runs those whose turn it is, at the last step all; what was measured in its turn.

    For a learned sampler: a run that is made longer afterwards learns from the same steps.
    """
    measured: dict[str, float] = {}
    for evaluator in evaluators:
        due = step % evaluator.period == 0
        if due or last:
            values = evaluator.run(params)
            metrics.write(step, values)
            progress.evaluated(step, values, params)
            measured |= values if due else {}
    return measured


def _save(checkpoints: Checkpoints, state: TrainState, progress: Progress, note) -> dict[str, Any]:
    note = {**note, **progress.note(), "step": int(state.step)}
    items = average.items(state)
    if progress.best is not None:
        items["best"] = progress.best
    checkpoints.save(int(state.step), items, note)
    return note


def _check_same(checkpoint: str, saved: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    """ValueError: the checkpoint was trained on something else."""
    for name in ("vocabulary", "stream"):
        if name in note and saved.get(name) != note[name]:
            raise ValueError(
                f"{checkpoint} was trained with another {name} "
                f"({str(saved.get(name))[:12]} there, {str(note[name])[:12]} here); "
                "choose another MODEL_DIR, or start over with --fresh"
            )


def _restore(
    checkpoints: Checkpoints,
    step: int,
    saved: Mapping[str, Any],
    state: TrainState,
    progress: Progress,
) -> TrainState:
    items = {name: shapes(tree) for name, tree in average.items(state).items()}
    if progress.rule is not None and "best_step" in saved:
        items["best"] = shapes(state.params)
    found = checkpoints.restore(step, items)
    if "best" in found:
        progress.resume(saved, found["best"])
    at = jax.device_put(np.asarray(step, np.int32), state.step.sharding)
    return average.from_items(at, found)
