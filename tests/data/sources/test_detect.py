"""The layout of a folder is found from its names and first lines."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from m4.data.sources import SPLITS, Pair
from m4.data.sources.detect import detect
from m4.data.sources.reading.folder import m4_code
from m4.settings import InputError
from tests.data import folders
from tests.data.corpora import Texts, texts_of, write, write_files


def whole(name: str) -> Callable[[Path], Path]:
    return lambda folder: folders.whole(folder, name)


def parts(name: str) -> Callable[[Path], Path]:
    return lambda folder: write_files(folder, name, folders.texts("gl fy"))


# What writes a folder, the source that reads it, and the pattern of its files.
LAYOUTS: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "tsv": (folders.tsv, "tsv.Tsv", "{lang}.{split}.tsv", "fy gl pt"),
    "plain_tsv": (folders.plain_tsv, "tsv.Tsv", "{lang}.tsv", "fy gl pt"),
    "train_only": (whole("{lang}.train.tsv"), "tsv.Tsv", "{lang}.train.tsv", "fy gl"),
    "moses": (parts("{split}.en-{lang}.{side}"), "moses.Moses", "{split}.{pair}.{side}", "fy gl"),
    "opus": (whole("en-{lang}/Made.en-{lang}.{side}"), "moses.Moses", "{pair}/*.{side}", "fy gl"),
    "europarl": (
        whole("europarl-v7.{lang}-en.{side}"), "moses.Moses", "*.{pair}.{side}", "fy gl",
    ),
    "tmx": (whole("en-{lang}.tmx.gz"), "tmx.Tmx", "{pair}.tmx", "fy gl"),
    "json": (parts("{lang}.{split}.jsonl"), "jsonl.Jsonl", "{lang}.{split}.jsonl", "fy gl"),
    "json_mixed": (folders.json_mixed, "jsonl.Jsonl", "*.jsonl", "fy gl"),
    "json_many": (folders.json_many, "jsonl.Jsonl", "{split}.jsonl", "fy gl"),
    "po": (whole("{lang}.po"), "gettext.Gettext", "{lang}.po", "fy gl"),
    "installed": (
        folders.installed_po, "gettext.Gettext", "*/{lang}/LC_MESSAGES/*.po", "gl pt_BR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_found_and_gives_all_pairs(name: str, tmp_path: Path) -> None:
    make, source, files, languages = LAYOUTS[name]
    folder = make(tmp_path / "corpus")
    (folder / "README.md").write_text("what this is\n")
    found = detect(str(folder))
    assert (found.name, found.files) == (source, files)
    opened = found.opened(str(folder))
    assert opened.language_pairs() == [f"en-{code}" for code in languages.split()]
    for splits in texts_of(opened).values():
        assert sum(map(len, splits.values())) == 100
    assert found.by_hash == (() if "{split}" in files else ("dev", "test"))
    assert opened.hash_split.dev_every == (100 if found.by_hash else 0)


def test_a_split_that_is_not_there_is_taken_from_training_files_by_hash(tmp_path: Path) -> None:
    folder = folders.tsv(tmp_path / "corpus")
    for path in folder.glob("*.dev.tsv"):
        path.unlink()
    found = detect(str(folder))
    assert (found.by_hash, found.hash_rule) == (("dev",), "dev 1 in 100")
    often = dataclasses.replace(found, settings={**found.settings, "dev_every": 5})
    opened = often.opened(str(folder))
    by_split = texts_of(opened)["gl"]
    assert by_split["test"] == [*folders.pairs("gl")[:10]]
    assert sorted(by_split["train"] + by_split["dev"]) == sorted(folders.pairs("gl")[18:])
    assert len(by_split["dev"]) > 5
    english = {split: {pair.first for pair in of} for split, of in by_split.items()}
    assert english["dev"] == {pair.first for pair in opened.pairs("en-fy", "dev")}
    assert not english["dev"] & english["train"]


@pytest.mark.parametrize("to_english", [False, True])
def test_json_with_the_languages_of_both_sides(tmp_path: Path, to_english: bool) -> None:
    def record(code: str, pair: Pair) -> str:
        sides = (pair.second, pair.first, code, "en") if to_english else (*pair, "en", code)
        return json.dumps(dict(zip(("src", "tgt", "src_lang", "tgt_lang"), sides, strict=True)))

    for split, rows in (("train", slice(18, None)), ("dev", slice(8)), ("test", slice(8, 18))):
        lines = [record(code, pair) for code in ("gl", "fy") for pair in folders.pairs(code)[rows]]
        write(tmp_path / f"{split}.jsonl", "\n".join(lines) + "\n")
    opened = detect(str(tmp_path)).opened(str(tmp_path))
    assert opened.language_pairs() == ["en-fy", "en-gl"]
    assert [*opened.pairs("en-gl", "test")] == folders.pairs("gl")[8:18]


def test_json_of_pairs_without_english(tmp_path: Path) -> None:
    """Each record names both languages, in any order."""
    rows = [("de", "fr", "eins", "un"), ("fr", "de", "deux", "zwei"), ("wo", "fr", "ñett", "trois")]
    names = "src_lang", "tgt_lang", "src", "tgt"
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    write(tmp_path / "a.train.jsonl", "\n".join(lines) + "\n")
    opened = detect(str(tmp_path)).opened(str(tmp_path))
    assert opened.language_pairs() == ["de-fr", "fr-wo"]
    assert [*opened.pairs("de-fr", "train")] == [("eins", "un"), ("zwei", "deux")]
    assert [*opened.pairs("fr-wo", "train")] == [("trois", "ñett")]


@pytest.mark.parametrize(
    "name", ["{split}/{lang}", "{split}.{lang}", "{split}/{lang}.txt", "{split}/{split}.{lang}"]
)
@pytest.mark.parametrize("english", ["", "eng_Latn"])
def test_aligned_folders(tmp_path: Path, name: str, english: str) -> None:
    """Any number of languages; with English in Moses' own names it is Moses, as ever."""
    codes = ["fra_Latn", "wol_Latn", "spa_Latn", *english.split()]
    for split, word in (("train", "train"), ("dev", "dev"), ("test", "devtest")):
        for code in codes:
            write(tmp_path / name.format(split=word, lang=code), f"{code} {split}\n")
    write(tmp_path / "train" / "README", "what this is\n")
    found = detect(str(tmp_path))
    opened = found.opened(str(tmp_path))
    if english and name != "{split}/{lang}":
        assert found.name == "moses.Moses"
        return
    assert (found.name, found.files, found.by_hash) == ("aligned.Aligned", name, ())
    assert found.settings.get("english", "") == english
    # Three languages are three pairs; English makes three more, and they come first.
    others = ["fra_Latn-spa_Latn", "fra_Latn-wol_Latn", "spa_Latn-wol_Latn"]
    first = ["en-fra_Latn", "en-spa_Latn", "en-wol_Latn"] if english else []
    assert opened.language_pairs() == first + others
    pair = Pair("fra_Latn test", "wol_Latn test")
    assert [*opened.pairs("fra_Latn-wol_Latn", "test")] == [pair]


