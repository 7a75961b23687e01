"""m4's step and search, and stock T5X's, on the same module and batch."""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m4.data.cache.cache import Cache
from m4.data.stream.stream import Stream
from m4.eval.decoding.beam import beam_search
from m4.model.gates.mixtral import mixtral
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.train.step import TrainState, make_train_step
from tests.data.arrays import unpacked
from tests.t5x.conftest import needs_t5x
from tests.train.trainers import training_of

needs_t5x()
pytestmark = pytest.mark.filterwarnings("default")  # T5X's own

LOSSES: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "aux_loss_factor": 0.02}
# A gate without random choices: the two have different random numbers.
MOE = functools.partial(MoeLayer, num_experts=4, gate=mixtral, group_tokens=0)
MODELS = {"dense": {}, "moe": {"moe": MOE}, "scanned": {"moe": MOE, "scan_layers": True}}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, cache: Cache) -> Transformer:
    return Transformer(
        vocab_size=cache.target_vocabulary.size, width=32, heads=2, head_width=16, mlp_width=48,
        encoder_layers=4, decoder_layers=4, dropout_rate=0.0, **MODELS[request.param],
    )  # fmt: skip


def initial(model: Transformer, seed: int = 0) -> Any:
    ones = jnp.ones((1, 8), jnp.int32)
    arguments = (ones, ones, ones)
    made = jax.jit(functools.partial(model.init, enable_dropout=False))
    return made(jax.random.key(seed), *arguments)["params"]


def of_t5x(model: Transformer, cache: Cache, decode_fn: Any = None) -> Any:
    tasks = importlib.import_module("m4.t5x_tasks")
    vocabularies = [
        getattr(tasks, f"{side}_vocabulary")(str(cache.folder)) for side in ("inputs", "targets")
    ]
    name = "t5x.models" if model.moe is None else "t5x.contrib.moe.models"
    kind = "EncoderDecoderModel" if model.moe is None else "MoeEncoderDecoderModel"
    losses = {k: v for k, v in LOSSES.items() if model.moe is not None or k != "aux_loss_factor"}
    more = {} if decode_fn is None else {"decode_fn": decode_fn}
    made = getattr(importlib.import_module(name), kind)
    return made(
        model, *vocabularies, optimizer_def=None, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        **losses, **more,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "single"])
def test_loss_and_gradients_are_equal(model: Transformer, cache: Cache, layout: str) -> None:
    stream = Stream(cache, batch_rows=4, layout=layout)
    batch, params = stream.batch(0), initial(model)
    theirs = of_t5x(model, cache)
    t5x_batch = {k: v for k, v in batch.items() if not k.endswith("direction_ids")}
    key = jax.random.key(1)
    (loss, _), gradients = jax.jit(jax.value_and_grad(theirs.loss_fn, has_aux=True))(
        params, t5x_batch, key
    )
    # T5X shares the smoothed part among the V - 1 other pieces, m4 among all V.
    smoothing, V = LOSSES["label_smoothing"], cache.target_vocabulary.size
    ours = smoothing * V / (V - 1)
    # With this optimizer a step takes the gradients from the parameters.
    optimizer = optax.sgd(1.0)
    training = training_of(rng="threefry2x32", **{**LOSSES, "label_smoothing": ours})
    step = make_train_step(model, optimizer, training, len(stream.directions))
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    after, metrics = jax.jit(step)(state, batch)
    # T5X takes the entropy of the smoothed target off, a constant: 0 is then a perfect model.
    entropy = -(1 - smoothing) * math.log(1 - smoothing)
    entropy -= smoothing * math.log(smoothing / (V - 1))
    np.testing.assert_allclose(metrics["loss"] - entropy, loss, rtol=1e-5)
    taken = jax.tree.map(lambda a, b: a - b, params, after.params)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    assert largest > 1e-3
    for one, other in zip(jax.tree.leaves(taken), jax.tree.leaves(gradients), strict=True):
        # Parameters are about 1: their difference is known to 1e-7.
        np.testing.assert_allclose(one, other, atol=1e-5 * largest + 5e-7)


def test_logits_are_equal(model: Transformer, cache: Cache) -> None:
    batch = {key: of[:4] for key, of in unpacked(cache, "en-gl", "dev").items()}
    params = initial(model)
    names = [key for key in batch if not key.endswith("direction_ids")]
    theirs = of_t5x(model, cache)
    logits = jax.jit(lambda p, b: theirs._compute_logits(p, b))(
        params, {k: batch[k] for k in names}
    )
    inputs = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    more = {k: batch[k] for k in names if k.endswith(("segment_ids", "positions"))}
    own = jax.jit(functools.partial(model.apply, enable_dropout=False))(
        {"params": params}, *(batch[k] for k in inputs), **more
    )
    np.testing.assert_array_equal(own, logits)


def test_searches_are_equal(model: Transformer, cache: Cache) -> None:
    """T5X's model with its search and with m4's: the same four hypotheses and scores."""
    model = dataclasses.replace(model, scan_layers=False)
    batch = {
        "encoder_input_tokens": unpacked(cache, "en-gl", "dev")["encoder_input_tokens"][:4, :24],
        "decoder_input_tokens": np.zeros((4, 16), np.int32),
    }
    found = []

    def own(cache_offset: int, **arguments: Any) -> Any:
        assert cache_offset == 0  # layers are not scanned
        return beam_search(**arguments)

    for decode_fn in (None, own):
        theirs = of_t5x(model, cache, decode_fn)
        predict = functools.partial(
            theirs.predict_batch_with_aux, num_decodes=4, return_all_decodes=True
        )
        found.append(jax.jit(predict)(initial(model), batch))
    (tokens, aux), (own_tokens, own_aux) = found
    np.testing.assert_array_equal(own_tokens, tokens)
    np.testing.assert_allclose(own_aux["scores"], aux["scores"], rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_searches_are_equal_on_random_markov_chains(seed: int) -> None:
    decoding = importlib.import_module("t5x.decoding")
    rng = np.random.default_rng(seed)
    B, K, V, T = 3, 4, 7, 12
    logits_BVV = jnp.asarray(rng.normal(scale=2.0, size=(B, V, V)), jnp.float32)
    logits_BVV = logits_BVV.at[..., 0].set(-1e7)  # pad is never predicted

    def tokens_to_logits(state: Any) -> Any:
        chain_BVV = jnp.repeat(logits_BVV, K, axis=0)
        logits = jnp.take_along_axis(chain_BVV, state.cur_token[..., None], axis=1)[:, 0]
        return logits, state.cache

    inputs = np.zeros((B, T), np.int32)
    inputs[0, 1:3] = rng.integers(2, V, 2)  # a prefix
    options = {"alpha": float(rng.choice([0.0, 0.6, 1.0])), "num_decodes": K}
    found = [
        search(inputs, {"x": jnp.zeros((B, 1))}, tokens_to_logits, 1, **options)
        for search in (decoding.beam_search, beam_search)
    ]
    np.testing.assert_array_equal(found[1][0], found[0][0])
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5)
