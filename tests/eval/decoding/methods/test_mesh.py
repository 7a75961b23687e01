"""Samples, constrained beams and a gate by task over a mesh are those of one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import pytest

from m4.eval.decoding.methods.sampling import Sampling
from m4.model.gates.by_direction import by_direction
from m4.model.transformer import abstract_variables
from m4.parallel.layout import Layout
from m4.parallel.mesh import make_mesh
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny, translations

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
    axes = abstract_variables(model)["params_axes"]
    there = jax.device_put(params, layout.shardings(axes, params))
    alone = translations(model, params, Words(), texts, settings, **asked)
    found = translations(model, there, Words(), texts, settings, layout=layout, **asked)
    assert [each.texts for each in found] == [each.texts for each in alone]
    assert len({text for each in alone for text in each.texts}) > (12 if method else 5)
