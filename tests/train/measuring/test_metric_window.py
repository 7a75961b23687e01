"""A row of metrics is of all steps since the row before, whatever came between them."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.train.measuring.counters import Counters

DIRECTIONS = ["en-gl", "gl-en"]
STEPS = 37


def metrics(step: int) -> dict[str, Any]:
    """Returns what a step gives: numbers whose sum depends on the order of adding."""
    rng = np.random.default_rng(step)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.lognormal(0, 4, shape), jnp.float32)

    counts = jnp.asarray(rng.integers(1, 99, 2), jnp.int32)
    return {
        "loss": some(),
        "target_tokens": some(),
        "source_tokens": jnp.asarray(int(rng.integers(9)), jnp.int32),
        "nll_sum_D": some(2),
        "tokens_D": some(2),
        "load_E": some(4),
        "layers": {"encoder_1": {"load_E": some(4), "aux": some()}},
        "expert_loads": {},
        "data_counts": {
            name: counts * (i + 1)
            for i, name in enumerate(("pairs", "source_tokens", "target_tokens"))
        },
    }


def row(interruptions: tuple[int, ...]) -> dict[str, float]:
    """The row of all steps, of a run whose counters are rebuilt from notes, after some steps."""
    note: dict[str, Any] = {}
    counters = Counters(DIRECTIONS, {"all": DIRECTIONS}, note, 0, 1000)
    for step in range(1, STEPS + 1):
        counters.add(step, metrics(step))
        if step in interruptions:
            note = json.loads(json.dumps(counters.note()))
            counters = Counters(DIRECTIONS, {"all": DIRECTIONS}, note, step, 1000)
    found = counters.row()
    assert found.pop("tokens_per_second") > 0
    return found


def test_a_row_over_interruptions_is_bit_equal_to_that_of_an_undisturbed_run() -> None:
    whole = row(())
    assert {"share/en-gl", "nll/all", "moe/encoder_1/load/3"} <= whole.keys()
    for interruptions in ((1,), (5, 6, 30), (STEPS,)):
        assert row(interruptions) == whole, interruptions


def test_the_time_before_an_interruption_counts_for_tokens_a_second() -> None:
    counters = Counters(DIRECTIONS, {}, {}, 0, 1000)
    counters.add(1, metrics(1))
    note = counters.note()
    note["window"]["seconds"] = 100.0
    resumed = Counters(DIRECTIONS, {}, note, 1, 1000)
    found = resumed.row()
    tokens = found["target_tokens"] + found["source_tokens"]
    assert 0.9 < found["tokens_per_second"] / (tokens / 100) <= 1
