"""Stacks as pipelines over stages of the mesh (GPipe, Huang et al. 2019, arXiv 1811.06965).

A stage has the devices at one index of the mesh axis "stage", with layers / stages consecutive
layers of the scanned stack. The rows of each of its devices are divided into m microbatches. At
tick t, stage s computes microbatch t - s and passes it on to stage s + 1 (a collective-permute), so
that all are done after m + stages - 1 ticks. At stages - 1 ticks, a stage has no microbatch: it
computes on the rows that it holds, and the result is not used.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from m4.model.layers import Array, constrain
from m4.model.stack import REMAT, Block, Inputs, Mode
from m4.parallel.mesh import axes_of, split_axes
from m4.settings import SettingError, nearest_valid

STAGE = "stage"


def stages(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of stages of a mesh; 1 means no pipeline."""
    return mesh.shape.get(STAGE, 1)


def check(mesh: Mesh | AbstractMesh, model: Any, rows: int) -> None:
    """Raises SettingError unless a model (`Transformer`) can run as a pipeline over this mesh.

    Args:
        mesh: Mesh; without stages everything fits.
        rows: Number of rows that go through the stages at once, over all devices.
    """
    G, m = stages(mesh), model.pipeline_microbatches
    if G == 1:
        return
    if model.moe is not None:
        allowed = "1 for a model with experts (Transformer.moe); make_mesh.expert spreads them"
        raise SettingError("make_mesh.stage", G, allowed)
    if not model.scan_layers:
        allowed = f"True for a pipeline, make_mesh.stage = {G}"
        raise SettingError("Transformer.scan_layers", False, allowed)
    for name in ("encoder_layers", "decoder_layers", "pipeline_microbatches"):
        if (size := getattr(model, name)) < 1 or size % G:
            allowed = f"a multiple of make_mesh.stage = {G}; {nearest_valid(size, G)}"
            raise SettingError(f"Transformer.{name}", size, allowed)
    copies = math.prod(mesh.shape[axis] for axis in _rows_over(mesh))
    if rows % (copies * m):
        allowed = (
            f"a multiple of {copies * m}: Transformer.pipeline_microbatches = {m} on each of "
            f"{copies} parts of the mesh's other axes; {nearest_valid(rows, copies * m)}"
        )
        raise SettingError("Training.batch_size", rows, allowed)


def about(mesh: Mesh | AbstractMesh, model: Any) -> dict[str, float]:
    """Describes the pipeline for a run's notes; "bubble" is the share of idle ticks."""
    G, m = stages(mesh), model.pipeline_microbatches
    return {} if G == 1 else {"stages": G, "microbatches": m, "bubble": (G - 1) / (m + G - 1)}


