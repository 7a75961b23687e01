"""The model against T5X's contract (calls, axes, metrics, cache), and laws of encoder-decoders."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import unfreeze
from flax.linen import partitioning
from flax.traverse_util import flatten_dict

from m4.model.dispatch.gather import gather
from m4.model.gates.hash import hash as hash_gate
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.settings import SettingError
from m4.train.program import draw_together
from tests.shared import small_model

V, L, T = 32, 7, 6

# What stock T5X knows: names that its sharding rules map, and those that its Adafactor factors.
FACTORED_AXES = {
    *("vocab", "mlp", "heads", "kv", "joined_kv", "embed", "layers", "relpos_buckets"),
    *("layer_norm_scale", "mlp_embed", "expert", "expert_mlp", "unmodeled"),
}
T5X_METRICS = {
    "auxiliary_loss", "router_z_loss", "fraction_tokens_left_behind", "expert_usage",
    "router_confidence",
}  # fmt: skip


tiny = partial(
    small_model, encoder_layers=2, decoder_layers=2,
    moe=partial(MoeLayer, num_experts=4, group_tokens=16), moe_every=2, dropout_rate=0.1,
)  # fmt: skip
variants = pytest.mark.parametrize(
    "model",
    [
        tiny(),
        tiny(moe=None, activations=("gelu", "linear"), tied_logits=False),
        tiny(absolute_positions=True, dtype=jnp.bfloat16),
    ],
    ids=["moe", "dense gated untied", "positions bfloat16"],
)
# One layer a stack, for what is compiled with gradients or loops; both kinds of positions, and a
# dispatch that compiles in half the time of `dropless`.
SHALLOW = small_model(
    moe=partial(MoeLayer, num_experts=4, group_tokens=16, dropless_dispatch=gather),
    absolute_positions=True,
)
DROPLESS = SHALLOW.clone(moe=partial(MoeLayer, num_experts=4, group_tokens=16))
dispatched = pytest.mark.parametrize(
    "model",
    [SHALLOW, pytest.param(DROPLESS, marks=pytest.mark.thorough)],
    ids=["gather", "dropless"],
)


# Arguments that describe packed rows.
UNPACKED: dict[str, Any] = dict.fromkeys(
    f"{side}_{what}" for side in ("encoder", "decoder") for what in ("segment_ids", "positions")
)


@partial(jax.jit, static_argnames="model")
def init(model, seed=0):
    # Call 1 of the contract, with its float32 token arguments and a single key.
    make = partial(model.init, **UNPACKED, decode=False, enable_dropout=False)
    tokens = jnp.ones((2, L)), jnp.ones((2, T)), jnp.ones((2, T))
    return draw_together(make)(jax.random.key(seed), *tokens)


def sharp(model, seed=0):
    """Returns parameters of twice their initial size: attention and routing really choose."""
    return jax.tree.map(lambda x: 2.0 * x, jax.device_get(init(model, seed)["params"]))


@partial(jax.jit, static_argnames=("model", "dropout"))
def logits_of(model, params, source, inputs, targets, dropout=False, **packing):
    # Call 2 of the contract.
    rngs = {"dropout": jax.random.key(1)} if dropout else None
    how = {"decode": False, "enable_dropout": dropout, "rngs": rngs, "mutable": False}
    return model.apply({"params": params}, source, inputs, targets, **UNPACKED | packing, **how)


def sentence_pairs(seed=0, B=3):
    """Returns sources and targets of several lengths, padded with 0, and shifted inputs."""
    rng = np.random.default_rng(seed)
    source = rng.integers(2, V, (B, L)) * (np.arange(L)[None] < rng.integers(2, L, (B, 1)))
    target = rng.integers(2, V, (B, T)) * (np.arange(T)[None] < rng.integers(2, T, (B, 1)))
    inputs = np.pad(target[:, :-1], ((0, 0), (1, 0)))
    return source.astype(np.int32), inputs.astype(np.int32), target.astype(np.int32)


# --- T5X's contract, section 3 of its reading -----------------------------------------------------


@variants
def test_init_makes_float32_parameters_with_known_axes(model):
    variables = init(model)
    assert set(variables) - {"intermediates"} == {"params", "params_axes"}
    params, axes = variables["params"], variables["params_axes"]
    names = unfreeze(partitioning.get_axis_names(axes))
    # The same tree, a name an axis, every name known.
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    jax.tree.map(lambda spec, x: np.testing.assert_equal(len(spec), x.ndim), names, params,
                 is_leaf=is_spec)  # fmt: skip
    used = {name for spec in jax.tree.leaves(names, is_leaf=is_spec) for name in spec}
    assert used <= FACTORED_AXES
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    # The same under eval_shape, with integer tokens.
    ones = jax.ShapeDtypeStruct((2, T), jnp.int32)
    shapes = jax.eval_shape(
        partial(model.init, enable_dropout=False), jax.random.key(0), ones, ones, ones
    )
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes["params"])


def test_experts_and_nothing_else_have_expert_in_their_path():
    # T5X multiplies gradients, and adds the expert axis to statistics, by the path.
    variables = init(tiny())
    for path, x in jax.tree_util.tree_flatten_with_path(variables["params"])[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert ("expert" in name) == (x.ndim == 3), name
        if "expert" in name:
            assert name.endswith("/kernel")
            assert x.shape[0] == 4
    names = partitioning.get_axis_names(variables["params_axes"])
    moe = names["encoder_1"]["moe"]["experts"]
    assert tuple(moe["wi"]["kernel"]) == ("expert", "mlp_embed", "expert_mlp")
    assert tuple(moe["wo"]["kernel"]) == ("expert", "expert_mlp", "mlp_embed")


@variants
def test_train_call_gives_float32_logits_and_dropout(model):
    params = init(model)["params"]
    batch = sentence_pairs()
    calm = logits_of(model, params, *batch)
    assert calm.shape == (3, T, V)
    assert calm.dtype == jnp.float32
    assert np.isfinite(calm).all()
    np.testing.assert_array_equal(calm, logits_of(model, params, *batch))
    dropped = logits_of(model, params, *batch, dropout=True)
    assert not np.allclose(dropped, calm)


def test_every_moe_layer_sows_t5x_metrics_under_their_names():
    model = tiny()
    params = init(model)["params"]
    apply = jax.jit(partial(model.apply, enable_dropout=False, mutable=["intermediates"]))
    _, state = apply({"params": params}, *sentence_pairs())
    assert set(state) == {"intermediates"}
    found: dict[str, int] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names[-1] in T5X_METRICS:
            assert value.shape == ()
            found[names[-1]] = found.get(names[-1], 0) + 1
    # The second layer of either stack.
    assert found == dict.fromkeys(T5X_METRICS, 2)


def allocate(model, params, rows, length):
    # Call 3b: all names as keywords, full length.
    return model.apply(
        {"params": params}, encoder_input_tokens=jnp.ones((rows, L)),
        decoder_input_tokens=jnp.ones((rows, length)),
        decoder_target_tokens=jnp.ones((rows, length)), mutable=["cache"], decode=True,
        enable_dropout=False,
    )[1]["cache"]  # fmt: skip


@variants
def test_cache_leaves_follow_the_rules(model):
    cache = jax.jit(partial(allocate, model, rows=3, length=T))(init(model)["params"])
    for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]:
        name = path[-1].key
        if name in ("cache_index", "position_embedder_index"):
            assert leaf.shape == ()
        else:
            assert leaf.shape[0] == 3, name
        # Allocation does not advance, and beam search relies on zeros.
        assert not np.asarray(leaf).any(), name


@partial(jax.jit, static_argnames=("model", "length"))
def steps(model, params, source, inputs, length):
    """Returns logits [B, T, V] of calls 3a, 3b and 3c, one position at a time."""
    variables = {"params": params}
    encoded = model.apply(
        variables, encoder_input_tokens=source, enable_dropout=False, method=model.encode
    )
    cache = allocate(model, params, source.shape[0], length)

    def step(cache, token):
        logits, changed = model.apply(
            *({**variables, "cache": cache}, encoded, source, token[:, None], token[:, None]),
            **{"enable_dropout": False, "decode": True, "max_decode_length": length},
            **{"mutable": ["cache"], "method": model.decode},
        )
        assert set(changed) == {"cache"}
        return changed["cache"], logits[:, 0]

    return jnp.swapaxes(jax.lax.scan(step, cache, inputs.T)[1], 0, 1)


def test_step_by_step_equals_teacher_forcing():
    model = SHALLOW
    params = sharp(model)
    source, inputs, target = sentence_pairs()
    forced = logits_of(model, params, source, inputs, target)
    stepped = steps(model, params, source, inputs, T)
    real = target > 0  # after the end, teacher forcing masks and decoding continues
    np.testing.assert_allclose(stepped[real], forced[real], atol=1e-4)


# --- Laws -----------------------------------------------------------------------------------------


@dispatched
def test_no_gradient_from_a_position_to_later_inputs(model):
    # Causality. Embeddings stand for tokens, which have no gradient: perturb what is looked up.
    source, _, _ = sentence_pairs()
    # A different token in each position of the decoder's input, none of them in the source, and
    # logits that do not come from the embedding.
    source = np.where(source > 0, 2 + source % 3, 0)
    inputs = np.tile(np.arange(5, 5 + T), (3, 1)).astype(np.int32)
    untied = model.clone(tied_logits=False)
    params = sharp(untied)

    @jax.jit
    def reach(params):
        """Returns [T, T]: |d sum of logits at position t / d embedding of input position u|."""

        def logits_T(table):
            changed = {**params, "token_embedder": {"embedding": table}}
            logits = logits_of(untied, changed, source, inputs, np.ones_like(inputs))
            return jnp.sum(jnp.sin(logits), axis=(0, 2))

        jacobian = jax.jacrev(logits_T)(params["token_embedder"]["embedding"])
        return jnp.abs(jacobian[:, 5 : 5 + T]).sum(axis=-1)

    influence = np.asarray(reach(params))
    later = np.triu(np.ones((T, T), bool), 1)
    assert not influence[later].any()
    assert (influence[~later] > 0).all()


@dispatched
def test_packed_rows_equal_unpacked_ones(model):
    params = sharp(model)
    source, inputs, target = sentence_pairs(seed=3)
    alone = np.asarray(logits_of(model, params, source, inputs, target))
    sides = {"encoder": source > 0, "decoder": target > 0}
    packing = {}
    for side, real_BN in sides.items():
        row_BN, place_BN = np.indices(real_BN.shape)
        packing[f"{side}_segment_ids"] = joined(row_BN + 1, real_BN)
        packing[f"{side}_positions"] = joined(place_BN, real_BN)
    packed = (joined(source, source > 0), *(joined(x, target > 0) for x in (inputs, target)))
    together = np.asarray(logits_of(model, params, *packed, **packing))
    count = (target > 0).sum()
    np.testing.assert_allclose(together[0, :count], alone[target > 0], atol=1e-4)


def joined(x_BN: Any, real_BN: np.ndarray) -> np.ndarray:
    """Puts the real positions of all rows one after the other: one row, padded at its end."""
    x_J = x_BN[real_BN]
    return np.pad(x_J, (0, 3 * L - len(x_J)))[None].astype(np.int32)


@dispatched
def test_padding_is_invisible_and_all_parameters_get_gradients(model):
    params = sharp(model)
    source, inputs, target = sentence_pairs(seed=5, B=8)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(params, source, inputs, target):
        logits = logits_of(model, params, source, inputs, target)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)
        return jnp.sum(picked[..., 0] * (target > 0)), logits[:8, :T]

    of_short, short = gradient(params, source, inputs, target)
    # More columns, and two rows of nothing but padding.
    of_long, long = gradient(
        params, *(np.pad(x, ((0, 2), (0, 4))) for x in (source, inputs, target))
    )
    real = target > 0
    np.testing.assert_allclose(long[real], short[real], atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), of_long, of_short)
    for path, leaf in jax.tree_util.tree_flatten_with_path(of_short)[0]:
        assert np.isfinite(leaf).all()
        assert np.asarray(leaf).any(), jax.tree_util.keystr(path)


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"activations": ()}, "Transformer.activations"),
        ({"moe_every": 3}, "Transformer.moe_every"),  # no layer of two would have experts
        ({"moe": MoeLayer(num_experts=4)}, "Transformer.moe"),
        ({"moe": 8}, "Transformer.moe"),
        ({"width": 7, "absolute_positions": True}, "Transformer.width"),
        ({"decoder_moe": partial(MoeLayer, num_experts=2)}, "Transformer.decoder_moe"),
        ({"encoder_layers": 3, "scan_layers": True}, "Transformer.encoder_layers"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, setting):
    with pytest.raises(SettingError) as error:
        tiny(**options)
    assert error.value.setting == setting


def test_a_layer_of_experts_has_the_models_sizes_but_its_own_where_they_are_given():
    own = tiny(moe=partial(MoeLayer, 4, 20, activations=["silu", "linear"], dropout_rate=0.5))
    for model, sizes in ((tiny(), (16, ("relu",), 0.1)), (own, (20, ("silu", "linear"), 0.5))):
        layer = model.encoder_experts
        assert layer is not None
        assert (layer.mlp_width, layer.activations, layer.dropout_rate) == sizes
    assert tiny(moe=None).encoder_experts is None
    # A model of the same options is the same key of jit's cache; gin gives lists.
    assert hash(tiny()) == hash(tiny(activations=["relu"]))
    assert tiny() == tiny(activations=["relu"]) != own


# --- A vocabulary for sources and another one for targets -----------------------------------------

SOURCE = 40
SEPARATE = small_model(moe=None, source_vocab_size=SOURCE)
SOURCES = jnp.array([[SOURCE - 1, 5, 1, 0]])
TARGETS = jnp.array([[V - 1, 3, 1]])


def names_and_shapes(model: Transformer) -> dict[str, Any]:
    variables = jax.eval_shape(model.init, jax.random.key(0), SOURCES, TARGETS, TARGETS)
    flat: dict[str, Any] = flatten_dict(variables["params"], sep="/")
    return {name: leaf.shape for name, leaf in flat.items()}


def test_the_encoder_reads_the_sources_table_and_the_decoder_its_own():
    params = init(SEPARATE)["params"]

    def loss(params: Any) -> jax.Array:
        logits: Any = SEPARATE.apply(
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


def test_hash_routes_each_stack_by_its_own_ids():
    model = SEPARATE.clone(moe=partial(MoeLayer, num_experts=2, gate=hash_gate))
    shapes = names_and_shapes(model)
    tables = {name: shape for name, shape in shapes.items() if name.endswith("hash/table")}
    assert {name.split("_")[0]: shape for name, shape in tables.items()} == {
        "encoder": (SOURCE,),
        "decoder": (V,),
    }
