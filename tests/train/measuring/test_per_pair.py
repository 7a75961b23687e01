"""Layer and expert of what is not finite, and the losses of single pairs."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from m4.data.corpus import CorpusSpec
from m4.data.stream.stream import Stream
from m4.model.transformer import Transformer
from m4.parallel.batched_init import draw_together
from m4.train.measuring.per_pair import PairProbe, worst
from m4.train.state import initialize
from tests.data.corpus import Made
from tests.train.test_step import MODEL
from tests.train.trainers import training_of

# By layer, and as a stack of blocks that is scanned: where an expert's matrices are.
EXPERTS = {False: ("encoder_1", "moe"), True: ("encoder_blocks", "layer_1", "moe")}


@pytest.mark.parametrize("scanned", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_broken_expert_is_named_with_its_layer(tmp_path: Path, scanned: bool) -> None:
    corpus = CorpusSpec(
        Made({"gl": 60}), vocabulary_size=300, lengths={"inputs": 64, "targets": 64}
    ).build(tmp_path / "data")
    model: Transformer = MODEL.clone(
        vocab_size=-(-corpus.source_vocabulary.size // 8) * 8,
        directions=2,
        scan_layers=scanned,
        moe_every=2,
        encoder_layers=2,
        decoder_layers=2,
    )
    made = jax.jit(draw_together(lambda: initialize(model, optax.sgd(0.1), 0).params))()
    params = jax.tree.map(np.array, made)
    layer = params
    for part in EXPERTS[scanned]:
        layer = layer[part]
    for matrix in jax.tree.leaves(layer["experts"]):
        matrix[(slice(None), 1) if scanned else 1] = np.nan  # the second expert
    found, rows = Stream(corpus, seed=1, batch_rows=2).pairs(0)
    probe = PairProbe(model, params, training_of(), int(rows["decoder_loss_weights"].sum()))
    losses = probe.losses(rows)
    assert len(losses) == len(found)
    broken = np.flatnonzero(~np.isfinite(losses))
    assert len(broken) > 0
    extremes = probe.extremes(rows, int(broken[0]))
    names = [one.layer for one in extremes]
    assert names[:4] == ["token_embedder", "encoder_0/attention", "encoder_0/mlp", "encoder_0"]
    of = worst(extremes)
    assert (of.layer, of.expert) == ("encoder_1/moe", 1)
    assert np.isnan(probe.gradient_norm(rows, int(broken[0])))
