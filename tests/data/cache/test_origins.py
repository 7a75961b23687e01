"""File and line of every pair: through sources, cleaning and tokenizing."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard

from m4.data.cache.corpus_text import pair_file
from m4.data.cleaning.clean import Cleaning
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.stages import Duplicates
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS
from m4.data.sources.reading.folder import Folder
from m4.data.sources.tsv import Tsv
from tests.data.corpora import WRITERS, texts_of
from tests.data.corpus import Made


def lines(path: Path) -> list[str]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    return content.decode().split("\n")


@pytest.mark.parametrize("name", ["tsv", "moses", "jsonl"])
def test_the_line_of_a_pair_has_its_text(tmp_path: Path, name: str) -> None:
    texts = texts_of(Made({"gl": 12, "pt": 9}, held_out=4))
    source = WRITERS[name](tmp_path, texts)
    assert isinstance(source, Folder)
    seen = 0
    for code in source.language_pairs():
        for split in SPLITS:
            for pair in source.pairs(code, split):
                file, line = source.reading.origin
                assert pair.second in lines(tmp_path / file)[line - 1]
                seen += 1
    assert seen == sum(len(pairs) for splits in texts.values() for pairs in splits.values())


def test_a_cache_knows_file_and_line_of_each_row_in_little_space(tmp_path: Path) -> None:
    """Origins of two files, after duplicates and sentences that are too long have left."""
    pairs = [*Made({"gl": 400}).pairs("en-gl", "train")]
    bad = ["no pair\n", f"{'long ' * 200}\t{'longo ' * 200}\n"]
    for number, part in enumerate((pairs[:300], pairs[250:])):
        text = "".join(
            bad[i % 2] * (i % 50 == 0) + f"{one.first}  \t{one.second}\n"
            for i, one in enumerate(part)
        )
        (tmp_path / f"gl.train.{number}.tsv").write_text(text, encoding="utf-8")
    for split in ("dev", "test"):
        (tmp_path / f"gl.{split}.0.tsv").write_text("a b c\td e f\n", encoding="utf-8")
    cache = CorpusSpec(
        Tsv(tmp_path, files="{lang}.{split}.*.tsv", on_bad_line="skip"),
        cleaning=Cleaning((Normalise(), Duplicates())),
        vocabulary_size=400,
        lengths={"inputs": 96, "targets": 96},
        workers=1,
    ).build(tmp_path / "data")
    origins = cache.origins("en-gl", "train")
    assert origins is not None
    assert len(origins) == cache.size("en-gl", "train") == 400
    assert {origin.file for origin in origins} == {"gl.train.0.tsv", "gl.train.1.tsv"}
    for pair, (file, line) in zip(cache.pairs("en-gl", "train"), origins, strict=True):
        assert lines(tmp_path / file)[line - 1] == f"{pair.first}  \t{pair.second}"
    assert pair_file(cache.folder, "train", "en-gl", "origin").stat().st_size < 400
    assert cache.origins("en-gl", "dev") == [("gl.dev.0.tsv", 1)]
