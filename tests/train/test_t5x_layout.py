"""T5X's parameters and Adafactor's moments as m4's: the same model, the same update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning

from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer, abstract_variables
from m4.settings import InputError, SettingError
from m4.storage.checkpoints import by_path
from m4.train import t5x_layout
from m4.train.initial import check_adafactor, with_moments
from m4.train.optimizer import adafactor, adamw
from tests import t5x_files
from tests.model.test_attention import plain as bucket

Arrays = dict[str, np.ndarray]


def taken(parameters: Arrays) -> Arrays:
    """m4's path -> its parameter, out of T5X's."""
    there = t5x_files.targets(parameters)
    found = t5x_layout.sources({name: array.shape for name, array in there.items()})
    return {path: t5x_layout.parameter(source, there.__getitem__) for path, source in found.items()}


def nested(arrays: Arrays) -> dict:
    tree: dict = {}
    for path, array in arrays.items():
        *above, last = path.split("/")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = array
    return tree


# ---------------------------------------------------------- T5 in numpy, one sentence, no dropout


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def attend(p: Arrays, at: str, x: np.ndarray, y: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """T5 does not scale: queries' kernels are small."""
    heads = len(bias)
    q, k, v = (
        (of @ p[f"{at}/{name}/kernel"]).reshape(len(of), heads, -1)
        for of, name in ((x, "query"), (y, "key"), (y, "value"))
    )
    logits = np.einsum("qnd,rnd->nqr", q, k) + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nqr,rnd->qnd", weights, v).reshape(len(x), -1) @ p[f"{at}/out/kernel"]


def feed_forward(p: Arrays, at: str, x: np.ndarray) -> np.ndarray:
    if f"{at}/wi/kernel" in p:
        h = np.maximum(x @ p[f"{at}/wi/kernel"], 0)
    else:
        a = x @ p[f"{at}/wi_0/kernel"]
        gelu = a / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
        h = gelu * (x @ p[f"{at}/wi_1/kernel"])
    return h @ p[f"{at}/wo/kernel"]


def biases(table: np.ndarray, length: int, bidirectional: bool) -> np.ndarray:
    where = range(length)
    places = [[bucket(r - q, bidirectional, 32, 128) for r in where] for q in where]
    bias = table[:, np.array(places)]
    return bias if bidirectional else np.where(np.tri(length, dtype=bool), bias, -1e10)


def t5_logits(parameters: Arrays, source: list[int], inputs: list[int], layers: int) -> np.ndarray:
    p = {name: array.astype(np.float64) for name, array in parameters.items()}
    x = p["token_embedder/embedding"][source]
    bias = biases(p["encoder/relpos_bias/rel_embedding"], len(source), True)
    for layer in range(layers):
        at = f"encoder/layers_{layer}"
        h = norm(x, p[f"{at}/pre_attention_layer_norm/scale"])
        x = x + attend(p, f"{at}/attention", h, h, bias)
        x = x + feed_forward(p, f"{at}/mlp", norm(x, p[f"{at}/pre_mlp_layer_norm/scale"]))
    encoded = norm(x, p["encoder/encoder_norm/scale"])
    x = p["token_embedder/embedding"][inputs]
    bias = biases(p["decoder/relpos_bias/rel_embedding"], len(inputs), False)
    for layer in range(layers):
        at = f"decoder/layers_{layer}"
        h = norm(x, p[f"{at}/pre_self_attention_layer_norm/scale"])
        x = x + attend(p, f"{at}/self_attention", h, h, bias)
        h = norm(x, p[f"{at}/pre_cross_attention_layer_norm/scale"])
        nothing = np.zeros((len(bias), 1, 1))
        x = x + attend(p, f"{at}/encoder_decoder_attention", h, encoded, nothing)
        x = x + feed_forward(p, f"{at}/mlp", norm(x, p[f"{at}/pre_mlp_layer_norm/scale"]))
    x = norm(x, p["decoder/decoder_norm/scale"])
    if "decoder/logits_dense/kernel" in p:
        return x @ p["decoder/logits_dense/kernel"]
    return x @ p["token_embedder/embedding"].T / np.sqrt(x.shape[-1])


