"""Names of pairs of languages and of directions, and mixtures."""

import dataclasses
from pathlib import Path

import pytest

from m4.data import directions
from m4.data.corpus import CorpusSpec
from m4.data.directions import directions_of, key_of, label_of, pair_of, side_of, sides_of
from m4.data.sources.moses import Moses
from m4.data.sources.tsv import Tsv
from m4.data.stream.stream import Stream
from m4.settings import SettingError
from tests.data.arrays import of_text, pairs_of, unpacked
from tests.data.corpus import Made

PAIRS = ["en-gl", "en-pt", "fr-wo"]


@pytest.mark.parametrize(
    ("name", "pair", "key"),
    [
        ("gl", "en-gl", "gl"),
        ("gl-en", "en-gl", "gl"),
        ("en-ar", "en-ar", "ar"),  # English comes first, whatever the other code
        ("wo-fr", "fr-wo", "fr-wo"),
        ("zh_Hant-gl", "gl-zh_Hant", "gl-zh_Hant"),
    ],
)
def test_a_pair_has_one_name(name: str, pair: str, key: str) -> None:
    assert (pair_of(name), key_of(pair), pair_of(key)) == (pair, key, pair)


@pytest.mark.parametrize("code", ["gl", "zh_Hant", "gl~bt", "gl~lexicon"])
def test_codes(code: str) -> None:
    assert directions.is_code(code)
    assert directions.base_language(code) == code.split("~")[0]
    assert not any(map(directions.is_code, (f"{code}~", f"~{code}", f"{code}~B-")))
    assert directions.split_direction(f"en-{code}") == ("en", code)


@pytest.mark.parametrize("wrong", ["gl", "en-en", "en-", "en-gl-pt", "", "en-../x"])
def test_what_is_no_direction(wrong: str) -> None:
    with pytest.raises(ValueError, match="must be two languages as 'en-xx'"):
        directions.split_direction(wrong)


@pytest.mark.parametrize(
    ("direction", "sides", "side", "label"),
    [
        ("en-gl", ("first", "second"), "en->xx", "gl"),
        ("gl-en", ("second", "first"), "xx->en", "gl"),
        ("wo-fr", ("second", "first"), "xx->yy", "wo-fr"),
    ],
)
def test_sides_and_labels(direction: str, sides: tuple[str, str], side: str, label: str) -> None:
    assert (sides_of(direction), side_of(direction)) == (sides, side)
    assert label_of(direction) == label


def test_mixtures() -> None:
    assert directions_of("to_english", PAIRS) == ["gl-en", "pt-en"]
    assert directions_of("from_english", PAIRS) == ["en-gl", "en-pt"]
    assert directions_of("english_centric", PAIRS) == ["en-gl", "en-pt", "gl-en", "pt-en"]
    assert directions_of("any_to_any", PAIRS) == directions_of("direct", PAIRS)
    assert directions.pivoted(["en-gl", "en-pt", "fr-pt", "en-gl~bt"]) == ["en-fr", "gl-pt"]
    assert directions_of("direct", PAIRS) == [*PAIRS, "gl-en", "pt-en", "wo-fr"]
    for name in directions.MIXTURES:  # what a model wrote is never a target
        found = directions_of(name, ["en-gl", "en-gl~bt", "en-gl~lexicon"])
        assert "en-gl~bt" not in found
        assert ("gl~bt-en" in found) == ("gl-en" in found)
    assert directions_of(["wo-fr", "en-gl", "en-eo"], PAIRS) == ["wo-fr", "en-gl"]
    assert directions.languages_of(PAIRS) == ["en", "gl", "pt", "fr", "wo"]
    assert directions.sides_with("source", ["gl-en", "wo-fr"]) == ["second"]
    assert directions.sides_with("target", ["gl-en", "fr-wo"]) == ["first", "second"]


def test_a_corpus_with_pairs_without_english(tmp_path: Path) -> None:
    """Each side has its language's tag and ids; a list of directions decides what is drawn."""
    made = Made({"gl": 60, "fr-wo": 40, "gl-wo": 20})
    spec = CorpusSpec(made, vocabulary_size=500, lengths={"inputs": 96, "targets": 96})
    cache = spec.build(tmp_path)
    assert cache.language_pairs() == ["en-gl", "fr-wo", "gl-wo"]
    assert cache.languages() == cache.source_vocabulary.languages == ["en", "gl", "fr", "wo"]
    assert cache.directions == ["en-gl", "fr-wo", "gl-wo", "gl-en", "wo-fr", "wo-gl"]
    assert [*cache.pairs("wo-fr", "test")] == [*made.pairs("fr-wo", "test")]
    for direction in cache.directions:
        found = pairs_of(unpacked(cache, direction, "dev"))
        assert [tuple(ids) for _, *ids in found] == of_text(cache, direction, "dev")
    chosen = ["wo-fr", "en-gl", "wo-gl"]
    listed = dataclasses.replace(spec, mixture=chosen).build(tmp_path)
    assert (listed.fingerprint, listed.directions) == (cache.fingerprint, chosen)
    assert Stream(listed, batch_rows=8).directions == chosen
    for changed, said in (
        ({"mixture": ["wo-en"]}, "mixture = 'wo-en': must be directions of the pairs en-gl, fr-wo"),
        ({"mixture": "to_english", "languages": ["fr-wo"]}, "must be a mixture with directions of"),
        ({"languages": ["fr-wo", "wo-fr"]}, "must be at least one code, each once"),
    ):
        with pytest.raises(SettingError, match=said):
            dataclasses.replace(spec, **changed).build(tmp_path)


def test_files_named_by_pairs_without_english(tmp_path: Path) -> None:
    """Columns and Moses' files are in the order of the name, the pair in that of the codes."""
    (tmp_path / "wo-fr.train.tsv").write_text("xale bi\tl'enfant\n", "utf-8")
    (tmp_path / "fr-wo.dev.tsv").write_text("le pain\tmburu mi\n", "utf-8")
    (tmp_path / "en-wo.train.tsv").write_text("the child\txale bi\n", "utf-8")
    source = Tsv(tmp_path, files="{pair}.{split}.tsv")
    assert source.language_pairs() == ["en-wo", "fr-wo"]
    assert [*source.pairs("fr-wo", "train")] == [("l'enfant", "xale bi")]
    assert [*source.pairs("wo-fr", "dev")] == [("le pain", "mburu mi")]
    for side, text in (("wo", "xale bi\n"), ("fr", "l'enfant\n")):
        (tmp_path / f"train.wo-fr.{side}").write_text(text, "utf-8")
    assert [*Moses(tmp_path).pairs("fr-wo", "train")] == [("l'enfant", "xale bi")]
    with pytest.raises(ValueError, match=r"no es-qu in .*; there is en-wo, fr-wo"):
        list(source.pairs("qu-es", "train"))
