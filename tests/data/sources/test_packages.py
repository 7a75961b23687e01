"""The corpus `catalogues`: messages of programs in packages that are data only."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo

from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Pair
from m4.data.sources.packages import FOLDER, Packages
from m4.data.splits import normal
from tests.command_line import experiment_of, m4
from tests.data.corpora import quoted, write

CONFIG = Path(__file__).parents[3] / "gin_configs" / "catalogues.gin"
HEAD = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'


def po(folder: Path, name: str, messages: dict[str, str]) -> None:
    entries = [f"msgid {quoted(e)}\nmsgstr {quoted(t)}\n" for e, t in messages.items()]
    write(folder / name, HEAD + "\n".join(entries))


def mo(folder: Path, name: str, messages: dict[str, str]) -> None:
    catalog, file = Catalog(), io.BytesIO()
    for english, translation in messages.items():
        catalog.add(english, translation)
    write_mo(file, catalog)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(file.getvalue())


def package(folder: Path, name: str, *lines: str) -> None:
    said = [f"Name: {name}", "Version: 1.0", *lines]
    write(folder / f"{name}-1.0.dist-info" / "METADATA", "\n".join(said) + "\n\nWhat it is.\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two packages with catalogues at different depths."""
    package(tmp_path, "shop", "License-Expression: MIT", "Classifier: License :: OSI :: X License")
    package(tmp_path, "blog", "Classifier: License :: OSI Approved :: BSD License")
    package(tmp_path, "old", "License: Apache 2.0")
    package(tmp_path, "silent")
    po(
        tmp_path,
        "blog/contrib/admin/locale/gl/LC_MESSAGES/django.po",
        {"Delete": "Eliminar", "Change password": "Cambiar o contrasinal"},
    )
    # What the file above was before: it is not read.
    mo(tmp_path, "blog/contrib/admin/locale/gl/LC_MESSAGES/django.mo", {"Old": "Vello"})
    po(
        tmp_path,
        "shop/locale/gl_ES/LC_MESSAGES/shop.po",
        {
            "delete ": "borrar",  # the same sentence, said otherwise
            "Your order": "O seu pedido",
            "See <a>this</a>": "Vexa <a>isto</a>",
            "Hello %s": "Ola %s",
        },
    )
    mo(tmp_path, "shop/locale/pt_BR/LC_MESSAGES/shop.mo", {"Delete": "Excluir"})
    write(tmp_path / "shop/locale/pt_BR/LC_MESSAGES/odd.po", "no catalogue\n")
    po(tmp_path, "shop/locale/en_GB/LC_MESSAGES/shop.po", {"Color": "Colour"})
    return tmp_path


def source(folder: Path, **options) -> Packages:  # type: ignore
    return Packages(folder, **options)


def pairs(made: Packages, language: str) -> list[Pair]:
    return sorted(pair for split in SPLITS for pair in made.pairs(language, split))


def test_catalogues_of_all_packages_are_one_language_each(folder: Path) -> None:
    made = source(folder)
    assert made.languages() == ["gl", "pt"]
    assert pairs(made, "pt") == [Pair("Delete", "Excluir")]
    assert pairs(made, "gl") == [
        Pair("Change password", "Cambiar o contrasinal"),
        Pair("Delete", "Eliminar"),
        Pair("Your order", "O seu pedido"),
    ]
    name, odd = "shop/locale/gl_ES/LC_MESSAGES/shop.po", "shop/locale/pt_BR/LC_MESSAGES/odd.po"
    counted = {
        (odd, "no catalogue, a line that is none of PO's"): 1,
        (name, "markup"): 1,
        (name, "placeholders"): 1,
        (name, "there before"): 1,
        ("shop/locale/en_GB/LC_MESSAGES/shop.po", "a catalogue of English"): 1,
    }
    assert made.skipped == counted
    pairs(made, "gl")
    assert made.skipped == counted  # read once, counted once


def test_a_sentence_is_in_the_same_split_in_every_language(tmp_path: Path) -> None:
    words = [f"Message number {'i' * n}" for n in range(1, 60)]
    for code in ("gl", "pt_BR"):
        po(tmp_path, f"a/locale/{code}/LC_MESSAGES/a.po", {w: f"{w} {code}" for w in words})
        shouted = {w.upper(): f"{w} {code} again" for w in words}
        po(tmp_path, f"b/locale/{code}/LC_MESSAGES/b.po", shouted)
    made = source(tmp_path, dev_every=8, test_every=4)
    of = {
        split: [[p.english for p in made.pairs(code, split)] for code in ("gl", "pt")]
        for split in SPLITS
    }
    assert all(gl == pt and gl for gl, pt in of.values())
    assert sorted(text for gl, _ in of.values() for text in gl) == sorted(words)


def test_the_manifest_names_packages_and_licences(folder: Path, tmp_path: Path) -> None:
    many = {f"Sentence {'e' * n}": f"Frase {'e' * n}" for n in range(1, 30)}
    po(folder, "shop/locale/gl_ES/LC_MESSAGES/more.po", many)
    spec = CorpusSpec(
        source(folder, dev_every=6, test_every=4), languages=["gl"], vocabulary_size=400
    )
    spec.build(tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text(encoding="utf-8"))
    assert '"licences": ' in json.dumps(manifest)
    assert manifest["identity"]["source"]["licences"] == {
        "blog 1.0": "BSD License",
        "old 1.0": "Apache 2.0",
        "shop 1.0": "MIT",
        "silent 1.0": "not said",
    }


def test_without_the_packages_the_command_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = m4(
        "data",
        "prepare",
        f"--gin_file={CONFIG}",
        f"--model_dir={tmp_path / 'run'}",
        f"--gin.packages.Packages.folder='{missing}'",
    )
    assert re.search(r"packages\.Packages\.folder = .*missing'.*`make catalogues`", said.mistake)
    assert not [*tmp_path.rglob("manifest.json")]


@pytest.fixture(scope="module")
def installed() -> Packages:
    """The source of gin_configs/catalogues.gin."""
    if not Path(FOLDER).is_dir():
        pytest.skip("the packages are not there: `make catalogues`")
    made = experiment_of(CONFIG).data.corpus.opened_source
    assert isinstance(made, Packages)
    return made


def test_the_packages_may_be_used_by_anybody(installed: Packages) -> None:
    licences = installed.licences()
    assert len(licences) >= 10
    for package, licence in licences.items():
        assert re.search(r"\b(BSD|MIT|Apache)\b", licence), f"{package}: {licence}"
        assert not re.search(r"GPL|Commons", licence), f"{package}: {licence}"


def test_packages_are_catalogues_alone(installed: Packages) -> None:
    def code() -> Iterator[Path]:
        yield from Path(installed.folder).rglob("*.py")

    assert next(code(), None) is None


@pytest.mark.thorough
def test_no_test_sentence_is_in_any_languages_training_set(installed: Packages) -> None:
    held_out, trained = set(), set()
    for language in experiment_of(CONFIG).data.corpus.languages or ():
        sizes = {}
        for split, texts in (("train", trained), ("dev", held_out), ("test", held_out)):
            found = [normal(pair.english) for pair in installed.pairs(language, split)]
            assert len(found) == len(set(found))
            sizes[split] = len(found)
            texts.update(found)
        assert min(sizes.values()) > 20, (language, sizes)
    assert not held_out & trained
