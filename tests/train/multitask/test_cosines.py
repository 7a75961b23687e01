"""Cosines of groups' gradients: equal to gradients taken one by one, and what a sampler learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.data.samplers.learned import Learned, alignment
from m4.data.samplers.uniform import uniform
from m4.data.stream.stream import Stream
from m4.settings import SettingError
from m4.train.measuring.dev import dev_batches
from m4.train.multitask.cosines import GradientCosines, gradient_cosines, named
from m4.train.multitask.groups import Directions, Listed, by_family, by_language, by_level, by_side
from m4.train.optimizer import adamw
from m4.train.step import apply_model
from tests.shared import small_corpus
from tests.train.test_step import SHALLOW, mesh_of
from tests.train.trainers import program_of

NAMES = ["en-gl", "en-de", "gl-en", "de-en"]
KNOWN = Directions(
    NAMES, {"en-gl": 60, "en-de": 120, "gl-en": 60, "de-en": 120}, {"high": ["en-de", "de-en"],
    "medium": [], "low": ["en-gl", "gl-en"]},
)  # fmt: skip


def test_groups_by_hand():
    assert by_level(KNOWN) == {"high": ["en-de", "de-en"], "low": ["en-gl", "gl-en"]}
    assert by_language(KNOWN) == {"gl": ["en-gl", "gl-en"], "de": ["en-de", "de-en"]}
    assert by_family(KNOWN) == {"romance": ["en-gl", "gl-en"], "germanic": ["en-de", "de-en"]}
    assert by_side(KNOWN) == {"en->xx": ["en-gl", "en-de"], "xx->en": ["gl-en", "de-en"]}
    listed = Listed({"mine": ["low", "en-de"]})
    assert listed(KNOWN) == {"mine": ["en-gl", "gl-en", "en-de"], "others": ["de-en"]}
    with pytest.raises(SettingError, match="'en-gl': must be in one group, not in 'b' too"):
        Listed({"a": ["gl"], "b": ["en-gl"]})(KNOWN)
    with pytest.raises(SettingError, match=r"Listed\.groups = 'fr'"):
        Listed({"a": ["fr"]})(KNOWN)
    with pytest.raises(SettingError, match="without a slash"):
        GradientCosines(groups=Listed({"a/b": ["gl"]})).of(KNOWN)


def test_a_row_by_hand():
    # (3, 4) and (4, 3): 24 / 25; (0, 0) is left out; (-3, -4): -1 and -24 / 25.
    vectors = np.array([[3, 4], [4, 3], [0, 0], [-3, -4]], float)
    groups = {"a": ["en-a", "a-en"], "b": ["en-b"], "none": ["en-c"], "d": ["en-d"]}
    row = named(vectors @ vectors.T, list(groups), groups)
    assert row == {
        "gradients/cosine/a/b": 0.96, "gradients/cosine/a/d": -1.0, "gradients/cosine/b/d": -0.96,
        "gradients/alignment/en-a": -0.02, "gradients/alignment/a-en": -0.02,
        "gradients/alignment/en-b": 0.0, "gradients/alignment/en-d": -0.98,
    }  # fmt: skip


def test_what_helps_others_is_drawn_more():
    sampler = Learned(start=uniform, signal=alignment, step_size=1.0, floor=0.1)
    measured = {"gradients/alignment/a": 0.9, "gradients/alignment/b": 0.1, "dev/nll/c": 1.0}
    rates = sampler.rates(sampler.update(sampler.begin(), measured), dict.fromkeys("abc", 1 / 3))
    assert rates["a"] > rates["c"] > rates["b"]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [(1, 1), (2, 2, 1, 2)])
def test_cosines_equal_those_of_gradients_taken_one_by_one(tmp_path_factory, layout):
    cache = small_corpus(tmp_path_factory)
    stream = Stream(cache, batch_rows=8)
    assert stream.directions == NAMES
    mesh = mesh_of(*layout)
    model = SHALLOW.clone(vocab_size=cache.target_vocabulary.size)
    params = program_of(model, mesh, adamw(10)).new_state().params
    settings = GradientCosines(groups=Listed({"gl": ["gl"], "en-de": ["en-de"]}), pairs=20)
    row = gradient_cosines(cache, stream, model, mesh, settings, KNOWN)(params)

    batches = [jax.device_get(batch) for batch in dev_batches(cache, stream, mesh, 20)]
    groups = {"gl": (0, 2), "en-de": (1,), "others": (3,)}

    def loss(params, numbers):
        total = 0.0
        for batch in batches:
            logits, _ = apply_model(model, params, batch, None)
            nll = -jnp.take_along_axis(
                jax.nn.log_softmax(logits), batch["decoder_target_tokens"][..., None], -1
            )[..., 0]
            mine = np.isin(batch["direction_ids"], numbers) * batch["decoder_loss_weights"]
            total += jnp.sum(nll * mine)
        return total

    params = jax.device_get(params)
    flat = {
        name: np.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(params, numbers))])
        for name, numbers in groups.items()
    }
    for a, b in (("gl", "en-de"), ("gl", "others"), ("en-de", "others")):
        wanted = flat[a] @ flat[b] / np.linalg.norm(flat[a]) / np.linalg.norm(flat[b])
        assert row[f"gradients/cosine/{a}/{b}"] == pytest.approx(wanted, abs=1e-4)
    assert set(row) >= {f"gradients/alignment/{name}" for name in NAMES}