def _rows_over(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that rows are sharded over, apart from the stages."""
    return tuple(axis for axis in split_axes(mesh, "batch") if axis != STAGE)


def spread(x: Array, axes: tuple[str | None, ...]) -> Array:
    """Constrains an array outside the stacks, with rows over the stages too.

    Without this, each stage would compute all embeddings and logits.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = ("batch", (*_rows_over(mesh), STAGE))
    with nn.logical_axis_rules((rows, *nn.get_logical_axis_rules())):
        return constrain(x, axes)


def pipelined(
    stack: Any,
    x_BLM: Array,
    inputs: Inputs,
    mode: Mode,
    microbatches: int,
    policy: str,
    dropout_key: Array | None,
) -> Array:
    """Computes `stack(x_BLM, inputs, mode)` over the stages of the mesh; rows stay in order.

    All axes of the mesh but "model" are manual here, also for weights: their gradients are summed,
    and sharded ones gathered, once per step; the partitioner would do it at every tick.

    Args:
        stack: Bound scan of dense layers (`m4.model.stack.scanned`), with one layer per block.
        microbatches: m, a multiple of the number of stages.
        inputs: See `m4.model.stack.Inputs`.
        policy: A name of `REMAT`.
        dropout_key: Key of this stack, from which each layer and microbatch, on each part of the
            mesh with different rows, gets its own key. None without dropout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    copies, m = _rows_over(mesh), microbatches
    manual = (*copies, STAGE)
    run_stage = _stage(stack, mode, policy)
    given = {name: x for name, x in inputs.items() if name != "about" and x is not None}
    # Inputs shared by all rows: relative biases.
    shared = {name: x for name, x in given.items() if x.shape[0] == 1}
    # Inputs with a gradient, such as the encoder's output for the decoder, move with their
    # microbatch while the stages compute. Gathering them at every stage would send half the bytes,
    # but all before the first tick, when nothing else can run, and would sum their gradients over
    # the stages after the last tick.
    moving = {
        name: x for name, x in given.items()
        if name not in shared and jnp.issubdtype(x.dtype, jnp.floating)
    }  # fmt: skip
    # Inputs without one are masks, made of token ids, which every stage has. Each stage takes those
    # of its microbatch, so nothing is sent.
    here = {name: x for name, x in given.items() if name not in {**shared, **moving}}

    def on_a_device(params, x_RLM: Array, shared, here, moving, key: Array | None) -> Array:
        # From here on, devices may differ in them, so their gradients are summed here, once.
        params = lax.pcast(params, copies, to="varying")
        shared = lax.pcast(shared, manual, to="varying")
        if key is not None and copies:
            key = jax.random.fold_in(key, lax.axis_index(copies))
        here = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), here)
        G = lax.axis_size(STAGE)
        moving = {"x": x_RLM, **moving}
        moving = jax.tree.map(lambda a: a.reshape(m // G, -1, *a.shape[1:]), moving)

        def work(microbatch: Array, held: dict[str, Array]) -> dict[str, Array]:
            given = {
                name: lax.dynamic_index_in_dim(a, microbatch, 0, False) for name, a in here.items()
            }
            x_BLM, given = held["x"], {**shared, **given, **held, "about": {}}
            return {**held, "x": run_stage(params, x_BLM, given, microbatch, key)}

        return schedule(work, moving, m)["x"].reshape(x_RLM.shape)

    rules = [
        (name, to) for name, to in nn.get_logical_axis_rules() if not {*axes_of(to)} & {*manual}
    ]
    whole, by_rows = PartitionSpec(), PartitionSpec(copies)
    by_both = PartitionSpec((*copies, STAGE))
    with nn.logical_axis_rules(rules):
        return jax.shard_map(
            on_a_device,
            in_specs=(PartitionSpec(STAGE), by_both, whole, by_rows, by_both, whole),
            out_specs=by_both,
            axis_names={*manual},
        )(stack.variables["params"], x_BLM, shared, here, moving, dropout_key)


def schedule(work, rows, m: int):
    """Runs all ticks of one stage.

    Microbatches that have not begun move towards stage 0, and finished ones move back from the last
    stage, in the same places: at tick t, place t mod m/stages of every stage moves by one. Thus
    only permutations between neighbours are sent.

    Args:
        work: (number of the microbatch, moving arrays) -> moving arrays: this stage's layers.
        rows: Tree of arrays [m / stages, ...]: the microbatches placed at this stage; stage s has
            the numbers from s m / stages on.

    Returns:
        The output of the last stage, placed as `rows` is.
    """
    G, stage = lax.axis_size(STAGE), lax.axis_index(STAGE)
    k = m // G
    up, down = [(i, i + 1) for i in range(G - 1)], [(i + 1, i) for i in range(G - 1)]

    def tick(carry, t: Array):
        waiting, held = carry
        place = t % k
        first = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, 0, False), waiting)
        held = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), first, held)
        done = work(jnp.clip(t - stage, 0, m - 1), held)
        back = lax.ppermute(first, STAGE, down)
        back = jax.tree.map(lambda a, b: jnp.where(stage == G - 1, a, b), done, back)
        waiting = jax.tree.map(
            lambda a, b: lax.dynamic_update_index_in_dim(a, b, place, 0), waiting, back
        )
        return (waiting, lax.ppermute(done, STAGE, up)), None

    # Idle stages also compute on real rows, so that they never divide by zero, whose gradient would
    # be 0 times infinity.
    held = jax.tree.map(lambda a: a[0], rows)
    (waiting, _), _ = lax.scan(tick, (rows, held), jnp.arange(m + G - 1))
    # Microbatch s k + i was finished at tick s k + i + G - 1, into place (i + G - 1) mod k, which
    # has since moved G - 1 - s times, to stage s.
    return jax.tree.map(lambda a: jnp.roll(a, -(G - 1), axis=0), waiting)


def _stage(stack: Any, mode: Mode, policy: str):
    """Returns (parameters, x, inputs, microbatch, key) -> x after the layers of one stage."""
    block = Block(stack.make, 1, parent=None)

    def layer(params, x_BLM: Array, inputs: Inputs, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        return block.apply({"params": params}, x_BLM, inputs, mode, rngs=rngs)[0]

    if policy != "none":
        layer = jax.checkpoint(layer, policy=REMAT[policy], prevent_cse=False)

    def run(params, x_BLM: Array, inputs: Inputs, microbatch: Array, key: Array | None) -> Array:
        layers = jax.tree.leaves(params)[0].shape[0]
        first = lax.axis_index(STAGE) * layers

        def step(x_BLM: Array, numbered):
            params, index = numbered
            own = key
            if own is not None:
                own = jax.random.fold_in(jax.random.fold_in(own, first + index), microbatch)
            return layer(params, x_BLM, inputs, own), None

        return lax.scan(step, x_BLM, (params, jnp.arange(layers)))[0]

    return run
