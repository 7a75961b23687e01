"""A user's own corpus through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.storage.files import read_jsonl
from tests.command_line import m4
from tests.data import corpora
from tests.data.corpus import Made

TATOEBA = Path(__file__).parents[1] / "gin_configs" / "tatoeba.gin"


@pytest.mark.slow
def test_a_users_corpus_from_text_to_report(tmp_path: Path) -> None:
    """gin_configs/tatoeba.gin on a folder of two of its languages, small and short."""
    corpora.tsv(tmp_path / "texts", corpora.texts_of(Made({"kat": 150, "amh": 130}, held_out=9)))
    arguments = [
        f"--gin_file={TATOEBA}",
        f"--gin.TEXT_DIR={str(tmp_path / 'texts')!r}",
        f"--gin.MODEL_DIR={str(tmp_path / 'model')!r}",
        "--gin.LANGUAGES=['kat', 'amh']",
        "--gin.corpus.CorpusSpec.vocabulary_size=700",
        "--gin.TRAIN_STEPS=2",
        "--gin.BATCH_SIZE=8",
        "--gin.transformer.Transformer.width=16",
        "--gin.transformer.Transformer.mlp_width=32",
        "--gin.transformer.Transformer.encoder_layers=1",
        "--gin.transformer.Transformer.decoder_layers=1",
        "--gin.transformer.Transformer.moe_every=1",
        "--gin.experiment.Decoding.max_target_length=8",
    ]
    for job in ("train", "eval"):
        said = m4(job, *arguments)
        assert said.status == 0, said.err
    rows = read_jsonl(tmp_path / "model" / "scores.jsonl")
    assert {row["direction"] for row in rows} == {"kat-en", "en-kat", "amh-en", "en-amh"}
    assert {row["system"] for row in rows} == {"moe", "copy"}
    assert {row["sentences"] for row in rows} == {9}
