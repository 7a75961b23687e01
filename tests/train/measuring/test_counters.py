"""Counts of a run: rows of all steps since the row before, sums on the devices, counts of data."""

import collections
import gc
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.data.stream.stream import Stream
from m4.train.measuring.counters import DATA_COUNTS, Counters, DeviceSum
from m4.train.step import count_data

DIRECTIONS = ["en-gl", "gl-en"]
STEPS = 37


def metrics(step: int) -> dict[str, Any]:
    """Returns a step's metrics: numbers whose sum depends on the order of adding."""
    rng = np.random.default_rng(step)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.lognormal(0, 4, shape), jnp.float32)

    counts = jnp.asarray(rng.integers(1, 99, 2), jnp.int32)
    return {
        "loss": some(), "target_tokens": some(),
        "source_tokens": jnp.asarray(int(rng.integers(9)), jnp.int32), "nll_sum_D": some(2),
        "tokens_D": some(2), "load_E": some(4),
        "layers": {"encoder_1": {"load_E": some(4), "aux": some()}}, "expert_loads": {},
        "data_counts": {name: counts * (i + 1) for i, name in enumerate(DATA_COUNTS)},
    }  # fmt: skip


def row(interruptions: tuple[int, ...]) -> dict[str, float]:
    """Returns the row of all steps when counters are rebuilt from notes after some steps."""
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


def recounted(stream: Stream, batch: Mapping[str, np.ndarray]) -> dict[str, collections.Counter]:
    """Counts pairs one by one, each named by its row and its segment there."""
    counts = {name: collections.Counter() for name in DATA_COUNTS}
    for row, column in np.ndindex(*batch["decoder_target_tokens"].shape):
        if batch["decoder_segment_ids"][row, column]:
            direction = stream.directions[batch["direction_ids"][row, column]]
            counts["target_tokens"][direction] += 1
            counts["pairs"][direction] += int(batch["decoder_positions"][row, column] == 0)
    for row, column in np.ndindex(*batch["encoder_input_tokens"].shape):
        if batch["encoder_segment_ids"][row, column]:
            direction = stream.directions[batch["encoder_direction_ids"][row, column]]
            counts["source_tokens"][direction] += 1
    return counts


@pytest.mark.parametrize("layout", ["packed", "single"])
def test_a_steps_counts_equal_a_recount(corpus, layout: str) -> None:
    stream = Stream(corpus, seed=1, batch_rows=4, layout=layout)
    batch: Any = stream.batch(3)
    seen = jax.device_get(count_data(batch, len(stream.directions)))
    counts = recounted(stream, batch)
    for name in DATA_COUNTS:
        assert seen[name].tolist() == [counts[name][d] for d in stream.directions]
    assert sum(counts["pairs"].values()) >= 4


def test_counts_continue_from_a_note() -> None:
    counters = Counters(DIRECTIONS, {}, {}, 0, 1000)
    given = {name: np.array([i + 1, 10 * i], np.int32) for i, name in enumerate(DATA_COUNTS)}
    for step in (1, 2):
        counters.add(step, {**metrics(step), "data_counts": dict(given)})
    # Tokens a step: 2 + 3 of en-gl, 10 + 20 of gl-en.
    row = counters.row()
    shares = row["share/en-gl"], row["share/gl-en"]
    assert shares == pytest.approx((5 / 35, 30 / 35), rel=1e-5)
    saved = counters.note()
    assert saved["seen"]["directions"] == {
        "en-gl": {"pairs": 2, "source_tokens": 4, "target_tokens": 6},
        "gl-en": {"pairs": 0, "source_tokens": 20, "target_tokens": 40},
    }
    languages = {"gl": {"pairs": 2, "source_tokens": 24, "target_tokens": 46}}
    assert saved["seen"]["languages"] == languages
    again = Counters(DIRECTIONS, {}, saved, 2, 1000)
    again.add(3, {**metrics(3), "data_counts": dict(given)})
    assert again.note()["seen"]["directions"]["en-gl"]["target_tokens"] == 9
    assert again.note()["seen"]["from_step"] == 0
    assert Counters(DIRECTIONS, {}, {}, 7, 1000).note()["seen"]["from_step"] == 7


def test_one_array_whatever_the_number_of_steps() -> None:
    shape, total = (3, 17), DeviceSum(most=100)
    for step in range(6):
        total.add({"encoder_0": jnp.full(shape, step, jnp.int32)})
    gc.collect()
    assert sum(x.shape == shape for x in jax.live_arrays()) == 1
    np.testing.assert_array_equal(total.take()["encoder_0"], np.full(shape, 15))
    assert total.take() is None


def test_sums_that_int32_cannot_hold_are_exact() -> None:
    total = DeviceSum(most=2**30)
    for _ in range(5):
        total.add(jnp.asarray([2**30], jnp.int32))
    assert total.take().tolist() == [5 * 2**30]
