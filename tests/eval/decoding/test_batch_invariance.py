"""The audit finds what makes a translation depend on its batch, and nothing where there is none."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from m4.eval.decoding import batch_invariance
from m4.eval.decoding.batch_invariance import Placed, Way, changed_tokens, ways
from m4.eval.decoding.decode import Batch
from m4.parallel.layout import Layout
from m4.parallel.mesh import make_mesh
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny

TEXTS = sentences(11, seed=1)
SOURCES = {"en-a": TEXTS[:6], "en-b": TEXTS[6:]}


def test_a_model_that_drops_tokens_depends_on_its_batch() -> None:
    """The planted fault: experts with too few slots for the tokens of a batch of beams."""
    model, params = tiny(moe=partial(MOE, decode_capacity_factor=0.5))
    chosen = [way for way in ways([Placed(params)]) if way.rows < 64]
    found = changed_tokens(model, Words(), SOURCES, SETTINGS, chosen)
    assert sum(sum(one.changed.values()) for one in found.values()) > 0


@pytest.mark.thorough
def test_a_sound_model_does_not() -> None:
    model, params = tiny()
    chosen = [Way(Placed(params), 1), Way(Placed(params), 8), Way(Placed(params), 8, True)]
    found = changed_tokens(model, Words(), SOURCES, SETTINGS, chosen)
    assert {name: one.sentences for name, one in found.items()} == {"en-a": 6, "en-b": 5}
    assert all(one.tokens >= one.sentences for one in found.values())
    assert all(not +one.changed for one in found.values())


def test_changed_tokens_are_counted_by_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a search: in batches of 8 rows "w1" is another token, and "w2" is longer."""
    tokens = {"w0": [5, 1], "w1": [6, 1], "w2": [7, 1]}
    other = {**tokens, "w1": [9, 1], "w2": [7, 8, 8, 1]}

    def search(model: Any, params: Any, pieces: Any, sources: Any, settings: Any, **more: Any):
        chosen = other if settings.batch_rows == 8 else tokens
        for row, source in enumerate(sources):
            padded = [*chosen[source], 0, 0, 0, 0][:4]
            more["on_batch"](Batch([row], np.zeros((1, 1))), np.array([padded] * 2))

    monkeypatch.setattr(batch_invariance, "decode", search)
    sources = {"en-a": ["w0", "w1"], "en-b": ["w1", "w2"], "en-c": ["w0"]}
    found = changed_tokens(None, Words(), sources, SETTINGS, ways([Placed({})]))  # pyright: ignore
    assert {name: one.tokens for name, one in found.items()} == {"en-a": 4, "en-b": 4, "en-c": 2}
    assert {name: dict(+one.changed) for name, one in found.items()} == {
        "en-a": {"1 device, 8 rows": 1},
        # w1, and of 7 1 -> 7 8 8 1 one token that is another and two that are new.
        "en-b": {"1 device, 8 rows": 1 + 3},
        "en-c": {},
    }


def test_the_ways_are_batches_and_orders_on_each_place() -> None:
    mesh = Layout(make_mesh(expert=4))
    assert [way.name for way in ways([Placed({}), Placed({}, mesh)])] == [
        "1 device, 1 rows",
        "1 device, 8 rows",
        "1 device, 64 rows",
        "1 device, 64 rows, shuffled",
        "8 devices, 1 rows",
        "8 devices, 8 rows",
        "8 devices, 64 rows",
        "8 devices, 64 rows, shuffled",
    ]
