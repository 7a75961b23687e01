"""A new model takes over from a trained one by rule: bit-equal where nothing changed."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.gates.by_direction import by_direction
from m4.model.moe import MoeLayer
from m4.model.stack import unstack
from m4.model.transformer import Transformer, abstract_variables
from m4.settings import InputError, SettingError
from m4.storage.checkpoints import by_path
from m4.train import initial
from m4.train.initial import Rows
from tests.shared import small_model

SIZES = {"vocab_size": 24, "width": 16, "mlp_width": 32, "heads": 2, "head_width": 8}
TOKENS = jnp.array([[5, 6, 7, 1, 0], [8, 9, 1, 0, 0]])
TASKS = functools.partial(MoeLayer, num_experts=4, gate=by_direction)
NO_ROWS = Rows(np.arange(20, dtype=np.int32), {})


def model(experts: int = 0, layers: int = 2, **more: Any) -> Transformer:
    moe = functools.partial(MoeLayer, num_experts=experts) if experts else None
    layers_of = {"encoder_layers": layers, "decoder_layers": layers, "moe_every": 2}
    return small_model(**{**SIZES, **layers_of, "moe": moe, **more})


def parameters(of: Transformer, seed: int) -> Any:
    """Returns random numbers in the model's shapes, without compiling anything."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), jnp.float32),
        abstract_variables(of)["params"],
    )


def logits(of: Transformer, params: Any) -> np.ndarray:
    apply = jax.jit(functools.partial(of.apply, enable_dropout=False))
    of_all = np.asarray(apply({"params": params}, TOKENS, TOKENS, TOKENS))
    return of_all[np.asarray(TOKENS) > 0]  # experts compute nothing for padding


def begun(
    old: Transformer, new: Transformer, layers: str | None = None, rows: Rows = NO_ROWS,
    use: initial.Use | None = None,
) -> tuple[Any, Any, Sequence[initial.Leaf]]:  # fmt: skip
    """Returns the old parameters, the new ones, and the plan."""
    before, fresh = parameters(old, 0), parameters(new, 1)
    plan = initial.plan(initial.shapes_of(old), new, layers, lambda _: rows)
    return before, taken(plan, before, fresh, use or {}), plan.leaves


