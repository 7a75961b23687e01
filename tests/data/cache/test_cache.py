from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.cache import FORMAT, Cache, differences, manifest_digest
from m4.data.cleaning import clean
from m4.data.corpus import CorpusSpec, bilingual
from m4.data.directions import reverse
from m4.data.preprocess import target_ids
from m4.data.sources import SPLITS
from tests.damage import damaged_json, refused
from tests.data.arrays import tokens as tokens_of
from tests.data.cleaning.cases import Listed
from tests.data.corpus import Made

SMALL: dict[str, Any] = {"vocabulary_size": 400, "lengths": {"inputs": 96, "targets": 96}}


def listed(**pairs: list[tuple[str, str]]) -> Listed:
    """A source of Galician with the given pairs of each split."""
    return Listed({("gl", split): of for split, of in pairs.items()})


def test_arrays_are_the_text_in_order(made: Made, made_cache: Cache) -> None:
    for split in SPLITS:
        arrays = {side: tokens_of(made_cache, split, side) for side in ("first", "second")}
        for code in made_cache.language_pairs():
            pairs = list(made_cache.pairs(code, split))
            assert pairs == list(made.pairs(code, split))
            assert len(pairs) == made_cache.size(code, split) == len(made_cache.rows(code, split))
            for side, (flat, offsets) in arrays.items():
                texts = [getattr(pair, side) for pair in pairs]
                wanted = target_ids(made_cache.vocabulary, texts, 1000)
                for row, ids in zip(made_cache.rows(code, split), wanted, strict=True):
                    assert [*flat[offsets[row] : offsets[row + 1]], 1] == ids
    assert made_cache.subsets("en-pt", "test") == made.subsets("en-pt", "test")
    assert made_cache.subsets("en-pt", "train") == {}
    assert made_cache.origins("en-gl", "train") is None, "the source has no files"
    assert flat.dtype == np.uint16
    assert offsets.dtype == np.int64


