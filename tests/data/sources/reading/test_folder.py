"""Files of a folder and the pairs that they are read as: Moses, aligned files, TMX, codes."""

import re
from pathlib import Path
from typing import Any

import pytest

from m4.data.sources import Pair
from m4.data.sources.aligned import Aligned
from m4.data.sources.gettext import Gettext
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.tmx import Tmx
from m4.data.sources.tsv import Tsv
from m4.data.testsets import Segment, segments_for
from m4.settings import InputError
from tests.data.corpora import json_lines, tmx_of, write


def test_several_corpora_of_a_pair_in_either_order(tmp_path: Path) -> None:
    for name, text in {
        "B.en-gl.en.gz": "from B", "B.en-gl.gl": "de B", "A.de-en.en": "from A",
        "A.de-en.de": "von A", "C.en-gl.en": "from C", "C.en-gl.gl.zst": "de C",
        "C.gl-de.de": "von C", "C.gl-de.gl": "de C", "D.some-thing.de": "none", "README": "text",
    }.items():  # fmt: skip
        write(tmp_path / name, f"{text}\n")
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
        tmp_path, files="{split}/{side}.{split}", english="eng_Latn",
        splits={"train": "train", "dev": "dev", "test": "devtest"}, codes={"sr": "srp_Cyrl"},
    )  # fmt: skip
    assert source.language_pairs() == ["en-glg_Latn", "en-sr"]
    wanted = Pair("eng_Latn in devtest", "srp_Cyrl in devtest")
    assert list(source.pairs("en-sr", "test")) == [wanted]
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


LANGUAGES = ("eng_Latn", "fra_Latn", "spa_Latn", "wol_Latn")


def made(folder: Path, languages: tuple[str, ...] = LANGUAGES) -> Path:
    for split, count in (("train", 5), ("dev", 2), ("test", 3)):
        for code in languages:
            write(folder / split / code, "".join(f"{code} {split} {n}\n" for n in range(count)))
    write(folder / "train" / "README", "what this is\n")
    return folder


def test_every_two_languages_are_a_pair_once(tmp_path: Path) -> None:
    source = Aligned(made(tmp_path), english="eng_Latn", codes={"fr": "fra_Latn"})
    # 4 languages: 4 * 3 / 2 pairs, English first in its own.
    assert source.language_pairs() == [
        "en-fr", "en-spa_Latn", "en-wol_Latn", "fr-spa_Latn", "fr-wol_Latn", "spa_Latn-wol_Latn",
    ]  # fmt: skip
    wanted = [Pair(f"fra_Latn train {n}", f"wol_Latn train {n}") for n in range(5)]
    assert [*source.pairs("wol_Latn-fr", "train")] == wanted
    assert source.reading.origin == ("train/fra_Latn and train/wol_Latn", 5)
    assert [*source.pairs("en-fr", "dev")][1] == ("eng_Latn dev 1", "fra_Latn dev 1")
    assert {*source.identity()["common"]} == {
        f"{split}/{code}" for split in ("train", "dev", "test") for code in LANGUAGES
    }
    with pytest.raises(InputError, match=r"no gl-wol_Latn in files called like .*; there is en-fr"):
        list(source.pairs("gl-wol_Latn", "train"))


def test_the_same_folder_is_a_test_set(tmp_path: Path) -> None:
    """Pairs to train on and segments to translate are the same lines."""
    source = Aligned(made(tmp_path))
    assert len(source.directions()) == 4 * 3
    found = segments_for("it", source, "wol_Latn-fra_Latn")
    assert found == [Segment(f"wol_Latn test {n}", (f"fra_Latn test {n}",)) for n in range(3)]
    pairs = source.pairs("fra_Latn-wol_Latn", "test")
    assert [Pair(one.references[0], one.source) for one in found] == [*pairs]


