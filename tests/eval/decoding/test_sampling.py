"""Translations that are drawn: which tokens may be, how often, and from what alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.eval.decoding.beam import NEG_INF
from m4.eval.decoding.sampling import Sampling, filtered, sample
from tests.eval.small_model import SETTINGS, sentences, tiny, translations

P_V = np.array([0.4, 0.25, 0.2, 0.1, 0.05])


def kept(sampling: Sampling) -> np.ndarray:
    """Returns the drawn distribution, by a loop: temperature, then top-k, then top-p."""
    p_V = P_V ** (1 / sampling.temperature)
    order = np.argsort(-p_V)[: sampling.top_k or None]
    share, chosen = p_V[order] / p_V[order].sum(), []
    for index, token in enumerate(order):
        if share[:index].sum() < sampling.top_p:
            chosen.append(token)
    result = np.where(np.isin(np.arange(5), chosen), p_V, 0)
    return result / result.sum()


CASES = [
    Sampling(), Sampling(temperature=0.5), Sampling(top_k=2), Sampling(top_p=0.6),
    Sampling(2.0, 4, 0.8), Sampling(top_k=9, top_p=0.39),
]  # fmt: skip


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_what_is_left_is_what_a_loop_leaves(sampling: Sampling) -> None:
    shuffled = np.array([3, 0, 4, 1, 2])
    logp_BKV = jnp.log(jnp.asarray(P_V[shuffled], jnp.float32))[None, None]
    got_V = np.asarray(filtered(logp_BKV, sampling))[0, 0]
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(got_V)), kept(sampling)[shuffled], 1e-5)
    assert ((got_V == NEG_INF) == (kept(sampling)[shuffled] == 0)).all()


def test_a_share_that_is_reached_exactly_is_enough() -> None:
    x_V = jnp.log(jnp.array([4.0, 2.0, 1.0, 1.0]) / 8)  # probabilities of whole eighths are exact
    kept_V = np.asarray(filtered(x_V[None, None], Sampling(top_p=0.75)))[0, 0] > NEG_INF
    assert kept_V.tolist() == [True, True, False, False]


def test_shares_of_many_samples_and_their_scores() -> None:
    # Tokens 2 to 6 have P_V at step 0, then comes the end; 4,000 samples of two rows.
    table = np.full((2, 7), 1e-30)
    table[0, 2:] = P_V
    table[1, 1] = 1

    def model(state: Any) -> Any:
        logits_V = jnp.log(jnp.asarray(table, jnp.float32))[jnp.minimum(state.cur_index, 1)]
        return jnp.broadcast_to(logits_V, (len(state.cur_token), 7)), state.cache

    sampling = Sampling(top_k=4, temperature=2.0)
    inputs = jnp.zeros((2, 3), jnp.int32)
    draw = jax.jit(lambda name_B: sample(inputs, name_B, {}, model, 1, 4000, 0.6, sampling))
    tokens_BKT, score_BK = jax.device_get(draw(np.array([7, 8], np.uint32)))
    for b in range(2):
        share_V = np.bincount(tokens_BKT[b, :, 0], minlength=7)[2:] / 4000
        # Five standard deviations of a share are at most 0.04.
        np.testing.assert_allclose(share_V, kept(sampling), atol=0.04)
    assert (tokens_BKT[0] != tokens_BKT[1]).any()
    np.testing.assert_array_equal(tokens_BKT[:, :, 1:], np.broadcast_to([1, 0], (2, 4000, 2)))
    # The score is the model's: neither temperature nor top-k is in it.
    wanted = np.log(P_V[tokens_BKT[:, :, 0] - 2]) / (7 / 6) ** 0.6
    np.testing.assert_allclose(score_BK, wanted, rtol=1e-5)


def test_a_sample_depends_on_its_sentence_and_the_seed_alone() -> None:
    made, texts = tiny(moe=None), sentences(9, seed=3)

    def drawn(texts: list[str], rows: int, seed: int = 0) -> list[list[str]]:
        sampling = Sampling(temperature=0.7, seed=seed)
        settings = replace(SETTINGS, batch_rows=rows, sampling=sampling, n_best=3)
        return [each.texts for each in translations(made, texts, settings)]

    together = drawn(texts, 8)
    assert len({text for each in together for text in each}) > 12
    assert drawn(texts, 1) == together
    order = np.random.default_rng(2).permutation(len(texts))
    assert drawn([texts[i] for i in order], 8) == [together[i] for i in order]
    assert drawn(texts, 8, seed=1) != together
