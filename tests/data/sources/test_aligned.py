from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.aligned import Aligned
from m4.data.testsets import Segment, segments_for
from m4.settings import InputError
from tests.data.corpora import write

LANGUAGES = ("eng_Latn", "fra_Latn", "spa_Latn", "wol_Latn")


def made(folder: Path, languages: tuple[str, ...] = LANGUAGES) -> Path:
    for split, count in (("train", 5), ("dev", 2), ("test", 3)):
        for code in languages:
            write(folder / split / code, "".join(f"{code} {split} {n}\n" for n in range(count)))
    write(folder / "train" / "README", "what this is\n")
    return folder


def test_every_two_languages_are_a_pair_once(tmp_path: Path) -> None:
    source = Aligned(made(tmp_path), english="eng_Latn", codes={"fr": "fra_Latn"})
    # 4 languages: 4 * 3 / 2 pairs, English first in its own.
    assert source.language_pairs() == [
        "en-fr", "en-spa_Latn", "en-wol_Latn", "fr-spa_Latn", "fr-wol_Latn", "spa_Latn-wol_Latn",
    ]  # fmt: skip
    wanted = [Pair(f"fra_Latn train {n}", f"wol_Latn train {n}") for n in range(5)]
    assert [*source.pairs("wol_Latn-fr", "train")] == wanted
    assert source.reading.origin == ("train/fra_Latn and train/wol_Latn", 5)
    assert [*source.pairs("en-fr", "dev")][1] == ("eng_Latn dev 1", "fra_Latn dev 1")
    assert {*source.identity()["common"]} == {
        f"{split}/{code}" for split in ("train", "dev", "test") for code in LANGUAGES
    }
    with pytest.raises(InputError, match=r"no gl-wol_Latn in files called like .*; there is en-fr"):
        list(source.pairs("gl-wol_Latn", "train"))


def test_the_same_folder_is_a_test_set(tmp_path: Path) -> None:
    """Pairs to train on and segments to translate are the same lines."""
    source = Aligned(made(tmp_path))
    assert len(source.directions()) == 4 * 3
    found = segments_for("it", source, "wol_Latn-fra_Latn")
    assert found == [Segment(f"wol_Latn test {n}", (f"fra_Latn test {n}",)) for n in range(3)]
    pairs = source.pairs("fra_Latn-wol_Latn", "test")
    assert [Pair(one.references[0], one.source) for one in found] == [*pairs]


def test_files_without_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are a test set, or, with dev_every and test_every, of every split."""
    write(tmp_path / "README.md", "what this is\n")
    for code in ("fr", "wo"):
        write(tmp_path / f"news.{code}.gz", "".join(f"{code} {n}\n" for n in range(200)))
    testset = Aligned(tmp_path, "*.{lang}")
    assert (testset.language_pairs(), testset.directions()) == ([], ["fr-wo", "wo-fr"])
    assert len(testset.segments("wo-fr")) == 200
    assert capsys.readouterr().err == ""
    source = Aligned(tmp_path, "*.{lang}", dev_every=10, test_every=5)
    sizes = [len([*source.pairs("fr-wo", split)]) for split in ("train", "dev", "test")]
    assert sum(sizes) == 200
    assert all(sizes)
    assert len(source.segments("wo-fr")) == sizes[2]
    write(tmp_path / "web.wo", "another corpus\n")  # without French: no pair
    assert len([*Aligned(tmp_path, "*.{lang}").pairs("fr-wo", "test")]) == 200
