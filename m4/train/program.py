"""The training step of a model on a mesh before compilation, and the sharding of its state."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.model import pipeline
from m4.model.layers import names_of, shapes_only
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.mesh import Layout, check_divides, parameter_shardings, rows_over
from m4.settings import SettingError, nearest_valid
from m4.storage.checkpoints import by_path
from m4.train.multitask.direction_groups import DirectionGroups, direction_groups
from m4.train.multitask.groups import Directions, by_direction
from m4.train.optimizer import with_rates
from m4.train.step import TrainState, make_train_step
from m4.train.training import Training

# (rows, source length, target length) of a batch.
BatchShape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """A training step over a mesh; nothing is computed before `jit` or `new_state` is called."""

    # (state, batch) -> (state, metrics), pure (`m4.train.step.make_train_step`).
    step: Callable[..., Any]
    model: Transformer
    optimizer: optax.GradientTransformation  # includes the state for sets of directions
    layout: Layout  # the mesh with the sharding rules of parameters
    seed: int
    # Sets of directions whose gradients a step computes, or None.
    groups: DirectionGroups | None

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def about(self) -> dict[str, Any]:
        """The note about the step in checkpoints: sets of directions, stages of a pipeline."""
        stages = pipeline.about(self.mesh, self.model)
        about = self.groups.note() if self.groups else {}
        return {**about, "pipeline": stages} if stages else about

    def axis_rules(self) -> AbstractContextManager[None]:
        """Context that maps logical axes to the mesh; trace and call the step in it."""
        return self.layout.axis_rules()

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Sharding of each array of the state."""
        with self.axis_rules():
            return state_shardings(self.mesh, self.model, self.optimizer, self.layout.fsdp_axes)

    def abstract_state(self) -> TrainState:
        """Returns shapes and shardings of the state, enough to lower the step."""
        with shapes_only():
            shapes = jax.eval_shape(lambda: initialize(self.model, self.optimizer, self.seed))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def new_state(self) -> TrainState:
        """Makes the initial state, each shard on its device."""
        return self._made(lambda: initialize(self.model, self.optimizer, self.seed), self.shardings)

    def new_params(self, paths: Collection[str]) -> dict[str, Any]:
        """Makes only these parameters of the new state, "a/b/c" -> array."""
        if not paths:
            return {}
        shardings = by_path(self.shardings.params)
        placed = {path: sharding for path, sharding in shardings.items() if path in paths}

        def chosen() -> dict[str, jax.Array]:
            made = by_path(initialize(self.model, optax.identity(), self.seed).params)
            return {path: made[path] for path in placed}

        return self._made(chosen, placed)

    def _made(self, make: Callable[[], Any], shardings: Any) -> Any:
        # On CPUs, optimizing the program takes several times as long as running it once.
        options: dict[str, Any] = {}
        if self.mesh.devices.flat[0].platform == "cpu":
            options["xla_backend_optimization_level"] = 0
            if jax.__version_info__ < (0, 11):  # later versions have no such option
                options["xla_cpu_use_fusion_emitters"] = False
        with self.axis_rules():
            return jax.jit(draw_together(make), out_shardings=shardings, compiler_options=options)()

    def jit(self, step: Callable[..., Any] | None = None) -> Any:
        """Returns the jitted step, or another step with its state; call it in `axis_rules`."""
        return jit_step(step or self.step, self.shardings)


def jit_step(step: Callable[..., Any], shardings: TrainState) -> Any:
    """Returns the jitted step, which reuses the state's memory and replicates its metrics."""
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))


