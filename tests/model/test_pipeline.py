"""A pipeline over stages is the same model as without stages; what it sends, draws, refuses."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from m4.model import pipeline
from m4.model.moe import MoeLayer
from m4.model.stack import Mode, unstack
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.mesh import axis_rules_context, make_mesh, parameter_shardings, to_global
from m4.plan.hlo import collectives, summary
from m4.train.program import draw_together
from tests.shared import small_model

MODEL = small_model(
    encoder_layers=4, decoder_layers=4, moe=None, scan_layers=True, pipeline_microbatches=4
)
ROWS, LENGTH = 16, 8


def mesh_of(**sizes: int):
    return make_mesh(**{"data": 1, **sizes}, devices=jax.devices()[: math.prod(sizes.values())])


def packed() -> dict[str, np.ndarray]:
    """Returns rows of two pairs of different lengths and padding, all different."""
    random = np.random.default_rng(0)
    place = np.arange(LENGTH)[None]
    first = 2 + np.arange(ROWS)[:, None] % 3
    source, target = random.integers(1, 32, (2, ROWS, LENGTH))
    source, target = source * (place < first + 4), target * (place < first + 3)
    segment = np.where(place < first, 1, 2)
    batch = {
        "encoder_input_tokens": source,
        "decoder_input_tokens": np.where(place == first, 0, np.roll(target, 1, 1) * (place > 0)),
        "decoder_target_tokens": target,
        "encoder_segment_ids": segment * (source > 0),
        "decoder_segment_ids": segment * (target > 0),
    }
    return {name: value.astype(np.int32) for name, value in batch.items()}


@functools.cache
def params():
    x = jnp.ones((1, LENGTH), jnp.int32)

    def make(key):
        return MODEL.init(key, x, x, x, enable_dropout=False)["params"]

    return jax.device_get(jax.jit(draw_together(make))(jax.random.key(0)))


def loss(model: Transformer, params, batch):
    logits_BTV: Any = model.apply({"params": params}, **batch, enable_dropout=False)
    targets_BT = batch["decoder_target_tokens"]
    nll_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), targets_BT[..., None], -1)[..., 0]
    return jnp.sum(nll_BT * (targets_BT > 0)) / jnp.sum(targets_BT > 0)


@functools.cache
def one_after_the_other():
    plain = functools.partial(loss, MODEL.clone(scan_layers=False))
    return jax.device_get(jax.jit(jax.value_and_grad(plain))(unstack(params()), packed()))


@functools.cache
def compiled(mesh, remat: str):
    """Returns the program of loss and gradients, and its arguments."""
    model = MODEL.clone(remat=remat)
    shardings = parameter_shardings(mesh, abstract_variables(model)["params_axes"], params())
    function = jax.value_and_grad(functools.partial(loss, model))
    with axis_rules_context(mesh):
        given = jax.device_put(params(), shardings), to_global(mesh, packed())
        lowered = jax.jit(function, out_shardings=(None, shardings)).lower(*given)
        return lowered.compile(), given


def assert_same(found):
    value, gradients = jax.device_get(found)
    expected, its = one_after_the_other()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5)
    jax.tree.map(close, unstack(gradients), its)


@pytest.mark.thorough
def test_without_stages_it_is_the_scan():
    function = jax.jit(jax.value_and_grad(functools.partial(loss, MODEL)))
    assert_same(function(params(), packed()))


@pytest.mark.parametrize(
    ("stage", "data", "model", "remat"),
    [
        (2, 2, 2, "products"),
        pytest.param(2, 4, 1, "full", marks=pytest.mark.thorough),
        pytest.param(4, 2, 1, "none", marks=pytest.mark.thorough),
    ],
)
def test_loss_and_gradients_are_those_of_the_layers(stage, data, model, remat):
    program, given = compiled(mesh_of(stage=stage, data=data, model=model), remat)
    assert_same(program(*given))


def test_nothing_but_permutations_crosses_stages():
    """2 stages, 4 microbatches: 5 ticks, each of them forward and backward.

    At a tick of the encoder a microbatch's x moves on and a waiting one moves up, 2 permutations;
    in the decoder the encoder's output moves too, 4. (2 + 4) * 2 * 5 = 60, each of 16 rows / (4
    devices along "data" * 4 microbatches) = 1 row of 8 * 8 float32: 256 bytes.
    """
    program, _ = compiled(mesh_of(stage=2, data=4), "full")
    found = collectives(program.as_text() or "")
    total = summary(found)
    assert set(total) == {"all-reduce", "collective-permute"}
    assert total["collective-permute"].count == 60
    assert total["collective-permute"].operand_bytes == 60 * 256
    # Sums of gradients and of the loss, once a step: not at every tick.
    assert all(each.times == 1 for each in found if each.kind == "all-reduce")


def test_sharded_weights_are_gathered_once():
    program, given = compiled(mesh_of(stage=2, fsdp=2), "full")
    assert_same(program(*given))
    gathers = [c for c in collectives(program.as_text() or "") if c.kind == "all-gather"]
    assert gathers
    assert all(each.times == 1 and len(each.groups[0]) == 2 for each in gathers)


def test_every_layer_microbatch_and_device_draws_for_itself():
    """Each of 4 layers writes a random number into its own place of x."""

    class Draw(nn.Module):
        @nn.compact
        def __call__(self, x_BLM, inputs, mode):
            layer = self.param("layer", nn.initializers.zeros, ())
            drawn = jax.random.uniform(self.make_rng("dropout"), x_BLM.shape[:1])
            mine_M = jnp.arange(x_BLM.shape[-1]) == layer
            return x_BLM + drawn[:, None, None] * mine_M[None, None]

    stack = SimpleNamespace(
        make=lambda index, name: Draw(name=name),
        variables={"params": {"layer_0": {"layer": jnp.arange(4.0)}}},
    )
    mesh = mesh_of(stage=2, data=4)

    @jax.jit
    def drawn(seed):
        mode, key = Mode(deterministic=False), jax.random.key(seed)
        return pipeline.pipelined(stack, jnp.zeros((ROWS, 1, 4)), {}, mode, 4, "none", key)

    with axis_rules_context(mesh):
        first, again, other = (np.asarray(drawn(seed)) for seed in (1, 1, 2))
    assert len(np.unique(first)) == ROWS * 4
    np.testing.assert_array_equal(first, again)
    assert not np.intersect1d(first, other).size


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 6), (4, 8), (8, 8)])
def test_microbatches_go_through_the_stages_in_order(stages, microbatches):
    """Stage s makes w_s + 1/x of x: what idle stages hold may neither matter nor be zero."""
    random = np.random.default_rng(0)
    w_G = random.uniform(1, 2, stages).astype(np.float32)
    x_J = random.uniform(1, 2, microbatches).astype(np.float32)

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(stage=stages),
        in_specs=PartitionSpec("stage"),
        out_specs=PartitionSpec("stage"),
    )
    def pipelined(w_1, x_k):
        return pipeline.schedule(lambda _, x: w_1[0] + 1 / x, x_k, microbatches)

    def in_order(w_G, x_J):
        for w in w_G:
            x_J = w + 1 / x_J
        return x_J

    def both(function):
        return jax.jit(
            lambda w, x: (function(w, x), jax.grad(lambda w: function(w, x)[1:].sum())(w))
        )

    for a, b in zip(both(pipelined)(w_G, x_J), both(in_order)(w_G, x_J), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


MOE = {"moe": functools.partial(MoeLayer, num_experts=2)}


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (MOE, 16, r"^make_mesh.stage = 2: must be 1 for a model with experts \(Transformer.moe\)"),
        ({"scan_layers": False}, 16, "^Transformer.scan_layers = False: must be True"),
        ({"decoder_layers": 3}, 16, "^Transformer.decoder_layers = 3: .* valid sizes: 2 and 4"),
        ({"pipeline_microbatches": 0}, 16, "pipeline_microbatches = 0: must be a multiple of"),
        ({"pipeline_microbatches": 3}, 16, "nearest valid sizes: 2 and 4"),
        (
            {},
            24,
            "^Training.batch_size = 24: must be a multiple of 16: Transformer.pipeline_"
            "microbatches = 4 on each of 4 parts of the mesh's other axes; "
            "nearest valid sizes: 16 and 32",
        ),
    ],
)
def test_refusals(change, rows, message):
    mesh = mesh_of(stage=2, data=4)
    with pytest.raises(ValueError, match=message):
        pipeline.check(mesh, MODEL.clone(**change), rows)
