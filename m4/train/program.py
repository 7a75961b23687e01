"""The training step of a model on a mesh, before its compilation, and the sharding of its state."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from m4.model import pipeline
from m4.model.layers import shapes_only
from m4.model.transformer import Transformer
from m4.parallel.batched_init import draw_together, unoptimized
from m4.parallel.layout import Layout
from m4.parallel.mesh import axis_rules_context, check_divides, rows_over
from m4.settings import SettingError, nearest_valid
from m4.storage.checkpoints import by_path
from m4.train.batches import BatchShape
from m4.train.multitask.grouped import DirectionGroups, direction_groups
from m4.train.multitask.groups import Directions, by_direction
from m4.train.parameter_rates import with_rates
from m4.train.state import TrainState, initialize, state_shardings
from m4.train.step import make_train_step
from m4.train.training import Training


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """One training step over a mesh; nothing is computed until `jit` or `new_state` is called."""

    # (state, batch) -> (state, metrics), pure (`m4.train.step.make_train_step`).
    step: Callable[..., Any]
    model: Transformer
    optimizer: optax.GradientTransformation  # with the state of the groups of directions
    layout: Layout  # the mesh, with the rules by which parameters lie over it
    seed: int
    # Groups of directions whose gradients a step computes. None where it needs none.
    groups: DirectionGroups | None

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def axis_rules(self) -> AbstractContextManager[None]:
        """A context in which logical axes mean the mesh's; trace and call the step in it."""
        return self.layout.axis_rules()

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Sharding of each array of the state."""
        with self.axis_rules():
            return state_shardings(self.mesh, self.model, self.optimizer, self.layout.fsdp_axes)

    def abstract_state(self) -> TrainState:
        """Returns shapes and shardings of the state: enough to lower the step."""
        with shapes_only():
            shapes = jax.eval_shape(lambda: initialize(self.model, self.optimizer, self.seed))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def new_state(self) -> TrainState:
        """Makes the state before the first step, shard by shard where it belongs."""
        return self._made(lambda: initialize(self.model, self.optimizer, self.seed), self.shardings)

    def new_params(self, paths: Collection[str]) -> dict[str, Any]:
        """Makes some parameters of the new state, "a/b/c" -> array, and no others."""
        if not paths:
            return {}
        shardings = by_path(self.shardings.params)
        placed = {path: sharding for path, sharding in shardings.items() if path in paths}

        def chosen() -> dict[str, jax.Array]:
            made = by_path(initialize(self.model, optax.identity(), self.seed).params)
            return {path: made[path] for path in placed}

        return self._made(chosen, placed)

    def _made(self, make: Callable[[], Any], shardings: Any) -> Any:
        # On CPUs optimizing the program takes several times as long as running it, once.
        options = unoptimized(self.mesh)
        with self.axis_rules():
            return jax.jit(draw_together(make), out_shardings=shardings, compiler_options=options)()

    def jit(self, step: Callable[..., Any] | None = None) -> Any:
        """Returns the step, or another one with its state, as jax.jit; call it in `axis_rules`."""
        return jit_step(step or self.step, self.shardings)


def jit_step(step: Callable[..., Any], shardings: TrainState) -> Any:
    """Returns the step as jax.jit: the new state takes the place of the old one in memory.

    Metrics are replicated, so that every process can read them.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))


def train_program(
    training: Training,
    model: Transformer,
    directions: Directions | Sequence[str],
    mesh: Mesh,
    batch_shape: BatchShape | None = None,
) -> TrainProgram:
    """Returns the training step of a model; nothing is computed, read or written.

    Args:
        directions: Directions in the order of a batch's direction_ids. Names alone are of one size.
        batch_shape: Shape of the batches. Defaults to one that is not checked.

    Raises:
        SettingError: Sizes that do not divide over the mesh, or settings that do not fit together.
    """
    if not isinstance(directions, Directions):
        directions = Directions.assumed(directions)
    with axis_rules_context(mesh, training.extra_axis_rules):
        if batch_shape is not None:
            check_batch(mesh, model, batch_shape, training.grad_accum_steps)
        check_model(mesh, model)
    weights, rates = (
        None if given is None else by_direction(f"Training.{name}", given, directions)
        for name in ("loss_weights", "learning_rates")
        for given in (getattr(training, name),)
    )
    groups = direction_groups(training.gradients, rates, directions)
    optimizer = training.optimizer(training.total_steps)
    if training.parameter_rates is not None:
        optimizer = with_rates(optimizer, training.parameter_rates)
    step = make_train_step(
        model, optimizer, training, len(directions.names), loss_weights=weights, groups=groups
    )
    optimizer = optimizer if groups is None else groups.with_state(optimizer)
    layout = Layout(mesh, training.fsdp_axes, training.extra_axis_rules)
    return TrainProgram(step, model, optimizer, layout, training.seed, groups)


def check_model(mesh: Mesh, model: Transformer) -> None:
    """SettingError where an array of the model cannot be split evenly over the mesh."""
    width = model.heads * model.head_width
    check_divides(mesh, "width", model.width, "embed", "Transformer.width")
    check_divides(mesh, "attention", model.heads, "heads", "Transformer.heads")
    joined = "attention: heads * head_width"
    check_divides(mesh, joined, width, "joined_kv", "Transformer.head_width")
    check_divides(mesh, "attention", model.head_width, "kv", "Transformer.head_width")
    check_divides(mesh, "feed-forward", model.mlp_width, "mlp", "Transformer.mlp_width")
    shared = model.source_vocab_size is None
    vocabularies = {("" if shared else "target_") + "vocabulary_size": model.vocab_size}
    if model.source_vocab_size is not None:
        vocabularies["vocabulary_size"] = model.source_vocab_size
    for setting, size in vocabularies.items():
        check_divides(mesh, "embedding, rounded up", size, "vocab", f"CorpusSpec.{setting}")
    for experts in (model.encoder_experts, model.decoder_experts):
        if experts is not None:
            assert experts.mlp_width is not None
            check_divides(mesh, "experts", experts.num_experts, "expert", "MoeLayer.num_experts")
            check_divides(mesh, "experts", experts.mlp_width, "expert_mlp", "MoeLayer.mlp_width")
            check_divides(mesh, "experts", experts.shared_width, "mlp", "MoeLayer.shared_width")


def check_batch(mesh: Mesh, model: Transformer, shape: BatchShape, grad_accum_steps: int) -> None:
    """SettingError where a batch does not divide over the mesh or into accumulation steps."""
    rows, *lengths = shape
    check_divides(mesh, "batch", rows, "batch", "Training.batch_size")
    for length in lengths:
        check_divides(mesh, "batch", length, "length", "CorpusSpec.lengths")
    devices = rows_over(mesh)
    if rows % (devices * grad_accum_steps):
        allowed = (
            f"a multiple of {devices * grad_accum_steps}: Training.grad_accum_steps = "
            f"{grad_accum_steps} parts on each of {devices} devices with different rows; "
            f"{nearest_valid(rows, devices * grad_accum_steps)}"
        )
        raise SettingError("Training.batch_size", rows, allowed)
    try:
        pipeline.check(mesh, model, rows // grad_accum_steps, "Training.batch_size")
    except SettingError as error:
        if grad_accum_steps == 1 or error.setting != "Training.batch_size":
            raise
        allowed = f"{grad_accum_steps} (Training.grad_accum_steps) times {error.allowed}"
        raise SettingError(error.setting, rows, allowed) from None
