"""Operations of a beam search by arithmetic: against its traced and its compiled program."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from m4.eval.decoding.search import search
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer, abstract_variables
from m4.plan.flops import forward_executed_flops, forward_model_flops, search_flops, traced_flops
from m4.plan.hlo import read
from m4.plan.program import planned
from tests.command_line import experiment_of
from tests.plan.test_flops import SIZES

ROWS, SOURCE, TARGET, BEAMS = 3, 8, 6, 2
CONFIGS = Path(__file__).parents[2] / "gin_configs"


def traced(model: Transformer) -> Any:
    params = abstract_variables(model)["params"]
    tokens_BL = jax.ShapeDtypeStruct((ROWS, SOURCE), jnp.int32)
    return search.trace(model, params, tokens_BL, TARGET, BEAMS, 0.6)


def arithmetic(model: Transformer) -> tuple[dict[str, int], dict[str, int]]:
    return search_flops(model, ROWS, SOURCE, TARGET, BEAMS)


def parts(program: Any) -> tuple[float, float]:
    """Operations of a traced search outside of its loop, and of one step."""
    whole = traced_flops(program.jaxpr, 1)
    (loop,) = (each for each in program.jaxpr.eqns if each.primitive.name == "while")
    step = traced_flops(loop.params["body_jaxpr"], 1)
    return whole - step, step


def test_operations_of_one_layer_by_hand() -> None:
    encoding, step = arithmetic(Transformer(**{**SIZES, "encoder_layers": 1, "decoder_layers": 1}))
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
    one = {"encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(**{**SIZES, **one}, activations=("gelu", "linear"))
    encoding, step = arithmetic(model)
    program = traced(model)
    once, each = parts(program)
    assert each == forward_executed_flops(step, one_hot=False) == forward_model_flops(step)
    # A step of the decoder with a row a sentence fills the memory of its attention over the source;
    # that step has no other use.
    assert once == sum(encoding.values()) + sum(step.values()) // BEAMS
    # The loop's length is not in XLA's text.
    assert read(program.lower().compile().as_text() or "").loops == 1


def test_without_capacity_the_experts_have_rows_for_all_choices() -> None:
    def model(**options: Any) -> Transformer:
        moe = functools.partial(MoeLayer, num_experts=4, group_tokens=8, capacity_rule="paper")
        return Transformer(**SIZES, moe=functools.partial(moe, **options))

    encoding, step = arithmetic(model())
    # One of two layers a stack has experts. 24 tokens have 48 choices, 12 an expert: blocks of 8,
    # 48 / 8 + 4 of them. 6 tokens have 12 choices: 3 + 4 blocks of 4.
    assert encoding["experts"] == 2 * 2 * (10 * 8) * 16 * 32
    assert step["experts"] == 2 * 2 * (7 * 4) * 16 * 32
    assert encoding["experts_used"] == 2 * 2 * 48 * 16 * 32
    assert step["router"] == 2 * 6 * 16 * 4
    # Traced, combining adds the weighted sum of two results a token, 2 * 2 * 6 * 16.
    _, each = parts(traced(model()))
    assert each == forward_executed_flops(step, one_hot=False) + 2 * 2 * 6 * 16
    # Groups of 8 with 2 * 8 / 4 = 4 slots an expert hold 16 of 8 tokens' choices; of 6 tokens, one
    # group with 3 slots an expert.
    few = arithmetic(model(eval_capacity_factor=1.0, decode_capacity_factor=1.0))
    assert few[0]["experts"] == 2 * 2 * (3 * 4 * 4) * 16 * 32 == few[0]["experts_used"]
    assert few[1]["experts"] == 2 * 2 * (4 * 3) * 16 * 32
    _, each = parts(traced(model(eval_capacity_factor=1.0, decode_capacity_factor=1.0)))
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
