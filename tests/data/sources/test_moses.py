from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.moses import Moses
from tests.data.corpora import write


def test_several_corpora_of_a_pair_in_either_order(tmp_path: Path) -> None:
    write(tmp_path / "B.en-gl.en.gz", "from B\n")
    write(tmp_path / "B.en-gl.gl", "de B\n")
    write(tmp_path / "A.de-en.en", "from A\n")
    write(tmp_path / "A.de-en.de", "von A\n")
    write(tmp_path / "C.en-gl.en", "from C\n")
    write(tmp_path / "C.en-gl.gl.zst", "de C\n")
    write(tmp_path / "C.gl-de.de", "von C\n")
    write(tmp_path / "C.gl-de.gl", "de C\n")
    write(tmp_path / "D.some-thing.de", "no languages\n")
    write(tmp_path / "README", "text\n")
    source = Moses(tmp_path, files="*.{pair}.{side}", test_every=1000)
    assert source.language_pairs() == ["en-de", "en-gl", "de-gl"]
    assert list(source.pairs("de-gl", "train")) == [Pair("von C", "de C")]
    assert list(source.pairs("en-gl", "train")) == [Pair("from B", "de B"), Pair("from C", "de C")]
    assert list(source.pairs("en-de", "train")) == [Pair("from A", "von A")]


def test_many_ways_with_one_english_file(tmp_path: Path) -> None:
    for split in ("train", "dev", "devtest"):
        for code in ("eng_Latn", "glg_Latn", "srp_Cyrl"):
            write(tmp_path / split / f"{code}.{split}", f"{code} in {split}\n")
    source = Moses(
        tmp_path,
        files="{split}/{side}.{split}",
        english="eng_Latn",
        splits={"train": "train", "dev": "dev", "test": "devtest"},
        codes={"sr": "srp_Cyrl"},
    )
    assert source.language_pairs() == ["en-glg_Latn", "en-sr"]
    assert list(source.pairs("en-sr", "test")) == [
        Pair("eng_Latn in devtest", "srp_Cyrl in devtest")
    ]
    # All languages share the English file; the other one is its language's alone.
    identity = source.identity()
    assert set(identity["common"]) == {f"{s}/eng_Latn.{s}" for s in ("train", "dev", "devtest")}
    assert set(identity["by_pair"]) == {"en-glg_Latn", "en-sr"}


def test_missing_sides_and_files_twice(tmp_path: Path) -> None:
    write(tmp_path / "train.en-gl.gl", "un\n")
    with pytest.raises(ValueError, match=r"train\.en-gl\.gl: its en side is missing"):
        Moses(tmp_path).language_pairs()
    write(tmp_path / "train.en-gl.en", "one\n")
    assert Moses(tmp_path).language_pairs() == ["en-gl"]
    write(tmp_path / "dev.en-gl.en", "one\n")
    with pytest.raises(ValueError, match=r"dev\.en-gl\.en: its gl side is missing"):
        Moses(tmp_path).language_pairs()
    (tmp_path / "dev.en-gl.en").unlink()
    write(tmp_path / "train.en-gl.en.gz", "one\n")
    with pytest.raises(ValueError, match=r"train\.en-gl\.en(\.gz)? is there too"):
        Moses(tmp_path).language_pairs()
