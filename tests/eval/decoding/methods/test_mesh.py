"""Samples and constrained beams over a mesh are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from m4.eval.decoding.methods.sampling import Sampling
from m4.model.transformer import abstract_variables
from m4.parallel.layout import Layout
from m4.parallel.mesh import make_mesh
from tests.eval.small_model import SETTINGS, Words, sentences, tiny, translations


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [{"sampling": Sampling(temperature=0.7, top_k=9)}, {"no_repeat_ngram": 2, "min_length": 2}],
    ids=["sampling", "constraints"],
)
def test_a_mesh_finds_what_one_device_does(method: dict[str, Any]) -> None:
    (model, params), texts = tiny(moe=None), sentences(7, seed=4)
    settings = replace(SETTINGS, beams=3, n_best=3, **method)
    layout = Layout(make_mesh(data=2, model=2, devices=jax.devices()[:4]))
    axes = abstract_variables(model)["params_axes"]
    there = jax.device_put(params, layout.shardings(axes, params))
    asked: Any = {"prefixes": ["w3", "", "w5 w6", "", "", "", ""]}
    alone = translations(model, params, Words(), texts, settings, **asked)
    found = translations(model, there, Words(), texts, settings, layout=layout, **asked)
    assert [each.texts for each in found] == [each.texts for each in alone]
    assert len({text for each in alone for text in each.texts}) > 12
