"""Decoding with a tiny model of random weights: laws, and equality with a search without cache."""

import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from m4.eval.decoding import decode as decoding
from m4.eval.decoding.decode import BatchCounts
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.chrf import chrf
from m4.model.gates.by_direction import by_direction
from m4.parallel.mesh import Layout, axis_rules_context, make_mesh
from tests.eval.search_over_lists import search_over_lists
from tests.eval.small_model import (
    MOE,
    SETTINGS,
    WORDS,
    decode,
    score_references,
    sentences,
    tiny,
    translations,
)


@pytest.fixture(scope="module")
def made():
    return tiny()


def test_batches_have_one_shape_a_bucket_and_every_source_once():
    sources = [[5] * n for n in (3, 20, 7, 16, 1, 17, 9)]
    got = list(decoding.batches(sources, [16, 32], batch_rows=3))
    # Longest first: bucket 32 holds lengths 20 and 17, bucket 16 the other five.
    assert [batch.rows for batch in got] == [[1, 5], [3, 6, 2], [0, 4]]
    assert [batch.tokens_BL.shape for batch in got] == [(3, 32), (3, 16), (3, 16)]
    for batch in got:
        for b, row in enumerate(batch.rows):
            assert batch.tokens_BL[b].tolist() == sources[row] + [0] * (
                batch.tokens_BL.shape[1] - len(sources[row])
            )
        for b in range(len(batch.rows), 3):
            assert batch.tokens_BL[b].tolist() == batch.tokens_BL[len(batch.rows) - 1].tolist()

    # A batch has one factor of the limit.
    got = list(decoding.batches([[5] * n for n in (3, 20, 7, 16, 1)], [16, 32], 2, [2, 2, 4, 2, 4]))
    assert [(batch.rows, batch.tokens_BL.shape[1], batch.factor) for batch in got] == [
        ([1], 32, 2), ([3, 0], 16, 2), ([2, 4], 16, 4),
    ]  # fmt: skip


def test_buckets_and_limits():
    assert decoding.default_buckets(100) == [16, 32, 64, 100]
    assert decoding.default_buckets(16) == [16]
    assert decoding.default_buckets(10) == [10]
    longest = replace(SETTINGS, max_target_length=256)
    assert decoding.target_limit(16, longest) == 48
    assert decoding.target_limit(128, longest) == 256
    assert decoding.target_limit(16, longest, 5) == 5 * 16 + 16
    assert decoding.target_limit(16, replace(longest, min_length=60)) == 48 + 60


def test_share_of_real_tokens():
    counts = BatchCounts()
    # Sources of 3 and 2 tokens in [4, 4], two rows to fill up; translations of 2 and 3 tokens.
    tokens_BL = np.array([[5, 5, 1, 0], [5, 1, 0, 0], [5, 1, 0, 0], [5, 1, 0, 0]])
    best_BT = np.array([[6, 1, 0, 0, 0], [6, 6, 1, 0, 0], [6, 6, 1, 0, 0], [6, 6, 1, 0, 0]])
    counts(decoding.Batch([4, 2], tokens_BL), best_BT)
    assert (counts.sentences, counts.tokens, counts.unended) == (2, 5, [])
    assert (counts.real, counts.places) == (3 + 2 + 5, 4 * (4 + 3))
    assert "36% of the batches are real tokens" in counts.said()


def test_limits_of_translations_are_those_of_their_language(monkeypatch):
    """A translation without an end is cut at 2 L + 16, or by the factor of its language."""

    def endless(model, params, batch, limit, *_, **__):
        rows = len(batch["encoder_input_tokens"])
        return jnp.full((rows, 1, limit), 5), jnp.zeros((rows, 1))

    monkeypatch.setattr(decoding, "search", endless)
    counts, never = BatchCounts(), replace(SETTINGS, max_target_length=256)
    texts = ["<2gl> w1 w2", "<2el> w1 w2"]
    decode((cast(Any, None), {}), texts, never, on_batch=counts, factors={"el": 5})
    assert sorted(counts.unended) == [(0, 2 * 16 + 16), (1, 5 * 16 + 16)]
    said = decoding.cut_said(Counter(limit for _, limit in counts.unended), never, {"el": 5})
    assert said.startswith(
        "2 translations are cut at their limit of 48 to 96 tokens, without an end"
    )
    assert "(2 L + 16 for a source padded to L tokens, 5 L + 16 into el; at most" in said
    said = decoding.cut_said({48: 1}, never, {})
    assert said.startswith("1 translation is cut at its limit of 48 tokens")


