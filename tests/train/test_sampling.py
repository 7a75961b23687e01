"""Learned sampling and what was seen: equal to a recount of the batches, exact after a resume."""

from __future__ import annotations

import collections
import functools
import signal
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
from m4.train.loop import Evaluator, Interrupted, Trained
from m4.train.measuring.counters import DATA_COUNTS, Counters
from m4.train.sampling import LearnedSampling
from m4.train.step import count_data
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


@pytest.mark.parametrize("layout", ["packed", "single"])
def test_a_steps_counts_equal_a_recount(corpus: caches.Cache, layout: str) -> None:
    stream = Stream(corpus, seed=1, batch_rows=4, layout=layout)
    batch = stream.batch(3)
    seen = jax.device_get(count_data(batch, len(stream.directions)))  # pyright: ignore
    counts = recounted(stream, batch)
    for name in DATA_COUNTS:
        assert seen[name].tolist() == [counts[name][d] for d in stream.directions]
    assert sum(counts["pairs"].values()) >= 4


def test_counts_continue_from_a_note() -> None:
    names = ["en-gl", "gl-en"]

    def add(seen: Counters, number: int) -> None:
        counts = {name: np.array([i + 1, 10 * i], np.int32) for i, name in enumerate(DATA_COUNTS)}
        zeros = dict.fromkeys(("nll_sum_D", "tokens_D"), np.zeros(2))
        zeros |= dict.fromkeys(("target_tokens", "source_tokens"), np.zeros(()))
        seen.add(number, {"expert_loads": {}, "layers": {}, "data_counts": counts, **zeros})

    seen = Counters(names, {}, {}, 0, 20)
    add(seen, 1)
    add(seen, 2)
    # Tokens a step: 2 + 3 of en-gl, 10 + 20 of gl-en.
    shares = {name: value for name, value in seen.row().items() if name.startswith("share/")}
    assert shares == pytest.approx({"share/en-gl": 5 / 35, "share/gl-en": 30 / 35}, rel=1e-5)
    saved = seen.note()
    assert saved["seen"]["directions"] == {
        "en-gl": {"pairs": 2, "source_tokens": 4, "target_tokens": 6},
        "gl-en": {"pairs": 0, "source_tokens": 20, "target_tokens": 40},
    }
    languages = {"gl": {"pairs": 2, "source_tokens": 24, "target_tokens": 46}}
    assert saved["seen"]["languages"] == languages
    again = Counters(names, {}, saved, 2, 20)
    add(again, 3)
    assert again.note()["seen"]["directions"]["en-gl"]["target_tokens"] == 9
    assert again.note()["seen"]["from_step"] == 0
    assert Counters(names, {}, {}, 7, 20).note()["seen"]["from_step"] == 7


def run(
    folder: Path, corpus: caches.Cache, evaluators: list[Evaluator], dev_period: int = 2
) -> Trained:
    """Eight steps, evaluated every second; every step is a group, so new rates start at once."""

    def measure(params: Any) -> dict[str, float]:
        """Some number of the weights for each direction, that moves as they do."""
        leaves = jax.tree.leaves(params)
        return {
            f"dev/nll/{name}": 1.0 + float(np.abs(np.asarray(leaves[i])).sum())
            for i, name in enumerate(corpus.directions)
        }

    make = functools.partial(Stream, seed=1, batch_rows=4, layout="single")
    learns = {"Training.dev_period": dev_period}
    stream, sampling = learned_sampling(corpus, LEARNED, 8, make, learns)
    return train(
        folder,
        model_for(corpus, moe=None),
        stream,
        mesh_of(1, 1),
        total_steps=8,
        checkpoint_period=100,
        log_period=1,
        evaluators=[Evaluator(dev_period, measure), *evaluators],
        sampling=sampling,
    )


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
def test_resume_learns_and_draws_the_same(tmp_path: Path, corpus: caches.Cache) -> None:
    def interrupt(_: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        return {}

    whole = run(tmp_path / "whole", corpus, [])
    # At step 5, where two updates have been made and the rates of the second are in force.
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", corpus, [Evaluator(5, interrupt)])
    with pytest.raises(ValueError, match=r"^Training\.dev_period = 4: must be 2, .* set"):
        run(tmp_path / "parts", corpus, [], dev_period=4)
    parts = run(tmp_path / "parts", corpus, [])
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
    assert parts.note["sampling"] == whole.note["sampling"]
    assert parts.note["seen"] == whole.note["seen"]
    rows = {name: timeless_rows(tmp_path / name) for name in ("whole", "parts")}
    rows["parts"] = [row for row in rows["parts"] if len(row) > 1]  # of the interrupting evaluator
    assert rows["parts"] == rows["whole"]

    # The rates did change, and a stream of these phases has the batches that were trained on.
    saved = whole.note["sampling"]["phases"]
    assert [first_step for first_step, _ in saved] == [3, 5, 7, 9]
    start = mixture.phases(corpus, LEARNED, "tokens")[0].rates
    assert max(abs(saved[1][1][d] - start[d]) for d in start) > 0.01
    stream = Stream(
        corpus,
        phases=[Phase(0, start), *(Phase(step, rates) for step, rates in saved)],
        seed=1,
        batch_rows=4,
        layout="single",
    )
    counts = {name: collections.Counter() for name in DATA_COUNTS}
    for step in range(8):
        for name, more in recounted(stream, stream.batch(step)).items():
            counts[name].update(more)
    for direction, seen in whole.note["seen"]["directions"].items():
        assert seen == {name: counts[name][direction] for name in DATA_COUNTS}
    weights = [row for row in rows["whole"] if "weight/en-gl" in row]
    assert [row["step"] for row in weights] == [2, 4, 6, 8]
    for row in weights:
        rates = [row[f"rate/{name}"] for name in corpus.directions]
        assert sum(rates) == pytest.approx(1.0, abs=1e-5)
    assert weights[0]["weight/en-gl"] == 1.0  # one evaluation alone teaches nothing yet