@pytest.mark.parametrize("train", ["", "train/{}.train", "train.{}.txt"])
def test_flores_is_no_training_text(tmp_path: Path, train: str) -> None:
    """Its folders are read next to training text of the same form."""
    for code in ("eng_Latn", "glg_Latn", "fry_Latn"):
        for split in ("dev", "devtest"):
            write(tmp_path / split / f"{code}.{split}", "one\n")
        if train:
            write(tmp_path / train.format(code), "one\n")
    if train.startswith("train/"):
        found = detect(str(tmp_path))
        assert (found.files, found.by_hash) == ("{split}/{side}.{split}", ())
        assert found.opened(str(tmp_path)).language_pairs() == ["en-fry_Latn", "en-glg_Latn"]
        return
    said = "saw dev/eng_Latn.dev, .*" + ("" if train else "says dev or devtest is never trained on")
    with pytest.raises(InputError, match=said):
        detect(str(tmp_path))


# How well-known corpora call their files, with {split} as they say it: (names of a language's
# files, words for train, dev and test). Moses' sides are the language's code and English's.
NAMES: dict[str, tuple[str, str, str, str]] = {
    "OPUS-100": ("en-{lang}/opus.en-{lang}-{split}.{side}", "en", "gl fy", "train dev test"),
    "WMT": ("{split}.{lang}-en.{side}", "en", "de cs", "train newstest2013 newstest2014"),
    "WMT, folders": ("{split}/corpus.{lang}-en.{side}", "en", "de cs", "training dev test"),
    "FLORES-200": ("{split}/{side}.{split}", "eng_Latn", "glg_Latn fry_Latn", "train dev devtest"),
    "Tatoeba Challenge": ("eng-{lang}/{split}.{place}.gz", "eng", "glg fry", "train dev test"),
    "IWSLT": ("{lang}-en/{split}.{lang}-en.{side}", "en", "de fr", "train dev2010 tst2010"),
    "underscores": ("{lang}_{split}.tsv", "en", "gl fy pt_BR", "train dev test"),
    "in front": ("{split}_{lang}.tsv", "en", "gl fy", "train valid test"),
    "hyphens": ("en-{lang}-{split}.tsv", "en", "gl fy", "Train Validation Test"),
    "pairs in folders": ("{lang}-en/corpus-{split}.{side}", "en", "gl fy", "train tune eval"),
    "behind a name": ("web.{lang}.{split}.tsv", "en", "gl fy", "train val devtest"),
    "whole words": ("{split}.{lang}.tsv", "en", "gl fy", "training development testing"),
    "sets": ("{lang}.{split}.tsv", "en", "gl fy", "trainset devset testset"),
    "held out": ("{lang}.{split}.tsv", "en", "gl fy", "train tuning heldout"),
    "packed": ("{lang}-{split}.tsv.xz", "en", "gl fy", "train dev test"),
    "json": ("{split}-{lang}.jsonl", "en", "gl fy", "train valid test"),
}  # fmt: skip


