"""Counts of routing: those of one forward pass, kept by group of directions."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.eval.decoding import routing_counter
from m4.eval.decoding.decode import Batch, TrainedModel
from m4.eval.decoding.routing_counter import RoutingCounter
from m4.model.transformer import Transformer
from tests.eval.small_model import Words, decode, sentences, tiny

NAMES = [f"en-x{i}" for i in range(9)]


def test_every_token_of_source_and_translation_has_two_choices(tmp_path: Path) -> None:
    model, params = tiny(directions=len(NAMES))
    texts = sentences(9, seed=3)
    counter = RoutingCounter(
        tmp_path / "atlas.json", NAMES, TrainedModel(model, params, Words()), {}
    )
    counter.starting(NAMES)
    got = decode((model, params), texts, on_batch=counter)
    # The same translations as without.
    assert got == decode((model.clone(directions=0), params), texts)
    layers = counter.current.layers
    assert layers.keys() == {"encoder_0", "decoder_0"}
    for row, text in enumerate(texts):
        # With EOS, which a translation at its limit of 10 tokens lacks.
        assert layers["encoder_0"][row].sum() == 2 * (len(text.split()) + 1)
        assert layers["decoder_0"][row].sum() == 2 * min(len(got[row].split()) + 1, 10)


def test_the_choices_are_those_of_the_search(tmp_path: Path) -> None:
    # Token by token through the cache, as the search goes, against the one pass.
    model, params = tiny(directions=1)
    tokens_BL = np.zeros((1, 16), np.int32)
    tokens_BL[0, :3] = 3, 5, 1
    best_BT = np.array([[7, 9, 4, 1, 0, 0, 0, 0, 0, 0]], np.int32)
    counter = RoutingCounter(
        tmp_path / "atlas.json", ["en-xx"], TrainedModel(model, params, Words()), {}
    )
    counter.starting(["en-xx"])
    counter(Batch([0], tokens_BL), best_BT)
    variables: Any = {"params": params}
    encoded = jax.jit(
        lambda: model.apply(variables, tokens_BL, enable_dropout=False, method="encode")
    )()
    full = jax.ShapeDtypeStruct(best_BT.shape, jnp.int32)
    _, made = jax.eval_shape(
        lambda x: model.apply(
            variables, tokens_BL, x, x, enable_dropout=False, decode=True, mutable=["cache"]
        ),
        full,
    )
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), made["cache"])
    expected = np.zeros(4, np.int64)

    @jax.jit  # which compiles quicker than its operations
    def one(cache: Any, last: Any) -> Any:
        return model.apply(
            {**variables, "cache": cache}, encoded, tokens_BL, last, last, enable_dropout=False,
            decode=True, max_decode_length=10, decoder_direction_ids=jnp.zeros((1, 1), jnp.int32),
            mutable=["cache", "intermediates"], method="decode",
        )[1]  # fmt: skip

    for token in (0, 7, 9, 4):  # what comes before each token of the translation
        sown = one(cache, np.full((1, 1), token, np.int32))
        cache = sown["cache"]
        found = jax.tree_util.tree_flatten_with_path(sown["intermediates"])[0]
        (assigned_DE,) = [x for path, x in found if "assigned_DE" in str(path)]
        expected += np.asarray(assigned_DE)[0]
    np.testing.assert_array_equal(counter.current.layers["decoder_0"], [expected])


def test_counts_grow_by_groups_and_are_replaced_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, directions = tmp_path / "atlas.test.json", ["en-gl", "gl-en"]
    model = Transformer(8)

    def counted(step: int, group: list[str], expert: int) -> dict[str, Any]:
        """Counts a sentence of two tokens, which both choose `expert`, for each of `group`."""

        def forward(*arguments: Any) -> dict[str, np.ndarray]:
            arrays = arguments[-1]
            assigned_DE = np.zeros((2, 3), np.int64)
            numbers_B = arrays["direction_ids"][:, 0]
            np.add.at(assigned_DE, (numbers_B[numbers_B < 2], expert), 2)
            return {"encoder_1": assigned_DE}

        monkeypatch.setattr(routing_counter, "run_model", forward)
        trained = TrainedModel(model, {}, Words())
        counter = RoutingCounter(path, directions, trained, {"made_by": {"step": step}})
        counter.starting(group)
        # The last row only fills the batch up.
        rows, tokens = list(range(len(group))), np.ones((len(group) + 1, 2), np.int32)
        counter(Batch(rows, tokens), tokens)
        counter.save()
        return json.loads(path.read_text("utf-8"))

    assert counted(7, ["gl-en", "gl-en"], 1)["layers"] == {"encoder_1": [[0, 0, 0], [0, 4, 0]]}
    # Another process continues with the other direction; the same direction replaces its counts.
    assert counted(7, ["en-gl"], 2)["layers"] == {"encoder_1": [[0, 0, 2], [0, 4, 0]]}
    assert counted(7, ["gl-en"], 0)["layers"] == {"encoder_1": [[0, 0, 2], [2, 0, 0]]}
    saved = counted(8, ["gl-en"], 0)
    assert saved["layers"] == {"encoder_1": [[0, 0, 0], [2, 0, 0]]}
    assert (saved["made_by"], saved["directions"]) == ({"step": 8}, directions)
