"""T5X's parameters and Adafactor's moments as m4's: the same model, the same update."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning

from m4.jobs.checkpoints.initial import SourceHf
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer, abstract_variables
from m4.settings import InputError, SettingError
from m4.storage.checkpoints import by_path
from m4.train import t5x_layout
from m4.train.initial import at_step, check_adafactor
from m4.train.optimizer import adafactor, adamw
from tests import t5x_files

Arrays = dict[str, np.ndarray]


def taken(parameters: Arrays) -> Arrays:
    """Returns m4's path -> parameter, made from T5X's."""
    there = t5x_files.targets(parameters)
    found = t5x_layout.sources({name: array.shape for name, array in there.items()})
    return {path: t5x_layout.parameter(source, there.__getitem__) for path, source in found.items()}


# ------------------------------------------------------------------------ transformers' models

HF = Path(__file__).parents[1] / "testdata" / "hf"
NORMS = {"encoder": ("attention", "mlp"), "decoder": ("self_attention", "cross_attention", "mlp")}
ATTENTION = {"encoder": ("attention",), "decoder": ("self_attention", "encoder_decoder_attention")}
KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
OUTSIDE = {
    "shared.weight": "token_embedder/embedding",
    "lm_head.weight": "decoder/logits_dense/kernel",
    **{f"{stack}.final_layer_norm.weight": f"{stack}/{stack}_norm/scale" for stack in NORMS},
}


def t5x_name(name: str) -> str:
    """Returns T5X's name of a parameter of transformers' T5."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    stack, _, layer, _, part, *inner, _ = name.split(".")
    at = f"{stack}/layers_{layer}"
    match inner:
        case ["layer_norm"]:
            return f"{at}/pre_{NORMS[stack][int(part)]}_layer_norm/scale"
        case ["DenseReluDense", kernel]:
            return f"{at}/mlp/{kernel}/kernel"
        case [_, "relative_attention_bias"]:
            return f"{stack}/relpos_bias/rel_embedding"
        case [_, kernel]:
            return f"{at}/{ATTENTION[stack][int(part)]}/{KERNELS[kernel]}/kernel"
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["t5_1_0", "t5_1_1"])
def test_t5s_parameters_by_t5xs_names_are_those_of_transformers(name: str) -> None:
    """T5 1.1 and mT5 are gated and have separate logits; T5 1.0 neither.

    m4's logits with these are those of transformers (tests/jobs/checkpoints/test_hf.py).
    """
    there, made = SourceHf(HF / name), {}
    for at in there.weights.files:
        array = there.weights.read(at)
        made[t5x_name(at)] = array if array.ndim == 1 or at == "shared.weight" else array.T
    found, old_ids = taken(made), there.vocabulary().old_ids
    table, logits = "token_embedder/embedding", "logits_dense/kernel"
    found[table] = found[table][old_ids]
    if logits in found:
        found[logits] = found[logits][:, old_ids]
    assert found.keys() == there.shapes.keys()
    for path, array in found.items():
        np.testing.assert_allclose(array, there.read(path), rtol=1e-6, err_msg=path)


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


# ------------------------------------------------------------------------------- Adafactor's state

ROW, COLUMN = {"embed", "mlp_embed"}, {"vocab", "mlp", "heads", "kv", "joined_kv", "expert_mlp"}
BATCH = {"layers", "stack", "expert"}


def t5x_factors(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int] | None:
    """Returns the axes of v_row and v_col by T5X's rules, or None if not factored."""
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
    factored, _, rate = at_step(of.init(PARAMS), 7, made)
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