@pytest.mark.parametrize("corpus", NAMES)
def test_official_splits_are_found(tmp_path: Path, corpus: str) -> None:
    name, english, languages, words = NAMES[corpus]
    texts: Texts = {code: {} for code in languages.split()}
    for code, split in itertools.product(texts, SPLITS):
        texts[code][split] = [Pair(f"the {split} {n}", f"{code} {split} {n} a") for n in range(20)]
    write_files(tmp_path, name, texts, english, dict(zip(SPLITS, words.split(), strict=True)))
    if corpus == "Tatoeba Challenge":
        write(tmp_path / "eng-glg" / "train.id.gz", "1\n")
    found = detect(str(tmp_path))
    assert found.by_hash == ()
    opened = found.opened(str(tmp_path))
    assert texts_of(opened) == {m4_code(code): of for code, of in texts.items()}


REFUSED: dict[str, tuple[str, str]] = {
    "a test set next to training text": (
        "europarl.es-en.es europarl.es-en.en newstest2013.es-en.es newstest2013.es-en.en",
        r"newstest2013\.es-en\.en': its name says newstest2013, and it would be used as training",
    ),
    "another separator": (
        "gl.train.tsv fy.train.tsv gl_test.tsv",
        r"gl_test\.tsv': its name says test, and it would not be read; call all files like",
    ),
    "a second test set": (
        "gl.train.tsv gl.dev.tsv gl.test.tsv gl.devtest.tsv",
        r"gl\.devtest\.tsv': its name says devtest, and it would not be read",
    ),
    "a test set in the training folder": (
        "train/a.es train/a.en train/newstest2013.es train/newstest2013.en",
        r"train/newstest2013\.en': its name says train and newstest2013, and it would be used",
    ),
    "nothing to train on": (
        "dev/eng_Latn.dev dev/glg_Latn.dev devtest/eng_Latn.devtest devtest/glg_Latn.devtest",
        "expected sentence pairs, in files",
    ),
    "held-out files alone": ("gl_dev.tsv gl_test.tsv", r"gl_dev\.tsv': its name says dev, and"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_split_that_is_not_used_as_such_is_one_line(tmp_path: Path, case: str) -> None:
    names, says = REFUSED[case]
    for name in names.split():
        write(tmp_path / name, "red\troxo\n" if name.endswith(".tsv") else "red\n")
    with pytest.raises(InputError, match=says) as error:
        detect(str(tmp_path))
    assert "\n" not in str(error.value)
