"""The limit of translations comes from the lengths of training pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from m4.data.cache.tokens import whole_factors
from m4.data.cleaning.clean import NOTHING
from m4.data.corpus import CorpusSpec
from m4.data.directions import MIXTURES, Mixture, pair_of, split_direction
from m4.data.preprocess import source_ids, target_ids
from m4.data.sources.tsv import Tsv


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("target_size", [None, 320])
def test_targets_of_nearly_all_pairs_fit(
    tmp_path: Path, mixture: Mixture, target_size: int | None
) -> None:
    """Against all pairs one by one: at least 99.9% fit, and with a smaller factor fewer do."""
    for code, verbose in (("gl", "longo "), ("el", "ϡ" * 40)):  # the second is spelled in bytes
        lines = [f"x {n} y\t{verbose * (1 + n % 3)}{n}\n" for n in range(60)]
        for split in ("train", "dev", "test"):
            (tmp_path / f"{code}.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    made = CorpusSpec(
        Tsv(tmp_path), mixture=mixture, vocabulary_size=320, target_vocabulary_size=target_size,
        lengths={"inputs": 1024, "targets": 1024}, cleaning=NOTHING,
    ).build(tmp_path / "c")  # fmt: skip
    found = made.manifest["length_factors"]
    assert {*found} >= {*made.directions}
    for direction in made.directions:
        source, target = split_direction(direction)
        pairs = [*made.pairs(pair_of(direction), "train")]
        sides = [p.first for p in pairs], [p.second for p in pairs]
        first, second = sides if source == "en" else sides[::-1]
        lengths = [
            np.array([*map(len, ids)])
            for ids in (
                source_ids(made.vocabulary, first, target, 2000),
                target_ids(made.target_vocabulary, second, 2000),
            )
        ]
        factor = found[direction]
        # Of 60 pairs, 99.9% are all; the factor is rounded to three digits.
        assert (lengths[1] <= (factor + 0.001) * lengths[0] + 16).all()
        assert (lengths[1] > (factor - 0.001) * lengths[0] + 16).any()
    if "en-el" in found:
        assert made.length_factors.keys() <= {"el", "gl"}


def test_a_language_has_the_largest_factor_of_its_directions() -> None:
    factors = {"en-gl": 1.4, "gl-en": 2.0, "en-el": 2.001, "el-en": 3.5}
    assert whole_factors(factors, [*factors]) == {"el": 3, "en": 4}
    assert whole_factors(factors, ["en-gl", "gl-en"]) == {}