@pytest.mark.parametrize(("gated", "tied"), [(True, False), (False, True)])
def test_m4_computes_what_t5_does(gated: bool, tied: bool) -> None:
    """T5 1.1 and mT5 are gated and have separate logits; T5 1.0 neither."""
    parameters = t5x_files.t5_parameters(rows=50, gated=gated, tied=tied)
    model = Transformer(
        50, width=16, heads=2, head_width=4, mlp_width=32, encoder_layers=2, decoder_layers=2,
        activations=("gelu", "linear") if gated else ("relu",), tied_logits=tied,
    )  # fmt: skip
    mine = nested(taken(parameters))
    assert jax.tree.map(np.shape, mine) == jax.tree.map(
        lambda leaf: leaf.shape, dict(abstract_variables(model)["params"])
    )
    source, inputs = [7, 30, 2, 49, 12, 1] * 3, [0, 5, 9, 44]
    found = model.apply(
        {"params": mine}, jnp.array([source]), jnp.array([inputs]), jnp.ones((1, 4), jnp.int32),
        enable_dropout=False,
    )  # fmt: skip
    wanted = t5_logits(parameters, source, inputs, 2)
    np.testing.assert_allclose(np.asarray(found)[0], wanted, rtol=2e-4, atol=2e-4)


def test_scanned_stacks_are_the_same_parameters() -> None:
    parameters = t5x_files.t5_parameters(rows=50, layers=3)
    one, other = taken(parameters), taken(t5x_files.scanned(parameters))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[path], other[path]) for path in one)


def test_layers_that_share_no_position_bias_are_refused() -> None:
    there = t5x_files.targets(t5x_files.scanned(t5x_files.t5_parameters(rows=50)))
    shapes = {name: array.shape for name, array in there.items()}
    t5x_layout.check_shared_bias(shapes, there.__getitem__)
    there["target/decoder/decoder/relpos_bias/rel_embedding"][0, 1, 5] += 1
    with pytest.raises(InputError, match="decoder/decoder/relpos_bias/rel_embedding differs"):
        t5x_layout.check_shared_bias(shapes, there.__getitem__)


def test_parameters_without_a_place_are_refused() -> None:
    for more, said in (
        (
            {"encoder/layers_0/adapter/kernel": (16, 4)},
            r"encoder/layers_0/adapter/kernel \[16, 4\]",
        ),
        ({"encoder/encoder_norm/scale": None}, "neither of m4's module nor of T5X's T5"),
        (
            {f"{s}/relpos_bias/rel_embedding": None for s in ("encoder", "decoder")},
            "no relative position bias",
        ),
    ):
        there = {k: a.shape for k, a in t5x_files.t5_parameters(rows=50).items()} | more
        shapes = {f"target/{k}": shape for k, shape in there.items() if shape is not None}
        with pytest.raises(InputError, match=said):
            t5x_layout.sources(shapes)


# ------------------------------------------------------------------------------- Adafactor's state

ROW, COLUMN = {"embed", "mlp_embed"}, {"vocab", "mlp", "heads", "kv", "joined_kv", "expert_mlp"}
BATCH = {"layers", "stack", "expert"}


def t5x_factors(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int] | None:
    """(axis of v_row, axis of v_col) by T5X's rules for logical axes; None: not factored."""
    if len(shape) <= 2 and not BATCH & {*axes}:
        order = np.argsort(shape)
        return None if len(shape) < 2 or shape[order[0]] < 128 else (order[0], order[1])
    rows = [i for i, axis in enumerate(axes) if axis in ROW]
    columns = [i for i, axis in enumerate(axes) if axis in COLUMN]
    return (rows[0], columns[0]) if rows and columns else None


