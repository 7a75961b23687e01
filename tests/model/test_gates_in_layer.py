"""Laws of the layer for every gate in the folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.moe import mean_metrics
from tests.model.compiled_step import products
from tests.model.test_gates import GATES, WITHOUT_ROUTER, E, S
from tests.shared import small_layer


@functools.cache
def layer_program(name: str):
    """Returns a program and its arguments x_BLM and mask_BL.

    For evaluation and for training, with the same parameters, the program returns ((sum of squared
    outputs + losses, outputs), gradients of parameters and x).
    """
    sizes = {"num_experts": E, "group_tokens": S, "vocab_size": 50, "directions": 3}
    layer = small_layer(gate=GATES[name], **sizes)
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(2, S, 6)).astype(np.float32)
    mask_BL = rng.random((2, S)) < 0.8
    ids_BL = rng.integers(0, 50, (2, S)).astype(np.int32)
    direction_BL = rng.integers(0, 3, (2, S)).astype(np.int32)

    @jax.jit
    def outputs_and_gradients(x_BLM, mask_BL):
        key = jax.random.key(0)
        variables = layer.init(key, x_BLM, mask_BL, ids_BL, deterministic=True)

        def total(params, x_BLM, train):
            y_BLM, sown = layer.apply(
                {"params": params},
                x_BLM,
                mask_BL,
                ids_BL,
                direction_BL,
                step=jnp.asarray(3) if train else None,
                deterministic=not train,
                rngs={"dropout": key} if train else None,
                mutable=["intermediates"],
            )
            metrics = mean_metrics(sown["intermediates"])
            losses = metrics["auxiliary_loss"] + metrics["router_z_loss"]
            return jnp.sum(jnp.square(jnp.asarray(y_BLM))) + losses, (y_BLM, metrics)

        both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        return [both(variables["params"], x_BLM, train) for train in (False, True)]

    return outputs_and_gradients, (x_BLM, mask_BL)


@pytest.mark.parametrize("name", GATES)
def test_law_the_layer_trains_and_evaluates_with_it(name):
    """Parameters made in one mode serve the other: a gate asks for the same ones in both."""
    program, arguments = layer_program(name)
    for (total, _), (gradients, _) in program(*arguments):
        assert total > 0
        assert np.isfinite(total)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.asarray(gradients["experts"]["wi"]["kernel"]).any()


@pytest.mark.parametrize("name", GATES)
def test_law_products_of_the_gate_are_in_full_precision(name):
    """Forward and backward; those of `_carry` are the experts' and the dispatch's."""
    program, arguments = layer_program(name)
    text = program.lower(*arguments).as_text("hlo", debug_info=True)
    found = [p for p in products(text) if "._carry/" not in p.place]
    assert len(found) >= (0 if name in WITHOUT_ROUTER else 2 * 3)
    assert all(p.full and p.dtype == "f32" for p in found)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("name", GATES)
def test_law_what_padding_holds_does_not_matter(name, garbage):
    """Outputs, losses, metrics and gradients are bit for bit those of any other padding."""
    program, (x_BLM, mask_BL) = layer_program(name)
    assert not mask_BL.all()
    expected = program(x_BLM, mask_BL)
    got = program(np.where(mask_BL[..., None], x_BLM, np.float32(garbage)), mask_BL)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
