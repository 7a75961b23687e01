"""The layout of a folder is found from its names and first lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from m4.data.sources.detect import detect
from tests.data import folders

LAYOUTS: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "tsv": (folders.tsv, "tsv.Tsv", "{lang}.{split}.tsv", "fy gl pt"),
    "plain_tsv": (folders.plain_tsv, "tsv.Tsv", "{lang}.tsv", "fy gl pt"),
    "train_only": (folders.train_only, "tsv.Tsv", "{lang}.train.tsv", "fy gl pt"),
    "moses": (folders.moses, "moses.Moses", "{split}.{pair}.{side}", "fy gl"),
    "opus": (folders.opus, "moses.Moses", "{pair}/*.{side}", "fy gl"),
    "json": (folders.json_by_language, "jsonl.Jsonl", "{lang}.{split}.jsonl", "fy gl"),
    "json_mixed": (folders.json_mixed, "jsonl.Jsonl", "*.jsonl", "fy gl"),
    "json_many": (folders.json_many, "jsonl.Jsonl", "{split}.jsonl", "fy gl"),
    "po": (folders.po, "gettext.Gettext", "{lang}.po", "fy gl"),
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
    assert (found.name, found.files, found.not_read) == (source, files, ("README.md",))
    opened = found.opened(str(folder))
    assert opened.languages() == languages.split()
    total = sum(
        len([*opened.pairs(code, split)])
        for code in languages.split()
        for split in ("train", "dev", "test")
    )
    assert total == 100 * len(languages.split())
    assert found.by_hash == (() if "{split}" in files else ("dev", "test"))
    assert opened.hash_split.dev_every == (100 if found.by_hash else 0)


def test_a_split_that_is_not_there_is_taken_from_training_files_by_hash(tmp_path: Path) -> None:
    folder = folders.tsv(tmp_path / "corpus")
    for path in folder.glob("*.dev.tsv"):
        path.unlink()
    found = detect(str(folder))
    assert (found.by_hash, found.hash_rule) == (("dev",), "dev 1 in 100")
    opened = dataclasses.replace(found, settings={**found.settings, "dev_every": 5}).opened(
        str(folder)
    )
    by_split = {split: [*opened.pairs("gl", split)] for split in ("train", "dev", "test")}
    assert by_split["test"] == [*folders.pairs("gl")[:10]]
    assert sorted(by_split["train"] + by_split["dev"]) == sorted(folders.pairs("gl")[18:])
    assert len(by_split["dev"]) > 5
    english = {split: {pair.english for pair in of} for split, of in by_split.items()}
    assert english["dev"] == {pair.english for pair in opened.pairs("fy", "dev")}
    assert not english["dev"] & english["train"]


def test_a_folder_is_what_most_of_its_files_are(tmp_path: Path) -> None:
    folder = folders.tsv(tmp_path / "corpus")
    folders.po(folder)
    found = detect(str(folder))
    assert found.name == "tsv.Tsv"
    assert found.not_read == ("fy.po", "gl.po")
