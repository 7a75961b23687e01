from __future__ import annotations

import json
from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.jsonl import Jsonl
from tests.data.corpora import write


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def test_the_default_is_a_field_translation(tmp_path: Path) -> None:
    write(tmp_path / "gl.train.jsonl", jsonl({"translation": {"en": "day", "gl": "día"}, "id": 1}))
    source = Jsonl(tmp_path)
    assert list(source.pairs("en-gl", "train")) == [Pair("day", "día")]
    assert list(source.pairs("en-gl", "test")) == []


def test_many_languages_in_one_object(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl.gz",
        jsonl(
            {"translation": {"en": "day", "gl": "día", "pt-BR": "dia"}},
            {"translation": {"en": "night", "pt-BR": "noite", "gl": None}},
            {"translation": {"gl": "sen inglés", "pt-BR": "sem inglês"}},
            {"translation": {"en": "alone"}},
            {"translation": "text"},
        ),
    )
    source = Jsonl(tmp_path, files="{split}.jsonl", on_bad_line="skip")
    assert source.language_pairs() == ["en-gl", "en-pt_BR"]
    assert list(source.pairs("en-gl", "train")) == [Pair("day", "día")]
    assert list(source.pairs("en-pt_BR", "train")) == [Pair("day", "dia"), Pair("night", "noite")]
    # Counted once, whoever is read.
    assert source.reading.skipped == {
        ("train.jsonl", "no first side"): 2,
        ("train.jsonl", "no language but English"): 1,
        ("train.jsonl", "no field translation"): 1,
    }
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz line 3: no first side \(Jsonl\."):
        Jsonl(tmp_path, files="{split}.jsonl").language_pairs()


def test_a_field_of_languages(tmp_path: Path) -> None:
    rows = [{"meta": {"l": code}, "src": "day", "tgt": code} for code in ("gl", "zh-Hant", "en", 3)]
    write(tmp_path / "all.jsonl", jsonl(*rows))
    source = Jsonl(
        tmp_path,
        files="all.jsonl",
        english_field="src",
        translation_field="tgt",
        language_field="meta.l",
        test_every=1000,
        on_bad_line="skip",
    )
    assert source.language_pairs() == ["en-gl", "en-zh_Hant"]
    assert list(source.pairs("en-zh_Hant", "train")) == [Pair("day", "zh-Hant")]
    assert source.reading.skipped == {
        ("all.jsonl", "the language is English"): 1,
        ("all.jsonl", "no language code in the language's field"): 1,
    }
