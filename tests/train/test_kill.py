"""kill -9 in the middle of training: the same call resumes, with the same result."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from m4.data.cache import cache as caches
from m4.data.corpus import CorpusSpec
from m4.data.stream.stream import Stream
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.loop.run import Evaluator
from m4.train.trainer import Trained
from tests.data.corpus import Made
from tests.train.test_step import SHALLOW, mesh_of
from tests.train.trainers import timeless_rows, train


def run(folder: Path, corpus: Path, killed_at: int = 0) -> Trained:
    """Six steps with dropout and a checkpoint every two; killed_at: the step that is the last."""
    cache = caches.Cache(corpus)

    def evaluate(params: object) -> dict[str, float]:
        done = len([row for row in read_metrics(folder) if "loss" in row])
        if killed_at and done == killed_at:
            for _ in range(600):  # saves are asynchronous: let the first one end
                if latest_step(folder / "checkpoints") is not None:
                    break
                signal.sigtimedwait([], 0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"dev/nll": 0.0}

    return train(
        folder,
        SHALLOW.clone(vocab_size=-(-cache.source_vocabulary.size // 8) * 8, dropout_rate=0.1),
        Stream(cache, seed=1, batch_rows=4),
        mesh_of(1, 1),
        total_steps=6,
        checkpoint_period=2,
        log_period=1,
        evaluators=[Evaluator(1, evaluate)],
    )


@pytest.mark.slow
def test_resume_after_sigkill_is_bit_equal(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    CorpusSpec(Made({"gl": 60}), vocabulary_size=300, lengths={"inputs": 64, "targets": 64}).build(
        corpus
    )
    process = multiprocessing.get_context("spawn").Process(
        target=run, args=(tmp_path / "killed", corpus, 5)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert latest_step(tmp_path / "killed" / "checkpoints") in (2, 4)
    assert read_metrics(tmp_path / "killed")[-1]["step"] == 5

    killed, whole = run(tmp_path / "killed", corpus), run(tmp_path / "whole", corpus)
    for a, b in zip(jax.tree.leaves(killed.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert timeless_rows(tmp_path / "killed") == timeless_rows(tmp_path / "whole")
    # And a save that was killed in the middle is cleaned up.
    names = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert names == ["2", "4", "6"]
    store = Checkpoints(tmp_path / "killed" / "checkpoints", read_only=True)
    assert store.note(6)["step"] == 6
    store.close()