def test_files_without_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are a test set, or, with dev_every and test_every, of every split."""
    write(tmp_path / "README.md", "what this is\n")
    for code in ("fr", "wo"):
        write(tmp_path / f"news.{code}.gz", "".join(f"{code} {n}\n" for n in range(200)))
    testset = Aligned(tmp_path, "*.{lang}")
    assert (testset.language_pairs(), testset.directions()) == ([], ["fr-wo", "wo-fr"])
    assert len(testset.segments("wo-fr")) == 200
    assert capsys.readouterr().err == ""
    source = Aligned(tmp_path, "*.{lang}", dev_every=10, test_every=5)
    sizes = [len([*source.pairs("fr-wo", split)]) for split in ("train", "dev", "test")]
    assert sum(sizes) == 200
    assert all(sizes)
    assert len(source.segments("wo-fr")) == sizes[2]
    write(tmp_path / "web.wo", "another corpus\n")  # without French: no pair
    assert len([*Aligned(tmp_path, "*.{lang}").pairs("fr-wo", "test")]) == 200


def test_another_code_makes_another_language(tmp_path: Path) -> None:
    (tmp_path / "pt-BR.train.tsv").write_text("day\tdia\n")
    (tmp_path / "pt_BR.train.tsv").write_text("night\tnoite\n")
    source = Tsv(tmp_path, codes={"pt_BR_2": "pt_BR"})
    assert source.language_pairs() == ["en-pt_BR", "en-pt_BR_2"]
    assert list(source.pairs("en-pt_BR", "train")) == [Pair("day", "dia")]
    assert list(source.pairs("pt_BR_2", "train")) == [Pair("night", "noite")]


@pytest.mark.parametrize(
    ("source", "files", "settings", "said"),
    [
        (Tsv, ["gl.train.tsv", "glg.train.tsv"], {"codes": {"gl": "glg"}},
         r"'glg' next to 'gl' of .*gl\.train\.tsv: both .* 'gl'"),
        (Moses, [f"train.en-{c}.{s}" for c in ("sr@latin", "sr_latin") for s in ("en", c)], {},
         r"'sr_latin' next to 'sr@latin' of .*Moses\.codes"),
        (Aligned, [f"train/{code}" for code in ("en", "eng_Latn")], {"codes": {"en": "eng_Latn"}},
         r"language code \S* next to \S* of .*both would be 'en'"),
        (Jsonl, ["train.jsonl"], {"files": "{split}.jsonl"},
         r"'pt_BR' next to 'pt-BR': both .* Jsonl\.codes"),
    ],
)  # fmt: skip
def test_two_codes_of_one_language(
    tmp_path: Path, source: Any, files: list[str], settings: dict[str, Any], said: str
) -> None:
    records = [{"en": "day", "pt-BR": "dia"}, {"en": "night", "pt_BR": "noite"}]
    text = json_lines({"translation": record} for record in records)
    for name in files:
        write(tmp_path / name, text if source is Jsonl else "day\tdía\n")
    with pytest.raises(ValueError, match=said):
        source(tmp_path, **settings).language_pairs()


def test_files_that_are_not_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also held-out files of a language that is not trained on, and of another case of a code."""
    for name in ("gl.train", "gl.dev", "es.dev", "es.test", "zh_CN.train", "zh_cn.dev",
                 "readme.train"):  # fmt: skip
        (tmp_path / f"{name}.tsv").write_text("red\troxo\n")
    packed = [f"es.train.tsv{end}" for end in (".7z", ".Z", ".tar.gz", ".zip")]
    others = ["_.train.tsv", *packed, "gl.notes.tsv", "gl_.train.tsv", "more", "über.train.tsv"]
    for name in others:
        (tmp_path / name).touch()
    assert Tsv(tmp_path).language_pairs() == ["en-gl", "en-readme", "en-zh_CN"]
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}: not read: {', '.join(others)} (not called like "
        "{lang}.{split}.tsv; Tsv.files)",
        f"{tmp_path}: not read: es.dev.tsv, es.test.tsv (es has no training file; Tsv.files)",
        f"{tmp_path}: not read: zh_cn.dev.tsv (zh_cn has no training file (zh_CN has); Tsv.files)",
    ]


