"""Laws of every source in m4/data/sources."""

import functools
import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from m4.data import sources
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Pair, Source
from m4.data.sources.cldr import Cldr
from m4.data.sources.joined import Joined
from tests.data.corpora import WRITERS, Texts, arguments_of, texts_of
from tests.data.corpus import Made

TEXTS = texts_of(Made({"gl": 60, "pt": 40}, held_out=8))


def cldr(folder: Path, texts: Texts) -> Source:
    return Cldr({"gl": 40, "pt": 40}, test_pairs=3, dev_pairs=3)


def joined(folder: Path, texts: Texts) -> Source:
    """Joins a source's Galician with the Portuguese of a corpus that has another Galician."""
    old = CorpusSpec(Made({"gl": 40, "pt": 40}, held_out=3), vocabulary_size=400)
    return Joined(Made({"gl": 30}, held_out=4), str(old.build(folder / "data").folder))


FACTORIES: dict[str, Callable[[Path, Texts], Source]] = {
    "cldr": cldr, "joined": joined, **WRITERS}  # fmt: skip
# TensorFlow takes its time to import.
ALL, WRITTEN = (
    [pytest.param(name, marks=pytest.mark.slow if name == "tfds" else ()) for name in names]
    for names in (FACTORIES, WRITERS)
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Writes one corpus per source, once, for reading only."""
    return {name: tmp_path_factory.mktemp(name) for name in FACTORIES}


@pytest.fixture(scope="module")
def made_sources(folders: dict[str, Path]) -> Callable[[str], Source]:
    return functools.cache(lambda name: FACTORIES[name](folders[name], TEXTS))


def source_classes() -> dict[str, type]:
    """Returns module -> the class in it that is a source."""
    found = {}
    for module in pkgutil.iter_modules(sources.__path__):
        members = vars(importlib.import_module(f"m4.data.sources.{module.name}"))
        for name, member in members.items():
            if name.lower() == module.name and hasattr(member, "language_pairs"):
                found[module.name] = member
    return found


def test_every_source_is_here() -> None:
    assert source_classes().keys() == FACTORIES.keys()


@pytest.mark.parametrize("name", ALL)
def test_the_order_is_the_same_every_time(
    name: str, made_sources: Callable[[str], Source], tmp_path: Path
) -> None:
    first = made_sources(name)
    again = FACTORIES[name](tmp_path, TEXTS)
    assert texts_of(first) == texts_of(first) == texts_of(again)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_is_read(name: str, made_sources: Callable[[str], Source]) -> None:
    read = texts_of(made_sources(name))
    for code, splits in TEXTS.items():
        assert all(type(pair) is Pair for split in SPLITS for pair in read[code][split])
        if name == "gettext":  # its own splits
            assert all(read[code].values())
            assert sorted(chain(*read[code].values())) == sorted(chain(*splits.values()))
        elif name == "tfds":  # the order of its files
            assert all(sorted(read[code][split]) == sorted(of) for split, of in splits.items())
        else:
            assert read[code] == splits


@pytest.mark.parametrize("name", ALL)
def test_identity_is_json_and_the_same_for_the_same_text_wherever_it_lies(
    name: str, made_sources: Callable[[str], Source], folders: dict[str, Path], tmp_path: Path
) -> None:
    source = made_sources(name)
    identity = source.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["source"] == name
    if name != "tfds":  # TFDS writes the date and more into a dataset
        assert FACTORIES[name](tmp_path / "again", TEXTS).identity() == identity
    if name in WRITERS:
        other = shutil.copytree(folders[name], tmp_path / "other")
        assert type(source)(**arguments_of(name, other)).identity() == identity


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("split", ["train", "test"])
def test_identity_changes_with_one_character(
    name: str, split: str, made_sources: Callable[[str], Source], tmp_path: Path
) -> None:
    first = TEXTS["gl"][split][0]
    changed = {code: dict(splits) for code, splits in TEXTS.items()}
    changed["gl"][split] = [Pair(first.first, first.second + "."), *TEXTS["gl"][split][1:]]
    assert WRITERS[name](tmp_path, changed).identity() != made_sources(name).identity()


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_language_is_one_clear_line(
    name: str, made_sources: Callable[[str], Source]
) -> None:
    source = made_sources(name)
    with pytest.raises(ValueError, match=r"eo.*gl, (en-)?pt") as error:
        list(source.pairs("en-eo", "train"))
    assert f"{type(source).__name__}." in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_missing_folder_is_one_clear_line(name: str, tmp_path: Path) -> None:
    argument = "data_dir" if name == "tfds" else "folder"
    with pytest.raises(ValueError, match=rf"^\w+\.{argument} = .*missing': must be a folder that"):
        source_classes()[name](**arguments_of(name, tmp_path / "missing")).language_pairs()


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"tfds"}))
def test_an_empty_folder_is_one_clear_line(name: str, tmp_path: Path) -> None:
    source = source_classes()[name](**arguments_of(name, tmp_path))
    with pytest.raises(ValueError, match=r"no file is called like .* \(\w+\.files\)"):
        source.language_pairs()


def test_a_joined_source_has_each_language_of_one_of_the_two(
    made_sources: Callable[[str], Source],
) -> None:
    source, new = made_sources("joined"), Made({"gl": 30}, held_out=4)
    old = Made({"gl": 40, "pt": 40}, held_out=3)
    assert source.language_pairs() == ["en-gl", "en-pt"]
    for split in SPLITS:
        assert [*source.pairs("gl", split)] == [*new.pairs("gl", split)]
        assert [*source.pairs("pt", split)] == [*old.pairs("pt", split)]
    by_pair = source.identity()["by_pair"]
    assert by_pair["en-gl"] == 30
    assert {*by_pair["en-pt"]} == {*SPLITS}