def initialize(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Returns a new state for a seed; a pure function for jitting or mapping over seeds."""
    tokens, key = jnp.ones((1, 8), jnp.int32), jax.random.key(seed)
    params = model.init(key, tokens, tokens, tokens, enable_dropout=False)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def state_shardings(
    mesh: Mesh, model: Transformer, optimizer: optax.GradientTransformation,
    fsdp_axes: Sequence[str] = ("fsdp",),
) -> TrainState:  # fmt: skip
    """Returns the sharding of every array of the state.

    Optimizer statistics of a parameter's shape are sharded like it; factored ones follow the
    leading axes shared with the parameter (an expert's statistics stay with it).
    """
    variables = abstract_variables(model)
    params = parameter_shardings(mesh, variables["params_axes"], variables["params"], fsdp_axes)
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    known = {
        tuple(names_of(path)): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(params), strict=True)
    }

    def sharding(path, leaf):
        names = tuple(names_of(path))
        for start in range(len(names)):  # the parameter's path within the optimizer's
            for stop in range(len(names), start, -1):
                if names[start:stop] in known:
                    shape, whole = known[names[start:stop]]
                    return NamedSharding(mesh, _common_spec(leaf.shape, shape, whole.spec))
        return replicated

    abstract = jax.eval_shape(optimizer.init, variables["params"])
    return TrainState(replicated, params, jax.tree_util.tree_map_with_path(sharding, abstract))


def _common_spec(shape, parameter_shape, spec) -> PartitionSpec:
    if shape == parameter_shape:
        return spec
    common = []
    for mine, its, axis in zip(shape, parameter_shape[:-2], tuple(spec), strict=False):
        if mine != its:
            break
        common.append(axis)
    return PartitionSpec(*common)


def train_program(
    training: Training, model: Transformer, directions: Directions | Sequence[str], mesh: Mesh,
    batch_shape: BatchShape | None = None,
) -> TrainProgram:  # fmt: skip
    """Returns the training step of a model; nothing is computed, read or written.

    Directions are in the order of a batch's direction_ids; mere names get equal sizes. Raises
    SettingError if sizes do not divide over the mesh or settings do not fit together.
    """
    if not isinstance(directions, Directions):
        directions = Directions.assumed(directions)
    layout = Layout(mesh, training.fsdp_axes, training.extra_axis_rules)
    with layout.axis_rules():
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
    return TrainProgram(step, model, optimizer, layout, training.seed, groups)


def check_model(mesh: Mesh, model: Transformer) -> None:
    """Raises SettingError if an array of the model cannot be split evenly over the mesh."""
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
    """Raises SettingError if a batch does not divide over the mesh or into accumulation steps."""
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
        pipeline.check(mesh, model, rows // grad_accum_steps)
    except SettingError as error:
        if grad_accum_steps == 1 or error.setting != "Training.batch_size":
            raise
        allowed = f"{grad_accum_steps} (Training.grad_accum_steps) times {error.allowed}"
        raise SettingError(error.setting, rows, allowed) from None


# ------------------------------------------------- a new model's weights, drawn quickly

# XLA's options do not suffice to compile these programs quickly: without batching, 6 + 6 layers
# take 9.3 CPU seconds instead of 1.5, and a quarter of the arrays get other last bits.

# Larger arrays are drawn separately, as a batch of them would need their memory twice.
_LARGEST = 2**20


def draw_together(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with similar random draws batched: the same values, up to rounding.

    Each draw from a random key is a separate program for XLA, about a hundred instructions long.
    Draws are batched if they are the same operation on arguments of the same shapes, and none needs
    another's result. The function maps arrays to a tree of arrays, in jax.jit.
    """

    def together(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for alike in _in_order(closed.jaxpr):
            inputs = [[read(atom) for atom in equation.invars] for equation in alike]
            if len(alike) == 1:
                outputs = [_call(alike[0], *inputs[0])]
            else:
                stacked = [jnp.stack(each) for each in zip(*inputs, strict=True)]
                drawn = jax.vmap(lambda *xs, one=alike[0]: _call(one, *xs))(*stacked)
                # Otherwise XLA recomputes the whole batch for each of its parts.
                drawn = jax.lax.optimization_barrier(drawn)
                outputs = [[each[i] for each in drawn] for i in range(len(alike))]
            for equation, results in zip(alike, outputs, strict=True):
                values |= zip(equation.outvars, results, strict=True)
        leaves = [read(atom) for atom in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return together


def _in_order(jaxpr: Any) -> list[list[Any]]:
    """Orders the equations for evaluation, with similar ones together."""
    level: dict[Any, int] = defaultdict(int)
    groups: dict[Any, list[Any]] = defaultdict(list)
    for number, equation in enumerate(jaxpr.eqns):
        atoms = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
        mine = 1 + max((level[atom] for atom in atoms), default=0)
        for var in equation.outvars:
            level[var] = mine
        what: Any = number
        if _is_draw(equation):
            parameters = tuple((name, id(value)) for name, value in equation.params.items())
            shapes = tuple(atom.aval for atom in equation.invars)
            what = (equation.primitive, parameters, shapes)
        groups[mine, what].append(equation)
    return [alike for _, alike in sorted(groups.items(), key=lambda item: item[0][0])]


def _is_draw(equation: Any) -> bool:
    """Returns whether it is an operation on a random key with small results."""
    key = any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in equation.invars)
    small = all(var.aval.size <= _LARGEST for var in equation.outvars)
    name = equation.primitive.name
    return key and small and (name == "jit" or name.startswith("random_"))


def _call(equation: Any, *inputs: Any) -> list[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    outputs = equation.primitive.bind(*inputs, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]
