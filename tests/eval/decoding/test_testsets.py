"""Test sets by direction, and their translation as it is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m4.data.cache import cache as caches
from m4.data.corpus import CorpusSpec
from m4.data.directions import key_of, pair_of
from m4.data.sources import Pair
from m4.eval.decoding.testsets import Portion, check_held_out, n_way_pairs, pair_sizes
from m4.jobs.decoding.zero_shot import chosen


class Corpus:
    """Source with one pair per split, in which languages lack some splits."""

    def __init__(self, lacking: dict[str, tuple[str, ...]]) -> None:
        self.lacking = lacking

    def language_pairs(self) -> list[str]:
        return [*map(pair_of, self.lacking)]

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        language = key_of(pair)
        if split not in self.lacking[language]:
            yield Pair(f"the {split} text", f"{language} {split}")

    def identity(self) -> dict:
        return {"source": "one pair"}


def opened(folder: Path, lacking: dict[str, tuple[str, ...]]) -> caches.Cache:
    return CorpusSpec(Corpus(lacking), vocabulary_size=300).build(folder)


class Ten(Corpus):
    """Source with ten pairs per split, of which half are marked."""

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        return (Pair(f"{split} text {n}", f"{key_of(pair)} {n} {split}") for n in range(10))

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        return {"seen": [n % 2 == 0 for n in range(10)]}


def test_a_cap_takes_test_sentences_at_even_distances_and_leaves_dev(tmp_path: Path) -> None:
    cache = CorpusSpec(Ten({"gl": ()}), vocabulary_size=300).build(tmp_path)
    capped = Portion("test", test_sentences=2)
    assert capped.name == "test"
    assert capped.pairs(cache)["en-gl"] == [
        ("test text 2", "gl 2 test"),
        ("test text 7", "gl 7 test"),
    ]
    assert capped.subsets(cache) == {"en-gl": {"seen": [True, False]}}
    assert len(capped._replace(test_sentences=20).pairs(cache)["gl-en"]) == 10
    assert len(capped._replace(split="dev").pairs(cache)["gl-en"]) == 10
    assert len(capped._replace(sentences=1).pairs(cache)["gl-en"]) == 1


class NWay(Corpus):
    """Source of English sentences 0 to 5, with Galician 0 to 3, twice, and Portuguese 2 to 5."""

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        code = key_of(pair)
        numbers = {"gl": [0, 1, 2, 3, 3], "pt": [5, 4, 3, 2]}[code]
        return (Pair(f"{split} {n}", f"{code} {n} {split} {at}") for at, n in enumerate(numbers))


def test_a_direction_without_pairs_has_the_sentences_of_a_third_language(tmp_path: Path) -> None:
    """English sentences 2 and 3 are shared; of two translations of 3 the first is taken."""
    cache = CorpusSpec(NWay({"gl": (), "pt": ()}), vocabulary_size=300).build(tmp_path)
    expected = [("gl 2 test 2", "pt 2 test 3"), ("gl 3 test 3", "pt 3 test 2")]
    assert n_way_pairs(cache, "gl-pt", "test") == expected
    back = [("pt 3 test 2", "gl 3 test 3"), ("pt 2 test 3", "gl 2 test 2")]
    assert n_way_pairs(cache, "pt-gl", "test") == back
    asked = Portion("test", 1, ("gl-pt", "gl-en"))
    assert asked.pairs(cache)["gl-pt"] == expected[1:]
    with pytest.raises(ValueError, match="no pt-xx; there are en-gl"):
        Portion("test", directions=("pt-xx",)).pairs(cache)


def test_pivoted_directions_are_asked_for_too(tmp_path: Path) -> None:
    """They are trained on, but have no test sentences of their own."""
    spec = CorpusSpec(NWay({"gl": (), "pt": ()}), mixture="any_to_any", vocabulary_size=300)
    cache = spec.build(tmp_path)
    assert "gl-pt" in cache.directions
    assert "gl-pt" not in Portion("test").pairs(cache)
    assert len(Portion("test", directions=("gl-pt",)).pairs(cache)["gl-pt"]) == 2
    experiment: Any = None  # only for separate test sets
    assert {*chosen(experiment, cache, Portion("test"), "all")} == {"gl-pt", "pt-gl"}


def test_a_pair_without_text_counts_as_its_smaller_language() -> None:
    known = {"gl": 60, "pt": 100, "es": 150, "es-pt": 10}
    sizes = pair_sizes(known, ["gl-pt", "pt-es", "en-gl"])
    assert sizes == {"gl-pt": 60, "es-pt": 10, "gl": 60}


def test_languages_that_cannot_have_a_baseline_are_named(tmp_path: Path) -> None:
    check_held_out(opened(tmp_path / "all", {"gl": (), "pt": ()}))
    lacking = {"gl": (), "pt": ("dev",), "de": ("dev", "test")}
    with pytest.raises(ValueError, match=r"no dev sentences of pt, de: .*CorpusSpec\.languages"):
        check_held_out(opened(tmp_path / "no_dev", lacking))
    with pytest.raises(ValueError, match="no test sentences of fr"):
        check_held_out(opened(tmp_path / "no_test", {"fr": ("test",)}))