def test_a_file_whose_name_says_test_is_not_trained_on(tmp_path: Path) -> None:
    for name in ("gl_train", "gl_test", "es"):
        (tmp_path / f"{name}.tsv").write_text("red\troxo\n")
    says = r"gl_test\.tsv: its name says test, and it would be trained on; .*Tsv\.files, Tsv\."
    with pytest.raises(ValueError, match=says):
        Tsv(tmp_path, files="{lang}.tsv", test_every=10).language_pairs()
    (tmp_path / "es.tsv").unlink()
    assert Tsv(tmp_path, files="{lang}_{split}.tsv").language_pairs() == ["en-gl"]
    # Who names it in a setting means it.
    alone = Tsv(tmp_path, files="{lang}_test.tsv", test_every=10)
    assert alone.language_pairs() == ["en-gl"]


@pytest.mark.parametrize("to", ["gl.train.tsv", "missing"])
def test_links_that_lead_nowhere_are_one_line(tmp_path: Path, to: str) -> None:
    (tmp_path / "gl.train.tsv").symlink_to(to)
    for read in (lambda: [*Tsv(tmp_path).pairs("en-gl", "train")], Tsv(tmp_path).identity):
        with pytest.raises(ValueError, match=r"gl\.train\.tsv: cannot be read: a broken link"):
            read()


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (Moses, {"files": "{split}.{pair}"}, "must be a pattern with {side}, the code"),
    (Moses, {"files": "{pair}.{side}"}, "must be a pattern with {split}, or dev_every"),
    (Moses, {"test_every": 9}, "a pattern without {split} where dev_every"),
    (Moses, {"files": "{langs}.{split}.{side}"}, "and *, not {langs}"),
    (Moses, {"files": "../{pair}.{split}.{side}"}, "must be a path below Moses.folder"),
    (Moses, {"splits": {"train": "train", "valid": "dev"}}, "of train (needed), dev and test"),
    (Moses, {"codes": {"zh": "zh_CN", "yue": "zh_CN"}}, "a dictionary of different values"),
    (Tmx, {"files": "{split}.tmx"}, "Tmx.files = '{split}.tmx': must be a pattern with {lang} or"),
    (Gettext, {"files": "x.po"}, "Gettext.files = 'x.po': must be a pattern with {lang}"),
    (Jsonl, {"translation_field": "target"}, "or Jsonl.english_field must be set"),
    (Jsonl, {"translation_field": "{lang}.text"}, "in its last part"),
    (Jsonl, {"files": "{split}.jsonl", "translation_field": "target", "english_field": "source"},
     "or set Jsonl.language_field"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "settings", "said"), MISTAKES)
