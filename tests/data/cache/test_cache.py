import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.cache import FORMAT, Cache, differences
from m4.data.cache.corpus_text import pair_file
from m4.data.cache.shards import Damaged
from m4.data.cleaning import clean
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.stages import Duplicates
from m4.data.corpus import CorpusSpec, bilingual
from m4.data.directions import SIDES, reverse
from m4.data.sources import SPLITS
from m4.data.sources.tsv import Tsv
from m4.storage import checksums
from m4.storage.files import write_json
from tests.damage import damaged_json, refused
from tests.data.arrays import rows_of
from tests.data.cleaning.cases import Listed
from tests.data.corpus import Made

SMALL: dict[str, Any] = {"vocabulary_size": 400, "lengths": {"inputs": 96, "targets": 96}}


def listed(**pairs: list[tuple[str, str]]) -> Listed:
    """Returns a source of Galician with the given pairs of each split."""
    return Listed({("gl", split): of for split, of in pairs.items()})


def test_arrays_are_the_text_in_order(made: Made, made_cache: Cache) -> None:
    for split in SPLITS:
        rows = {side: rows_of(made_cache, split, side) for side in SIDES}
        for code in made_cache.language_pairs():
            pairs, own = list(made_cache.pairs(code, split)), made_cache.rows(code, split)
            assert pairs == list(made.pairs(code, split))
            assert len(pairs) == made_cache.size(code, split) == len(own)
            for side, texts in zip(SIDES, zip(*pairs, strict=True), strict=True):
                ids = made_cache.vocabulary.encode(list(texts))
                assert rows[side][own.start : own.stop] == ids
    assert made_cache.subsets("en-pt", "test") == made.subsets("en-pt", "test")
    assert made_cache.subsets("en-pt", "train") == {}
    assert made_cache.origins("en-gl", "train") is None, "the source has no files"
    assert made_cache.sentences("train").take(np.arange(9)).ids.dtype == np.uint16


