from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from m4.data.sources import Pair
from m4.data.sources.huggingface import HuggingFace
from tests.data.corpora import translation_table

PAIRS = [Pair(f"day {number}", f"día {number}") for number in range(2500)]


def write(path: Path, table: pa.Table, kind: str = "parquet") -> None:
    """Writes Parquet, Arrow's file format, or its stream, as `datasets.save_to_disk` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        parquet.write_table(table, path)
        return
    new = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_every_format_in_shards(tmp_path: Path, kind: str) -> None:
    for number in range(2):
        table = translation_table("gl", PAIRS[number::2])
        write(tmp_path / "gl" / "train" / f"data-0000{number}-of-00002.arrow", table, kind)
    source = HuggingFace(tmp_path, files="{lang}/{split}/*.arrow")
    assert list(source.pairs("en-gl", "train")) == PAIRS[::2] + PAIRS[1::2]


def test_a_missing_shard_and_damage_are_one_clear_line(tmp_path: Path) -> None:
    table = translation_table("gl", PAIRS)
    path = tmp_path / "gl" / "train" / "data-00000-of-00002.arrow"
    write(path, table, "stream")
    files = "{lang}/{split}/*.arrow"
    with pytest.raises(ValueError, match=r"gl/train/data-00001-of-00002\S*: missing"):
        HuggingFace(tmp_path, files=files).language_pairs()
    whole = path.read_bytes()
    path = path.rename(path.with_name("data.arrow"))
    for content in (whole[:-8], whole[: len(whole) // 2], b"no Arrow", b"PAR1 no Parquet", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.arrow: damaged, or not Arrow") as error:
            list(HuggingFace(tmp_path, files=files).pairs("en-gl", "train"))
        assert "\n" not in str(error.value)


def test_columns_by_name(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2], "source": ["a", "b"], "target": ["x", None]})
    write(tmp_path / "gl" / "train.parquet", table)
    options = {"files": "{lang}/{split}.parquet", "english_field": "source"}
    source = HuggingFace(tmp_path, translation_field="target", on_bad_line="skip", **options)  # type: ignore
    assert list(source.pairs("en-gl", "train")) == [Pair("a", "x")]
    assert source.reading.skipped == {("gl/train.parquet", "no second side"): 1}
    with pytest.raises(ValueError, match=r"no column 'targets'; it has n, source, target \(Hugg"):
        list(HuggingFace(tmp_path, translation_field="targets", **options).pairs("en-gl", "train"))  # type: ignore
    with pytest.raises(ValueError, match=r"train\.parquet row 2: no second side \(Hugg"):
        list(HuggingFace(tmp_path, translation_field="target", **options).pairs("en-gl", "train"))  # type: ignore


def test_columns_named_by_pair(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": [1, 2],
            "sentence_eng_Latn": ["day", "night"],
            "sentence_glg_Latn": ["día", "noite"],
            "sentence_srp_Cyrl": ["дан", None],
        }
    )
    write(tmp_path / "dev.parquet", table)
    source = HuggingFace(
        tmp_path,
        files="{split}.parquet",
        splits={"train": "dev"},
        translation_field="sentence_{lang}",
        english="eng_Latn",
        codes={"sr": "srp_Cyrl"},
    )
    assert source.language_pairs() == ["en-glg_Latn", "en-sr"]
    assert list(source.pairs("en-sr", "train")) == [Pair("day", "дан")]
    assert list(source.pairs("en-glg_Latn", "train")) == [
        Pair("day", "día"),
        Pair("night", "noite"),
    ]


def test_translations_of_variable_languages(tmp_path: Path) -> None:
    """Hugging Face's feature TranslationVariableLanguages."""
    kind = pa.struct([("language", pa.list_(pa.string())), ("translation", pa.list_(pa.string()))])
    rows = [
        {"language": ["en", "gl", "gl"], "translation": ["day", "día", "xornada"]},
        {"language": ["pt-br"], "translation": ["sem inglês"]},
    ]
    write(tmp_path / "train.parquet", pa.table({"translation": pa.array(rows, kind), "n": [1, 2]}))
    source = HuggingFace(tmp_path, files="{split}.parquet", on_bad_line="skip")
    assert source.language_pairs() == ["en-gl"]
    assert list(source.pairs("en-gl", "train")) == [Pair("day", "día"), Pair("day", "xornada")]
    assert source.reading.skipped == {("train.parquet", "no first side"): 1}


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    bad = pa.array([b"day", b"ni\xf1ht", b"week"], pa.binary()).cast(pa.string(), safe=False)
    write(tmp_path / "gl.train.parquet", pa.table({"en": bad, "gl": ["a", "b", "c"]}))
    options = {"files": "{lang}.{split}.parquet", "translation_field": "{lang}"}
    source = HuggingFace(tmp_path, on_bad_line="skip", **options)  # type: ignore
    assert list(source.pairs("en-gl", "train")) == [Pair("day", "a"), Pair("week", "c")]
    assert source.reading.skipped == {("gl.train.parquet", "not UTF-8"): 1}