def test_a_ready_cache_is_opened_not_built(tmp_path: Path) -> None:
    stages: list[str] = []
    spec = CorpusSpec(Made({"gl": 50}), ["gl"], **SMALL)
    built = spec.build(tmp_path / "c", progress=lambda stage, *_: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["text", "vocabulary", "tokens"]
    stages.clear()
    opened = spec.build(tmp_path / "c", progress=lambda stage, *_: stages.append(stage))
    assert not stages
    assert opened.fingerprint == built.fingerprint
    assert opened.folder == tmp_path / "c" / built.fingerprint
    assert [*(tmp_path / "c").iterdir()] == [opened.folder], "nothing temporary is left"
    umask = os.umask(0)
    os.umask(umask)
    assert opened.folder.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocabulary_size": 500}, "vocabulary_size = 400, now 500"),
        ({"vocabulary_temperature": 1}, "vocabulary_temperature = 5.0, now 1.0"),
        ({"source": Made({"gl": 50, "pt": 30}, seed=1)}, "source.seed = 0, now 1"),
        ({"source": Made({"gl": 51, "pt": 30})}, "source.by_pair.en-gl = 50, now 51"),
        ({"languages": ["gl", "pt"]}, "language_pairs = ['en-gl'], now ['en-gl', 'en-pt']"),
    ],
)
def test_another_corpus_lies_next_to_it(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    spec = CorpusSpec(Made({"gl": 50, "pt": 30}), ["gl"], **SMALL)
    first = spec.build(tmp_path)
    other = dataclasses.replace(spec, **change).build(tmp_path)
    assert {*tmp_path.iterdir()} == {first.folder, other.folder}
    assert len({*tmp_path.iterdir()}) == 2
    assert says in differences(first.manifest["identity"], other.manifest["identity"])
    assert spec.build(tmp_path).folder == first.folder


def test_of_two_that_build_at_once_the_first_to_end_stays(tmp_path: Path) -> None:
    spec = CorpusSpec(Made({"gl": 50}), ["gl"], **SMALL)
    first: list[int] = []

    def build_meanwhile(stage: str, done: int, total: int) -> None:
        if stage == "tokens" and not first:
            first.append((spec.build(tmp_path).folder / "manifest.json").stat().st_ino)

    cache = spec.build(tmp_path, progress=build_meanwhile)
    assert [*tmp_path.iterdir()] == [cache.folder]
    assert [(cache.folder / "manifest.json").stat().st_ino] == first


def test_other_languages_of_the_source_do_not_matter(tmp_path: Path) -> None:
    first = CorpusSpec(Made({"gl": 50}), ["gl"], **SMALL).build(tmp_path / "c")
    again = CorpusSpec(Made({"gl": 50, "pt": 9}), ["gl"], **SMALL).build(tmp_path / "c")
    assert again.fingerprint == first.fingerprint
    assert again.language_pairs() == ["en-gl"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CorpusSpec(Made({"gl": 50}), ["gl"], **SMALL).build(tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_long_pairs_are_dropped_from_train_and_counted(tmp_path: Path) -> None:
    long = "12345678901234567890123456789"  # digits are split: 30 pieces in any vocabulary
    source = listed(
        train=[(f"word {n}", f"drow {n}") for n in range(50)] + [(long, "x"), ("x", long)],
        dev=[(f"{long} {long}", "x y")],
    )
    settings = {**SMALL, "vocabulary_size": 300, "lengths": {"inputs": 24, "targets": 24}}
    made = CorpusSpec(source, ["gl"], **settings).build(tmp_path / "c")
    ledger = made.manifest["ledger"]["pairs"]["en-gl"]
    too_long = {"pieces: too long": 2}
    assert ledger["train"] == {"read": 52, "kept": 50, "dropped": too_long}
    assert ledger["dev"] == {"read": 1, "kept": 1, "flagged": {"pieces: too long": 1}}
    assert (made.size("en-gl", "train"), made.size("en-gl", "dev")) == (50, 1)
    assert len(list(made.pairs("en-gl", "train"))) == 50
    assert list(made.pairs("en-gl", "dev")) == [(f"{long} {long}", "x y")]
    assert max(made.longest("en-gl").values()) <= 22
    only_long = listed(train=[(long, "x")])
    with pytest.raises(ValueError, match=r"all 1 are longer than 22 pieces \(CorpusSpec\.lengths"):
        CorpusSpec(only_long, ["gl"], **settings).build(tmp_path / "d")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"source": Made({"gl": 0})}, "en-gl has no training pairs: the source has none"),
    ({"source": listed(train=[("a\tb", "c")]), "cleaning": clean.NOTHING},
     "en-gl train: a tab or line end inside a sentence"),
    *(({"languages": wrong}, "CorpusSpec.languages = ")
      for wrong in (["en"], ["gl-"], ["gl", "gl-en"], ["a-b-c"], [])),
    ({"languages": "gl"}, "CorpusSpec.languages = 'gl': must be a list"),
    ({"mixture": "all"}, "mixture = 'all': must be one of to_english"),
    ({"vocabulary_size": 100}, "vocabulary_size = 100: must be at least 277 (3 special"),
    ({"vocabulary_size": "x"}, ".vocabulary_size = 'x': must be a whole number"),
    ({"target_vocabulary_size": 200}, ".target_vocabulary_size = 200: must be at least 275"),
    ({"vocabulary_temperature": 0.5}, "vocabulary_temperature = 0.5: must be a number"),
    ({"vocabulary_sentences": 0}, ".vocabulary_sentences = 0: must be a whole"),
    ({"segmentations": 0}, "CorpusSpec.segmentations = 0: must be a whole number from 1"),
    ({"segmentations": 2, "sampling_alpha": 1.0}, "sampling_alpha = 1.0: must be a number above"),
    ({"workers": 0}, "CorpusSpec.workers = 0: must be"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "says"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        CorpusSpec(**{"source": Made({"gl": 9}), **SMALL, **settings}).build(tmp_path)
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_what_is_no_cache(tmp_path: Path, made_cache: Cache) -> None:
    with pytest.raises(ValueError, match="not a cache, it has no manifest"):
        Cache(tmp_path)
    for content, says in (
        ("{", r"damaged: manifest\.json"),
        ("[]", r"damaged: manifest\.json"),
        ('{"format": 0}', f"cache format 0, this m4 needs {FORMAT}"),
    ):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=says):
            Cache(tmp_path)
    with pytest.raises(ValueError, match="no pair en-eo; it has en-gl, en-pt, en-sr_Latn"):
        made_cache.size("en-eo", "train")


def test_languages_of_the_manifest_stay_in_the_folder(made_cache: Cache, tmp_path: Path) -> None:
    """A cache may be a stranger's, and languages are part of names that are written."""
    manifest = {**made_cache.manifest, "language_pairs": {"en-../../gl": {}}}
    manifest["sha256"] = manifest_digest(manifest)  # which a stranger can write, too
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ValueError, match=r"gl': must be two languages"):
        Cache(tmp_path)


