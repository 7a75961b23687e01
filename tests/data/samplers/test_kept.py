"""Directions of an old model: a share of the draws, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.samplers import Sampler
from m4.data.samplers.kept import Kept, kept_of
from m4.data.samplers.shares import Shares
from m4.data.samplers.temperature import temperature
from m4.data.sources import Pair
from m4.data.stream.mixture import make_stream
from m4.data.stream.stream import Stream
from m4.experiment import Data
from m4.settings import SettingError
from tests.data.corpus import Made

KEEP = ["pt", "sr_Latn-en"]
OLD = {"en-pt", "pt-en", "sr_Latn-en"}


def stream_of(cache: Cache, sampler: Sampler, sample_by: str = "examples") -> Stream:
    return make_stream(cache, sampler, sample_by, seed=3, batch_rows=8)


@pytest.mark.parametrize("sampler", [temperature, Shares({"en-*": 0.7})])
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_kept_directions_have_their_share_of_the_draws(
    made_cache: Cache, sampler: Sampler, share: float
) -> None:
    stream = stream_of(made_cache, Kept(sampler, KEEP, share))
    seen = stream.examples_seen(200)
    assert {*seen} == {*made_cache.directions}
    # The draws of whole blocks are off by at most 1 a direction, those of the last block (4,096)
    # as a random order leaves them: 4 standard deviations.
    old, total = sum(seen[name] for name in OLD), sum(seen.values())
    assert abs(old - share * total) <= len(seen) + 4 * np.sqrt(4096 * share * (1 - share))
    rates = Kept(sampler, KEEP, share)(made_cache.sizes())
    assert sum(rates[name] for name in OLD) == pytest.approx(share)
    within = sampler({n: s for n, s in made_cache.sizes().items() if n in OLD})
    assert {n: rates[n] / share for n in OLD} == pytest.approx(within)


@pytest.mark.parametrize("sample_by", ["examples", "tokens"])
def test_share_0_leaves_the_batches_bit_equal(made_cache: Cache, sample_by: str) -> None:
    def others(sizes: dict[str, int]) -> dict[str, float]:
        return temperature({n: size for n, size in sizes.items() if n not in OLD})

    kept = stream_of(made_cache, Kept(temperature, KEEP, 0.0), sample_by)
    alone = stream_of(made_cache, others, sample_by)
    assert kept.directions == alone.directions == ["en-gl", "en-sr_Latn", "gl-en"]
    assert kept.fingerprint() == alone.fingerprint()
    for step in (0, 7, 30):
        for name, array in kept.batch(step).items():
            np.testing.assert_array_equal(array, alone.batch(step)[name])


class TestSetsAlone(Made):
    """A language has no training pairs."""

    __test__ = False

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        if (pair, split) != ("en-pt", "train"):
            yield from super().pairs(pair, split)


@pytest.mark.parametrize("segmentations", [1, 2])
def test_a_kept_language_needs_no_training_pairs(tmp_path: Path, segmentations: int) -> None:
    lengths = {"inputs": 96, "targets": 96}
    spec = CorpusSpec(TestSetsAlone({"gl": 60, "pt": 30}), vocabulary_size=400, lengths=lengths,
                      segmentations=segmentations)  # fmt: skip
    with pytest.raises(ValueError, match="en-pt has no training pairs: the source has none"):
        spec.build(tmp_path)
    data = Data(spec, keep=["pt"])
    cache = spec.build(tmp_path, untrained=data.untrained)
    assert (cache.size("pt", "train"), cache.size("pt", "test") > 0) == (0, True)
    assert {*cache.length_factors} <= {"gl", "en"}
    for unit in ("examples", "tokens"):
        assert stream_of(cache, data.full_sampler, unit).directions == ["en-gl", "gl-en"]
    replay = Data(spec, keep=["pt"], keep_share=0.3)
    with pytest.raises(SettingError, match=r"Data.keep_share = 0.3: must be 0: no kept direction"):
        stream_of(cache, replay.full_sampler)


def test_what_cannot_be_kept(made: Made, made_cache: Cache) -> None:
    spec = CorpusSpec(made)
    with pytest.raises(SettingError, match=r"Data.keep_share = 0.3: must be 0 where Data.keep"):
        Data(spec, keep_share=0.3)
    with pytest.raises(SettingError, match=r"Data.keep = 'fr': must be a language or direction of"):
        kept_of(["fr"], made_cache.directions)
    with pytest.raises(SettingError, match=r"must be some of the directions, so that one"):
        stream_of(made_cache, Data(spec, keep=[*made.sizes]).full_sampler)
