"""Learned sampling: rates follow what is measured, and batches follow the rates."""

import functools

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.train.sampling import LearnedSampling
from tests.train.trainers import learned_sampling

LEARNED = Learned(start=uniform, step_size=1.0)
SEEN = ("en-gl", "gl-en", "en-de", "de-en")


def made(corpus: Cache, rows: int) -> tuple[LearnedSampling, Stream]:
    make = functools.partial(Stream, seed=1, batch_rows=rows, layout="single")
    stream = mixture.make_stream(corpus, LEARNED, "examples", 8, make)
    return LearnedSampling(LEARNED, LEARNED(corpus.sizes()), dict, stream, {}), stream


def learn(sampling: LearnedSampling) -> dict[str, float]:
    """Learns after two steps and after four; returns the last row."""
    row = {}
    for step in (2, 4):
        measured = {f"dev/nll/{d}": i + 1 / step for i, d in enumerate(SEEN)}
        row = sampling.evaluated(step, measured)
    return row


def test_a_run_that_goes_back_forgets_what_it_learned_since(corpus: Cache) -> None:
    sampling, stream = made(corpus, 4)
    phases, note, batch = [*stream._phases.entries], sampling.note(), stream.batch(5)
    learn(sampling)
    assert ([*stream._phases.entries], sampling.note()) != (phases, note)
    sampling.resume(None)
    assert ([*stream._phases.entries], sampling.note()) == (phases, note)
    for name, array in stream.batch(5).items():
        np.testing.assert_array_equal(array, batch[name])


def test_a_run_begins_with_what_another_one_learned(corpus: Cache) -> None:
    before, _ = made(corpus, 4)
    row = learn(before)
    (began, one), (resumed, other) = made(corpus, 8), made(corpus, 8)
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


def test_rates_of_other_measurements_are_refused(corpus: Cache) -> None:
    make = functools.partial(Stream, seed=1, batch_rows=4, layout="single")
    notes = [learned_sampling(corpus, LEARNED, 8, make, {"Training.dev_period": n}) for n in (2, 4)]
    saved = notes[0][1].note()["sampling"]
    with pytest.raises(ValueError, match=r"^Training\.dev_period = 4: must be 2, .* set"):
        notes[1][1].resume(saved)
