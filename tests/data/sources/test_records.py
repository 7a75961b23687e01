"""Records with fields: Parquet, Arrow and JSON lines."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from m4.data.sources import Pair
from m4.data.sources.huggingface import HuggingFace
from m4.data.sources.jsonl import Jsonl
from tests.data import corpora
from tests.data.corpora import json_lines, translation_table

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


def test_columns_named_by_language(tmp_path: Path) -> None:
    texts = {"eng_Latn": ["day", "night"], "glg_Latn": ["día", "noite"], "srp_Cyrl": ["дан", None]}
    table = pa.table({"id": [1, 2], **{f"sentence_{code}": of for code, of in texts.items()}})
    write(tmp_path / "dev.parquet", table)
    source = HuggingFace(tmp_path, "{split}.parquet", splits={"train": "dev"}, english="eng_Latn",
                         translation_field="sentence_{lang}", codes={"sr": "srp_Cyrl"})  # fmt: skip
    assert source.language_pairs() == ["en-glg_Latn", "en-sr"]
    assert list(source.pairs("en-sr", "train")) == [Pair("day", "дан")]
    assert list(source.pairs("glg_Latn", "train")) == [Pair("day", "día"), Pair("night", "noite")]


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    bad = pa.array([b"day", b"ni\xf1ht", b"week"], pa.binary()).cast(pa.string(), safe=False)
    write(tmp_path / "gl.train.parquet", pa.table({"en": bad, "gl": ["a", "b", "c"]}))
    options = {"files": "{lang}.{split}.parquet", "translation_field": "{lang}"}
    source = HuggingFace(tmp_path, on_bad_line="skip", **options)  # type: ignore
    assert list(source.pairs("en-gl", "train")) == [Pair("day", "a"), Pair("week", "c")]
    assert source.reading.skipped == {("gl.train.parquet", "not UTF-8"): 1}


def test_many_languages_in_one_object(tmp_path: Path) -> None:
    rows: list[object] = [
        {"en": "day", "gl": "día", "pt-BR": "dia"}, {"en": "night", "pt-BR": "noite", "gl": None},
        {"gl": "sen inglés", "pt-BR": "sem inglês"}, {"en": "alone"}, "text",
    ]  # fmt: skip
    corpora.write(tmp_path / "train.jsonl.gz", json_lines({"translation": row} for row in rows))
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
    corpora.write(tmp_path / "all.jsonl", json_lines(rows))
    source = Jsonl(tmp_path, "all.jsonl", "skip", test_every=1000, english_field="src",
                   translation_field="tgt", language_field="meta.l")  # fmt: skip
    assert source.language_pairs() == ["en-gl", "en-zh_Hant"]
    assert list(source.pairs("en-zh_Hant", "train")) == [Pair("day", "zh-Hant")]
    assert source.reading.skipped == {
        ("all.jsonl", "the language is English"): 1,
        ("all.jsonl", "no language code in the language's field"): 1,
    }
