"""Through the command line with a source and a target vocabulary and sampled segmentations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from m4.storage.files import read_jsonl
from tests.command_line import TINY, m4


@pytest.mark.slow
@pytest.mark.thorough
def test_train_decode_translate(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    arguments = [
        f"--gin_file={TINY}",
        f"--model_dir={folder}",
        "--gin.corpus.CorpusSpec.target_vocabulary_size=330",
        "--gin.corpus.CorpusSpec.segmentations=2",
        "--gin.cldr.Cldr.sizes={'es': 90, 'gl': 60}",
        "--gin.corpus.CorpusSpec.mixture='to_english'",
        "--gin.TRAIN_STEPS=2",
        "--gin.experiment.Training.dev_period=2",
        "--gin.transformer.Transformer.moe=None",
        "--gin.transformer.Transformer.encoder_layers=1",
        "--gin.transformer.Transformer.decoder_layers=1",
    ]
    for job in ("train", "decode"):
        said = m4(job, *arguments)
        assert said.status == 0, said.err
    made = Cache(folder / "data")
    assert made.separate
    assert made.segmentations == 2
    assert made.directions == ["es-en", "gl-en"]
    for direction in made.directions:
        assert len(read_jsonl(folder / "decodes" / f"test.{direction}.jsonl")) == 12
    about = json.loads((folder / "decodes" / "test.gl-en.json").read_text(encoding="utf-8"))
    assert about["vocabulary"] == made.vocabulary.fingerprint
    said = m4("translate", f"--model_dir={folder}", "--to=en", "dous días")
    assert said.status == 0, said.err
    assert said.out.count("\n") == 1
    # Another target vocabulary is another model.
    said = m4("decode", *arguments, "--gin.corpus.CorpusSpec.target_vocabulary_size=320")
    assert said.status == 2
    assert "target_vocabulary_size" in said.err