def taken(plan: initial.Plan, before: Any, fresh: Any, use: initial.Use) -> Any:
    """Returns the new parameters on the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), fresh)
    old, start = initial.unscanned(before), by_path(fresh)
    return plan.take_over(old, start, use, like)


@pytest.mark.parametrize("scanned", [(False, False), (True, False), (False, True), (True, True)])
def test_the_same_model_is_bit_equal_scanned_or_not(scanned: tuple[bool, bool]) -> None:
    old, new = (model(4, 4, scan_layers=scan) for scan in scanned)
    before, params, leaves = begun(old, new)
    assert {leaf.rule for leaf in leaves} == {"taken", "pieces"}
    wanted = by_path(unstack(before))
    for path, value in by_path(jax.tree.map(np.asarray, unstack(params))).items():
        assert np.array_equal(value, wanted[path]), path


def test_upcycled_experts_compute_what_the_dense_layer_did() -> None:
    # Every expert is the dense layer, and a token's gates sum to 1 (top-2 of GShard, normalised).
    old, new = model(0), model(4)
    before, params, leaves = begun(old, new)
    assert "upcycled" in {leaf.rule for leaf in leaves}
    np.testing.assert_allclose(logits(new, params), logits(old, before), rtol=0, atol=2e-5)


def test_a_merged_layer_is_the_mean_weighed_by_use() -> None:
    use = {layer: np.array([1, 3]) for layer in ("encoder_1", "decoder_1")}
    before, params, _ = begun(model(2), model(0), use=use)
    experts = before["encoder_1"]["moe"]["experts"]["wi"]["kernel"]
    expected = 0.25 * experts[0] + 0.75 * experts[1]
    np.testing.assert_allclose(params["encoder_1"]["mlp"]["wi"]["kernel"], expected, rtol=1e-6)


def test_more_experts_are_copies_and_fewer_are_the_most_used() -> None:
    before, params, _ = begun(model(2), model(4))
    was, now = (tree["decoder_1"]["moe"] for tree in (before, params))
    for j in range(4):
        assert np.array_equal(
            now["experts"]["wo"]["kernel"][j], was["experts"]["wo"]["kernel"][j % 2]
        )
        assert np.array_equal(now["router"]["kernel"][:, j], was["router"]["kernel"][:, j % 2])
    use = {layer: np.array([5, 1, 9, 7]) for layer in ("encoder_1", "decoder_1")}
    before, params, _ = begun(model(4), model(2), use=use)
    was, now = (tree["encoder_1"]["moe"] for tree in (before, params))
    kept = np.array([2, 3])  # with the uses 9 and 7
    assert np.array_equal(now["experts"]["wi"]["kernel"], was["experts"]["wi"]["kernel"][kept])
    assert np.array_equal(now["router"]["kernel"], was["router"]["kernel"][:, kept])


def test_layers_of_zeros_change_nothing() -> None:
    old, new = model(4, 2), model(4, 4)
    before, params, leaves = begun(old, new, "zeros")
    assert sum(leaf.rule == "zeros" for leaf in leaves) == 2 * 2 + 2 * 3  # out and wo; cross too
    np.testing.assert_allclose(logits(new, params), logits(old, before), rtol=0, atol=1e-6)


def test_stacked_and_spaced_layers_are_the_old_ones() -> None:
    old, new = model(0, 2), model(0, 4)
    for rule, sources in (("stack", [0, 1, 0, 1]), ("spaced", [0, 0, 1, 1])):
        before, params, _ = begun(old, new, rule)
        for layer, source in enumerate(sources):
            for path, value in by_path(params[f"encoder_{layer}"]).items():
                assert np.array_equal(value, by_path(before[f"encoder_{source}"])[path])
    before, params, _ = begun(new, old, "spaced")
    same = jax.tree.map(np.array_equal, params["decoder_1"], before["decoder_2"])  # 1 * 4 // 2
    assert jax.tree.all(same)


def test_new_pieces_are_the_mean_of_what_spells_them() -> None:
    rows = Rows(np.array([*range(20), -1, -1], np.int32), {20: [4, 6], 21: [7]})
    before, params, _ = begun(model(0), model(0, vocab_size=32), rows=rows)
    was, now = (np.asarray(tree["token_embedder"]["embedding"]) for tree in (before, params))
    assert np.array_equal(now[:20], was[:20])
    np.testing.assert_allclose(now[20], (was[4] + was[6]) / 2, rtol=1e-6)
    np.testing.assert_allclose(now[21], was[7], rtol=1e-6)
    assert np.array_equal(now[22:24], was[22:24])  # rows that no piece has


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activations": ("gelu",)}, "Transformer.activations = .*gelu.*: must be .*relu"),
        ({"absolute_positions": True}, "Transformer.absolute_positions = True: must be False, as"),
        ({"relative_distance": 64}, "Transformer.relative_distance = 64: must be 128"),
        ({"tied_logits": False}, "Transformer.tied_logits"),
        ({"heads": 1, "head_width": 16}, "Transformer.head_width = 16: must be 8"),
        ({"moe": functools.partial(MoeLayer, num_experts=4, activations=("gelu",))},
         "MoeLayer.activations = .*gelu.*: must be .*relu"),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused(change: Any, said: str) -> None:
    """Their parameters may have the same shapes; experts compared with the dense layer, too."""
    for wanted in (model(4), model()):
        with pytest.raises(SettingError, match=said):
            initial.check_computation(model(4, **change), initial.computation(wanted), "runs/old")
    free = {"dropout_rate": 0.5, "scan_layers": True, "dtype": jnp.bfloat16}
    initial.check_computation(model(4, **free), initial.computation(model()), "runs/old")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        # A task of each direction; a language came between, and the order is another one.
        ([{"gl-en"}, {"en-fo"}, {"en-gl"}, {"es-en"}, {"en-es"}], [3, -1, 0, 2, 1]),
        # Tasks of several directions: of one old task, of a new direction too, and of two.
        ([{"gl-en", "fo-en"}, {"en-gl", "en-es"}], [3, -1]),
    ],
)
def test_rows_of_tasks_belong_to_directions_by_name(names: Any, wanted: list[int]) -> None:
    old_names = [{"en-gl"}, {"en-es"}, {"es-en"}, {"gl-en"}]
    rows = initial.task_rows(old_names, names)
    assert rows.old_V.tolist() == wanted
    old, new = (model(4, directions=len(each), moe=TASKS) for each in (old_names, names))
    before, params, leaves = begun(old, new, rows=rows)
    path = "encoder_1/moe/tasks/kernel"
    assert {leaf.path for leaf in leaves if leaf.rule == "directions"} == {
        path, path.replace("encoder", "decoder")
    }  # fmt: skip
    was, fresh, now = (by_path(tree)[path] for tree in (before, parameters(new, 1), params))
    for at, row in enumerate(wanted):
        assert np.array_equal(now[at], was[row] if row >= 0 else fresh[at])


def test_what_no_rule_takes_over_is_one_line_with_both_values() -> None:
    for old, new, rule, said in (
        (model(), model(mlp_width=64), None, r"is \[16, 64\] here and \[16, 32\] in the model"),
        (model(0, 2), model(0, 4), None, "has 4 encoder layers, .* begins from 2: .*'zeros'"),
        (model(0, 4), model(0, 2), "stack", "has 2 encoder .* begins from 4: must be 'spaced'"),
        (model(4), model(2), None, "has not counted in decoder_1"),
    ):
        with pytest.raises(InputError, match=said):
            begun(old, new, rule)
