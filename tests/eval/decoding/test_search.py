"""A search over a mesh is that of one device: translations, scores, routing, samples."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4.eval.decoding import search as searching
from m4.eval.decoding.decode import TrainedModel, batches
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.routing_counter import RoutingCounter
from m4.eval.decoding.sampling import Sampling
from m4.eval.decoding.search import search
from m4.model.dispatch.all_to_all import all_to_all
from m4.model.dispatch.einsum import einsum
from m4.model.gates.by_direction import by_direction
from m4.model.transformer import abstract_variables
from m4.parallel.mesh import Layout, Rules, make_mesh
from m4.plan.hlo import collectives
from m4.storage.checkpoints import Checkpoints, shapes
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny, translations

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
    """Returns translations, each layer's choices by sentence and scores, from one device."""
    return run(*tiny(directions=len(TEXTS), **(STAGES if stages else {})), None, beams, rows)


def placed(model: Any, params: Any, layout: Layout) -> Any:
    axes = abstract_variables(model)["params_axes"]
    return jax.device_put(params, layout.shardings(axes, params))


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
    found = translations((model, params), TEXTS, settings, layout=layout, on_batch=counter)
    texts = [each.texts[0] for each in found]
    return texts, counter.current.layers, np.array([each.scores[0] for each in found])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "beams", "rules"),
    [
        (TWICE, {}, 4, ()),
        pytest.param(
            TWICE,
            {"moe": functools.partial(MOE, dropless_dispatch=all_to_all)},
            1,
            (),
            marks=THOROUGH,
        ),
        pytest.param(
            {"data": 1, "fsdp": 2, "expert": 4},
            {"moe": functools.partial(MOE, dropless_dispatch=einsum)},
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
    there = placed(model, params, layout)
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


PREFIXES = {"prefixes": ["w3", "", "w5 w6", "", "", "", ""]}
CONSTRAINED = {"no_repeat_ngram": 2, "min_length": 2, "beams": 3, "n_best": 3}
SAMPLED = {"sampling": Sampling(temperature=0.7, top_k=9), "n_best": 3}
HALVES = {"data": 2, "model": 2}
TASKS = {"moe": functools.partial(MOE, gate=by_direction), "directions": 3}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "mesh", "method", "asked"),
    [
        ({"moe": None}, HALVES, SAMPLED, PREFIXES),
        ({"moe": None}, HALVES, CONSTRAINED, PREFIXES),
        (TASKS, {"data": 2, "expert": 2}, {}, {"directions": [row % 3 for row in range(7)]}),
    ],
    ids=["sampling", "constraints", "by_task"],
)
def test_a_mesh_finds_what_one_device_does(
    changes: dict[str, Any], mesh: dict[str, int], method: dict[str, Any], asked: dict[str, Any]
) -> None:
    (model, params), texts = tiny(**changes), sentences(7, seed=4)
    settings = replace(SETTINGS, **method)
    layout = Layout(make_mesh(**mesh, devices=jax.devices()[:4]))
    there = placed(model, params, layout)
    alone = translations((model, params), texts, settings, **asked)
    found = translations((model, there), texts, settings, layout=layout, **asked)
    assert [each.texts for each in found] == [each.texts for each in alone]
    assert len({text for each in alone for text in each.texts}) > (12 if method else 5)


@pytest.mark.slow
def test_where_only_rows_are_sharded_a_step_sends_one_flag() -> None:
    model, params = tiny(moe=None)
    layout = Layout(make_mesh(data=8))
    given = shapes(params, layout.shardings(abstract_variables(model)["params_axes"], params))
    batch = layout.batch({"encoder_input_tokens": np.zeros((8, 16), np.int32)})
    with layout.axis_rules():
        jitted = searching.jit_over(layout, searching.search_batch, model, 10, 4, 0.6)
        program = jitted.lower(given, batch).compile()
    found = collectives(program.as_text())
    # The loop: is every row done? After it: 8 rows of 10 tokens, 8 scores, of 4 bytes each.
    kinds = sorted((one.kind, one.result_bytes) for one in found)
    assert kinds == [("all-gather", 32), ("all-gather", 320), ("all-reduce", 1)]


@pytest.mark.slow
def test_a_cache_that_grows_gives_the_same_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SHORTEST_STAGE", 3)
    assert searching.stages(13) == [4, 8, 13]
    model, params = tiny()
    (rows,) = batches([[*pieces, 1] for pieces in Words().encode_tagged(TEXTS[:4])], [16], 4)
    asked: Any = (model, params, {"encoder_input_tokens": rows.tokens_BL}, 13, 2, 0.6, 2)
    whole, whole_scores = search(*asked)
    grown, scores = search(*asked, grows=True)
    assert len(np.unique(whole[:, 0], axis=0)) > 2  # the law would be empty otherwise
    assert np.any(whole[:, 0, 8:])
    np.testing.assert_array_equal(grown, whole)
    # A softmax over fewer zeros adds in another order: a dozen sums of float32.
    np.testing.assert_allclose(scores, whole_scores, rtol=3e-5, atol=1e-5)


def test_each_device_reads_its_shards(tmp_path: Path) -> None:
    model, params = tiny(scan_layers=True)
    with Checkpoints(tmp_path / "checkpoints") as store:
        store.save(3, {"params": params}, {})
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
