"""Losses of dev sentences by direction."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from m4.data.corpus import CorpusSpec
from m4.data.sources import Pair
from m4.data.stream.stream import Stream
from m4.train.measuring.dev import dev_loss
from m4.train.optimizer import adamw
from m4.train.step import make_eval_step
from tests.data.arrays import unpacked
from tests.data.corpus import Made
from tests.shared import model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import program_of


class WithoutDev(Made):
    """Source whose first language has no dev sentences."""

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        if (pair, split) != ("en-de", "dev"):
            yield from super().pairs(pair, split)


def test_directions_have_their_own_losses_where_another_has_none(tmp_path: Path) -> None:
    """Each equals that of its sentences one by one, without other directions in the batch."""
    spec = CorpusSpec(
        WithoutDev({"de": 60, "gl": 60}), vocabulary_size=300, lengths={"inputs": 64, "targets": 64}
    )
    cache = spec.build(tmp_path / "data")
    stream = Stream(cache, batch_rows=8)
    assert stream.directions[0] == "de-en" or stream.directions[0] == "en-de"
    model, mesh = model_for(cache, moe=None), mesh_of(1, 1)
    params = program_of(model, mesh, adamw(10)).new_state().params
    found = dev_loss(cache, stream, model, mesh)(params)
    assert found.keys() == {"dev/nll", "dev/nll/en-gl", "dev/nll/gl-en"}
    alone = jax.jit(make_eval_step(model, directions=1))
    total = tokens = 0.0
    for direction in ("en-gl", "gl-en"):
        sums = alone(params, unpacked(cache, direction, "dev"))
        nll, count = (float(sums[name][0]) for name in ("nll_sum_D", "tokens_D"))
        np.testing.assert_allclose(found[f"dev/nll/{direction}"], nll / count, rtol=1e-5)
        total, tokens = total + nll, tokens + count
    np.testing.assert_allclose(found["dev/nll"], total / tokens, rtol=1e-5)
    aside = dev_loss(cache, stream, model, mesh, aside=["en-gl"])(params)
    assert aside == {**found, "dev/nll": aside["dev/nll/gl-en"]}
