"""A vocabulary for sources and another one for targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from m4.model.gates.hash import hash
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer

V, SOURCE = 24, 40
MODEL = Transformer(
    vocab_size=V,
    source_vocab_size=SOURCE,
    width=8,
    heads=2,
    head_width=4,
    mlp_width=16,
    encoder_layers=1,
    decoder_layers=1,
    moe_every=1,
    dropout_rate=0.0,
)
SOURCES = jnp.array([[SOURCE - 1, 5, 1, 0]])
TARGETS = jnp.array([[V - 1, 3, 1]])


def names_and_shapes(model: Transformer) -> dict[str, Any]:
    variables = jax.eval_shape(model.init, jax.random.key(0), SOURCES, TARGETS, TARGETS)
    flat: dict[str, Any] = flatten_dict(variables["params"], sep="/")
    return {name: leaf.shape for name, leaf in flat.items()}


def test_each_has_a_table_and_the_targets_is_the_softmax() -> None:
    own, shared = names_and_shapes(MODEL), names_and_shapes(MODEL.clone(source_vocab_size=None))
    # The one more, and nothing else of the shared model's is another.
    assert own == {**shared, "source_token_embedder/embedding": (SOURCE, 8)}
    assert own["token_embedder/embedding"] == (V, 8)
    untied = names_and_shapes(MODEL.clone(tied_logits=False))
    assert untied["logits_dense/kernel"] == (8, V)


def test_the_encoder_reads_the_sources_table_and_the_decoder_its_own() -> None:
    params = jax.jit(MODEL.init)(jax.random.key(0), SOURCES, TARGETS, TARGETS)["params"]

    def loss(params: Any) -> jax.Array:
        logits: Any = MODEL.apply(
            {"params": params}, SOURCES, TARGETS, TARGETS, enable_dropout=False
        )
        assert logits.shape == (1, 3, V)
        return (logits[..., 0] ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    by_source = np.abs(gradient["source_token_embedder"]["embedding"]).sum(axis=1)
    # Padding, 0, is masked. Of the targets' table also the row of the logit that is looked at.
    assert set(np.flatnonzero(by_source)) == {1, 5, SOURCE - 1}
    by_target = np.abs(gradient["token_embedder"]["embedding"]).sum(axis=1)
    assert set(np.flatnonzero(by_target)) == {0, 1, 3, V - 1}


def test_hash_routes_each_stack_by_its_own_ids() -> None:
    model = MODEL.clone(moe=partial(MoeLayer, num_experts=2, gate=hash))
    shapes = names_and_shapes(model)
    tables = {name: shape for name, shape in shapes.items() if name.endswith("hash/table")}
    assert {name.split("_")[0]: shape for name, shape in tables.items()} == {
        "encoder": (SOURCE,),
        "decoder": (V,),
    }
