"""One sentence in a model: the experts are those that are counted, attention is a distribution."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4.eval.decoding.explain import explain
from m4.eval.decoding.routing_counter import RoutingCounter
from m4.eval.decoding.translate import Translator
from m4.model.transformer import abstract_variables
from m4.parallel.mesh import Layout, make_mesh
from m4.settings import InputError
from tests.eval.small_model import SETTINGS, Words, decode, tiny


class Shown(Words):
    """Vocabulary of words that can be shown."""

    pieces = ("<pad>", "</s>", "<unk>", "<2xx>", *(f"w{number}" for number in range(20)))
    languages = ("xx",)


def translator(**changes: Any) -> Translator:
    model, params = tiny(**changes)
    # One sentence a batch, as `explain` translates: one program to compile.
    one = dataclasses.replace(SETTINGS, batch_rows=1)
    return Translator(model, params, Shown(), one, batch_rows=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"remat": "full"}])
def test_pieces_experts_and_attention(tmp_path: Path, changes: dict[str, Any]) -> None:
    ready, line = translator(directions=1, **changes), "w3 w5 w0 w19"
    found = explain(ready, line, "xx")
    assert [found.text] == ready.candidates([line], "xx")[0].texts
    assert found.source == ["<2xx>", "w3", "w5", "w0", "w19", "</s>"]
    written = found.text.split()
    assert found.target in ([*written, "</s>"], written)  # without an end at the limit
    N, T = len(found.source), len(found.target)
    # The experts are those that the atlas counts, two a token, whose weights sum to 1.
    counter = RoutingCounter(tmp_path / "a.json", ["en-xx"], ready, {})
    counter.starting(["en-xx"])
    made = ready.model, ready.params
    decode(made, [f"<2xx> {line}"], ready.decoding, on_batch=counter)
    assert found.experts.keys() == counter.current.layers.keys() == {"encoder_0", "decoder_0"}
    for layer, tokens in found.experts.items():
        chosen = Counter(expert for token in tokens for expert in token)
        counted = counter.current.layers[layer][0]
        assert chosen == {e: n for e, n in enumerate(counted.tolist()) if n}
        assert len(tokens) == (N if layer == "encoder_0" else T)
        assert [sum(token.values()) for token in tokens] == pytest.approx([1.0] * len(tokens))
    shapes = {name: weights.shape[1:] for name, weights in found.attention.items()}
    assert shapes == {
        "encoder_0/attention": (N, N),
        "decoder_0/self_attention": (T, T),
        "decoder_0/encoder_decoder_attention": (T, N),
    }
    for weights in found.attention.values():  # padding gets none
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(found.attention["decoder_0/self_attention"][0], 1).any()


@pytest.mark.thorough
def test_over_a_mesh_it_is_as_on_one_device() -> None:
    ready, layout = translator(directions=1), Layout(make_mesh(data=2, expert=4))
    axes = abstract_variables(ready.model)["params_axes"]  # type: ignore[arg-type]
    there = jax.device_put(ready.params, layout.shardings(axes, ready.params))
    one, other = explain(ready, "w3 w5", "xx"), explain(
        dataclasses.replace(ready, params=there, layout=layout), "w3 w5", "xx"
    )  # fmt: skip
    assert other[:3] == one[:3]
    assert {layer: [[*token] for token in tokens] for layer, tokens in other.experts.items()} == {
        layer: [[*token] for token in tokens] for layer, tokens in one.experts.items()
    }
    for layer, weights in one.attention.items():
        np.testing.assert_allclose(other.attention[layer], weights, atol=1e-5)


def test_a_dense_model_has_no_experts_and_an_empty_line_nothing() -> None:
    ready = translator(moe=None)
    assert explain(ready, "w1", "xx").experts == {}
    with pytest.raises(InputError, match="an empty sentence"):
        explain(ready, " ", "xx")
