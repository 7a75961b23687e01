"""Language codes that m4 would write alike are never one language by accident."""

from __future__ import annotations

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
from tests.data.corpora import json_lines, write


def test_two_codes_of_one_language_are_an_error_with_both_files(tmp_path: Path) -> None:
    for name in ("pt-BR.train.tsv", "pt_BR.train.tsv", "pt-BR.dev.tsv"):
        (tmp_path / name).write_text("day\tdia\n")
    with pytest.raises(ValueError) as error:
        Tsv(tmp_path).language_pairs()
    for words in ("/pt_BR.train.tsv: ", "/pt-BR.dev.tsv: ", "Tsv.codes = {'pt_BR_2': 'pt_BR'}"):
        assert words in str(error.value)
    assert "\n" not in str(error.value)
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
    for name in ("gl", "über", "gl_", "_", "readme"):
        (tmp_path / f"{name}.train.tsv").write_text("red\troxo\n")
    (tmp_path / "gl.notes.tsv").touch()
    assert Tsv(tmp_path).language_pairs() == ["en-gl", "en-readme"]
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        ": not read: _.train.tsv, gl.notes.tsv, gl_.train.tsv, über.train.tsv (not called" in line
    )


def test_languages_without_a_training_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out files of a language that is not trained on, and of another case of a code."""
    for name in ("gl.train", "gl.dev", "es.dev", "es.test", "zh_CN.train", "zh_cn.dev"):
        (tmp_path / f"{name}.tsv").write_text("red\troxo\n")
    packed = [f"es.train.tsv{end}" for end in (".7z", ".Z", ".tar.gz", ".zip")]
    for name in packed:
        (tmp_path / name).touch()
    (tmp_path / "more").mkdir()
    assert Tsv(tmp_path).language_pairs() == ["en-gl", "en-zh_CN"]
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}: not read: {', '.join(packed)}, more/ (not called like "
        "{lang}.{split}.tsv; Tsv.files)",
        f"{tmp_path}: not read: es.dev.tsv, es.test.tsv (es has no training file; Tsv.files)",
        f"{tmp_path}: not read: zh_cn.dev.tsv (zh_cn has no training file (zh_CN has); Tsv.files)",
    ]


def test_a_file_whose_name_says_test_is_not_trained_on(tmp_path: Path) -> None:
    for name in ("gl_train", "gl_test", "es"):
        (tmp_path / f"{name}.tsv").write_text("red\troxo\n")
    says = (
        r"gl_test\.tsv: its name says test, and it would be trained on; .*Tsv\.files, Tsv\.splits"
    )
    with pytest.raises(ValueError, match=says):
        Tsv(tmp_path, files="{lang}.tsv", test_every=10).language_pairs()
    (tmp_path / "es.tsv").unlink()
    assert Tsv(tmp_path, files="{lang}_{split}.tsv").language_pairs() == ["en-gl"]
    # Who names it in a setting means it.
    alone = Tsv(tmp_path, files="{lang}_test.tsv", test_every=10)
    assert alone.language_pairs() == ["en-gl"]


def test_a_code_that_is_no_name_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / f"{'g' * 200}.train.tsv").write_text("red\troxo\n")
    with pytest.raises(ValueError, match="of 200 letters: must have at most 64"):
        Tsv(tmp_path).language_pairs()


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
    (Moses, {"splits": {"dev": "dev"}}, "of train (needed), dev and test"),
    (Moses, {"codes": {"zh": "zh_CN", "yue": "zh_CN"}}, "a dictionary of different values"),
    (Tmx, {"files": "{split}.tmx"}, "Tmx.files = '{split}.tmx': must be a pattern with {lang} or"),
    (Tsv, {"files": "{split}.tsv"}, "Tsv.files = '{split}.tsv': must be a pattern with {lang} or"),
    (Tsv, {"on_bad_line": "ignore"}, "'ignore': must be one of fail, skip"),
    (Tsv, {"max_line_bytes": 0}, "Tsv.max_line_bytes = 0"),
    (Gettext, {"files": "x.po"}, "Gettext.files = 'x.po': must be a pattern with {lang}"),
    (Gettext, {"placeholders": "none"}, "must be one of same, drop, keep"),
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