def test_equals_search_without_cache_or_batches(made):
    model, params = made
    length, beams, alpha = 10, 2, 0.6

    @jax.jit
    def log_probs(source_1L, target_1T):
        inputs = jnp.pad(target_1T[:, :-1], ((0, 0), (1, 0)))
        logits = model.apply(
            {"params": params}, source_1L, inputs, jnp.ones_like(inputs), enable_dropout=False
        )
        return jax.nn.log_softmax(logits)[0]

    checked = 0
    vocabulary, texts = WORDS, sentences(12)
    got = decode(made, texts)
    for text, hypothesis in zip(texts, got, strict=True):
        ids = [*vocabulary.encode_tagged([text])[0], 1]
        source = np.zeros((1, 16), np.int32)
        source[0, : len(ids)] = ids

        def score(tokens, source=source):
            target = np.zeros((1, length), np.int32)
            target[0, : len(tokens)] = tokens
            return np.asarray(log_probs(source, target))[len(tokens)].tolist()

        best_first, _, gap = search_over_lists(score, [], beams, alpha, length)
        if gap > 1e-4:
            assert hypothesis == vocabulary.decode(best_first[:1])[0]
            checked += 1
    assert checked >= 6  # close calls are left out


def test_does_not_depend_on_batch_or_order(made):
    texts = sentences(21, seed=1)
    together = decode(made, texts)
    assert len(set(together)) > 10  # the law would be empty otherwise
    assert decode(made, texts, replace(SETTINGS, batch_rows=1)) == together
    order = np.random.default_rng(2).permutation(len(texts))
    shuffled = decode(made, [texts[i] for i in order])
    assert shuffled == [together[i] for i in order]
    # Alone in a batch of four.
    assert decode(made, texts[:1]) == together[:1]
    assert decode(made, []) == []


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (2, 2), (4, 2)])
def test_the_number_of_batches_at_once_has_no_effect(made, monkeypatch, cores, most):
    texts = sentences(21, seed=1)
    wanted = [decode(made, [text])[0] for text in texts]
    search, lock, together = decoding.search, threading.Lock(), threading.Barrier(most, timeout=60)
    now, seen, first = 0, [], iter([True] * most)

    def counted(*arguments, **options):
        nonlocal now
        with lock:
            now += 1
            seen.append(now)
        # The first ones wait for each other: fewer threads would break the barrier.
        if next(first, False):
            together.wait()
        found = jax.block_until_ready(search(*arguments, **options))
        with lock:
            now -= 1
        return found

    monkeypatch.setattr(decoding, "available_cpus", lambda: list(range(cores)))
    monkeypatch.setattr(decoding, "search", counted)
    assert decode(made, texts) == wanted
    assert max(seen) == most


@pytest.mark.parametrize(
    ("cores", "batch_rows", "beams", "rows"),
    [(1, 32, 1, 32), (2, 32, 1, 16), (2, 30, 1, 30), (2, 8, 4, 4), (2, 7, 4, 7)],
)
def test_a_call_of_one_batch_is_divided_over_the_cores(
    made, monkeypatch, cores, batch_rows, beams, rows
):
    """Into parts of 16 hypotheses or more, rows times beams."""
    monkeypatch.setattr(decoding, "available_cpus", lambda: list(range(cores)))
    texts, shapes = sentences(batch_rows - 1, seed=1), []
    settings = replace(SETTINGS, batch_rows=batch_rows, beams=beams)

    def keep(batch, best_BT):
        shapes.append(len(batch.tokens_BL))

    found = decode(made, texts, settings, on_batch=keep)
    assert set(shapes) == {rows}
    assert found == decode(made, texts, replace(SETTINGS, beams=beams))


