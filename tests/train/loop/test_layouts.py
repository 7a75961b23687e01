"""Training on buckets: several shapes of batches, resumed."""

from pathlib import Path

import jax
import numpy as np
import pytest

from m4.data.cache import cache as caches
from m4.data.stream.stream import Stream
from m4.storage.metrics_log import read_metrics
from m4.train.loop import Trained
from tests.train.test_step import MODEL, mesh_of
from tests.train.trainers import train


def bucketed(corpus: caches.Cache) -> Stream:
    # 4 rows of 64 + 64 ids are 6.4 of 40 + 40: 6.
    return Stream(corpus, batch_rows=4, layout="bucketed", widths=(40,), rows_multiple=2)


def run(corpus: caches.Cache, folder: Path, steps: int, devices: int = 2) -> Trained:
    return train(
        folder,
        MODEL.clone(vocab_size=-(-corpus.target_vocabulary.size // 8) * 8),
        bucketed(corpus),
        mesh_of(devices, 1),
        total_steps=steps,
        log_period=1,
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_resume_is_bit_equal(tmp_path: Path, corpus: caches.Cache) -> None:
    stream = bucketed(corpus)
    whole = run(corpus, tmp_path / "whole", 4)
    run(corpus, tmp_path / "parts", 2)
    parts = run(corpus, tmp_path / "parts", 4)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_array_equal(a, b)
    for row in read_metrics(tmp_path / "whole"):
        batch = stream.batch(row["step"] - 1)
        assert row["target_tokens"] == batch["decoder_loss_weights"].sum()
    shapes = {stream.batch(step)["decoder_target_tokens"].shape for step in range(4)}
    assert len(shapes) == len(stream.shapes)


def test_rows_that_do_not_divide_are_refused(tmp_path: Path, corpus: caches.Cache) -> None:
    with pytest.raises(ValueError, match=r"Training\.batch_size"):
        run(corpus, tmp_path, 1, devices=4)
