"""Test sets in the layouts that are published, made up here, each with its config of ten lines."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from m4 import config
from m4.data.sources.aligned import Aligned
from m4.data.sources.tsv import Tsv
from m4.data.testsets import Segment, Table, directions_for, segments_for
from m4.settings import InputError
from tests.command_line import TINY
from tests.data import corpora

CONFIGS = Path(__file__).parents[2] / "gin_configs" / "testsets"
TRAINED = ["en-de", "en-gl", "de-en", "gl-en", "de-gl"]


def write(path: Path, lines: list[str]) -> None:
    corpora.write(path, "".join(f"{line}\n" for line in lines))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    corpora.write(path, corpora.json_lines(rows))


def published(name: str, folder: Path, *more: str) -> Any:
    """Returns the test set of gin_configs/testsets/<name>.gin."""
    given = ["MODEL_DIR = 'x'", f"{name.upper()} = {str(folder)!r}", *more]
    made = config.load([TINY, CONFIGS / f"{name}.gin"], given).experiment()
    return made.testsets[name]


def found(testset: Any, trained: list[str] = TRAINED) -> dict[str, list[Segment]]:
    """Returns a test set's segments by the model's direction."""
    chosen = directions_for("it", testset, trained)
    return {ours: segments_for("it", testset, theirs) for ours, theirs in chosen.items()}


def test_flores_plus(tmp_path: Path) -> None:
    """One file a language, dev and devtest: all directions between the languages."""
    for split, count in (("dev", 2), ("devtest", 3)):
        for code in ("eng_Latn", "deu_Latn", "glg_Latn", "wol_Latn"):
            write(tmp_path / split / f"{split}.{code}", [f"{code} {n}" for n in range(count)])
    testset = published("flores", tmp_path)
    assert len(testset.directions()) == 4 * 3
    texts = found(testset)
    assert list(texts) == TRAINED
    assert texts["de-gl"] == [Segment(f"deu_Latn {n}", (f"glg_Latn {n}",)) for n in range(3)]
    assert texts["en-de"][2] == Segment("eng_Latn 2", ("deu_Latn 2",))


def test_ntrex(tmp_path: Path) -> None:
    """NTREX-128: one source, references by language, English of several countries, documents."""
    write(tmp_path / "newstest2019-src.eng.txt", ["a", "b"])
    for code in ("deu", "glg", "eng-GB", "eng-US"):
        write(tmp_path / f"newstest2019-ref.{code}.txt", [f"{code} {n}" for n in range(2)])
    write(tmp_path / "DOCUMENT_IDS.tsv", ["one", "two"])
    testset = published("ntrex", tmp_path)
    assert "eng-eng_GB" in testset.directions()
    # The English without a territory is meant.
    first, second = found(testset)["en-de"]
    assert (first, second) == (Segment("a", ("deu 0",), "one"), Segment("b", ("deu 1",), "two"))
    other = published("ntrex", tmp_path, "ntrex/aligned.Aligned.codes = {'en': 'eng-GB'}")
    assert found(other)["en-de"][0] == Segment("eng-GB 0", ("deu 0",), "one")


def test_wmt24pp(tmp_path: Path) -> None:
    """JSON lines a pair; some sources are bad and not to be used; en-de_DE is the model's en-de."""
    for code in ("de_DE", "ar_EG", "ar_SA"):
        rows = [
            {"lp": f"en-{code}", "domain": "news", "document_id": f"d{n // 2}", "segment_id": n,
             "is_bad_source": n == 1, "source": f"s{n}", "target": f"{code} {n}",
             "original_target": "x"}
            for n in range(4)
        ]  # fmt: skip
        jsonl(tmp_path / f"en-{code}.jsonl", rows)
    texts = found(published("wmt24pp", tmp_path))
    assert list(texts) == ["en-de"]
    assert texts["en-de"] == [Segment(f"s{n}", (f"de_DE {n}",), f"d{n // 2}") for n in (0, 2, 3)]
    with pytest.raises(InputError, match=r"ar_EG and ar_SA are both ar; choose one: codes"):
        found(published("wmt24pp", tmp_path), ["en-ar"])
    chosen = published("wmt24pp", tmp_path, "wmt24pp/testsets.Table.codes = {'ar': 'ar_SA'}")
    assert found(chosen, ["en-ar"])["en-ar"][0].references == ("ar_SA 0",)


def test_bouquet(tmp_path: Path) -> None:
    """BOUQuET: languages in rows; paragraphs are documents."""
    rows = [
        {"uniq_id": f"P{p}-S{s}", "par_id": f"P{p}", "src_lang": "deu_Latn", "tgt_lang": "eng_Latn",
         "src_text": f"de {p}.{s}", "tgt_text": f"en {p}.{s}"}
        for p in range(2) for s in range(2)
    ]  # fmt: skip
    jsonl(tmp_path / "deu_Latn.jsonl", rows)
    texts = found(published("bouquet", tmp_path))
    assert list(texts) == ["en-de", "de-en"]
    assert texts["de-en"][3] == Segment("de 1.1", ("en 1.1",), "P1")
    assert texts["en-de"][3] == Segment("en 1.1", ("de 1.1",), "P1")