@pytest.mark.parametrize("scan_layers", [False, True])
def test_moments_have_the_axes_of_t5xs_rules_and_come_back(scan_layers: bool) -> None:
    def moe(**more: object) -> MoeLayer:
        return MoeLayer(num_experts=4, **more)  # type: ignore[arg-type]

    model = Transformer(
        300, width=256, heads=2, head_width=64, mlp_width=144, encoder_layers=2, decoder_layers=2,
        moe=moe, scan_layers=scan_layers, tied_logits=False,
    )  # fmt: skip
    variables = abstract_variables(model)
    axes = by_path(partitioning.get_axis_names(variables["params_axes"]))
    draw = np.random.default_rng(0)
    factored = 0
    for path, leaf in by_path(variables["params"]).items():
        shape, stacked = leaf.shape, "_blocks/" in path
        of = t5x_factors(shape, tuple(axes[path]))
        square = draw.random(shape).astype(np.float32)
        given = {"": square}
        if of is not None:
            given = {"rows": square.mean(-1), "columns": square.mean(-2)}
        made = t5x_layout.t5x_moments(path, shape, given, stacked)
        if of is None:
            assert made["v"].shape == shape, path
            assert made["v_row"].shape == made["v_col"].shape == (1,)
        else:
            factored += 1
            assert np.allclose(made["v_row"], square.mean(of[1])), path
            assert np.allclose(made["v_col"], square.mean(of[0])), path
        there = {f"state/param_states/{path}/{name}": value for name, value in made.items()}
        there[f"target/{path}"] = square
        shapes = {name: value.shape for name, value in there.items()}
        blocks = shape[0] if stacked else 1
        for block in range(blocks):
            source = t5x_layout.T5xParameter(path, block if stacked else None)
            back = t5x_layout.moments(source, shapes, there.__getitem__)
            assert back.keys() == given.keys()
            for part, value in given.items():
                assert np.array_equal(back[part], value[block] if stacked else value), path
    assert factored >= 12


# Rows are multiples of each other, so that rows and columns stand for the whole.
FULL = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
FACTORS = {"rows": FULL.mean(-1), "columns": FULL.mean(-2)}
STACK = {"encoder_blocks": {"layer_0": {"mlp": {"wi": {"kernel": jnp.ones((2, 2, 2))}}}}}
PARAMS = {**STACK, "encoder_norm": {"scale": jnp.ones(3)}}


@pytest.mark.parametrize("smallest", [2, 3])
@pytest.mark.parametrize("given", [{"": FULL}, FACTORS])
def test_a_scanned_stack_gets_each_layers_moments(smallest: int, given: dict) -> None:
    of = adafactor(10, smallest_factored=smallest)
    doubled = {name: 2 * value for name, value in given.items()}
    made = {
        "encoder_0/mlp/wi/kernel": given,
        "encoder_1/mlp/wi/kernel": doubled,
        "encoder_norm/scale": {"": np.arange(3.0)},
    }
    factored, _, rate = with_moments(of.init(PARAMS), 7, made)
    assert int(factored.count) == int(rate.count) == 7
    moment = factored.moments["encoder_blocks"]["layer_0"]["mlp"]["wi"]["kernel"]
    if smallest == 2:
        assert np.allclose(moment.rows, [FACTORS["rows"], 2 * FACTORS["rows"]])
        assert np.allclose(moment.columns, [FACTORS["columns"], 2 * FACTORS["columns"]])
    else:
        assert np.allclose(moment, [FULL, 2 * FULL])
    assert np.array_equal(factored.moments["encoder_norm"]["scale"], np.arange(3.0))


def test_another_optimizer_is_refused() -> None:
    check_adafactor(adafactor(10))
    with pytest.raises(SettingError, match="the optimizer is another"):
        check_adafactor(adamw(10))


def test_moments_of_the_other_kind_are_what_factors_stand_for() -> None:
    rows, columns = FACTORS["rows"], FACTORS["columns"]
    assert np.allclose(t5x_layout.together(rows, columns), FULL)
    name = "encoder_1/moe/experts/wi/kernel"
    made = t5x_layout.t5x_moments(name, (1, 2, 2), {"": FULL[None]}, stacked=False)
    assert np.allclose(made["v_row"], rows)
    assert np.allclose(made["v_col"], columns)


def test_momentum_is_refused() -> None:
    shapes = {"target/a/kernel": (2, 2)}
    shapes |= {f"state/param_states/a/kernel/{name}": (2, 2) for name in ("v", "m")}
    with pytest.raises(InputError, match="has a momentum"):
        t5x_layout.moments(
            t5x_layout.T5xParameter("a/kernel"), shapes, lambda name: np.ones((2, 2))
        )
