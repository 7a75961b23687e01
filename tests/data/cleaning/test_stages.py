"""Each stage of cleaning drops and changes the right pairs."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fontTools.unicodedata import script as script_of
from hypothesis import given
from hypothesis import strategies as st

from m4.data.cleaning.chunk import Chunk, Digests, digests
from m4.data.cleaning.language_id import LanguageId, installed
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.overlap import Overlap
from m4.data.cleaning.script import Script
from m4.data.cleaning.stages import Duplicates, Empty, Identical, Length, LengthRatio
from m4.data.directions import key_of
from m4.data.scripts import likely_scripts_of, scripts_of
from m4.data.splits import normal
from tests.data.cleaning.cases import Listed, dropped, run

TEXT = st.text(max_size=12)
TEXTS = st.lists(TEXT, min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("text", "wanted", "reasons"),
    [
        ("cafe\u0301", "café", ("NFC",)),
        ("ﬁn ① Ａ", "ﬁn ① Ａ", ()),  # NFC leaves compatibility characters
        ("co\u00adop\u2060era\u200btion", "cooperation", ("invisible characters",)),
        ("a\x00b\x9fc\ufffe", "abc", ("control characters",)),
        ("one\r\ntwo\tthree\u2028", "one two three", ("line ends and tabs",)),
        ("\u202aabc\u202c", "abc", ("direction marks",)),
        # Where something is written from right to left, marks say how it is read.
        ("\u05e9\u05dc\u05d5\u05dd\u200f!", "\u05e9\u05dc\u05d5\u05dd\u200f!", ()),
        # Persian, Malayalam and emoji are shaped by joiners, Latin is not.
        ("می\u200cخواهم", "می\u200cخواهم", ()),
        ("\u0d28\u0d4d\u200d", "\u0d28\u0d4d\u200d", ()),
        ("Auf\u200clage \u200dx", "Auflage x", ("invisible characters",)),
        # Khmer divides words by zero-width spaces, English does not.
        ("ខ្ញុំ\u200bទៅ", "ខ្ញុំ\u200bទៅ", ()),
        ("  two  spaces  ", "  two  spaces  ", ()),  # the sources' business
    ],
)
def test_normalise(text: str, wanted: str, reasons: tuple[str, ...]) -> None:
    assert Normalise().fix(text) == (wanted, [*reasons])


@given(TEXTS)
def test_normalising_a_chunk_is_normalising_its_sentences(texts: list[str]) -> None:
    stage = Normalise()
    # A character that spoils and one that does not, so that both ways are gone.
    texts = [*texts, "e\u0301\u200b", "x"]
    chunk = Chunk(np.arange(len(texts)), texts, ["y"] * len(texts))
    check = stage.open(["gl"])("gl", "train")
    assert callable(check)
    found = check(chunk)
    english = found.chunk.first if found.chunk else texts
    assert english == [stage.fix(text)[0] for text in texts]
    assert english == [stage.fix(text)[0] for text in english], "done once is done"
    changed = [a != b for a, b in zip(texts, english, strict=True)]
    said = np.any([*found.change.values(), np.zeros(len(texts), bool)], axis=0)
    assert said.tolist() == changed


@given(TEXTS)
def test_digests_differ_where_normal_forms_do(texts: list[str]) -> None:
    texts = [*texts, "A  b", "ａ B", "", " ", "a\nb", "a b\u2028"]
    for keys in ([*map(normal, texts)], texts):
        pairs = list(zip(digests(keys).tolist(), keys, strict=True))
        assert len({d for d, _ in pairs}) == len({k for _, k in pairs}) == len(set(pairs))


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=12))
def test_a_set_of_digests_is_a_set(parts: list[list[int]]) -> None:
    made, wanted = Digests(), set[int]()
    for part in parts:
        numbers = np.array(part, np.uint64)
        assert made.contains(numbers).tolist() == [n in wanted for n in part]
        new = []
        for number in part:
            new.append(number not in wanted)
            wanted.add(number)
        assert made.add(numbers).tolist() == new
        assert len(made) == len(wanted)


def test_empty_and_length(tmp_path: Path) -> None:
    pairs = [("a", "b"), (" \u200b", "b"), ("a", "\u3164"), ("a", "…"), ("", "\u200f")]
    found = dropped(Empty(), pairs, tmp_path)
    assert found == {1: "empty: first side", 2: "empty: second side", 4: "empty: first side"}
    pairs = [("a" * 9, "b" * 9), ("a" * 10, "b"), ("a", "b" * 10)]
    found = dropped(Length(9), pairs, tmp_path)
    assert found == {1: "length: first side", 2: "length: second side"}


def test_identical_sentences_go_and_names_stay(tmp_path: Path) -> None:
    pairs = [
        ("Rio de Janeiro", "Rio de Janeiro"),  # three words
        ("It was not translated.", "it was  not translated."),
        ("It was translated here.", "Traduciuse aquí."),
    ]
    assert dropped(Identical(), pairs, tmp_path) == {1: "identical: both sides"}
    assert list(dropped(Identical(name_words=2), pairs, tmp_path)) == [0, 1]


def test_duplicates_are_those_of_a_set(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["a", "A", "b", "ｂ", "a  a", "a a"]
    pairs = [(rng.choice(words), rng.choice(words)) for _ in range(40)]
    for by in ("pair", "first", "second"):
        seen, seen_normal, wanted = set(), set(), {}
        what = "pair" if by == "pair" else f"{by} side"
        for row, pair in enumerate(pairs):
            key = pair if by == "pair" else (pair[by == "second"],)
            alike = tuple(map(normal, key))
            if key in seen:
                wanted[row] = f"duplicates: exact {what}"
            elif alike in seen_normal:
                wanted[row] = f"duplicates: normalised {what}"
            seen.add(key)
            seen_normal.add(alike)
        assert dropped(Duplicates(by, normalised=True), pairs, tmp_path) == wanted
        exact = {row: why for row, why in wanted.items() if "exact" in why}
        assert dropped(Duplicates(by), pairs, tmp_path) == exact
        assert 0 < len(exact) < len(wanted)


def test_length_ratio_by_hand(tmp_path: Path) -> None:
    # Translation / English: 20/10 for 60 pairs, so the median is 2 whatever the three below are.
    usual = [("e" * 10, f"{n:02}" + "f" * 18) for n in range(60)]
    # With slack 10, bound 2.5: English 30 wants from (30+10)/2.5-10 = 6 to (30+10)*2.5-10 = 90
    # English-long characters, twice as many of the translation: 12 to 180.
    odd = [("e" * 30, "f" * 12), ("e" * 30, "f" * 11), ("e" * 30, "f" * 180), ("e" * 30, "f" * 181)]
    found = dropped(LengthRatio(), usual + odd, tmp_path)
    assert found == {61: "length_ratio: second side too short",
                     63: "length_ratio: second side too long"}  # fmt: skip
    # The median of 49 pairs is not trusted.
    few = [*usual[:48], ("e" * 30, "f" * 400)]
    assert dropped(LengthRatio(), few, tmp_path) == {}
    _, ledger = run([LengthRatio()], Listed({("gl", "train"): few}), tmp_path)
    reason = "length_ratio: fewer than 50 pairs"
    assert ledger.count("en-gl", "train").not_checked == {reason: 49}


# Language, its text, another text and the side that is wrong: real strings of software, too.
SCRIPTS: list[tuple[str, str, str, str | None]] = [
    ("ru", "Hello", "Привет, мир 123!", None), ("ru", "Hello", "Privet, mir", "second"),
    ("gl", "Hello", "Привет", "second"), ("gl", "Hello", "o símbolo π", None),
    ("ja", "Hello", "今日はイカ", None), ("ko", "Hello", "안녕 漢字", None),
    ("zh", "Hello", "It is English 是", "second"), ("ar", "Hello", "שלום", "second"),
    ("srp_Cyrl", "Hello", "Zdravo", "second"), ("hi", "Hello", "👍 100%", None),
    # Names that the other side has, and what is still dropped.
    ("ru", "Download Firefox ESR", "Скачать Firefox ESR", None),
    ("ru", "Download Firefox", "Skačat Firefox", "second"),
    ("am", "Add another %(verbose_name)s", "ሌላ %(verbose_name)s ጨምር", None),
    ("he", "Enter a valid URL.", "Enter a valid URL.", "second"),
    ("he", "Enter the whole address", "Enter the address", None),  # three words: a title
    ("uk", "The PDF file", "Файл pdf", None),  # without case
    ("ru", "Say “привет мир”!", "Скажи «привет мир»!", None),
    ("ru", "Say “привет мир”!", "Скажи это!", "first"),
    # What a letter carries: each text has more Latin letters than others.
    ("zh", "Tom Hunter", "我是Thomas", None), ("ko", "The iPhone case", "Xphone 상자입니다", None),
    ("ru", "In Firefoxes", "в Mozillas", "second"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "english", "text", "wrong"), SCRIPTS)
def test_script(tmp_path: Path, code: str, english: str, text: str, wrong: str | None) -> None:
    wanted = {0: f"script: {wrong} side"} if wrong else {}
    assert dropped(Script(), [(english, text)], tmp_path, code=code) == wanted


def test_script_counts_as_a_loop_over_characters_does() -> None:
    rng = random.Random(1)
    letters, tenths = "abcхуж漢かאα١٢ 12.,́", {"Hani": 30, "Hira": 15, "Hebr": 13, "Arab": 12}
    texts = ["", *("".join(rng.choices(letters, k=rng.randint(0, 9))) for _ in range(300)), ""]
    stage, chunk = Script(), Chunk(np.arange(302), texts, ["1"] * 302)
    for scripts in (frozenset(["Latn"]), frozenset(["Cyrl"]), frozenset(["Hebr", "Arab"])):
        wanted = []
        for text in texts:
            sums = {"own": 0, "latin": 0, "other": 0}
            for script in map(script_of, text):
                kind = "latin" if script == "Latn" else "other"
                sums["own" if script in scripts else kind] += (
                    0 if script in ("Zyyy", "Zinh") else tenths.get(script, 10)
                )
            whole = sum(sums.values())
            wanted.append(sums["latin"] > 0.5 * whole or sums["other"] > 0.2 * whole)
        assert stage.wrong(chunk, "first", scripts).tolist() == wanted


def test_scripts_of_languages() -> None:
    assert scripts_of("ja") == scripts_of("jpn") == {"Hani", "Hira", "Kana"}
    assert scripts_of("en") == scripts_of("sr_Latn") == scripts_of("uzb_Latn") == {"Latn"}
    assert scripts_of("uzb_Cyrl") == {"Cyrl"}
    assert scripts_of("xal") is None, "not in m4's table"
    assert likely_scripts_of("xal") == {"Cyrl"}
    assert likely_scripts_of("qqq") is None


@pytest.mark.parametrize(
    ("scripts", "codes"),
    [
        ("Hani Bopo", "zh_CN zh_TW zh_HK zh_cn zh_tw zh_2 cmn_2 yue_HK"),
        ("Latn", "pt_BR pt_br pt_BR_2 az_AZ glg_2"),
        # CLDR: in Pakistan Punjabi is Arab, in Iran Azerbaijani too, in China Mongolian is Mong.
        ("Arab", "pa_PK pa_PK_2 az_IR"),
        ("Mong", "mn_CN"),
        ("Guru", "pa_IN pa_2"),
        ("Hani Hira Kana", "ja_JP jpn_2"),
    ],
)
def test_a_territory_does_not_hide_the_language(scripts: str, codes: str) -> None:
    for code in codes.split():
        assert scripts_of(code) is None, f"{code} names no script, so it is only likely"
        assert likely_scripts_of(code) == set(scripts.split()), code
    # A script does decide, whatever comes after it.
    assert scripts_of("zh_Hant_TW") == scripts_of("zh_Hans_2") == {"Hani", "Bopo"}
    assert scripts_of("pt_Cyrl_BR") == {"Cyrl"}


def test_a_likely_script_counts_where_most_of_the_text_has_it(tmp_path: Path) -> None:
    cyrillic, latin = ("Hello", "привет"), ("Hello", "privet")
    for code, right, wrong in (("xal", cyrillic, latin), ("pt_BR", latin, cyrillic)):
        assert list(dropped(Script(), [right] * 3 + [wrong], tmp_path, code=code)) == [3]
    _, ledger = run([Script()], Listed({("xal", "train"): [latin] * 3 + [cyrillic]}), tmp_path)
    count = ledger.count("en-xal", "train")
    assert count.kept == 4
    why = "script: most of the text is not in the language's likely script"
    assert count.not_checked == {why: 4}
    _, ledger = run([Script()], Listed({("qqq", "train"): [latin]}), tmp_path)
    unknown = "script: nothing is known of the language's script"
    assert ledger.count("en-qqq", "train").not_checked == {unknown: 1}


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
        ("gl", 2): "overlap: first side in test", ("gl", 3): "overlap: second side in test",
        ("gl", 4): "overlap: first side in dev", ("gl", 5): "overlap: first side in test",
        ("gl", 7): "overlap: first side in extra", ("gl", 8): "overlap: first side in news",
        ("gl", 9): "overlap: second side in news", ("gl", 10): "overlap: second side in extra",
        ("pt", 2): "overlap: first side in extra",
    }  # fmt: skip
    assert kept["pt", "train"] == [("z", "probado"), ("z", "da prensa")]
    assert ledger.count("en-gl", "dev").flagged == {"overlap: first side in test": 1}
    kept, _ = run([Overlap(sides=["first"])], source, tmp_path)
    assert ("z", "PROBADO") in kept["gl", "train"]


def test_overlap_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Overlap\.files = 'dev': must be another name"):
        Overlap(files={"dev": {}})
    (tmp_path / "bad").write_bytes(b"fine\n\xff\n")
    for name, said in (("gone", r"no such file \(Overlap\.files\)"), ("bad", "line 2: not UTF-8")):
        with pytest.raises(ValueError, match=f"{name}:? {said}|{name}: {said}"):
            Overlap(files={"news": {"gl": str(tmp_path / name)}}).open(["gl"])


class Vowels:
    """A made-up language identifier that looks at the first letter only."""

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
        ("Eng", "Por"),  # the same branch as Galician, with which identifiers confuse it
        ("Eng", "Unsure"),
        ("Eng", "De 12"),  # two letters
        ("Eng", "undetermined"),
    ]
    found = dropped(stage, pairs, tmp_path)
    assert found == {1: "language_id: second side", 2: "language_id: first side"}
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
    why = "overlap: first side in a translation of a test set"
    assert ledger.count("fr-wo", "train").dropped == {why: 1}
