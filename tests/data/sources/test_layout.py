"""Language codes that m4 would write alike are never one language by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.tsv import Tsv


def test_two_codes_of_one_language_are_an_error_with_both_files(tmp_path: Path) -> None:
    for name in ("pt-BR.train.tsv", "pt_BR.train.tsv", "pt-BR.dev.tsv"):
        (tmp_path / name).write_text("day\tdia\n")
    with pytest.raises(ValueError) as error:
        Tsv(tmp_path).languages()
    assert str(error.value) == (
        f"{tmp_path}/pt_BR.train.tsv: language code 'pt_BR' next to 'pt-BR' of "
        f"{tmp_path}/pt-BR.dev.tsv: both would be 'pt_BR'; use one code, or give one another "
        "name: Tsv.codes = {'pt_BR_2': 'pt_BR'}"
    )
    (tmp_path / "pt_BR.train.tsv").write_text("night\tnoite\n")
    source = Tsv(tmp_path, codes={"pt_BR_2": "pt_BR"})
    assert source.languages() == ["pt_BR", "pt_BR_2"]
    assert list(source.pairs("pt_BR", "train")) == [Pair("day", "dia")]
    assert list(source.pairs("pt_BR_2", "train")) == [Pair("night", "noite")]


def test_a_given_name_that_is_another_files_own(tmp_path: Path) -> None:
    for name in ("gl.train.tsv", "glg.train.tsv"):
        (tmp_path / name).write_text("day\tdía\n")
    with pytest.raises(ValueError, match=r"'glg' next to 'gl' of .*gl\.train\.tsv: both .* 'gl'"):
        Tsv(tmp_path, codes={"gl": "glg"}).languages()


def test_pairs_of_moses(tmp_path: Path) -> None:
    for name in ("train.en-sr@latin", "train.en-sr_latin"):
        for side in ("en", name.removeprefix("train.en-")):
            (tmp_path / f"{name}.{side}").write_text("day\n")
    with pytest.raises(ValueError, match=r"'sr_latin' next to 'sr@latin' of .*Moses\.codes"):
        Moses(tmp_path).languages()


def test_records_of_one_file(tmp_path: Path) -> None:
    records = [{"en": "day", "pt-BR": "dia"}, {"en": "night", "pt_BR": "noite"}]
    text = "".join(json.dumps({"translation": record}) + "\n" for record in records)
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"'pt_BR' next to 'pt-BR': both .* Jsonl\.codes"):
        Jsonl(tmp_path, files="{split}.jsonl").languages()