def test_bilingual_is_a_small_cache_of_the_same_pairs(tmp_path: Path, made_cache: Cache) -> None:
    small = bilingual(made_cache, "pt", vocabulary_size=350).build(tmp_path / "pt")
    assert small.directions == ["en-pt", "pt-en"]
    assert small.vocabulary.languages == ["en", "pt"]
    assert small.source_vocabulary.size <= 350
    assert (small.source_length, small.target_length) == (96, 96)
    for split in SPLITS:
        assert list(small.pairs("en-pt", split)) == list(made_cache.pairs("en-pt", split))
    assert small.subsets("en-pt", "dev") == made_cache.subsets("en-pt", "dev")


def test_bilingual_depends_on_its_own_language_only(tmp_path: Path) -> None:
    parents = [
        CorpusSpec(Made({"gl": 60, "pt": size}), ["gl", "pt"], **SMALL).build(tmp_path / str(size))
        for size in (30, 40)
    ]
    first = bilingual(parents[0], "gl", vocabulary_size=350).build(tmp_path / "gl")
    stages: list[str] = []
    again = bilingual(parents[1], "gl", vocabulary_size=350).build(
        tmp_path / "gl", progress=lambda stage, *_: stages.append(stage)
    )
    assert not stages, "reused"
    assert again.fingerprint == first.fingerprint


def test_whatever_is_damaged_in_json(made_cache: Cache, tmp_path: Path) -> None:
    shutil.copytree(made_cache.folder, tmp_path, dirs_exist_ok=True)

    def read() -> None:
        cache = Cache(tmp_path)
        for language in cache.language_pairs():
            for direction in (language, reverse(language)):
                cache.mean_pieces(direction, "train")
            _ = cache.longest(language), cache.rows(language, "dev"), cache.sizes()
        _ = cache.manifest, cache.identity(), cache.ledger()
        _ = cache.fingerprint, cache.separate, cache.segmentations
        _ = cache.source_length + cache.target_length

    for name in ("manifest.json", "ledger.json"):
        text = (tmp_path / name).read_text()
        for damaged in damaged_json(text):
            (tmp_path / name).write_bytes(damaged)
            refused(read, name)
        (tmp_path / name).write_text(text)
    read()


def test_each_leaf_that_differs_is_named_with_both_values() -> None:
    before = {"seed": 0, "files": {"gl": {"gl.train.tsv": [5, "b"]}, "pt": {"pt.tsv": [5, "b"]}}}
    now = {"seed": 1, "files": {"gl": {"gl.train.tsv": [6, "c"]}, "pt": {"pt.tsv": [5, "b"]}}}
    assert differences(before, now | {"languages": ["gl"] * 40}) == [
        "seed = 0, now 1",
        "files.gl.gl.train.tsv = [5, 'b'], now [6, 'c']",
        "languages = None, now ['gl', 'gl', 'gl', 'gl', 'gl', 'gl', 'gl', 'gl', '... (240 letters)",
    ]