def test_a_wrong_setting_is_one_line(
    tmp_path: Path, source: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        source(tmp_path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("on_bad_line", ["fail", "skip"])
@pytest.mark.parametrize(
    ("source", "files"),
    [(Moses, "train.en-gl.{}"), (Moses, "train.gl-en.{}"), (Aligned, "train/{}")],
)
def test_files_of_unequal_length(tmp_path: Path, source: Any, files: str, on_bad_line: str) -> None:
    for side, text in (("en", "one\ntwo\nthree\n"), ("gl", "un\ndous\n")):
        write(tmp_path / files.format(side), text)
    names = (re.escape(files.format(side)) for side in ("en", "gl"))
    said = r"{} has 3 lines and \S*{} 2: they are not translations".format(*names)
    with pytest.raises(ValueError, match=said) as error:
        list(source(tmp_path, on_bad_line=on_bad_line).pairs("en-gl", "train"))
    assert "\n" not in str(error.value)


# TMX as OPUS publishes it, and what may be wrong with it.


def test_a_file_a_pair_also_compressed(tmp_path: Path) -> None:
    text = tmx_of("wo", "fr", [Pair(f"wo {n} <b>", f"fr\n{n} TAG") for n in range(3)])
    write(tmp_path / "fr-wo.tmx.gz", text.replace("TAG", "<ph>{1}</ph><hi>é</hi>"))
    write(tmp_path / "en-pt.tmx", tmx_of("EN-US", "pt_br", [Pair("red", "vermelho")]))
    source = Tmx(tmp_path, files="{pair}.tmx", test_every=1000)
    assert source.language_pairs() == ["en-pt", "fr-wo"]
    # Entities of XML are read, a text processor's codes are not, and a line end is a blank.
    wanted = [Pair(f"fr {n} é", f"wo {n} <b>") for n in range(3)]
    assert [*source.pairs("fr-wo", "train")] == wanted
    # The third <tu> starts in line 6 + 2 * 5: a text has a line end, so a unit has five lines.
    assert source.reading.origin == ("fr-wo.tmx.gz", 16)
    assert [*source.pairs("en-pt", "train")] == [Pair("red", "vermelho")]


def test_a_territory_matters_where_there_are_two(tmp_path: Path) -> None:
    text = tmx_of("pt-PT", "pt-BR", [Pair("1", "2")])
    english = '<tuv lang="en"><seg>3</seg></tuv></tu>'
    write(tmp_path / "en-pt_BR.train.tmx", text.replace("</tu>", english))
    assert [*Tmx(tmp_path).pairs("en-pt_BR", "train")] == [Pair("3", "2")]


def test_large_files_are_read_in_pieces(tmp_path: Path) -> None:
    rows = [Pair(f"sentence {n} {'a' * 50}", f"oración {n}") for n in range(9000)]
    write(tmp_path / "en-gl.train.tmx", tmx_of("en", "gl", rows))  # more than a mebibyte
    assert [*Tmx(tmp_path).pairs("gl", "train")] == rows


ONE = tmx_of("en", "gl", [Pair("a", "b")])
EXTERNAL = '<!DOCTYPE tmx [<!ENTITY e SYSTEM "file:///etc/passwd">]>'
ENTITY = '<!DOCTYPE tmx [<!ENTITY e "a">]>'
DAMAGED = {
    # Ten lines: the head's five, an element of four, and the next one without its end.
    "cut off": (ONE.partition("</tu>")[0] + "</tu>\n<tu", "line 10 column 1: .*unclosed token$"),
    "not XML": ("red\troxo\n", r"line 1 column 1: .*syntax error"),
    "closed wrongly": ("<tmx>\n<body>\n</tmx>", r"line 3 column 3: .*mismatched tag"),
    "an entity": (f"{ENTITY}<tmx>&e;</tmx>", "line 1 column .*declares or uses an entity"),
    "an external one": (f"{EXTERNAL}<tmx>&e;</tmx>", "declares or uses an entity"),
    "one of a DTD": ('<!DOCTYPE tmx SYSTEM "a.dtd"><tmx>&e;</tmx>', "declares or uses an entity"),
    "an unknown encoding": ('<?xml version="1.0" encoding="x-y"?><tmx/>', "line 1 .*encoding"),
    "no pairs": ("<tmx></tmx>", "no pairs in it"),
    "another language": (ONE.replace("gl", "fr"), "line 6: no xml:lang 'gl', there is en"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path: Path, case: str) -> None:
    text, said = DAMAGED[case]
    write(tmp_path / "en-gl.train.tmx", text)
    with pytest.raises(InputError, match=rf"en-gl\.train\.tmx.*{said}") as error:
        list(Tmx(tmp_path).pairs("gl", "train"))
    assert "\n" not in str(error.value)


def test_a_doctype_alone_is_read(tmp_path: Path) -> None:
    text = ONE.replace("<tmx", '<!DOCTYPE tmx SYSTEM "x.dtd">\n<tmx', 1)
    write(tmp_path / "en-gl.train.tmx", text)
    assert [*Tmx(tmp_path).pairs("gl", "train")] == [Pair("a", "b")]