def test_tico19(tmp_path: Path) -> None:
    """TICO-19: columns with a header."""
    names = "sourceLang targetLang sourceString targetString stringID url license translatorId"
    head = names.replace(" ", "\t")
    lines = [f"en\tgl\tmask {n}\tmáscara {n}\tid{n}\thttp://a\tpublic\t7" for n in range(2)]
    write(tmp_path / "test" / "test.en-gl.tsv", [head, *lines])
    testset = published("tico19", tmp_path)
    assert found(testset)["en-gl"][1] == Segment("mask 1", ("máscara 1",), "http://a")
    assert found(testset)["gl-en"][1] == Segment("máscara 1", ("mask 1",), "http://a")
    write(tmp_path / "test" / "test.en-de.tsv", [head, "en\tde\tmask"])
    with pytest.raises(InputError, match=r"en-de.tsv line 2: 3 columns, not 8 \(sourceLang, "):
        found(published("tico19", tmp_path))


def test_tatoeba_challenge(tmp_path: Path) -> None:
    """Compressed columns without a header."""
    lines = [f"deu\teng\tSatz {n}\tsentence {n}" for n in range(2)]
    write(tmp_path / "tatoeba-test-v2021-08-07.deu-eng.txt.gz", lines)
    texts = found(published("tatoeba_challenge", tmp_path))
    assert texts["de-en"] == [Segment(f"Satz {n}", (f"sentence {n}",)) for n in range(2)]


def test_smol(tmp_path: Path) -> None:
    """SMOL: sentences with a reference, documents as lists of sentences; GATITOS: references."""
    sent = {"id": 3, "sl": "en", "tl": "gl", "is_src_orig": True, "src": "hello"}
    jsonl(tmp_path / "smolsent" / "en_gl.jsonl", [{**sent, "trg": "ola"}])
    (one,) = found(published("smolsent", tmp_path / "smolsent"))["en-gl"]
    assert one == Segment("hello", ("ola",))
    jsonl(tmp_path / "gatitos" / "en_gl.jsonl", [{**sent, "trgs": ["ola", "boas"]}])
    doc = {"id": "d7", "sl": "en", "tl": "gl", "srcs": ["One.", "Two."], "trgs": ["Un.", "Dous."]}
    jsonl(tmp_path / "smoldoc" / "en_gl.jsonl", [doc])
    languages = ["sl", "tl"]
    sentences = Table(tmp_path / "gatitos", source="src", target="trgs", languages=languages)
    assert found(sentences) == {"en-gl": [Segment("hello", ("ola", "boas"))]}
    both = [Segment("One.", ("Un.",), "d7"), Segment("Two.", ("Dous.",), "d7")]
    assert found(published("smoldoc", tmp_path / "smoldoc"))["en-gl"] == both
    jsonl(tmp_path / "smoldoc" / "en_gl.jsonl", [{**doc, "trgs": ["Un."]}])
    with pytest.raises(InputError, match=r"srcs, trgs have \[2, 1\] sentences: must be as many"):
        found(published("smoldoc", tmp_path / "smoldoc"))


def test_sacrebleu_echo(tmp_path: Path) -> None:
    """Columns of: sacrebleu -t wmt21 -l en-de --echo src ref:A ref:B docid."""
    lines = ["hello\thallo\tguten Tag\tnews-1", "bye\ttschüss\tciao\tnews-1"]
    write(tmp_path / "wmt21" / "en-de.tsv", lines)
    first, second = found(published("sacrebleu", tmp_path / "wmt21"))["en-de"]
    assert first == Segment("hello", ("hallo", "guten Tag"), "news-1")
    assert second.more() == {"references": ["tschüss", "ciao"], "document": "news-1"}


def test_a_source_is_a_test_set_by_its_test_split(tmp_path: Path) -> None:
    write(tmp_path / "gl.train.tsv", ["x\ty"])
    write(tmp_path / "gl.test.tsv", ["hello\tola"])
    there, back = [Segment("hello", ("ola",))], [Segment("ola", ("hello",))]
    assert found(Tsv(tmp_path)) == {"en-gl": there, "gl-en": back}


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "eng", ["a", "b"])
    write(tmp_path / "glg", ["a"])
    jsonl(tmp_path / "en-de.jsonl", [{"source": "a", "target": text} for text in "b "])
    write(tmp_path / "bad.jsonl", ["[1]"])
    by_name = functools.partial(Table, tmp_path, files="{pair}.jsonl")
    by_field = functools.partial(Table, tmp_path, languages="lp")
    for make, message in [
        (lambda: Aligned(tmp_path, "{lang}"), r"eng has 2 lines and .*glg 1: they are not"),
        (lambda: Aligned(tmp_path, "{lang}.txt"), r"no file is called like {lang}.txt"),
        (lambda: Aligned(tmp_path, "*"), r"Aligned.files = '\*': must be a pattern with {lang}"),
        (lambda: Aligned(tmp_path / "none"), r"Aligned.folder = .*a folder that exists"),
        (lambda: Table(tmp_path), r"Table.languages = None: must be fields of the languages"),
        (by_name, r"testset it: en-de has no reference of segment 2 of 2"),
        (lambda: by_field(files="en-*.jsonl"), r"no field 'lp'; there is source"),
        (lambda: by_field(files="bad.jsonl"), r"line 1: .*not a JSON object"),
        (lambda: by_name(where={"ok": True}), r"en-de.jsonl line 1: no field 'ok'; there is"),
        (lambda: by_name(codes={"de": "x"}), r"none of the model's"),
    ]:
        with pytest.raises(InputError) as error:
            found(make(), ["en-gl"] if "eng has" in message else ["en-de", "en-gl"])
        assert re.search(message, str(error.value)), str(error.value)
        assert "\n" not in str(error.value)
