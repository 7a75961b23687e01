from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.stream.batches import Batch, SplitReader, evaluation_batches, lay_out
from m4.data.stream.packing import Shape, first_fit_decreasing
from tests.data import stream_reference
from tests.data.arrays import Ids, of_text, pairs_of


def pairs_in(batches: Iterable[Batch], direction: int = 0) -> list[Ids]:
    return [(s, t) for batch in batches for of, s, t in pairs_of(batch) if of == direction]


@pytest.mark.parametrize("direction", ["en-gl", "gl-en"])
def test_evaluation_batches_are_the_split_in_order(made_cache: Cache, direction: str) -> None:
    batches = list(evaluation_batches(made_cache, direction, "dev", 8))
    assert [b["encoder_input_tokens"].shape for b in batches] == [(8, 96)] * 3  # 20 = 8 + 8 + 4
    assert max(batch["encoder_segment_ids"].max() for batch in batches) == 1, "one pair a row"
    assert pairs_in(batches) == of_text(made_cache, direction, "dev")
    assert all((array[4:] == 0).all() for array in batches[-1].values()), "empty rows at the end"


def test_long_pairs_are_trimmed_as_seqio_does(made_cache: Cache) -> None:
    batches = evaluation_batches(made_cache, "gl-en", "test", 20, 12, 9)
    assert pairs_in(batches) == of_text(made_cache, "gl-en", "test", 12, 9)


@pytest.mark.parametrize("pack", [False, True])
def test_several_directions_each_pair_once(made_cache: Cache, pack: bool) -> None:
    names = ["gl-en", "en-pt"]
    batches = list(evaluation_batches(made_cache, names, "dev", 3, pack=pack, limit=7))
    for number, name in enumerate(names):
        assert sorted(pairs_in(batches, number)) == sorted(of_text(made_cache, name, "dev")[:7])
    assert len(batches) < 5 if pack else len(batches) == 5  # 14 pairs in rows of 3
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
