"""The embedded corpus: its splits, its text, and that nothing but its arguments decides it."""

import hashlib
import os
import subprocess
import sys
from datetime import date

import pytest
from babel import Locale, dates, localedata, numbers

from m4.data.cldr.phrases import Phrases, english, normalise
from m4.data.cldr.tables import cldr_version
from m4.data.languages import LANGUAGES
from m4.data.sources import SPLITS, Pair, cldr
from m4.data.sources.cldr import Cldr, accept, atoms, held, inventory, power_law, split_of

SIZES = {"ru": 400, "de": 300, "gl": 60, "ckb": 40}
DAY = date(1961, 5, 18).toordinal()


@pytest.fixture(scope="module")
def corpus() -> Cldr:
    return Cldr(SIZES, test_pairs=40, dev_pairs=20)


@pytest.fixture(scope="module")
def big() -> Cldr:
    return Cldr({"ru": 3000}, test_pairs=100)


def texts(corpus: Cldr, language: str) -> str:
    """Returns all sentences of a language as one text."""
    pairs = [pair for split in SPLITS for pair in corpus.pairs(language, split)]
    return "\n".join("\t".join(pair) for pair in pairs)


def test_sizes_and_order(corpus):
    assert corpus.language_pairs() == [f"en-{code}" for code in SIZES]
    for language, size in SIZES.items():
        for split, count in (("train", size), ("dev", 20), ("test", 40)):
            pairs = list(corpus.pairs(language, split))
            assert len(pairs) == count
            assert len({pair.first for pair in pairs}) == count
            assert pairs == list(corpus.pairs(language, split))
            assert all(isinstance(pair, Pair) and all(pair) for pair in pairs)


def test_no_english_sentence_is_in_two_splits(corpus):
    sides = {
        split: {pair.first for language in SIZES for pair in corpus.pairs(language, split)}
        for split in SPLITS
    }
    assert not sides["train"] & (sides["dev"] | sides["test"])
    assert not sides["dev"] & sides["test"]
    assert all(split_of(text) == split for split, texts in sides.items() for text in texts)


def test_held_atoms_are_in_no_training_pair(big):
    assert not any(held("ru", atom) for _, atoms in big._of("en-ru", "train") for atom in atoms)
    assert any(held("ru", atom) for _, atoms in big._of("en-ru", "test") for atom in atoms)
    # One in 16 of about 2,000: 125, with a standard deviation of 11.
    known = [atom for kind in inventory().values() for spec in kind for atom in atoms(spec)]
    share = sum(held("ru", atom) for atom in known) / len(known)
    assert 1 / 16 - 0.03 < share < 1 / 16 + 0.03
    assert {a for a in known if held("ru", a)} != {a for a in known if held("de", a)}


def test_seen_marks_the_sentences_whose_atoms_are_trained_on(corpus):
    for language in SIZES:
        trained = {atom for _, atoms in corpus._of(language, "train") for atom in atoms}
        seen = corpus.subsets(language, "test")["seen"]
        assert seen == [trained >= {*atoms} for _, atoms in corpus._of(language, "test")]


def test_the_text_does_not_depend_on_what_is_asked_first(corpus):
    other = Cldr(dict(reversed(SIZES.items())), test_pairs=40, dev_pairs=20)
    list(other.pairs("en-ckb", "test"))
    for language in reversed(SIZES):
        assert texts(other, language) == texts(corpus, language)
    alone = Cldr({"gl": 60}, test_pairs=40, dev_pairs=20)
    assert texts(alone, "gl") == texts(corpus, "gl")


def test_the_seed_decides(corpus):
    other = Cldr(SIZES, seed=1, test_pairs=40, dev_pairs=20)
    assert texts(other, "gl") != texts(corpus, "gl")
    assert other.identity() != corpus.identity()
    assert Cldr(SIZES, test_pairs=40, dev_pairs=20).identity() == corpus.identity()
    assert corpus.identity()["cldr"] == cldr_version()


def test_generator_version():
    # When this fails, the text has changed: raise GENERATOR with it, so that nothing that was
    # computed from the old text is taken for the new one's.
    corpus = Cldr({"ru": 50, "gl": 50, "fa": 50, "ja": 50}, test_pairs=20, dev_pairs=10)
    whole = "\n".join(texts(corpus, language) for language in corpus.language_pairs())
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    assert (cldr.GENERATOR, cldr_version(), digest) == (1, "47", "0a11d50b67d25b8c")


