"""A model of random weights, its vocabulary of words, and sentences for it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from m4.eval.decoding import decode as decoding
from m4.eval.decoding import score_references as scoring
from m4.eval.decoding.settings import Decoding
from m4.model.moe import MoeLayer
from m4.train.program import draw_together
from tests.shared import small_model

VOCAB, COUNT = 24, 20
# One set of shapes for nearly all tests: a compile takes seconds.
SETTINGS = Decoding(beams=2, batch_rows=4, max_target_length=10)


class Words:
    """Vocabulary of w0 ... w19 (ids 4 ...) and <2xx> (id 3)."""

    def encode_tagged(self, texts):
        return [
            [3 if word.startswith("<") else 4 + int(word[1:]) for word in text.split()]
            for text in texts
        ]

    def encode_targets(self, texts):
        return [[4 + int(word[1:]) for word in text.split()] for text in texts]

    def decode(self, ids):
        texts = []
        for row in ids:
            row = row[: row.index(1)] if 1 in row else row
            texts.append(" ".join(f"w{i - 4}" for i in row if i))
        return texts


WORDS = Words()


@partial(jax.jit, static_argnames="model")
def init(model, key):
    ones = jnp.ones((1, 4), jnp.int32)
    make = partial(model.init, enable_dropout=False)
    return draw_together(make)(key, ones, ones, ones)["params"]


MOE = partial(MoeLayer, num_experts=4, group_tokens=16)


def tiny(seed=0, **changes):
    """Returns a model with experts and wide random weights: its translations differ and end."""
    sizes = {"vocab_size": VOCAB, "width": 16, "head_width": 8, "mlp_width": 32}
    model = small_model(**{**sizes, "moe": MOE, **changes})
    params = jax.device_get(init(model, jax.random.key(seed)))
    return model, jax.tree.map(lambda x: 2.0 * x, params)


def sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        "<2xx> " + " ".join(f"w{i}" for i in rng.integers(0, COUNT, rng.integers(1, 14)))
        for _ in range(count)
    ]


def translations(
    made, sources, settings=SETTINGS, vocabulary=WORDS, *, layout=None, factors=None, **more
):
    """Returns the translations by `made`, a model and its parameters."""
    model, params = made
    trained = decoding.TrainedModel(model, params, vocabulary, settings, layout, factors or {})
    return decoding.translations(trained, sources, **more)


def decode(*arguments, **more):
    """Returns the first translation of each source."""
    return [each.texts[0] for each in translations(*arguments, **more)]


def score_references(made, sources, targets, settings=SETTINGS, vocabulary=WORDS, **more):
    """Returns the probabilities of translations by `made`, a model and its parameters."""
    model, params = made
    trained = decoding.TrainedModel(model, params, vocabulary, settings)
    return scoring.score_references(trained, sources, targets, **more)
