"""`m4 data cleaning_report`: the counts of a build, and a list of what is dropped."""

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from m4.data.cleaning import clean
from m4.data.cleaning.chunk import chunks
from m4.data.cleaning.english_side import NO_ENGLISH, SWAPPED, EnglishSides
from m4.data.cleaning.ledger import Ledger
from m4.data.corpus import CorpusSpec
from m4.data.inspection import cleaning_report
from m4.data.inspection.cleaning_report import PIECES, clean_corpus
from m4.data.sources import SPLITS, Pair
from m4.data.sources.cldr import Cldr
from m4.data.sources.tsv import Tsv
from m4.settings import InputError
from tests.command_line import TINY, m4
from tests.data import folders
from tests.data.cleaning.cases import Listed

LONG = ("12345678901234567890123456789", "x")  # digits are separate pieces
SETTINGS: dict[str, Any] = {"vocabulary_size": 320, "lengths": {"inputs": 24, "targets": 24}}


@pytest.fixture
def spec() -> CorpusSpec:
    pairs = [(f"word {n}", f"drow {n}") for n in range(60)]
    evil = ("<script>alert(1)</script>", "مرحبا\u202e")
    source = Listed(
        {
            ("gl", "train"): [*pairs, LONG, pairs[3], ("tested", "y"), LONG, ("a", " ")],
            ("gl", "test"): [("Tested", "z"), ("98765432109876543210987654321", "w")],
            ("ar", "train"): [*pairs, evil, evil, ("\u200b", "&")],
        }
    )
    return CorpusSpec(source, **SETTINGS)


def test_it_counts_as_the_build_does(spec: CorpusSpec, tmp_path: Path) -> None:
    before = clean_corpus(spec, tmp_path / "c")
    assert not (tmp_path / "c").exists(), "nothing is made"
    for splits in before.counts.values():
        for count in splits.values():
            assert count.not_checked["pieces: not tokenized yet"] == count.kept
    made = spec.build(tmp_path / "c")
    after = clean_corpus(spec, tmp_path / "c")
    assert after.as_json() == made.ledger().as_json() == made.manifest["ledger"]
    assert after.count("en-gl", "train").dropped == {
        "empty: second side": 1, "duplicates: exact pair": 2, "overlap: first side in test": 1,
        PIECES: 1,
    }  # fmt: skip
    for pair, splits in after.counts.items():
        for split, count in splits.items():
            assert count.kept == made.size(pair, split) == len(list(made.pairs(pair, split)))
            assert count.read == count.kept + sum(count.dropped.values())
    assert after.count("en-gl", "test").flagged == {PIECES: 1}
    other = clean_corpus(spec, tmp_path / "c", clean.thorough())
    assert other.count("en-gl", "train").not_checked["pieces: not tokenized yet"]


def test_what_is_dropped_can_be_listed(spec: CorpusSpec, tmp_path: Path) -> None:
    path, files = tmp_path / "dropped.jsonl.gz", []
    for reason in ("", "", "overlap"):
        with cleaning_report.listing(path, reason) as on_drop:
            ledger = clean_corpus(spec, tmp_path / "c", on_drop=on_drop)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    rows = [json.loads(line) for line in gzip.decompress(files[0]).splitlines()]
    assert len(rows) == sum(ledger.total().dropped.values()) == 6
    assert {"reason": "duplicates: exact pair", "languages": "en-gl", "split": "train", "pair": 62,
            "first": "word 3", "second": "drow 3"} in rows  # fmt: skip
    (row,) = [json.loads(line) for line in gzip.decompress(files[2]).splitlines()]
    assert (row["reason"], row["first"]) == ("overlap: first side in test", "tested")


def test_the_report_is_the_ledger_whatever_the_text(spec: CorpusSpec, tmp_path: Path) -> None:
    ledger = clean_corpus(spec, tmp_path / "c", clean.thorough())
    path, _ = cleaning_report.write_report(tmp_path, ledger)
    report = json.loads(path.read_text(encoding="utf-8"))
    assert Ledger.from_json(report).as_json() == ledger.as_json()
    assert (report["total"]["train"]["read"], report["stages_not_run"]) == (128, [])


def test_the_page_has_the_tables_and_escapes_text(tmp_path: Path) -> None:
    ledger, evil = Ledger({"script": {}}), "<script>alert(1)</script>"
    count = ledger.count("en-gl", "train")
    count.read = count.kept = 4000
    count.drop(evil, 3999)
    html = cleaning_report.write_report(tmp_path, ledger)[1].read_text(encoding="utf-8")
    assert not re.search("<(script|img|link|iframe|a|object)\\b", html), "shown, not run"
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3  # a row, a column, a warning
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in html
    for words in ("1 of 4,000 training pairs", "By reason", "Training pairs by language", "3,999",
                  "gl Galician", "100% of the training pairs", "Stages not run: "):  # fmt: skip
        assert words in html


def test_warnings_name_what_deserves_a_look() -> None:
    ledger = Ledger({"language_id": {}})
    for code, dropped in (("gl", 21), ("pt", 100), ("es", 20), ("en_GB", 0)):
        count = ledger.count(f"en-{code}", "train")
        count.read = count.kept = 100
        count.drop("script: second side", dropped)
    ledger.count("en-gl", "dev").flagged["overlap: first side in test"] = 3
    ledger.count("en-es", "train").not_checked["language_id: py3langid is not installed"] = 80
    said = cleaning_report.warnings(ledger)
    for line, words in zip(
        said,
        ("(en_GB): English on both sides", "Galician (gl): 21% of the training pairs are dropped",
         "Portuguese (pt): no training pair is left", "3 dev pairs", "the stage did not run"),
        strict=True,
    ):  # fmt: skip
        assert words in line


