"""Overlap with test sets; language identification."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from m4.data.cleaning.language_id import PACKAGE, LanguageId, installed
from m4.data.cleaning.overlap import Overlap
from m4.data.directions import key_of
from tests.data.cleaning.cases import Listed, dropped, run


def test_overlap_of_both_sides_with_every_test_set(tmp_path: Path) -> None:
    (tmp_path / "news.gl").write_text("Da prensa\n\n", encoding="utf-8")
    (tmp_path / "news.en").write_bytes(b"\xef\xbb\xbfFrom THE press\r\n")
    extra = Listed({("gl", "test"): [("Elsewhere", "Noutro sitio")], ("gl", "dev"): [("x", "y")]})
    stage = Overlap(
        sources={"extra": extra},
        files={"news": {"gl": str(tmp_path / "news.gl"), "en": [str(tmp_path / "news.en")]}},
    )
    source = Listed(
        {
            ("gl", "test"): [("Tested", "Probado")],
            ("gl", "dev"): [("Dev", "Des"), ("tested", "outro")],
            ("pt", "test"): [("In Portuguese", "Em português")],
            ("gl", "train"): [
                ("Kept", "Fica"),
                ("Ｔested", "x"),  # full width
                ("z", "PROBADO"),
                ("dev", "x"),
                ("in  portuguese", "x"),  # English of another language's test set
                ("z", "em português"),  # a translation counts in its own language
                ("elsewhere", "z"),
                ("from the press", "z"),
                ("z", "da prensa"),
                ("z", "Y"),
            ],
            ("pt", "train"): [("z", "probado"), ("x", "z"), ("z", "da prensa")],
        }
    )
    reasons: dict[tuple[str, int], str] = {}
    kept, ledger = run([stage], source, tmp_path, on_drop=lambda why, code, split, number, pair:
                       reasons.update({(key_of(code), number): why}))  # fmt: skip
    assert reasons == {
        ("gl", 2): "overlap: first side in test",
        ("gl", 3): "overlap: second side in test",
        ("gl", 4): "overlap: first side in dev",
        ("gl", 5): "overlap: first side in test",
        ("gl", 7): "overlap: first side in extra",
        ("gl", 8): "overlap: first side in news",
        ("gl", 9): "overlap: second side in news",
        ("gl", 10): "overlap: second side in extra",
        ("pt", 2): "overlap: first side in extra",
    }
    assert kept["pt", "train"] == [("z", "probado"), ("z", "da prensa")]
    assert ledger.count("en-gl", "dev").flagged == {"overlap: first side in test": 1}
    kept, _ = run([Overlap(sides=["first"])], source, tmp_path)
    assert ("z", "PROBADO") in kept["gl", "train"]


def test_overlap_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Overlap\.sides = 'english': must be a list"):
        Overlap(sides="english")
    with pytest.raises(ValueError, match=r"Overlap\.files = 'dev': must be another name"):
        Overlap(files={"dev": {}})
    gone = Overlap(files={"news": {"gl": str(tmp_path / "gone")}})
    for use in (gone.identity, lambda: gone.open(["gl"])):
        with pytest.raises(ValueError, match=r"gone: no such file \(Overlap\.files\)"):
            use()
    (tmp_path / "bad").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match="bad line 2: not UTF-8"):
        Overlap(files={"news": {"gl": str(tmp_path / "bad")}}).open(["gl"])


def test_the_identity_of_overlap_is_that_of_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "news"
    made = []
    for text in ("a\n", "b\n", "a\n"):
        path.write_text(text)
        made.append(Overlap(files={"news": {"en": str(path)}}).identity())
    assert made[0] == made[2] != made[1]


class Vowels:
    """An identifier that goes by the first letter: it is made up."""

    def languages(self) -> set[str]:
        return {"en", "gl", "pt", "de"}

    def identify(self, text: str) -> tuple[str, float]:
        return {"E": ("en", 1.0), "G": ("gl", 1.0), "P": ("pt", 1.0), "D": ("de", 0.95),
                "U": ("de", 0.5)}.get(text[0], ("und", 1.0))  # fmt: skip

    def identity(self) -> dict[str, Any]:
        return {"made": "up"}


def test_language_id(tmp_path: Path) -> None:
    stage = LanguageId(least_letters=3, identifier=Vowels)
    pairs = [
        ("Eng", "Gal"),
        ("Eng", "Deu"),
        ("Gal", "Gal"),
        ("Eng", "Por"),  # of Galician's branch: identifiers mistake one for the other
        ("Eng", "Unsure"),
        ("Eng", "De 12"),  # two letters
        ("Eng", "undetermined"),
    ]
    assert dropped(stage, pairs, tmp_path) == {
        1: "language_id: second side",
        2: "language_id: first side",
    }
    assert stage.identity()["identifier"] == {"made": "up"}
    _, ledger = run([stage], Listed({("eu", "train"): pairs}), tmp_path)
    why = "language_id: the identifier does not know the language"
    assert ledger.count("en-eu", "train").not_checked == {why: 7}


def test_language_id_that_is_not_installed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m4.data.cleaning.language_id.installed", lambda: False)
    kept, ledger = run([LanguageId()], Listed({("gl", "train"): [("a", "b")]}), tmp_path)
    assert kept["gl", "train"] == [("a", "b")]
    (why,) = ledger.count("en-gl", "train").not_checked
    assert why == "language_id: py3langid is not installed (`make langid`)"
    assert LanguageId().identity()["identifier"] is None


@pytest.mark.skipif(not installed(), reason="py3langid is not installed: `make langid`")
def test_py3langid(tmp_path: Path) -> None:
    german = "Das ist ein ganz gewöhnlicher deutscher Satz über das Wetter."
    english = "This is quite an ordinary sentence about the weather."
    pairs = [(english, german), (english, english), (german, german)]
    assert sorted(dropped(LanguageId(), pairs, tmp_path, code="de")) == [1, 2]


def test_cleaning_sees_what_make_langid_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "langid" not in one])
    if installed():
        pytest.skip("py3langid is among Python's own packages")
    package = tmp_path / "share" / "m4" / "langid" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert installed()


def test_translations_of_test_sentences_leave_pairs_without_english(tmp_path: Path) -> None:
    """A test sentence's French, known from en-fr's training text, is overlap in fr-wo."""
    source = Listed(
        {
            ("gl", "test"): [("A test", "Unha proba")],
            ("fr", "train"): [("A test", "Un essai"), ("Bread", "Du pain")],
            ("fr-wo", "train"): [("Un essai", "x"), ("Du pain", "mburu"), ("Autre", "y")],
            ("gl-wo", "train"): [("Unha proba", "z"), ("Pan", "mburu")],
        }
    )
    kept, ledger = run([Overlap()], source, tmp_path)
    assert kept["fr", "train"] == [("Bread", "Du pain")]
    assert kept["fr-wo", "train"] == [("Du pain", "mburu"), ("Autre", "y")]
    assert kept["gl-wo", "train"] == [("Pan", "mburu")]
    assert ledger.count("fr-wo", "train").dropped == {
        "overlap: first side in a translation of a test set": 1
    }
