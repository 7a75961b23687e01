from __future__ import annotations

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.preprocess import source_ids, target_ids
from m4.data.stream.batches import SplitReader, evaluation_batches, lay_out
from m4.data.stream.packing import Shape, first_fit_decreasing
from tests.data import stream_reference


def rows(batch: dict, key: str, segments: str) -> list[list[int]]:
    """Ids of every segment of every row, in order."""
    found = []
    for tokens, ids in zip(batch[key], batch[segments], strict=True):
        found += [tokens[ids == n].tolist() for n in range(1, ids.max() + 1)]
    return found


@pytest.mark.parametrize("direction", ["en-gl", "gl-en"])
def test_evaluation_batches_are_the_split_in_order(made_cache: Cache, direction: str) -> None:
    pairs = list(made_cache.pairs("en-gl", "dev"))
    english, translation = zip(*pairs, strict=True)
    source, target = (english, translation) if direction == "en-gl" else (translation, english)
    wanted_sources = source_ids(made_cache.vocabulary, source, direction[3:], 96)
    wanted_targets = target_ids(made_cache.vocabulary, target, 96)
    batches = list(evaluation_batches(made_cache, direction, "dev", 8))
    assert [b["encoder_input_tokens"].shape for b in batches] == [(8, 96)] * 3  # 20 = 8 + 8 + 4
    sources, targets = [], []
    for batch in batches:
        sources += rows(batch, "encoder_input_tokens", "encoder_segment_ids")
        targets += rows(batch, "decoder_target_tokens", "decoder_segment_ids")
        assert batch["encoder_segment_ids"].max() == 1, "one pair a row"
    assert (sources, targets) == (wanted_sources, wanted_targets)
    assert all((array[4:] == 0).all() for array in batches[-1].values()), "empty rows at the end"


def test_long_pairs_are_trimmed_as_seqio_does(made_cache: Cache) -> None:
    (batch,) = evaluation_batches(made_cache, "gl-en", "test", 20, 12, 9)
    pairs = list(made_cache.pairs("en-gl", "test"))
    vocabulary = made_cache.vocabulary
    assert rows(batch, "encoder_input_tokens", "encoder_segment_ids") == source_ids(
        vocabulary, [p.second for p in pairs], "en", 12
    )
    assert rows(batch, "decoder_target_tokens", "decoder_segment_ids") == target_ids(
        vocabulary, [p.first for p in pairs], 9
    )


@pytest.mark.parametrize("pack", [False, True])
def test_several_directions_each_pair_once(made_cache: Cache, pack: bool) -> None:
    names = ["gl-en", "en-pt"]
    batches = list(evaluation_batches(made_cache, names, "dev", 3, pack=pack, limit=7))
    targets = sorted(
        ids
        for batch in batches
        for ids in rows(batch, "decoder_target_tokens", "decoder_segment_ids")
    )
    vocabulary = made_cache.vocabulary
    english = [p.first for p in made_cache.pairs("en-gl", "dev")][:7]
    translation = [p.second for p in made_cache.pairs("en-pt", "dev")][:7]
    wanted = [target_ids(vocabulary, texts, 96) for texts in (english, translation)]
    assert targets == sorted(wanted[0] + wanted[1])
    assert len(batches) < 5 if pack else len(batches) == 5  # 14 pairs in rows of 3
    tokens = sum((b["direction_ids"][b["decoder_segment_ids"] > 0] == 1).sum() for b in batches)
    assert tokens == sum(map(len, wanted[1]))
    # The sources' directions: a segment has the same one on both sides, padding has 0.
    for batch in batches:
        sides = (batch["encoder_segment_ids"], batch["decoder_segment_ids"])
        ids = (batch["encoder_direction_ids"], batch["direction_ids"])
        for row in range(3):
            source, target = (
                {0: 0} | dict(zip(s[row], i[row], strict=True))
                for s, i in zip(sides, ids, strict=True)
            )
            assert source == target
            assert source[0] == 0
    assert {int(i) for batch in batches for i in batch["encoder_direction_ids"].flat} == {0, 1}


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
