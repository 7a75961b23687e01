from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from m4.data.cache import Cache
from m4.data.preprocess import source_ids, split_direction, target_ids
from m4.data.samplers.temperature import temperature
from m4.data.stream import Stream

INT_KEYS = {
    "encoder_input_tokens",
    "encoder_segment_ids",
    "encoder_positions",
    "encoder_direction_ids",
    "decoder_input_tokens",
    "decoder_target_tokens",
    "decoder_segment_ids",
    "decoder_positions",
    "direction_ids",
}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def pairs_of(batch: dict[str, np.ndarray]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(direction, source ids, target ids) of every segment."""
    found = []
    for row in range(len(batch["encoder_input_tokens"])):
        source_segments = batch["encoder_segment_ids"][row]
        target_segments = batch["decoder_segment_ids"][row]
        assert source_segments.max() == target_segments.max()
        for segment in range(1, source_segments.max() + 1):
            inside = target_segments == segment
            (direction,) = set(batch["direction_ids"][row][inside].tolist())
            of_source = batch["encoder_direction_ids"][row][source_segments == segment]
            assert set(of_source.tolist()) == {direction}
            source = batch["encoder_input_tokens"][row][source_segments == segment]
            target = batch["decoder_target_tokens"][row][inside]
            found.append((direction, tuple(source.tolist()), tuple(target.tolist())))
    return found


@pytest.fixture(scope="module")
def texts(made_cache: Cache) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Direction -> (source ids, target ids) of its training pairs, made from the text."""
    found = {}
    for direction in made_cache.directions:
        source, target = split_direction(direction)
        code = target if source == "en" else source
        english, foreign = zip(*made_cache.pairs(code, "train"), strict=True)
        sides = (english, foreign) if source == "en" else (foreign, english)
        vocabulary = made_cache.vocabulary
        ids = source_ids(vocabulary, sides[0], target, 96), target_ids(vocabulary, sides[1], 96)
        found[direction] = [(tuple(s), tuple(t)) for s, t in zip(*ids, strict=True)]
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_resume_is_exact(made_cache: Cache, pack: bool) -> None:
    first = Stream(made_cache, seed=3, batch_rows=4, pack=pack)
    batches = [first.batch(step) for step in range(140)]  # more than a group of 128 steps
    for step in (139, 0, 77, 128, 127, 128, 3):
        fresh = Stream(made_cache, seed=3, batch_rows=4, pack=pack)
        assert same(fresh.batch(step), batches[step])
        assert same(first.batch(step), batches[step])
    assert not same(Stream(made_cache, seed=4, batch_rows=4, pack=pack).batch(0), batches[0])
    far = 10**9 + 7
    assert same(first.batch(far), fresh.batch(far))


def test_keys_shapes_and_types(made_cache: Cache) -> None:
    batch = Stream(made_cache, batch_rows=5, source_length=100, target_length=110).batch(0)
    assert set(batch) == INT_KEYS | {"decoder_loss_weights"}
    for key, array in batch.items():
        assert array.dtype == (np.float32 if key == "decoder_loss_weights" else np.int32), key
        assert array.shape == (5, 100 if key.startswith("encoder") else 110), key


@pytest.mark.parametrize("pack", [True, False])
def test_every_segment_is_a_whole_pair(made_cache: Cache, texts: dict, pack: bool) -> None:
    stream = Stream(made_cache, batch_rows=4, pack=pack)
    known = [set(texts[d]) for d in stream.directions]
    for step in range(30):
        batch = stream.batch(step)
        for direction, source, target in pairs_of(batch):
            assert (source, target) in known[direction]
        segments = batch["decoder_segment_ids"]
        weights = batch["decoder_loss_weights"]
        assert np.array_equal(weights > 0, segments > 0)
        assert set(np.unique(weights)) <= {0.0, 1.0}
        if not pack:
            assert segments.max() == 1


def test_inputs_are_targets_moved_right_inside_each_segment(made_cache: Cache) -> None:
    batch = Stream(made_cache, batch_rows=3).batch(5)
    for row in range(3):
        segments = batch["decoder_segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            target = batch["decoder_target_tokens"][row][inside]
            assert batch["decoder_input_tokens"][row][inside].tolist() == [0, *target[:-1]]
            assert batch["decoder_positions"][row][inside].tolist() == list(range(len(target)))
        for side in ("encoder", "decoder"):
            padding = batch[f"{side}_segment_ids"][row] == 0
            assert (batch[f"{side}_positions"][row][padding] == 0).all()
            assert (np.diff(padding.astype(int)) >= 0).all(), "padding is at the end"


@pytest.mark.parametrize("pack", [True, False])
def test_every_pair_once_before_any_twice(made_cache: Cache, texts: dict, pack: bool) -> None:
    """After every single step, not only at the end of an epoch."""
    stream = Stream(made_cache, batch_rows=4, pack=pack)
    counts = {d: Counter(dict.fromkeys(pairs, 0)) for d, pairs in texts.items()}
    for step in range(200):
        for direction, source, target in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][(source, target)] += 1
        assert not stream.dropped(step)
        seen = stream.examples_seen(step + 1)
        for direction, counter in counts.items():
            assert max(counter.values()) - min(counter.values()) <= 1, (step, direction)
            assert counter.total() == seen[direction]
    epochs = stream.epochs(200)
    assert epochs["en-sr_Latn"] > 2
    for direction, counter in counts.items():
        assert epochs[direction] == pytest.approx(counter.total() / len(counter))


def test_shares(made_cache: Cache) -> None:
    rates = {"en-gl": 3.0, "sr_Latn-en": 1.0}
    stream = Stream(made_cache, list(rates), rates, batch_rows=8)
    seen = stream.examples_seen(1000)
    # Without replacement inside blocks of 4,096: closer than 4,096 binomial draws, 5 sigma.
    assert seen["en-gl"] - 0.75 * sum(seen.values()) == pytest.approx(0, abs=5 * 27.7)


def test_packing_fills_the_rows(made_cache: Cache) -> None:
    stream = Stream(made_cache, batch_rows=8)
    fills = [(stream.batch(step)["encoder_segment_ids"] > 0).mean() for step in range(64)]
    assert np.mean(fills) > 0.85
    assert min(fills) > 0.75
    assert sum(stream.dropped(step) for step in range(300)) == 0


def test_rows_that_hold_one_pair_only_are_never_empty(made_cache: Cache) -> None:
    # 36 / 35 ids are the longest pair of sr_Latn at most: about one pair a row.
    longest = max(made_cache.longest("sr_Latn").values())
    rates = {"en-sr_Latn": 1.0}
    stream = Stream(
        made_cache,
        ["en-sr_Latn"],
        rates,
        batch_rows=1,
        source_length=longest + 2,
        target_length=longest + 1,
    )
    assert all(len(pairs_of(stream.batch(step))) >= 1 for step in range(600))


def test_hosts_share_a_batch(made_cache: Cache) -> None:
    stream = Stream(made_cache, batch_rows=8)
    whole = stream.batch(9)
    parts = [Stream(made_cache, batch_rows=8).batch(9, slice(i, i + 2)) for i in range(0, 8, 2)]
    for key, array in whole.items():
        assert np.array_equal(np.concatenate([part[key] for part in parts]), array)


def test_fingerprint_is_everything_that_decides(made_cache: Cache) -> None:
    base: dict[str, Any] = {"seed": 1, "batch_rows": 4, "source_length": 100, "target_length": 100}
    assert Stream(made_cache, **base).fingerprint() == Stream(made_cache, **base).fingerprint()
    others: list[dict[str, Any]] = [
        base | {"seed": 2},
        base | {"batch_rows": 8},
        base | {"source_length": 101},
        base | {"target_length": 101},
        base | {"pack": False},
        base | {"directions": ["en-gl", "gl-en"]},
        base | {"rates": temperature(made_cache.sizes()) | {"en-gl": 0.5}},
    ]
    prints = {Stream(made_cache, **arguments).fingerprint() for arguments in [base, *others]}
    assert len(prints) == 1 + len(others)


def test_errors(made_cache: Cache) -> None:
    with pytest.raises(ValueError, match="no rate for en-eo; there are rates for en-gl"):
        Stream(made_cache, ["en-gl", "en-eo"])
    with pytest.raises(ValueError, match="no language 'eo'; it has gl, pt, sr_Latn"):
        Stream(made_cache, ["en-eo"], {"en-eo": 1.0})
    with pytest.raises(ValueError, match="source_length is 10, but a training sentence of 'gl'"):
        Stream(made_cache, source_length=10)
    with pytest.raises(ValueError, match="batch_rows is 0"):
        Stream(made_cache, batch_rows=0)
