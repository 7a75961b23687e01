"""Learned sampling: rates follow what is measured, and batches follow the rates."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4.data.cache import cache as caches
from m4.data.samplers import Phase
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.train.loop import Evaluator
from m4.train.measuring.counters import DATA_COUNTS
from m4.train.sampling import LearnedSampling
from tests.shared import model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import learned_sampling, timeless_rows, train

LEARNED = Learned(start=uniform, step_size=1.0)
SEEN = ("en-gl", "gl-en", "en-de", "de-en")


def recounted(stream: Stream, batch: Mapping[str, np.ndarray]) -> dict[str, collections.Counter]:
    """One by one: a pair is a segment of a row; the row and the segment are its name."""
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


def test_a_run_that_goes_back_forgets_what_it_learned_since(corpus: caches.Cache) -> None:
    make = functools.partial(Stream, seed=1, batch_rows=4, layout="single")
    stream = mixture.make_stream(corpus, LEARNED, "examples", 8, make)
    sampling = LearnedSampling(LEARNED, LEARNED(corpus.sizes()), dict, stream, {})
    phases, note, batch = [*stream._phases.entries], sampling.note(), stream.batch(5)
    for step in (2, 4):
        sampling.evaluated(step, {f"dev/nll/{d}": i + 1 / step for i, d in enumerate(SEEN)})
    assert ([*stream._phases.entries], sampling.note()) != (phases, note)
    sampling.resume(None)
    assert ([*stream._phases.entries], sampling.note()) == (phases, note)
    for name, array in stream.batch(5).items():
        np.testing.assert_array_equal(array, batch[name])


def test_a_run_begins_with_what_another_one_learned(corpus: caches.Cache) -> None:
    def made(rows: int) -> tuple[LearnedSampling, Stream]:
        make = functools.partial(Stream, seed=1, batch_rows=rows, layout="single")
        stream = mixture.make_stream(corpus, LEARNED, "examples", 8, make)
        return LearnedSampling(LEARNED, LEARNED(corpus.sizes()), dict, stream, {}), stream

    before, _ = made(4)
    row = {}
    for step in (2, 4):
        row = before.evaluated(step, {f"dev/nll/{d}": i + 1 / step for i, d in enumerate(SEEN)})
    (began, one), (resumed, other) = made(8), made(8)
    for _ in range(2):  # and again, where the run is killed
        began.begin(6, before.note()["sampling"])
    ((step, rates),) = began.note()["sampling"]["phases"]
    assert step == 6
    assert {f"rate/{name}": rate for name, rate in rates.items()} == pytest.approx(
        {name: value for name, value in row.items() if name.startswith("rate/")}, rel=1e-5
    )
    resumed.resume(began.note()["sampling"])
    assert resumed.note() == began.note()
    for name, array in one.batch(6).items():
        np.testing.assert_array_equal(array, other.batch(6)[name])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_trained_batches_are_those_of_the_noted_phases(
    tmp_path: Path, corpus: caches.Cache
) -> None:
    """Eight steps, evaluated every second; every step is a group, so new rates start at once."""

    def measure(params: Any) -> dict[str, float]:
        """Some number of the weights for each direction, that moves as they do."""
        leaves = map(np.asarray, jax.tree.leaves(params))
        return {
            f"dev/nll/{name}": 1.0 + float(np.abs(leaf).sum())
            for name, leaf in zip(corpus.directions, leaves, strict=False)
        }

    make = functools.partial(Stream, seed=1, batch_rows=4, layout="single")
    stream, sampling = learned_sampling(corpus, LEARNED, 8, make, {"Training.dev_period": 2})
    steps = {"total_steps": 8, "checkpoint_period": 100, "log_period": 1}
    note = train(
        *(tmp_path, model_for(corpus, moe=None), stream, mesh_of(1, 1)),
        **{**steps, "evaluators": [Evaluator(2, measure)], "sampling": sampling},
    ).note
    saved = note["sampling"]["phases"]
    assert [first_step for first_step, _ in saved] == [3, 5, 7, 9]
    start = mixture.phases(corpus, LEARNED, "tokens")[0].rates
    assert max(abs(saved[1][1][d] - start[d]) for d in start) > 0.01
    phases = [Phase(0, start), *(Phase(step, rates) for step, rates in saved)]
    again = make(corpus, phases=phases)
    counts = {name: collections.Counter() for name in DATA_COUNTS}
    for step in range(8):
        for name, more in recounted(again, again.batch(step)).items():
            counts[name].update(more)
    for direction, seen in note["seen"]["directions"].items():
        assert seen == {name: counts[name][direction] for name in DATA_COUNTS}
    weights = [row for row in timeless_rows(tmp_path) if "weight/en-gl" in row]
    assert [row["step"] for row in weights] == [2, 4, 6, 8]
    for row in weights:
        rates = [row[f"rate/{name}"] for name in corpus.directions]
        assert sum(rates) == pytest.approx(1.0, abs=1e-5)
    assert weights[0]["weight/en-gl"] == 1.0  # one evaluation alone teaches nothing yet


def test_rates_of_other_measurements_are_refused(corpus: caches.Cache) -> None:
    make = functools.partial(Stream, seed=1, batch_rows=4, layout="single")
    notes = [learned_sampling(corpus, LEARNED, 8, make, {"Training.dev_period": n}) for n in (2, 4)]
    saved = notes[0][1].note()["sampling"]
    with pytest.raises(ValueError, match=r"^Training\.dev_period = 4: must be 2, .* set"):
        notes[1][1].resume(saved)
