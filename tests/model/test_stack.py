"""A scanned stack, with and without recomputation, is the same model as its unscanned layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m4.eval.decoding.search import search
from m4.model.moe import MoeLayer, layer_metrics
from m4.model.stack import REMAT, unstack
from m4.train.optimizer import adafactor, adamw
from tests.shared import small_model

MODEL = small_model(
    encoder_layers=4,
    decoder_layers=2,
    moe=functools.partial(
        MoeLayer, num_experts=2, group_tokens=8, train_capacity_factor=2.0, shared_width=6
    ),
    moe_every=2,
    scan_layers=True,
)
X_BL = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 8)), jnp.int32)


@pytest.fixture(scope="module")
def params():
    # Arrays of numpy: taking them apart compiles nothing.
    return jax.device_get(
        jax.jit(
            lambda: MODEL.init(jax.random.key(0), X_BL, X_BL, X_BL, enable_dropout=False)["params"]
        )()
    )


@functools.cache
def loss_and_gradients(scan: bool, remat: str):
    model = MODEL.clone(scan_layers=scan, remat=remat)

    def loss(params):
        logits_BTV, sown = model.apply(
            {"params": params}, X_BL, X_BL, X_BL, enable_dropout=False, mutable=["intermediates"]
        )
        return jnp.mean(jnp.square(logits_BTV)), layer_metrics(sown["intermediates"])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7, rtol=rtol), a, b)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("remat", "scan"), [(remat, scan) for remat in REMAT for scan in (True, False)]
)
def test_values_gradients_and_metrics_are_those_of_the_layers(params, scan, remat):
    (plain, metrics), gradients = jax.device_get(loss_and_gradients(False, "none")(unstack(params)))
    given = params if scan else unstack(params)
    (value, found), its = jax.device_get(loss_and_gradients(scan, remat)(given))
    assert_close(value, plain)
    assert_close(unstack(its), gradients, rtol=1e-4)
    assert set(found) == set(metrics) == {"encoder_1", "encoder_3", "decoder_1"}
    assert_close(found, metrics)


def test_dropout_is_another_in_every_layer(params):
    model = MODEL.clone(dropout_rate=0.5)

    @jax.jit
    def encoded(key):
        return model.apply(
            {"params": params}, X_BL, enable_dropout=True, rngs={"dropout": key}, method="encode"
        )

    rows = [np.asarray(encoded(jax.random.key(seed))) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.abs(rows[0] - rows[2]).max() > 0.1


@pytest.mark.parametrize("optimizer", [adafactor, adamw])
def test_an_optimizer_treats_stacked_layers_one_by_one(params, optimizer):
    more = {"smallest_factored": 2} if optimizer is adafactor else {}
    tx = optimizer(10, weight_decay=0.1, **more)
    random = np.random.default_rng(1)
    gradients = jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), params)

    def updated(params, gradients):
        updates, _ = tx.update(gradients, tx.init(params), params)
        return optax.apply_updates(params, updates)

    stacked = jax.device_get(jax.jit(updated)(params, gradients))
    assert_close(unstack(stacked), jax.jit(updated)(unstack(params), unstack(gradients)))


def test_decoding_unstacks_the_layers(params):
    arguments = ({"encoder_input_tokens": X_BL}, 6, 2, 0.6)
    found = search(MODEL, params, *arguments)
    plain = search(MODEL.clone(scan_layers=False), unstack(params), *arguments)
    np.testing.assert_array_equal(found[0], plain[0])