def test_reversed_columns_are_found(tmp_path: Path) -> None:
    source = Tsv(folders.tsv(tmp_path / "corpus", swapped="gl"))
    ledger = clean_corpus(CorpusSpec(source), tmp_path)
    assert [code for code in ledger.counts if ledger.count(code, "train").flagged] == ["en-gl"]
    assert ledger.count("en-gl", "train").flagged[f"languages: {SWAPPED}"] == 82
    (said,) = [line for line in cleaning_report.warnings(ledger) if "English is on" in line]
    assert said.startswith("Galician (gl), train, dev, test: English is on the side of the tra")
    swapped = Tsv(folders.tsv(tmp_path / "swapped", swapped="gl fy pt"), english_column=2)
    assert not clean_corpus(CorpusSpec(swapped), tmp_path).total().flagged
    assert next(iter(swapped.pairs("en-gl", "test"))) == folders.pairs("gl")[0]
    assert swapped.identity() != Tsv(tmp_path / "swapped").identity()


def test_no_right_column_is_taken_for_reversed() -> None:
    sides = EnglishSides()
    source = Cldr({"hr": 300, "bs": 300, "de": 300, "ru": 300, "ja": 300})
    for code, split in itertools.product(source.language_pairs(), SPLITS):
        sides.read(code, split, chunks(source.pairs(code, split)))
    sides.read("en-gl", "train", chunks([Pair(f"w{n}", f"w{n}") for n in range(90)]))
    assert not sides.found()
    assert {sides.english(code, "train") for code in source.language_pairs()} <= {"first", None}
    assert sides.english("en-gl", "train") is None


def test_another_language_in_the_place_of_english_is_found() -> None:
    """Letters or frequent words show it; if the translation is English, sides are swapped."""
    texts = {
        "de": "Der Hund und die Katze sind nicht da.", "it": "Il cane e il gatto non sono qui.",
        "fi": "Se on minun, ja hän ei ole siellä.", "ru": "Собака и кошка дома.",
        "ja": "犬と猫は家にいます。", "ar": "الكلب والقطة في البيت.",
    }  # fmt: skip
    sides, right = EnglishSides(), "They were there with the dog and the cat."
    for code, text in texts.items():
        for split, translation in (("train", "w0 w1 w2 w3"), ("test", right)):
            pairs = (Pair(f"{n} {text}", f"{n} {translation}") for n in range(90))
            sides.read(f"en-{code}", split, chunks(pairs))
    found = sides.found()
    assert found == {
        (f"en-{code}", split): said
        for code in texts
        for split, said in (("train", NO_ENGLISH), ("test", SWAPPED))
    }


def test_a_side_without_english_that_is_another_language_is_found() -> None:
    """The side is English, or in another language's letters; Latin letters prove nothing."""
    english, greek = "They were there with the dog and the cat.", "Ο σκύλος και η γάτα είναι εδώ."
    other, sides = "Wax na ko ni xale yi dem nanu.", EnglishSides()
    for pair, texts in {
        "el-fr": (greek, other), "el-wo": (greek, english), "fr-wo": (other, english),
        "el-es": (other, greek), "es-wo": (other, other),
    }.items():  # fmt: skip
        pairs = (Pair(*(f"{n} {text}" for text in texts)) for n in range(90))
        sides.read(pair, "train", chunks(pairs))
    assert {pair: said for (pair, _), said in sides.found().items()} == {
        "el-wo": "the text of wo is English",
        "fr-wo": "the text of wo is English",
        "el-es": "the text of el is not in the letters of Greek",
    }


def test_pairs_in_another_language_than_english_build_no_corpus(tmp_path: Path) -> None:
    for split in SPLITS:
        lines = (f"der Hund und die Katze {split}{n}\to gato e non o {split}{n}" for n in range(30))
        (tmp_path / f"fr.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^en-fr, test: the text of en is not Engl"):
        CorpusSpec(Tsv(tmp_path)).build(tmp_path / "data")
    warned = cleaning_report.warnings(clean_corpus(CorpusSpec(Tsv(tmp_path)), tmp_path))[0]
    assert warned.startswith("French (fr), train, dev, test: the text of en is not English")


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model"
    arguments = ("data", "cleaning_report", f"--gin_file={TINY}", f"--model_dir={model}")
    said = m4(*arguments, "--stages=all", "--list")
    assert said.status == 0, said.err
    for words in ("Galician", "Training pairs by language", "data_report.html"):
        assert words in said.out
    made = {path.name for path in model.iterdir() if not path.name.startswith(".")}
    assert {"data_report.json", "data_report.html", "dropped.jsonl.gz"} <= made
    assert not made & {"data", "checkpoints"}
    said = m4(*arguments, "--list=nothing").mistake
    assert "--list=nothing: nothing is dropped for that; stages and reasons: " in said
    clean = m4(*arguments, "--list=empty")  # a stage that has nothing to drop is no mistake
    assert clean.status == 0
    assert "--list=empty: nothing is dropped for that" in clean.out
