"""The whole layer on eight devices is the layer on one; which collectives it is compiled to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m4.model.dispatch.gather import gather
from m4.model.moe import MoeLayer
from m4.parallel.mesh import axis_rules_context, logical_spec, make_mesh
from m4.plan.hlo import collectives, summary
from tests.model.dispatch.shared import IMPLEMENTATIONS, M, assert_close
from tests.shared import run_layer, small_layer

B, L = 8, 16


def layer(dispatch) -> MoeLayer:
    # Factor .25: 2 * 8 * .25 / 4 = 1, raised to 4 slots of each expert for 8 tokens; some drop.
    sizes = {"mlp_width": 4, "group_tokens": 8, "train_capacity_factor": 0.25, "dropout_rate": 0.5}
    return small_layer(**sizes, activations=("gelu", "linear"), dispatch=dispatch)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(B, L, M)).astype(np.float32)
    mask_BL = np.arange(L)[None] < rng.integers(1, L + 1, (B, 1))
    init = jax.jit(functools.partial(layer(gather).init, deterministic=True))
    params = jax.device_get(init(jax.random.key(0), x_BLM, mask_BL)["params"])
    # A strong router, so that experts overflow.
    params = {**params, "router": jax.tree.map(lambda w: 30.0 * w, params["router"])}
    return params, x_BLM, mask_BL


def run(model, params, x_BLM, mask_BL):
    """Returns (loss, (y_BLM, metrics)) of a training step with dropout inside the experts."""
    y_BLM, metrics = run_layer(model, params, x_BLM, mask_BL, train=True)
    return jnp.sum(jnp.sin(y_BLM)) + metrics["auxiliary_loss"], (y_BLM, metrics)


def compiled(model, mesh, *, backward: bool):
    """Returns (program, its arguments) with rows over all devices and experts over theirs."""
    put = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params, x_BLM, mask_BL = inputs()
    kernel = put(logical_spec(("expert", "mlp_embed", "expert_mlp")))
    params = {
        "router": jax.tree.map(put(PartitionSpec()), params["router"]),
        "experts": jax.tree.map(kernel, params["experts"]),
    }
    rows = put(logical_spec(("batch",)))
    arguments = (params, rows(x_BLM), rows(mask_BL))
    function = functools.partial(run, model)
    if backward:
        function = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
    with axis_rules_context(mesh):
        return jax.jit(function).lower(*arguments).compile(), arguments


@functools.cache
def on_one_device():
    one = jax.jit(jax.value_and_grad(functools.partial(run, layer(gather)), (0, 1), has_aux=True))
    return jax.device_get(one(*inputs()))


@functools.cache
def on_eight_devices(name: str):
    """Returns (program, its arguments) of forward and backward pass."""
    mesh = make_mesh(data=2, node=2, expert=2)
    return compiled(layer(IMPLEMENTATIONS[name]), mesh, backward=True)


every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@pytest.mark.filterwarnings("ignore:ragged. on CPUs:UserWarning")
@every_implementation
def test_eight_devices_are_one(name):
    expected = on_one_device()
    assert expected[0][1][1]["second_dropped"] > 0
    program, arguments = on_eight_devices(name)
    got = jax.block_until_ready(program(*arguments))
    jax.tree.map(functools.partial(assert_close, name=name), got, expected)


@pytest.mark.filterwarnings("ignore:ragged. on CPUs:UserWarning")
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@every_implementation
def test_what_padding_holds_is_not_carried(name, garbage):
    program, (params, x_BLM, mask_BL) = on_eight_devices(name)
    held = np.where(np.asarray(mask_BL)[..., None], x_BLM, np.float32(garbage))
    assert not np.isfinite(held).all()
    expected, got = (
        jax.device_get(program(params, jax.device_put(x, x_BLM.sharding), mask_BL))
        for x in (np.asarray(x_BLM), held)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ("name", "sizes", "exchanges"),
    [
        ("einsum", {"data": 2, "expert": 4}, 1),  # by annotation: the partitioner's choice
        ("gather", {"data": 2, "expert": 4}, 1),
        ("all_to_all", {"data": 2, "expert": 4}, 1),
        ("all_to_all", {"data": 2, "node": 2, "expert": 2}, 1),
        ("hierarchical_all_to_all", {"data": 2, "node": 2, "expert": 2}, 2),
        ("hierarchical_all_to_all", {"data": 2, "expert": 4}, 1),  # one node: one stage
    ],
)
def test_two_exchanges_forward_two_backward_and_no_tokens_gathered(name, sizes, exchanges):
    mesh = make_mesh(**sizes)
    for backward in (False, True):
        program, _ = compiled(layer(IMPLEMENTATIONS[name]), mesh, backward=backward)
        found = summary(collectives(program.as_text() or ""))
        # There and back; the backward pass sends gradients there and back. In addition the sums of
        # losses and of the gradients of what every device has.
        assert found["all-to-all"].count == 2 * exchanges * (2 if backward else 1)
        assert set(found) == {"all-to-all", "all-reduce"}