def test_power_law():
    # n(rank) = 5000 * (120 / 5000)^((rank - 1) / 136): rank 2 5000 * 0.97295 = 4864.8.
    sizes = power_law(5000, 120)
    assert [sizes[code] for code in ("es", "fr", "de", "gl", "ce")] == [5000, 4865, 4733, 542, 120]
    assert sum(sizes.values()) == 180_512
    assert Cldr().sizes == sizes


def test_at_least_100_languages_yield_pairs():
    corpus = Cldr(dict.fromkeys(LANGUAGES, 8), test_pairs=8, dev_pairs=4)
    for language in LANGUAGES:
        pairs = [pair for split in SPLITS for pair in corpus.pairs(language, split)]
        assert len(pairs) == 20
        assert all(accept(*pair) for pair in pairs)
    assert len(corpus.language_pairs()) == 137


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sizes": {"sr_Cyrl": 5}}, "Cldr.sizes = 'sr_Cyrl': must be a language .*sr_Latn"),
        ({"sizes": {"1234": 5}}, "Cldr.sizes = '1234': .*es, fr"),
        ({"sizes": {"gl": 2.5}}, "Cldr.sizes = .*2.5.*1 to 10,000,000"),
        ({"largest": 10, "smallest": 20}, r"Cldr.smallest = 20: .*Cldr.largest, 10"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        Cldr(**arguments)


def test_requests_that_cannot_be_met(corpus, monkeypatch):
    with pytest.raises(ValueError, match=r"'fr': Cldr\.sizes has only ru, de, gl, ckb"):
        corpus.pairs("en-fr", "train")
    monkeypatch.setattr(cldr, "PATIENCE", 100)
    with pytest.raises(ValueError, match=r"ce has \d+ train pairs, not 50000: lower Cldr.s"):
        Cldr({"ce": 50_000}).pairs("en-ce", "train")
    with pytest.raises(ValueError, match=r"ce has \d+ dev pairs, not 300: lower Cldr.dev_p"):
        Cldr({"ce": 5}, dev_pairs=300).pairs("en-ce", "dev")


EXAMPLES = [
    ("gl", ("date", "full", DAY), "Thursday, May 18, 1961", "xoves, 18 de maio de 1961"),
    ("gl", ("rate", "length-kilometer", 5, "duration-hour"), None, "5 quilómetros por hora"),
    ("gl", ("ago", "week", "past", 3), "3 weeks ago", "hai 3 semanas"),
    ("gl", ("big", 5, 6), "5 million", "5 millóns"),
    ("ru", ("money", "CHF", 21), "21 Swiss francs", "21 швейцарский франк"),
    ("sc", ("lang", "sc"), "Sardinian", "sardu"),
    ("gl", ("zcity", "Brasilia", "standard", "Asia/Riyadh"),
     "Brasilia Standard Time (Riyadh)", "hora estándar de Brasilia (Riad)"),
    ("de", ("span", "MMMd", DAY, DAY + 8), "May 18 – 26", "18.–26. Mai"),
    ("hi", ("qty", "length-meter", 1234567), "1,234,567 meters", "12,34,567 मीटर"),
    ("gsw", ("list", "standard", (("terr", "HU"), ("terr", "BA"), ("terr", "CG"))),
     "Hungary, Bosnia & Herzegovina, and Congo - Brazzaville",
     "Ungarn, Bosnie und Herzegowina und Kongo"),
    ("de", ("list", "or", (("terr", "DE"), ("terr", "FR"))), None, "Deutschland oder Frankreich"),
    # Quoted words in patterns are words, two of them together too.
    ("sc", ("span", "yMMMM", 717739, 717862), None, "freàrgiu–làmpadas de su 1966"),
    # Day periods: 00:12 is before dawn.
    ("zh_Hant", ("at", "long", DAY, 12), None, "1961年5月18日 凌晨12:12"),
    # Arabic has a dual that is a separate word, without a number.
    ("ar", ("qty", "duration-day", 2), "2 days", "يومان"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "spec", "in_english", "translation"), EXAMPLES)
def test_examples(language, spec, in_english, translation):
    assert Phrases(language).render(spec) == translation
    if in_english:
        assert english().render(spec) == in_english


@pytest.mark.parametrize(
    ("language", "spec"),
    [
        ("yi", ("qty", "length-meter", 3)),  # root has "{0} m"
        ("ko", ("at", "long", DAY, 700)),  # root has "AM"
        ("gl", ("terr", "XX")),
    ],
)
def test_fallbacks_to_root_or_english_are_no_data(language, spec):
    assert Phrases(language).render(spec) is None


ZEROS = "fa۰ bn০ mr० my၀ sd٠ ar0"


@pytest.mark.parametrize(("language", "zero"), [(one[:2], one[2]) for one in ZEROS.split()])
def test_native_digits(language, zero):
    digits = [chr(ord(zero) + digit) for digit in range(10)]
    specs = ("date", "long", DAY), ("qty", "length-meter", 25)  # 18 May 1961
    day, metres = (Phrases(language).render(spec) or "" for spec in specs)
    assert sorted(filter(str.isdigit, day)) == sorted(digits[n] for n in (1, 8, 1, 9, 6, 1))
    assert digits[2] + digits[5] in metres


def test_normalise():
    spaces_and_marks = "\u200f12\u202f345\xa0kg\u2009–\u2009\u061c7\u2066 a\u00adb\u2069 "
    assert normalise(spaces_and_marks) == "12 345 kg – 7 ab"
    assert normalise("می\u200cخواهم") == "می\u200cخواهم"  # a letter's form: spelling


def test_no_english_name_has_two_meanings():
    names = [english().render(spec) for kind in inventory().values() for spec in kind]
    folded = {name.casefold() for name in names if name}
    assert len(folded) == len(names) > 1900


def test_accept():
    assert accept("Thursday, May 18", "xoves, 18 de maio")
    assert accept("2.5 meters", "2.5 m")  # letters, though no word
    assert not accept("Afar and Iban", "AFAR AND IBAN")
    assert not accept("May 18, 1961", "18.05.1961")  # no letters
    assert not accept("Congo - Kinshasa", "Kongo-Kinshasa")  # one of two words
    assert accept("Congo - Kinshasa", "Kongo, Demokratische Republik Kinshasa")  # one of four
    assert not accept("Spain", "Españ" + "a" * 120)


# Babel's shared tables

RENDER = """
import sys
from babel import dates
from m4.data.sources.cldr import Cldr
if "poisoned" in sys.argv:
    # Resolves an alias of root in place: Babel's German stand-alone months are Japanese now.
    dates.get_month_names("wide", "stand-alone", "ja")
    assert dates.get_month_names("wide", "stand-alone", "de")[5] == "5月", "Babel is mended"
codes = [code for code in sys.argv[1:] if code != "poisoned"]
corpus = Cldr({code: 300 for code in codes}, test_pairs=30, dev_pairs=10)
for code in codes:
    pairs = [pair for split in ("train", "dev", "test") for pair in corpus.pairs(code, split)]
sys.stdout.buffer.write(repr(pairs).encode())
"""


def fresh_process(*codes: str, hash_seed: str) -> bytes:
    """Returns the last of the languages `codes`, made in this order by a new interpreter."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", RENDER, *codes]
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def test_no_language_contaminates_another():
    language = "de"
    alone = fresh_process(language, hash_seed="1")
    assert alone.count(b"Pair(") == 340
    assert fresh_process("ja", "he", "zh", language, hash_seed="2") == alone
    assert fresh_process("poisoned", "ja", language, hash_seed="3") == alone


@pytest.fixture
def babel(monkeypatch):
    """Gives Babel an empty cache during the test."""
    monkeypatch.setattr(localedata, "_cache", {})


def test_the_corpus_leaves_babel_alone(babel):
    dates.format_date(date(1961, 5, 18), locale="fr")
    cached = dict(localedata._cache)
    Phrases("de")
    assert localedata._cache.keys() == cached.keys()
    assert all(localedata._cache[name] is tables for name, tables in cached.items())


@pytest.mark.parametrize("language", ["de", "gl", "ru", "fi", "cy", "am", "vi"])
def test_dates_and_amounts_are_babels(language, babel):
    phrases = Phrases(language)
    locale = Locale.parse(language)
    for ordinal in range(DAY, DAY + 400, 37):
        day = date.fromordinal(ordinal)
        for name in ("full", "long", "medium"):
            expected = dates.format_date(day, name, locale)
            assert phrases.render(("date", name, ordinal)) == normalise(expected)
        for skeleton in ("MMMEd", "yMMMd"):
            later = date.fromordinal(ordinal + 9)
            expected = dates.format_interval(day, later, skeleton, fuzzy=False, locale=locale)
            got = phrases.render(("span", skeleton, ordinal, ordinal + 9))
            assert got in (None, normalise(expected))
        amount = ordinal - DAY  # 0, 37 ... 370
        expected = numbers.format_currency(
            amount, "CHF", locale=locale, format_type="name", currency_digits=False
        )
        assert phrases.render(("money", "CHF", amount)) == normalise(expected)
