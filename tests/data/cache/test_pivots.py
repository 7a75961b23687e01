"""Pairs of languages through a third one, against sets and lists of strings."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.cache.corpus_text import _joined, _unique
from m4.data.cleaning.clean import NOTHING, Cleaning
from m4.data.corpus import CorpusSpec, bilingual
from m4.data.directions import pair_of, split_direction
from m4.data.samplers.temperature import temperature
from m4.data.sources import Pair
from m4.data.sources.tsv import Tsv
from m4.data.splits import normal
from m4.data.stream.stream import Stream

Texts = dict[str, list[Pair]]


def by_strings(pairs: Texts, first: str, second: str, held_out: set[str]) -> list[Pair]:
    """Returns the pairs of two languages in a slow and obvious way."""
    found: dict[Pair, None] = {}
    for pivot in ("en", "fr", "gl", "wo"):
        sides = [pairs.get(pair_of(f"{pivot}-{code}")) if code != pivot else None
                 for code in (first, second)]  # fmt: skip
        if None in sides:
            continue
        translations: list[dict[str, list[str]]] = []
        for side, code in zip(sides, (first, second), strict=True):
            assert side is not None
            of: dict[str, list[str]] = defaultdict(list)
            for pair in side:
                own = pair if pair_of(f"{pivot}-{code}").startswith(f"{pivot}-") else pair[::-1]
                of[own[0]].append(own[1])
            translations.append(of)
        for text in translations[0].keys() & translations[1].keys():
            one, other = (of[text] for of in translations)
            for number in range(max(len(one), len(other))):
                found[Pair(one[number % len(one)], other[number % len(other)])] = None
    return [pair for pair in found if not held_out & {*map(normal, pair)}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes French and Wolof with English, Galician with French, and tests that train has too."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, number in (("train", 200), ("dev", 5), ("test", 5)):
        for pair, every in (("en-fr", 1), ("en-wo", 2), ("fr-gl", 3)):
            lines = []
            for n in range(0, number, every):
                texts = {
                    "en": f"the {n % 90} of the {split}", "fr": f"le {n % 80} du {split}{n % 3}",
                    "wo": f"WO {n % 70} ak {split}{n % 2}", "gl": f"o {n} do {split}",
                }  # fmt: skip
                first, second = pair.split("-")
                lines.append(f"{texts[first]}\t{texts[second]}\n")
            (folder / f"{pair}.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    with (folder / "en-wo.test.tsv").open("a", encoding="utf-8") as file:
        file.write("a sentence of the test\two 4 AK train0\n")
    return folder


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return spec(folder).build(tmp_path_factory.mktemp("c"))


def spec(folder: Path, mixture: str = "any_to_any", cleaning: Cleaning = NOTHING) -> CorpusSpec:
    source = Tsv(str(folder), files="{pair}.{split}.tsv")
    return CorpusSpec(source, mixture=mixture, vocabulary_size=400, cleaning=cleaning, workers=1)


def test_pairs_are_those_of_strings(made: Cache, folder: Path) -> None:
    assert made.language_pairs() == ["en-fr", "en-wo", "fr-gl", "en-gl", "fr-wo"]
    direct = {pair: [*made.pairs(pair, "train")] for pair in ("en-fr", "en-wo", "fr-gl")}
    source = Tsv(str(folder), files="{pair}.{split}.tsv")
    assert direct == {pair: [*source.pairs(pair, "train")] for pair in direct}
    tested = [source.pairs(pair, split) for pair in direct for split in ("dev", "test")]
    held_out = {normal(text) for pairs in tested for pair in pairs for text in pair}
    for pair in ("en-gl", "fr-wo"):
        wanted = by_strings(direct, *split_direction(pair), held_out)
        assert len(wanted) > 20
        found = [*made.pairs(pair, "train")]
        assert len(found) == len({*found}) == made.size(pair, "train")
        assert {*found} == {*wanted}
        assert not [*made.pairs(pair, "dev"), *made.pairs(pair, "test")]
    without = by_strings(direct, "fr", "wo", set())
    assert len(without) > made.size("fr-wo", "train"), "a test sentence was in some"


def test_no_text_is_copied(made: Cache, folder: Path, tmp_path: Path) -> None:
    direct = spec(folder, "direct").build(tmp_path)
    assert direct.language_pairs() == ["en-fr", "en-wo", "fr-gl"]
    assert made.fingerprint != direct.fingerprint
    for path in direct.folder.glob("text/*.txt"):
        assert path.read_bytes() == (made.folder / "text" / path.name).read_bytes()
    for name in ("train.tokens.00000.npy", "train.offsets.00000.npy"):
        assert (made.folder / name).read_bytes() == (direct.folder / name).read_bytes()


def test_they_are_trained_on_in_both_directions(made: Cache) -> None:
    assert {"fr-wo", "wo-fr", "en-gl", "gl-en"} <= {*made.directions}
    assert made.sizes()["fr-wo"] == made.size("fr-wo", "train") > 0
    names = [*temperature(made.sizes())]
    batch = Stream(made, batch_rows=64).batch(0)
    seen = {names[i] for i in np.unique(batch["direction_ids"][batch["decoder_segment_ids"] > 0])}
    assert seen == {*names}
    assert made.ledger().count("fr-wo", "train").read == made.size("fr-wo", "train")


def test_a_bilingual_corpus_without_english_has_the_same_recipe(
    made: Cache, tmp_path: Path
) -> None:
    """The source has the pair fr-gl."""
    small = bilingual(made, "fr-gl", vocabulary_size=350).build(tmp_path)
    assert small.vocabulary.languages == ["fr", "gl"]
    assert (small.source_length, small.target_length) == (made.source_length, made.target_length)
    for split in ("train", "dev", "test"):
        assert [*small.pairs("fr-gl", split)] == [*made.pairs("fr-gl", split)]
    Stream(small, batch_rows=4).batch(3)


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20)


@given(ROWS, ROWS)
def test_any_translations_are_joined(first: list, second: list) -> None:
    arrays = [np.array(rows, np.uint32).reshape(-1, 2) for rows in (first, second)]
    wanted = []
    for text in range(6):
        one, other = ([b for a, b in rows if a == text] for rows in (first, second))
        if one and other:
            wanted += [(one[n % len(one)], other[n % len(other)])
                       for n in range(max(len(one), len(other)))]  # fmt: skip
    found = _joined(*arrays)
    assert [*map(tuple, found.tolist())] == wanted
    assert [*map(tuple, _unique(found).tolist())] == [*dict.fromkeys(wanted)]
