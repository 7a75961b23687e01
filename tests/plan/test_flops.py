"""Operations by arithmetic against those of traced and compiled programs, also of a beam search."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from m4.eval.decoding.search import search
from m4.model.dispatch import grouped_matmul
from m4.model.dispatch.einsum import einsum
from m4.model.flops import (
    executed_flops,
    forward_executed_flops,
    forward_flops,
    forward_model_flops,
    model_flops,
    search_flops,
    traced_flops,
)
from m4.model.moe import MoeLayer
from m4.model.stack import REMAT
from m4.model.transformer import Transformer, abstract_variables
from m4.plan.hlo import read
from m4.plan.program import parameter_counts, planned
from tests.command_line import experiment_of

ROWS, SOURCE, TARGET = 4, 8, 6
SENTENCES, BEAMS = 3, 2  # for a search
CONFIGS = Path(__file__).parents[2] / "gin_configs"
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "width": 16, "heads": 2, "head_width": 8, "mlp_width": 32},
    **{"encoder_layers": 2, "decoder_layers": 2, "dropout_rate": 0.0},
}
ONE_LAYER: dict[str, Any] = {**SIZES, "encoder_layers": 1, "decoder_layers": 1}


def traced(model: Transformer, *, gradient: bool = False) -> float:
    def loss(params, tokens_BL, tokens_BT):
        logits_BTV, _ = model.apply(
            *({"params": params}, tokens_BL, tokens_BT, tokens_BT),
            **{"enable_dropout": True, "rngs": {"dropout": jax.random.key(0)}},
            mutable=["intermediates"],
        )
        return logits_BTV.sum()

    params = abstract_variables(model)["params"]
    tokens = [jax.ShapeDtypeStruct((ROWS, n), jnp.int32) for n in (SOURCE, TARGET)]
    function = jax.grad(loss) if gradient else loss
    return traced_flops(jax.make_jaxpr(function)(params, *tokens), 1)


def arithmetic(model: Transformer) -> dict[str, int]:
    return forward_flops(model, ROWS, SOURCE, TARGET)


def with_experts(**options: Any) -> Transformer:
    moe = functools.partial(MoeLayer, num_experts=4, group_tokens=8, capacity_rule="paper")
    return Transformer(**SIZES, moe=functools.partial(moe, **options))


def test_operations_of_one_layer_by_hand() -> None:
    found = arithmetic(Transformer(**ONE_LAYER))
    # 32 source pieces, 24 target pieces; M = 16, N D = 16, F = 32, V = 64.
    # The decoder has attention over its 6 and over the source's 8 pieces.
    assert found["attention"] == (4 * 32 + 4 * 24 + 2 * 24 + 2 * 32) * 2 * 16 * 16
    assert found["attention_logits"] == 2 * 2 * (32 * 8 + 24 * 6 + 24 * 8) * 16
    assert found["dense"] == 2 * 2 * (32 + 24) * 16 * 32
    assert found["logits"] == 2 * 24 * 16 * 64
    assert found["experts"] == found["router"] == found["dispatch"] == 0


@pytest.mark.parametrize("activations", [("relu",), ("gelu", "linear")])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_dense_model_equals_the_arithmetic(scan_layers: bool, activations) -> None:
    model = Transformer(**SIZES, scan_layers=scan_layers, activations=activations)
    assert traced(model) == sum(arithmetic(model).values())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_step_is_three_passes_and_rematerialization(remat: str) -> None:
    model = Transformer(**SIZES, scan_layers=True, remat=remat)
    forward = arithmetic(model)
    executed = executed_flops(model, forward, one_hot=False)
    assert traced(model, gradient=True) == executed
    assert model_flops(forward) == 3 * sum(forward.values())
    # Every layer again except the second product of its feed-forward part.
    again = sum(forward.values()) - forward["logits"] - forward["dense"] // 2
    assert executed - model_flops(forward) == (again if remat == "full" else 0)


@pytest.mark.parametrize("experts", [0, pytest.param(4, marks=pytest.mark.thorough)])
def test_policies_trade_operations_for_memory(experts: int) -> None:
    # Losses and gradients are the same: tests/model/test_stack.py.
    # Groups of 8 with 4 slots an expert; einsum, whose dispatch is products too.
    one_hot = experts > 0
    plain = with_experts(train_capacity_factor=1.0, dispatch=einsum)
    plain = plain if experts else plain.clone(moe=None)
    steps, executed = {}, {}
    for remat in REMAT:
        model = plain.clone(scan_layers=True, remat=remat)
        steps[remat] = traced(model, gradient=True)
        executed[remat] = executed_flops(model, arithmetic(model), one_hot=one_hot)
    assert steps["none"] < steps["products"] < steps["full"]
    # Repeated: attention logits and weighted sums; the experts' products; dispatch, but not
    # combine, which ends the block.
    kinds = arithmetic(plain)
    again = kinds["attention_logits"] + kinds["experts"] + kinds["dispatch"] // 2
    assert executed["products"] - executed["none"] == again
    # The masks' products are in the traced program only, and are repeated too.
    masks = {remat: steps[remat] - executed[remat] for remat in REMAT}
    if not experts:
        assert masks == dict.fromkeys(REMAT, 0)
    assert 0 <= masks["none"] <= masks["products"] == masks["full"] < 0.05 * steps["none"]


def test_experts_compute_all_slots() -> None:
    # 32 + 24 tokens, groups of 8, four experts with 2 * 8 / 4 = 4 slots: 4 * 4 = 16 slots a group,
    # two a token, as many as choices.
    found = arithmetic(with_experts(train_capacity_factor=1.0))
    assert found["experts"] == found["experts_used"] == 2 * 2 * (2 * 56) * 16 * 32
    assert found["router"] == 2 * 56 * 16 * 4
    twice = arithmetic(with_experts(train_capacity_factor=2.0))
    assert (twice["experts"], twice["experts_used"]) == (2 * found["experts"], found["experts"])
    assert model_flops(twice) == model_flops(found)
    # Traced, combining adds the weighted sum of two results a token: 2 * 2 * 56 * 16.
    used = {k: n for k, n in found.items() if k not in ("experts_used", "dispatch")}
    assert traced(with_experts(train_capacity_factor=1.0)) == sum(used.values()) + 2 * 2 * 56 * 16


@pytest.mark.parametrize(("scan_layers", "remat"), [(False, "none"), (True, "full")])
def test_a_shared_expert_is_a_dense_layer_beside_the_others(scan_layers: bool, remat: str) -> None:
    def step(width: int) -> tuple[dict[str, int], int, float, int]:
        moe = functools.partial(MoeLayer, num_experts=4, group_tokens=8, shared_width=width)
        model = Transformer(**SIZES, moe=moe, scan_layers=scan_layers, remat=remat)
        forward = arithmetic(model)
        executed = executed_flops(model, forward, one_hot=False)
        parameters = parameter_counts(abstract_variables(model)["params"])["dense feed-forward"]
        return forward, executed, traced(model, gradient=True), parameters

    (without, executed, in_program, few), (found, more, more_in_program, many) = step(0), step(48)
    assert many - few == 2 * 2 * 16 * 48
    # 56 tokens, M = 16: two products forward, four backward, and again the first of the two.
    one = 2 * 56 * 16 * 48
    assert found == {**without, "shared": 2 * one}
    assert model_flops(found) - model_flops(without) == 3 * 2 * one
    again = one if remat == "full" else 0
    assert more - executed == more_in_program - in_program == 3 * 2 * one + again


def test_training_that_drops_nothing_has_rows_for_all_choices() -> None:
    moe = functools.partial(MoeLayer, num_experts=16, group_tokens=8, train_capacity_factor=None)
    model = Transformer(**SIZES, moe=moe)
    # 64 and 48 choices in blocks of 8 and 4 rows, of at most 64 / 8 + 16 and 48 / 4 + 16 blocks.
    assert arithmetic(model)["experts"] == 2 * 2 * (24 * 8 + 28 * 4) * 16 * 32
    # Where rows travel, blocks have 8 rows at least: 48 / 8 + 16.
    apart = forward_flops(model, ROWS, SOURCE, TARGET, experts_apart=True)
    assert apart["experts"] == 2 * 2 * (24 * 8 + 22 * 8) * 16 * 32


def test_manual_region_counts_on_every_device() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()

    def product(x, y):
        return x @ y

    manual = jax.shard_map(product, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 3), (3, 5))]
    for function in (product, manual):
        assert traced_flops(jax.make_jaxpr(function)(*shapes), 4) == 2 * 8 * 3 * 5 / 4


def test_choice_by_platform_counts_its_default() -> None:
    def chosen(x_AB):
        return jax.lax.platform_dependent(
            x_AB, cpu=lambda x: (jnp.concatenate([x, x]) @ x.T)[:3], default=lambda x: x @ x.T
        )

    shape = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    assert traced_flops(jax.make_jaxpr(chosen)(shape), 1) == 2 * 3 * 5 * 3


def test_kernel_counts_by_its_estimate() -> None:
    # Four blocks of 8 rows, 128 by 256.
    shapes = [jnp.zeros((4, 8, 128)), jnp.zeros((2, 128, 256)), jnp.zeros(4, jnp.int32)]
    program = jax.make_jaxpr(functools.partial(grouped_matmul._megablox, interpret=True))(*shapes)
    assert traced_flops(program, 1) == 2 * 32 * 128 * 256


# --- A beam search ----------------------------------------------------------------


def traced_search(model: Transformer) -> Any:
    params = abstract_variables(model)["params"]
    tokens_BL = jax.ShapeDtypeStruct((SENTENCES, SOURCE), jnp.int32)
    return search.trace(model, params, {"encoder_input_tokens": tokens_BL}, TARGET, BEAMS, 0.6)


of_search = functools.partial(
    search_flops, rows=SENTENCES, source_length=SOURCE, target_length=TARGET, beams=BEAMS
)


def parts(program: Any) -> tuple[float, float]:
    """Returns the operations of a traced search outside of its loop, and of one step."""
    whole = traced_flops(program.jaxpr, 1)
    (loop,) = (each for each in program.jaxpr.eqns if each.primitive.name == "while")
    step = traced_flops(loop.params["body_jaxpr"], 1)
    return whole - step, step


def test_operations_of_one_layer_of_a_search_by_hand() -> None:
    encoding, step = of_search(Transformer(**ONE_LAYER))
    # 3 * 8 source pieces, 3 * 2 hypotheses of a piece; M = 16, N D = 16, F = 32, V = 64.
    # Four projections in the encoder's layer, keys and values for the decoder's.
    assert encoding["attention"] == (4 + 2) * 2 * 24 * 16 * 16
    assert encoding["attention_logits"] == 2 * 2 * 24 * 8 * 16
    assert encoding["dense"] == 2 * 2 * 24 * 16 * 32
    # A step: four projections, and query and result of the attention over the source; all 6
    # positions of the cache, all 8 of the source.
    assert step["attention"] == (4 + 2) * 2 * 6 * 16 * 16
    assert step["attention_logits"] == 2 * 2 * 6 * (6 + 8) * 16
    assert step["dense"] == 2 * 2 * 6 * 16 * 32
    assert step["logits"] == 2 * 6 * 16 * 64


def test_dense_search_equals_the_arithmetic() -> None:
    model = Transformer(**ONE_LAYER, activations=("gelu", "linear"))
    encoding, step = of_search(model)
    program = traced_search(model)
    once, each = parts(program)
    assert each == forward_executed_flops(step, one_hot=False) == forward_model_flops(step)
    # A step of the decoder with a row a sentence fills the memory of its attention over the source;
    # that step has no other use.
    assert once == sum(encoding.values()) + sum(step.values()) // BEAMS
    # The loop's length is not in XLA's text.
    assert read(program.lower().compile().as_text() or "").loops == 1


def test_without_capacity_the_experts_have_rows_for_all_choices() -> None:
    encoding, step = of_search(with_experts())
    # One of two layers a stack has experts. 24 tokens have 48 choices, 12 an expert: blocks of 8,
    # 48 / 8 + 4 of them. 6 tokens have 12 choices: 3 + 4 blocks of 4.
    assert encoding["experts"] == 2 * 2 * (10 * 8) * 16 * 32
    assert step["experts"] == 2 * 2 * (7 * 4) * 16 * 32
    assert encoding["experts_used"] == 2 * 2 * 48 * 16 * 32
    assert step["router"] == 2 * 6 * 16 * 4
    # Traced, combining adds the weighted sum of two results a token, 2 * 2 * 6 * 16.
    _, each = parts(traced_search(with_experts()))
    assert each == forward_executed_flops(step, one_hot=False) + 2 * 2 * 6 * 16
    # Groups of 8 with 2 * 8 / 4 = 4 slots an expert hold 16 of 8 tokens' choices; of 6 tokens, one
    # group with 3 slots an expert.
    bounded = with_experts(eval_capacity_factor=1.0, decode_capacity_factor=1.0)
    few = of_search(bounded)
    assert few[0]["experts"] == 2 * 2 * (3 * 4 * 4) * 16 * 32 == few[0]["experts_used"]
    assert few[1]["experts"] == 2 * 2 * (4 * 3) * 16 * 32
    _, each = parts(traced_search(bounded))
    assert each == forward_executed_flops(few[1], one_hot=False) + 2 * 2 * 6 * 16


def test_paper_scale_search_does_at_most_twice_the_work_there_is() -> None:
    experiment = experiment_of(CONFIGS / "v4_128.gin")
    model = planned(experiment, 100).model
    # 64 chips, a sentence each, 4 beams; 1,682 operations of 59 before the dispatch `dropless`.
    parts = search_flops(model, 64, 128, 128, 4, experts_apart=True)
    ratios = [
        forward_executed_flops(part, one_hot=False) / forward_model_flops(part) for part in parts
    ]
    assert ratios == pytest.approx([1.22, 1.67], abs=0.01)
