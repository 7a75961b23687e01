"""The step of training before its compilation: what is compiled, and how its arrays are sharded."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from m4.model.layers import shapes_only
from m4.model.transformer import Transformer
from m4.parallel.mesh import Rules, axis_rules_context
from m4.train.state import TrainState, initialize, new_state, state_shardings


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """One training step over a mesh; nothing is computed until `jit` or `new_state` is called.

    Attributes:
        step: (state, batch) -> (state, metrics), pure (`m4.train.step.make_train_step`).
        fsdp_axes, extra_axis_rules: see `m4.train.training.Training`.
    """

    step: Callable[..., Any]
    model: Transformer
    optimizer: optax.GradientTransformation
    mesh: Mesh
    seed: int
    fsdp_axes: Sequence[str]
    extra_axis_rules: Rules

    def axis_rules(self) -> AbstractContextManager[None]:
        """Within it logical axes mean the mesh's; the step must be traced and called there."""
        return axis_rules_context(self.mesh, self.extra_axis_rules)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Of every array of the state."""
        with self.axis_rules():
            return state_shardings(self.mesh, self.model, self.optimizer, self.fsdp_axes)

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state: enough to lower the step."""
        with shapes_only():
            shapes = jax.eval_shape(
                functools.partial(initialize, self.model, self.optimizer, self.seed)
            )
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def new_state(self) -> TrainState:
        """The state before the first step, made shard by shard where it belongs."""
        with self.axis_rules():
            return new_state(self.mesh, self.model, self.optimizer, self.seed, self.shardings)

    def jit(self, step: Callable[..., Any] | None = None) -> Any:
        """The step, or another one with its state, as jax.jit; to be called in `axis_rules`."""
        return jit_step(step or self.step, self.shardings)


def jit_step(step: Callable[..., Any], shardings: TrainState) -> Any:
    """The new state takes the place of the old one in memory, in these shardings.

    Metrics are replicated, so that every process can read them.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))
