from collections.abc import Iterable

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.stream.batches import (
    Batch,
    Shape,
    SplitReader,
    evaluation_batches,
    first_fit_decreasing,
    lay_out,
    plan,
)
from tests.data import stream_reference
from tests.data.arrays import Ids, of_text, pairs_of


def pairs_in(batches: Iterable[Batch], direction: int = 0) -> list[Ids]:
    return [(s, t) for batch in batches for of, s, t in pairs_of(batch) if of == direction]


def test_long_pairs_are_trimmed_as_seqio_does(made_cache: Cache) -> None:
    """20 pairs of at least 7 and 5 ids in rows of 12 and 9: a row has one."""
    batches = [*evaluation_batches(made_cache, ["gl-en"], "test", Shape(8, 12, 9))]
    assert [b["encoder_input_tokens"].shape for b in batches] == [(8, 12)] * 3  # 20 = 8 + 8 + 4
    assert pairs_in(batches) == of_text(made_cache, "gl-en", "test", 12, 9)
    assert all((array[4:] == 0).all() for array in batches[-1].values()), "empty rows at the end"


def test_several_directions_each_pair_once(made_cache: Cache) -> None:
    names = ["gl-en", "en-pt"]
    batches = list(evaluation_batches(made_cache, names, "dev", Shape(3, 96, 96), limit=7))
    for number, name in enumerate(names):
        assert sorted(pairs_in(batches, number)) == sorted(of_text(made_cache, name, "dev")[:7])
    assert len(batches) < 5  # 14 pairs in rows of 3
    for batch in batches:
        for side, ids in (("encoder", "encoder_direction_ids"), ("decoder", "direction_ids")):
            assert not batch[ids][batch[f"{side}_segment_ids"] == 0].any(), "0 is padding"


@pytest.mark.parametrize(("source_length", "target_length"), [(96, 96), (7, 5)])
def test_compiled_is_the_same(made_cache: Cache, source_length: int, target_length: int) -> None:
    """Many pairs a row; with short lengths pairs are trimmed and some fit in none."""
    data = SplitReader(made_cache, ["gl-en", "en-pt", "pt-en"], "train")
    rng = np.random.default_rng(0)
    directions = rng.integers(0, 3, 150)
    examples = data.examples(directions, rng.integers(0, 80, 150))
    examples = examples._replace(
        source_lengths=np.minimum(examples.source_lengths, source_length),
        target_lengths=np.minimum(examples.target_lengths, target_length),
    )
    shape = Shape(24, source_length, target_length)
    row_of = first_fit_decreasing(examples.source_lengths, examples.target_lengths, shape)
    assert (row_of < 0).any()
    chosen = np.flatnonzero(row_of >= 0)
    wanted = stream_reference.lay_out(data, examples, chosen, row_of, shape)
    for part in ((0, 1), (0, 3), (2, 3)):
        found = lay_out(data, examples, chosen, row_of, shape, part)
        assert found.keys() == wanted.keys()
        rows = slice(part[0] * 24 // part[1], (part[0] + 1) * 24 // part[1])
        for key, array in wanted.items():
            assert found[key].dtype == array.dtype
            assert np.array_equal(found[key], array[rows]), key


SHAPE = Shape(rows=8, source_length=64, target_length=64)
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(pairs: int, seed: int = 0, names: int = 5, epoch: int = 30) -> Pairs:
    """Returns (source lengths, target lengths, directions, epochs) of pairs in their draws' order.

    About 13 ids, long ones up to 64, both sides alike; `epoch` draws of a direction are an epoch.
    """
    rng = np.random.default_rng(seed)
    source = np.clip(rng.gamma(5.0, 2.6, pairs), 2, 62).astype(int) + 2
    target = np.clip(source + rng.integers(-3, 3, pairs), 2, 64)
    directions = rng.integers(0, names, pairs)
    occurrence = stream_reference.occurrences(directions, np.arange(names) * 7)
    return source, target, directions, occurrence // epoch


def test_first_fit_decreasing_by_hand() -> None:
    # Rows of 10/10. By larger side: pair 1 (7/2), 3 (2/6), 0 (5/5), 2 (3/1), 4 (2/2).
    # 1 -> row 0 (left 3/8); 3 -> row 0 (left 1/2); 0 -> row 1 (left 5/5); 2 -> row 1 (left 2/4);
    # 4 -> row 1.
    source, target = np.array([5, 7, 3, 2, 2]), np.array([5, 2, 1, 6, 2])
    assert first_fit_decreasing(source, target, Shape(2, 10, 10)).tolist() == [1, 0, 1, 0, 1]
    # One row: 1 and 3 fit; of the rest nothing does.
    assert first_fit_decreasing(source, target, Shape(1, 10, 10)).tolist() == [-1, 0, -1, 0, -1]


def test_a_plan_by_hand() -> None:
    # Two rows of 10/10 a step, two steps, one direction; both sides alike: 6 6 5 3 5 5, 30 in all.
    # The first step's part is 15: 6 and 6; with 5 it would be 17. The gaps, up to 15, go to the
    # largest that fits of as many pairs further on (5 and 3): 3, in row 0. Last step: 5 5, 5.
    length, zeros = np.array([6, 6, 5, 3, 5, 5]), np.zeros(6, int)
    made = plan(length, length, zeros, zeros, 2, Shape(2, 10, 10))
    assert made.step_of.tolist() == [0, 0, 1, 0, 1, 1]
    assert made.row_of.tolist() == [0, 1, 0, 0, 0, 1]
    # The 3 is of the next epoch now: it may not come before the first 5. Last step: 5 5, 5 3.
    made = plan(length, length, zeros, np.array([0, 0, 0, 1, 1, 1]), 2, Shape(2, 10, 10))
    assert made.step_of.tolist() == [0, 0, 1, 1, 1, 1]
    assert made.row_of.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("pairs", "steps", "shape", "seed"),
    [
        *((1000, 32, SHAPE, seed) for seed in range(5)),
        # 1,030 rows are packed in 5 parts of 206, because 3 and 4 do not divide them.
        (17_000, 4, Shape(1030, 64, 64), 0),
    ],
)
def test_a_plan_is_all_pairs_and_fits(pairs: int, steps: int, shape: Shape, seed: int) -> None:
    """Every row of every step holds its pairs, and there are as many pairs as rows."""
    source, target, directions, epochs = drawn(pairs, seed)
    made = plan(source, target, directions, epochs, steps, shape)
    assert made.left == 0
    assert set(made.step_of.tolist()) == set(range(steps))
    for step in range(steps):
        inside = made.step_of == step
        rows = made.row_of[inside]
        assert 0 <= rows.min() <= rows.max() < shape.rows <= len(rows)
        assert np.bincount(rows, source[inside]).max() <= shape.source_length
        assert np.bincount(rows, target[inside]).max() <= shape.target_length
    if steps == 32:
        loads = np.bincount(made.step_of, source + target)
        assert loads.std() < 0.02 * loads.mean(), "steps have about the same load"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [SHAPE, Shape(3, 64, 70), Shape(1, 1023, 1024)])
