"""Each stage of cleaning drops and changes the right pairs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from fontTools.unicodedata import script as script_of
from hypothesis import given
from hypothesis import strategies as st

from m4.data.cleaning.chunk import Chunk, Digests, both, digests
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.script import Script
from m4.data.cleaning.stages import Duplicates, Empty, Identical, Length, LengthRatio
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
        ("\ufeffola", "ola", ("invisible characters",)),
        ("co\u00adop\u2060era\u200btion", "cooperation", ("invisible characters",)),
        ("a\x00b\x9fc\ufffe", "abc", ("control characters",)),
        ("a\ud800b", "ab", ("control characters",)),
        ("one\r\ntwo\tthree\u2028", "one two three", ("line ends and tabs",)),
        ("a \u200e b", "a b", ("direction marks",)),
        ("\u202aabc\u202c", "abc", ("direction marks",)),
        # Where something is written from right to left, marks say how it is read.
        ("\u05e9\u05dc\u05d5\u05dd\u200f!", "\u05e9\u05dc\u05d5\u05dd\u200f!", ()),
        # Persian, Malayalam and emoji are shaped by joiners, Latin is not.
        ("می\u200cخواهم", "می\u200cخواهم", ()),
        ("\u0d28\u0d4d\u200d", "\u0d28\u0d4d\u200d", ()),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧", ()),
        ("Auf\u200clage \u200dx", "Auflage x", ("invisible characters",)),
        # Khmer divides words by zero-width spaces, English does not.
        ("ខ្ញុំ\u200bទៅ", "ខ្ញុំ\u200bទៅ", ()),
        ("  two  spaces  ", "  two  spaces  ", ()),  # the sources' business
    ],
)
def test_normalise(text: str, wanted: str, reasons: tuple[str, ...]) -> None:
    fixed = Normalise().fix(text)
    assert fixed == (wanted, reasons)


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
    assert english == [stage.fix(text).text for text in texts]
    assert english == [stage.fix(text).text for text in english], "done once is done"
    changed = [a != b for a, b in zip(texts, english, strict=True)]
    said = np.any([*found.change.values(), np.zeros(len(texts), bool)], axis=0)
    assert said.tolist() == changed


@given(TEXTS)
def test_digests_differ_where_normal_forms_do(texts: list[str]) -> None:
    texts = [*texts, "A  b", "ａ B", "", " ", "a\nb", "a b\u2028"]
    for keys in ([*map(normal, texts)], texts):
        pairs = list(zip(digests(keys).tolist(), keys, strict=True))
        assert len({d for d, _ in pairs}) == len({k for _, k in pairs}) == len(set(pairs))


def test_digests_are_the_same_on_every_machine() -> None:
    # Not stored, but a test set's digests must not change with the other texts around.
    alone, together = digests(["casa"]), digests(["", "río", "casa"])
    assert alone[0] == together[2]
    assert alone[0] == digests(["casa"])[0] != digests(["asac"])[0]
    assert len(set(both(digests(["a", "b"]), digests(["b", "a"])).tolist())) == 2, "sides differ"


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


def test_empty(tmp_path: Path) -> None:
    pairs = [("a", "b"), (" \u200b", "b"), ("a", "\u3164"), ("a", "…"), ("", "\u200f")]
    assert dropped(Empty(), pairs, tmp_path) == {
        1: "empty: first side",
        2: "empty: second side",
        4: "empty: first side",
    }


def test_length(tmp_path: Path) -> None:
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


def test_duplicates_are_of_one_language_and_split(tmp_path: Path) -> None:
    same = [("a", "b")]
    source = Listed({("gl", "train"): same, ("pt", "train"): same, ("gl", "dev"): same * 2})
    kept, ledger = run([Duplicates()], source, tmp_path)
    assert kept["gl", "train"] == kept["pt", "train"] == same
    assert ledger.count("en-gl", "dev").flagged == {"duplicates: exact pair": 1}


def test_length_ratio_by_hand(tmp_path: Path) -> None:
    # Translation / English: 20/10 for 60 pairs, so the median is 2 whatever the three below are.
    usual = [("e" * 10, f"{n:02}" + "f" * 18) for n in range(60)]
    # With slack 10, bound 2.5: English 30 wants from (30+10)/2.5-10 = 6 to (30+10)*2.5-10 = 90
    # English-long characters, twice as many of the translation: 12 to 180.
    odd = [("e" * 30, "f" * 12), ("e" * 30, "f" * 11), ("e" * 30, "f" * 180), ("e" * 30, "f" * 181)]
    found = dropped(LengthRatio(), usual + odd, tmp_path)
    assert found == {61: "length_ratio: second side too short",
                     63: "length_ratio: second side too long"}  # fmt: skip
    # In bytes й is 2 and the median 4; the same English wants 24 to 360 bytes.
    wide = [("e" * 10, "й" * 20) for _ in range(60)] + [("e" * 30, "й" * 11), ("e" * 30, "й" * 12)]
    assert list(dropped(LengthRatio(unit="bytes"), wide, tmp_path)) == [60]
    # Of 49 pairs the median is not trusted.
    few = [*usual[:48], ("e" * 30, "f" * 400)]
    assert dropped(LengthRatio(), few, tmp_path) == {}
    _, ledger = run([LengthRatio()], Listed({("gl", "train"): few}), tmp_path)
    reason = "length_ratio: fewer than 50 pairs"
    assert ledger.count("en-gl", "train").not_checked == {reason: 49}


@pytest.mark.parametrize(
    ("code", "english", "text", "wrong"),
    [
        *(
            (code, "Hello", text, "second" if is_wrong else None)
            for code, text, is_wrong in (
                ("ru", "Привет, мир 123!", False),
                ("ru", "Privet, mir", True),
                ("ru", "Компания IBM", False),
                ("gl", "Ola, mundo", False),
                ("gl", "Привет", True),
                ("gl", "o símbolo π", False),
                ("ja", "今日はイカ", False),
                ("ko", "안녕 漢字", False),
                ("zh", "Allen是个诗人", False),
                ("zh", "It is English 是", True),
                ("ar", "مرحبا", False),
                ("ar", "שלום", True),
                ("srp_Cyrl", "Zdravo", True),
                ("hi", "👍 100%", False),
            )
        ),
        # Names that the other side has: real strings of software, and what is still dropped.
        ("ru", "Download Firefox ESR", "Скачать Firefox ESR", None),
        ("ru", "Download Firefox", "Skačat Firefox", "second"),
        ("am", "Add another %(verbose_name)s", "ሌላ %(verbose_name)s ጨምር", None),
        ("he", "IPv4 or IPv6 address of HTTP", "IPv4 או IPv6 של HTTP", None),
        ("km", "The URL of Wikimedia Commons", "URL នៃ Wikimedia Commons", None),
        ("he", "Enter a valid URL.", "Enter a valid URL.", "second"),
        ("he", "Enter the whole address", "Enter the address", None),  # three words: a title
        ("uk", "The PDF file", "Файл pdf", None),  # without case
        ("ru", "Use Greek letters: α β γ δ", "α β γ δ: греческие", None),
        ("ru", "Say “привет мир”!", "Скажи «привет мир»!", None),
        ("ru", "Say “привет мир”!", "Скажи это!", "first"),
        # What a letter carries: each text has more Latin letters than others.
        ("zh", "Tom Hunter", "我是Thomas", None),
        ("ko", "The iPhone case", "Xphone 상자입니다", None),
        ("ru", "In Firefoxes", "в Mozillas", "second"),
    ],
)
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
    found = dropped(Script(scripts={"xal": ["Cyrl"]}), [latin] * 3 + [cyrillic], tmp_path, "xal")
    assert list(found) == [0, 1, 2]
    _, ledger = run([Script()], Listed({("qqq", "train"): [latin]}), tmp_path)
    unknown = "script: nothing is known of the language's script"
    assert ledger.count("en-qqq", "train").not_checked == {unknown: 1}
    with pytest.raises(ValueError, match=r"Script\.scripts\['gl'\] = \['Jpan'\]: must be a list"):
        Script(scripts={"gl": ["Jpan"]})