def test_over_a_mesh_one_batch_is_searched_at_a_time(monkeypatch):
    monkeypatch.setattr(decoding, "available_cpus", lambda: [0, 1, 2, 3])
    assert decoding.batches_at_once(None) == 2
    mesh = make_mesh()
    assert decoding.batches_at_once(Layout(mesh)) == 1
    with axis_rules_context(mesh):
        assert decoding.batches_at_once(None) == 1


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_is_raised_and_ends_the_search(made, monkeypatch, cores):
    search, begun = decoding.search, []

    def failing(*arguments, **options):
        begun.append(1)
        if len(begun) == 2:
            raise RuntimeError("no memory")
        return search(*arguments, **options)

    monkeypatch.setattr(decoding, "available_cpus", lambda: list(range(cores)))
    monkeypatch.setattr(decoding, "search", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        decode(made, sentences(40, seed=1))
    # Ten batches of four. Of two threads each may begin one more before the error is read.
    assert len(begun) <= 2 + 2 * (cores - 1)


def test_models_of_equal_shape_share_the_program(made):
    texts = sentences(3)
    programs = cast(Any, decoding.search)._cache_size
    one = decode(made, texts)
    compiled = programs()
    other = tiny(seed=1)
    assert other[0] is not made[0]
    assert decode(other, texts) != one
    assert decode(made, texts[:1]) == one[:1]
    assert programs() == compiled


def test_batches_and_cut(made, capsys):
    steps, cuts = [], []
    long = "<2xx>" + " w3" * 20
    texts = ["<2xx> w1 w2", long, *["<2xx> w4"] * 4]
    got = decode(
        made, texts, replace(SETTINGS, max_source_length=16),
        on_batch=lambda batch, _: steps.append(len(batch.rows)),
        on_cut=lambda *cut: cuts.append(cut),
    )  # fmt: skip
    # Tag, 20 words and EOS are 22 pieces; of them stay the first 15 and EOS.
    assert cuts == [(1, 22, 16)]
    assert decode(made, ["<2xx>" + " w3" * 14]) == [got[1]]
    assert steps == [4, 2]
    # The default is a line on stderr.
    decode(made, [long], replace(SETTINGS, max_source_length=16))
    assert capsys.readouterr().err == "source 1: 22 pieces, cut to 16\n"


BY_TASK = partial(MOE, gate=by_direction)


@pytest.mark.parametrize("beams", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_gate_by_task_translates_each_source_by_its_direction(beams):
    made = tiny(moe=BY_TASK, directions=3)
    texts = sentences(9, seed=4)
    numbers = [row % 3 for row in range(9)]
    settings = replace(SETTINGS, beams=beams)
    together = translations(made, texts, settings, directions=numbers)
    apart = {}
    for number in range(3):
        found = translations(made, texts, settings, directions=[number] * 9)
        apart[number] = [each.texts[0] for each in found]
    assert [each.texts[0] for each in together] == [apart[n][row] for row, n in enumerate(numbers)]
    assert sum(apart[0][row] != apart[1][row] for row in range(9)) > 4
    # The search over the cache says of its translations what one pass over all of them says.
    ended = [row for row, each in enumerate(together) if len(each.texts[0].split()) < 10]
    given = score_references(
        made, [texts[row] for row in ended],
        [together[row].texts[0] for row in ended], settings,
        directions=[numbers[row] for row in ended],
    )  # fmt: skip
    assert len(ended) > 1
    found = [together[row].scores[0] for row in ended]
    np.testing.assert_allclose([each.score for each in given], found, rtol=1e-4)


# Minimum Bayes risk.
SAID = ["the cat sat down", "the cat sat", "a dog ran", "the cat sat"]


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        (chrf, lambda said, other: CHRF().sentence_score(said, [other]).score),
        (bleu, lambda said, other: BLEU().corpus_score([said], [[other]]).score),
    ],
)
def test_the_utility_is_the_mean_of_sacrebleus_scores(metric, score):
    texts = [f"{one} on the mat today" for one in SAID]
    plain = [np.mean([score(said, other) for other in texts]) for said in texts]
    np.testing.assert_allclose(decoding.utilities(texts, metric, "en"), plain, rtol=1e-9)


def test_the_first_translation_is_the_one_most_like_the_others():
    made, texts = tiny(moe=None), sentences(5, seed=2)
    beams = replace(SETTINGS, beams=4, n_best=4)
    plain = translations(made, texts, beams)
    ranked = translations(made, texts, replace(beams, mbr=True))
    for before, after in zip(plain, ranked, strict=True):
        gains = decoding.utilities(before.texts, chrf, "xx")
        order = np.argsort(-gains, kind="stable")
        assert after.texts == [before.texts[k] for k in order]
        assert after.scores == [before.scores[k] for k in order]
        assert after.utilities == gains[order].tolist()
    assert [one.texts for one in ranked] != [one.texts for one in plain]
