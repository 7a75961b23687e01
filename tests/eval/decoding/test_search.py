"""The search over a mesh is that of one device: translations, scores, routing."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.eval.decoding import search as searching
from m4.eval.decoding.decode import TrainedModel, batches
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.routing_counter import RoutingCounter
from m4.eval.decoding.score_references import log_probabilities, penalty
from m4.eval.decoding.search import search
from m4.model.dispatch.all_to_all import all_to_all
from m4.model.dispatch.einsum import einsum
from m4.model.transformer import abstract_variables
from m4.parallel.layout import Layout
from m4.parallel.mesh import Rules, make_mesh
from m4.plan.hlo import collectives
from m4.storage.checkpoints import Checkpoints, shapes
from tests.eval.small_model import MOE, SETTINGS, Words, decode, sentences, tiny

TEXTS = sentences(11, seed=1)
THOROUGH = pytest.mark.thorough
TWICE: dict[str, Any] = {"data": 2, "expert": 2, "model": 2}
# A dense stack whose layers lie over the stages of a pipeline.
STAGES: dict[str, Any] = {"moe": None, "encoder_layers": 2, "decoder_layers": 2}
STAGES |= {"scan_layers": True, "pipeline_microbatches": 2}


@functools.cache
def translated(
    beams: int, stages: bool = False, rows: int = 4
) -> tuple[list[str], dict, np.ndarray]:
    """On one device, by `gather`: translations, layer -> choices of each sentence, scores."""
    return run(*tiny(directions=len(TEXTS), **(STAGES if stages else {})), None, beams, rows)


def run(
    model: Any, params: Any, layout: Layout | None, beams: int, rows: int
) -> tuple[list[str], dict[str, np.ndarray], np.ndarray]:
    # A direction a sentence: the counts of each.
    names = [f"en-{i}" for i in range(len(TEXTS))]
    counter = RoutingCounter(
        Path("unread"), names, TrainedModel(model, params, Words(), layout=layout), {}
    )
    counter.starting(names)
    settings = replace(SETTINGS, beams=beams, batch_rows=rows, max_source_length=16)
    texts = decode(model, params, Words(), TEXTS, settings, layout=layout, on_batch=counter)
    # The same programs again, for the scores.
    scores = np.zeros(len(TEXTS))
    ids = [[*pieces, 1] for pieces in Words().encode_tagged(TEXTS)]
    rows = rows if layout is None else layout.rows(rows)
    for batch in batches(ids, [16], rows):
        options = 10, beams, 0.6, searching.BEST
        if layout is None:
            _, found = search(model, params, batch.tokens_BL, *options)
        else:
            what, sources = "the program that translates", {"encoder_input_tokens": batch.tokens_BL}
            asked = layout, what, searching.jit_search, (model, *options), params, sources
            _, found = searching.run_over(*asked)
        scores[batch.rows] = np.asarray(found)[: len(batch.rows), 0]
    return texts, counter.current.layers, scores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "beams", "rules"),
    [
        (TWICE, {}, 4, ()),
        pytest.param(
            TWICE, {"moe": functools.partial(MOE, dispatch=all_to_all)}, 1, (), marks=THOROUGH
        ),
        pytest.param(
            {"data": 1, "fsdp": 2, "expert": 4},
            {"moe": functools.partial(MOE, dispatch=einsum)},
            4,
            (),
            marks=THOROUGH,
        ),
        pytest.param({"data": 4, "stage": 2}, STAGES, 4, (), marks=THOROUGH),
        # The cache of keys and values sharded along the heads' width.
        pytest.param({"data": 4, "stage": 2}, STAGES, 4, [("kv", "stage")], marks=THOROUGH),
    ],
)
def test_a_mesh_translates_as_one_device_does(
    mesh: dict[str, Any], changes: dict[str, Any], beams: int, rules: Rules
) -> None:
    stages = "stage" in mesh
    texts, counts, scores = translated(beams, stages)
    assert len(set(texts)) > 6  # the law would be empty otherwise
    layout = Layout(make_mesh(**mesh), extra_axis_rules=rules)
    model, params = tiny(directions=len(TEXTS), **changes)
    axes = abstract_variables(model)["params_axes"]
    there = jax.device_put(params, layout.shardings(axes, params))
    # Three rows a batch become as many as divide: 4 over data x expert, 8 over fsdp x expert.
    sharded, sharded_counts, sharded_scores = run(model, there, layout, beams, 3)
    assert sharded == texts
    # Sums of up to a dozen float32 logits' softmax in another order: on some CPUs 1.4e-5 of them.
    np.testing.assert_allclose(sharded_scores, scores, rtol=3e-5, atol=1e-5)
    assert sharded_counts.keys() == counts.keys()
    assert bool(counts) != stages
    for key, chosen in counts.items():
        np.testing.assert_array_equal(sharded_counts[key], chosen, err_msg=str(key))
    # Another size of the batches: the same translations.
    if beams == 1:
        assert run(model, there, layout, beams, 9)[0] == texts


@pytest.mark.slow
def test_where_only_rows_are_sharded_a_step_sends_one_flag() -> None:
    model, params = tiny(moe=None)
    layout = Layout(make_mesh(data=8))
    given = shapes(params, layout.shardings(abstract_variables(model)["params_axes"], params))
    batch = layout.batch({"encoder_input_tokens": np.zeros((8, 16), np.int32)})
    with layout.axis_rules():
        program = searching.jit_search(layout, model, 10, 4, 0.6).lower(given, batch).compile()
    found = collectives(program.as_text())
    # The loop: is every row done? After it: 8 rows of 10 tokens, 8 scores, of 4 bytes each.
    kinds = sorted((one.kind, one.result_bytes) for one in found)
    assert kinds == [("all-gather", 32), ("all-gather", 320), ("all-reduce", 1)]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bfloat16_model_over_two_devices_is_that_of_one() -> None:
    # No sum is split, and XLA may not keep more digits than bfloat16 has where it likes to, which
    # is in other places in the other program: so not even rounding differs.
    model, params = tiny(dtype=jnp.bfloat16)
    layout = Layout(make_mesh(data=1, expert=2, devices=jax.devices()[:2]))
    axes = abstract_variables(model)["params_axes"]
    there = jax.device_put(params, layout.shardings(axes, params))
    (rows,) = batches([[*pieces, 1] for pieces in Words().encode_tagged(TEXTS[:4])], [16], 4)
    exactly: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    alone = search.lower(model, params, rows.tokens_BL, 10, 2, 0.6).compile(exactly)
    expected = alone(params, rows.tokens_BL)
    batch = layout.batch({"encoder_input_tokens": rows.tokens_BL})
    with layout.axis_rules():
        lowered = searching.jit_search(layout, model, 10, 2, 0.6).lower(there, batch)
        found = lowered.compile(exactly)(there, batch)
    assert len(np.unique(expected[0], axis=0)) > 2  # the law would be empty otherwise
    for here, alone in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(here, alone)


@pytest.mark.slow
def test_a_cache_that_grows_gives_the_same_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SHORTEST_STAGE", 3)
    assert searching.stages(13) == [4, 7, 13]
    model, params = tiny()
    (rows,) = batches([[*pieces, 1] for pieces in Words().encode_tagged(TEXTS[:4])], [16], 4)
    asked: Any = (model, params, rows.tokens_BL, 13, 2, 0.6, searching.Method(n_best=2))
    whole, whole_scores = search(*asked)
    grown, scores = search(*asked, grows=True)
    assert len(np.unique(whole[:, 0], axis=0)) > 2  # the law would be empty otherwise
    assert np.any(whole[:, 0, 7:])
    np.testing.assert_array_equal(grown, whole)
    # A softmax over fewer zeros adds in another order: a dozen sums of float32.
    np.testing.assert_allclose(scores, whole_scores, rtol=3e-5, atol=1e-5)


@pytest.mark.thorough
def test_enough_beams_find_what_an_enumeration_finds() -> None:
    # Six tokens, five of which continue: 25 beams hold all of two tokens, so nothing is lost.
    model, params = tiny(vocab_size=6)
    source_1L = np.array([[3, 5, 4, 1, 0, 0, 0, 0]])
    kept = [v for v in range(6) if v != 1]
    every = [[*tokens, 1] for n in range(3) for tokens in itertools.product(kept, repeat=n)]
    # Token 0 is padding to a forward pass: of those that have it the search alone can say more.
    every = [tokens for tokens in every if 0 not in tokens]
    targets_BT = np.array([[*tokens, 0, 0][:3] for tokens in every])
    batch = {
        "encoder_input_tokens": np.repeat(source_1L, len(every), axis=0),
        "decoder_target_tokens": targets_BT,
    }
    logp_B = np.asarray(jax.jit(lambda batch: log_probabilities(model, params, batch))(batch))
    scores = [lp / penalty(0.6, len(one)) for lp, one in zip(logp_B, every, strict=True)]
    order = np.argsort(scores)[::-1]
    method = searching.Method(n_best=25)
    found, found_scores = jax.device_get(search(model, params, source_1L, 3, 25, 0.6, method))
    ended = [tokens[: tokens.index(1) + 1] for tokens in found[0].tolist() if 1 in tokens]
    plain = [k for k, tokens in enumerate(ended) if 0 not in tokens][:8]
    assert len(plain) == 8
    np.testing.assert_array_equal(found[0, plain], targets_BT[order[:8]])
    np.testing.assert_allclose(found_scores[0, plain], np.sort(scores)[::-1][:8], rtol=1e-4)


def test_groups_that_do_not_divide_name_the_setting() -> None:
    # Four rows of two hypotheses, a position each: one group of 8 tokens for two devices.
    model, params = tiny()
    moe = functools.partial(MOE, dispatch=all_to_all, decode_capacity_factor=2.0)
    model = model.clone(moe=moe)
    layout = Layout(make_mesh(data=1, expert=2, devices=jax.devices()[:2]))
    given = shapes(params, layout.shardings(abstract_variables(model)["params_axes"], params))
    batch = layout.batch({"encoder_input_tokens": np.zeros((4, 16), np.int32)})
    said = r"Decoding.batch_rows .*= 1: must be divisible by 2"
    with layout.axis_rules(), pytest.raises(ValueError, match=said):
        searching.jit_search(layout, model, 10, 2, 0.6).lower(given, batch)


def test_rows_are_rounded_up_to_divide_over_the_devices() -> None:
    # Rows lie over data x fsdp x node x expert, never over model or stage.
    layout = Layout(make_mesh(**TWICE))
    assert [layout.rows(n) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert Layout(make_mesh(data=2, stage=4)).rows(3) == 4
    assert Layout(make_mesh(data=1, model=8)).rows(3) == 3


def test_equal_layouts_share_programs() -> None:
    # gin gives lists where Python has tuples.
    mesh = make_mesh(**TWICE)
    as_lists: Any = [["embed", ["data", "model"]], ["kv", None]]
    here = Layout(mesh, ["expert"], as_lists)
    assert here == Layout(mesh, ("expert",), (("embed", ("data", "model")), ("kv", None)))
    asked: Any = (tiny()[0], 10, 2, 0.6)
    program = functools.partial(searching._program, what="", make=searching.jit_search)
    assert program(here, arguments=asked) is program(Layout(*vars(here).values()), arguments=asked)
    # Rules decide what a program does, and are part of what it is known by.
    assert program(Layout(mesh), arguments=asked) is not program(here, arguments=asked)


def test_each_device_reads_its_shards(tmp_path: Path) -> None:
    model, params = tiny(scan_layers=True)
    store = Checkpoints(tmp_path / "checkpoints")
    store.save(3, {"params": params}, {})
    store.close()
    layout = Layout(make_mesh(data=1, fsdp=2, expert=2, model=2))
    found, step, _ = restore_params(model, tmp_path / "checkpoints", layout=layout)
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, found, params)
    # [blocks, E, M, F]: two of four experts; F in two parts over model, each in two over fsdp.
    inward = found["encoder_blocks"]["layer_0"]["moe"]["experts"]["wi"]["kernel"]
    assert inward.shape == (1, 4, 16, 32)
    assert {part.data.shape for part in inward.addressable_shards} == {(1, 2, 16, 8)}
    whole, _, _ = restore_params(model, tmp_path / "checkpoints")
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(whole))