def test_a_ready_cache_is_opened_not_built(tmp_path: Path) -> None:
    stages: list[str] = []
    spec = CorpusSpec(Made({"gl": 50}), ["gl"], **SMALL)
    built = spec.build(tmp_path / "c", progress=lambda stage, *_: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["text", "vocabulary", "tokens"]
    stages.clear()
    opened = spec.build(tmp_path / "c", progress=lambda stage, *_: stages.append(stage))
    assert not stages
    assert opened.fingerprint == built.fingerprint
    more = CorpusSpec(Made({"gl": 50, "pt": 9}), ["gl"], **SMALL)  # other languages do not matter
    assert more.build(tmp_path / "c").folder == built.folder
    assert opened.folder == tmp_path / "c" / built.fingerprint
    assert [*(tmp_path / "c").iterdir()] == [opened.folder], "nothing temporary is left"
    os.umask(umask := os.umask(0))
    assert opened.folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_another_corpus_lies_next_to_it(tmp_path: Path) -> None:
    spec = CorpusSpec(Made({"gl": 50, "pt": 30}), ["gl"], **SMALL)
    first = spec.build(tmp_path)
    changes: dict[str, dict[str, Any]] = {
        "vocabulary_size = 400, now 500": {"vocabulary_size": 500},
        "vocabulary_temperature = 5.0, now 1.0": {"vocabulary_temperature": 1},
        "source.seed = 0, now 1": {"source": Made({"gl": 50, "pt": 30}, seed=1)},
        "source.by_pair.en-gl = 50, now 51": {"source": Made({"gl": 51, "pt": 30})},
        "language_pairs = ['en-gl'], now ['en-gl', 'en-pt']": {"languages": ["gl", "pt"]},
    }
    for number, (says, change) in enumerate(changes.items(), 2):
        other = dataclasses.replace(spec, **change).build(tmp_path)
        assert says in differences(first.manifest["identity"], other.manifest["identity"])
        assert len({*tmp_path.iterdir()}) == number
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
    ({"mixture": "all"}, "mixture = 'all': must be one of to_english"),
    ({"vocabulary_size": 100}, "vocabulary_size = 100: must be at least 277 (3 special"),
    ({"target_vocabulary_size": 200}, ".target_vocabulary_size = 200: must be at least 275"),
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
    write_json(tmp_path / "manifest.json", manifest)  # a stranger can write a checksum, too
    with pytest.raises(ValueError, match=r"gl': must be two languages"):
        Cache(tmp_path)


def test_bilingual_is_a_small_cache_of_the_same_pairs(tmp_path: Path, made_cache: Cache) -> None:
    small = bilingual(made_cache, "pt", vocabulary_size=350).build(tmp_path)
    assert small.directions == ["en-pt", "pt-en"]
    assert small.vocabulary.languages == ["en", "pt"]
    assert small.source_vocabulary.size <= 350
    assert (small.source_length, small.target_length) == (96, 96)
    for split in SPLITS:
        assert list(small.pairs("en-pt", split)) == list(made_cache.pairs("en-pt", split))
    assert small.subsets("en-pt", "dev") == made_cache.subsets("en-pt", "dev")
    # Other languages of the parent may change.
    parent = CorpusSpec(Made({"gl": 310, "pt": 90}), **SMALL).build(tmp_path / "parent")
    assert bilingual(parent, "pt", vocabulary_size=350).build(tmp_path).folder == small.folder


def test_whatever_is_damaged_in_json(made_cache: Cache, tmp_path: Path) -> None:
    shutil.copytree(made_cache.folder, tmp_path, dirs_exist_ok=True)

    def read() -> None:
        cache = Cache(tmp_path)
        for language in cache.language_pairs():
            for direction in (language, reverse(language)):
                cache.mean_pieces(direction)
            _ = cache.longest(language), cache.rows(language, "dev"), cache.sizes()
        _ = cache.identity(), cache.ledger()

    path = tmp_path / "manifest.json"
    text = path.read_text()
    found = []
    for damaged in damaged_json(text):
        path.write_bytes(damaged)
        found.append(refused(read, path.name))
    # A few values are as good as the manifest's own, such as an empty list for another one.
    assert found.count(False) <= 7
    path.write_text(text)
    read()


def test_a_cache_knows_file_and_line_of_each_row_in_little_space(tmp_path: Path) -> None:
    """Origins of two files, after duplicates and sentences that are too long have left."""
    pairs = [*Made({"gl": 400}).pairs("en-gl", "train")]
    bad = ["no pair\n", f"{'long ' * 200}\t{'longo ' * 200}\n"]
    for number, part in enumerate((pairs[:300], pairs[250:])):
        text = "".join(
            bad[i % 2] * (i % 50 == 0) + f"{one.first}  \t{one.second}\n"
            for i, one in enumerate(part)
        )
        (tmp_path / f"gl.train.{number}.tsv").write_text(text, encoding="utf-8")
    for split in ("dev", "test"):
        (tmp_path / f"gl.{split}.0.tsv").write_text("a b c\td e f\n", encoding="utf-8")
    cache = CorpusSpec(
        Tsv(tmp_path, files="{lang}.{split}.*.tsv", on_bad_line="skip"),
        cleaning=clean.Cleaning((Normalise(), Duplicates())),
        **SMALL,
    ).build(tmp_path / "data")
    origins = cache.origins("en-gl", "train")
    assert origins is not None
    assert len(origins) == cache.size("en-gl", "train") == 400
    assert {origin.file for origin in origins} == {"gl.train.0.tsv", "gl.train.1.tsv"}
    lines = {name: (tmp_path / name).read_text("utf-8").split("\n") for name, _ in origins}
    for pair, (name, line) in zip(cache.pairs("en-gl", "train"), origins, strict=True):
        assert lines[name][line - 1] == f"{pair.first}  \t{pair.second}"
    assert pair_file(cache.folder, "train", "en-gl", "origin").stat().st_size < 400
    assert cache.origins("en-gl", "dev") == [("gl.dev.0.tsv", 1)]


# A cache that is not as it was built is never trained on: one line names the file.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CorpusSpec(Made({"gl": 60}), **SMALL).build(tmp_path_factory.mktemp("built")).folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "data" / built.name))


TOKENS, OFFSETS = "train.tokens.00000.npy", "train.offsets.00000.npy"


def flipped(content: bytes) -> bytes:
    """Flips a bit in the middle of a file."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, flipped) for name in (TOKENS, OFFSETS, "vocabulary.model", "text/test.gl.txt")),
        ("text/test.gl.subsets.json", flipped),
        (OFFSETS, lambda content: content[:300]),
        (TOKENS, None),
        ("manifest.json", lambda content: content.replace(b'"pairs": 60', b'"pairs": 59')),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    folder: Path, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    """A missing file is named, too."""
    Cache(folder).verify()
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if change is not None:
        (folder / name).write_bytes(change(content))
    with pytest.raises(Damaged, match=rf"data/\w+: damaged: {name}: ?.*; remove that f") as said:
        Cache(folder).verify()
    assert "\n" not in str(said.value)
    with pytest.raises(Damaged):
        CorpusSpec(Made({"gl": 60}), **SMALL).build(folder.parent)


def test_a_machine_compares_a_large_corpus_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(checksums, "_WORTH_BYTES", 0)
    monkeypatch.setattr(checksums, "_TICK_SECONDS", -1.0)
    read: list[str] = []
    hash_ = checksums.Disk.sha256
    monkeypatch.setattr(
        checksums.Disk, "sha256", lambda disk, name: (read.append(name), hash_(disk, name))[1]
    )
    looks: list[tuple[int, checksums.Level | None]] = [(1, None), (1, None), (2, "full")]
    for times, level in looks:
        checksums._same.clear()
        checksums.choose(level)
        Cache(folder).verify()
        assert read.count(TOKENS) == times, level
    checksums.choose(None)
    (folder / TOKENS).write_bytes(flipped((folder / TOKENS).read_bytes()))
    with pytest.raises(Damaged):
        Cache(folder).verify()