@pytest.mark.parametrize("epoch", [3, 1000])
def test_compiled_plans_are_the_same(seed: int, shape: Shape, epoch: int) -> None:
    """Rows of 1,023 and 1,024 have so many parts that shares are sorted another way."""
    pairs = {8: 370, 3: 140, 1: 300}[shape.rows]
    source, target, directions, epochs = drawn(pairs, seed, epoch=epoch)
    assert np.array_equal(
        first_fit_decreasing(source, target, shape),
        stream_reference.first_fit_decreasing(source, target, shape),
    )
    made = plan(source, target, directions, epochs, 12, shape, tries=1)
    step_of, row_of = stream_reference.plan(source, target, directions, epochs, 12, shape)
    assert np.array_equal(made.step_of, step_of)
    assert np.array_equal(made.row_of, row_of)


@pytest.mark.parametrize("epoch", [2, 9, 40])
def test_no_epoch_begins_before_the_one_before_it_is_over(epoch: int) -> None:
    source, target, directions, epochs = drawn(1000, epoch=epoch)
    made = plan(source, target, directions, epochs, 32, SHAPE)
    for direction in range(5):
        steps, numbers = made.step_of[directions == direction], epochs[directions == direction]
        ends = [steps[numbers == number].max() for number in np.unique(numbers)]
        begins = [steps[numbers == number].min() for number in np.unique(numbers)]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_what_cannot_fit_is_left_over_in_the_last_step() -> None:
    # 40 pairs of 33 ids: one a row, 8 rows, 4 steps hold 32.
    source, zeros = np.full(40, 33), np.zeros(40, int)
    made = plan(source, source, zeros, zeros, 4, SHAPE)
    assert made.left == 8
    assert np.bincount(made.step_of).tolist() == [8, 8, 8, 16]
    assert np.bincount(made.step_of[made.row_of >= 0]).tolist() == [8, 8, 8, 8]
