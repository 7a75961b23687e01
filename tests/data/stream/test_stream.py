from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.preprocess import EOS_ID
from m4.data.samplers import Phase
from m4.data.samplers.temperature import temperature
from m4.data.stream.stream import LAYOUTS, Stream
from tests.data.arrays import Ids, of_text, pairs_of, same
from tests.data.arrays import tokens as tokens_of
from tests.data.corpus import Made


@pytest.fixture(scope="module")
def texts(made_cache: Cache) -> dict[str, list[Ids]]:
    """Direction -> the ids of its training pairs."""
    return {name: of_text(made_cache, name, "train") for name in made_cache.directions}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_exact(made_cache: Cache, layout: str) -> None:
    first = Stream(made_cache, seed=3, batch_rows=16, layout=layout)
    batches = [first.batch(step) for step in range(140)]  # more than a group: of 128, 64, 1 steps
    for step in (139, 0, 127, 128):
        fresh = Stream(made_cache, seed=3, batch_rows=16, layout=layout)
        assert same(fresh.batch(step), batches[step])
        assert same(first.batch(step), batches[step])
    assert not same(Stream(made_cache, seed=4, batch_rows=16, layout=layout).batch(0), batches[0])
    far = 10**9 + 7
    assert same(first.batch(far), fresh.batch(far))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_segment_is_a_whole_pair(made_cache: Cache, texts: dict, layout: str) -> None:
    stream = Stream(made_cache, batch_rows=8, layout=layout)
    known = [set(texts[d]) for d in stream.directions]
    for step in range(30):
        batch = stream.batch(step)
        for direction, source, target in pairs_of(batch):
            assert (source, target) in known[direction]
        segments = batch["decoder_segment_ids"]
        weights = batch["decoder_loss_weights"]
        assert np.array_equal(weights > 0, segments > 0)
        assert set(np.unique(weights)) <= {0.0, 1.0}
        if layout != "packed":
            assert segments.max() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_once_before_any_twice(made_cache: Cache, texts: dict, layout: str) -> None:
    """After every single step, not only at the end of an epoch."""
    stream = Stream(made_cache, batch_rows=8, layout=layout)
    counts = {d: Counter(dict.fromkeys(pairs, 0)) for d, pairs in texts.items()}
    for step in range(260):
        for direction, source, target in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][(source, target)] += 1
        seen = stream.examples_seen(step + 1)
        for direction, counter in counts.items():
            assert max(counter.values()) - min(counter.values()) <= 1, (step, direction)
            assert counter.total() == seen[direction]
    epochs = stream.epochs(260)
    assert epochs["en-sr_Latn"] > 2
    for direction, counter in counts.items():
        assert epochs[direction] == pytest.approx(counter.total() / len(counter))


@pytest.mark.parametrize("rows", [8, 64])
def test_packing_fills_the_rows(made_cache: Cache, rows: int) -> None:
    stream = Stream(made_cache, batch_rows=rows)
    fills = [(stream.batch(step)["encoder_segment_ids"] > 0).mean() for step in range(64)]
    # Short sentences: the tag is a large part of a source, so targets are emptier.
    assert np.mean(fills) > 0.92
    assert min(fills) > 0.85
    placed = sum(len(stream.pairs(step)[0]) for step in range(600))
    assert placed == sum(stream.examples_seen(600).values())  # none is left out


def test_rows_that_hold_one_pair_only_are_never_empty(made_cache: Cache) -> None:
    # 36 / 35 ids are the longest pair of sr_Latn at most: about one pair a row.
    longest = max(made_cache.longest("en-sr_Latn").values())
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_on_any_number_of_hosts(made_cache: Cache, layout: str) -> None:
    stream = Stream(made_cache, batch_rows=64, layout=layout)
    for step in np.random.default_rng(0).integers(0, 10**6, 6).tolist():
        whole = stream.batch(step)
        for hosts in (1, 2, 8):
            fresh = Stream(made_cache, batch_rows=64, layout=layout)
            parts = [fresh.batch(step, (host, hosts)) for host in range(hosts)]
            assert len({part["direction_ids"].shape for part in parts}) == 1
            for key, array in whole.items():
                assert np.array_equal(np.concatenate([part[key] for part in parts]), array)
    with pytest.raises(ValueError, match=r"of 64 rows .* over 3 hosts; nearest .*: 63 and 66$"):
        Stream(made_cache, batch_rows=64).batch(0, (0, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fingerprint_is_everything_that_decides(made_cache: Cache, layout: str) -> None:
    base: dict[str, Any] = {"seed": 1, "batch_rows": 8, "source_length": 90, "target_length": 90}
    base |= {"layout": layout}
    assert Stream(made_cache, **base).fingerprint() == Stream(made_cache, **base).fingerprint()
    rates = temperature(made_cache.sizes())
    others: list[dict[str, Any]] = [
        base | {"seed": 2},
        base | {"batch_rows": 16},
        base | {"source_length": 91},
        base | {"target_length": 91},
        base | {"layout": {"packed": "single", "single": "packed"}[layout]},
        base | {"directions": ["en-gl", "gl-en"]},
        base | {"window": 100},
        base | {"phases": rates | {"en-gl": 0.5}},
        base | {"phases": [Phase(0, rates), Phase(100, rates)]},
    ]
    prints = {Stream(made_cache, **arguments).fingerprint() for arguments in [base, *others]}
    assert len(prints) == 1 + len(others)


def test_each_epoch_has_its_way_to_tokenize(made: Made, tmp_path: Path) -> None:
    """Batches of one epoch each: epoch e has way e mod 3 of every sentence."""
    lengths = {"inputs": 140, "targets": 140}
    options = {"vocabulary_size": 300, "segmentations": 3, "sampling_alpha": 0.5, "workers": 1}
    three_ways = CorpusSpec(made, ["sr_Latn", "pt"], lengths=lengths, **options).build(tmp_path)
    rates = {"sr_Latn-en": 1.0}
    stream = Stream(three_ways, list(rates), rates, batch_rows=31, layout="single")
    arrays = [tokens_of(three_ways, "train", side) for side in ("second", "first")]
    rows, total = three_ways.rows("en-sr_Latn", "train"), (len(arrays[0][1]) - 1) // 3
    found = []
    for epoch in range(5):
        sides = [
            [tuple(flat[offsets[i] : offsets[i + 1]].tolist()) for i in entries]
            for flat, offsets in arrays
            for entries in [range(epoch % 3 * total + rows.start, epoch % 3 * total + rows.stop)]
        ]
        tag = three_ways.source_vocabulary.tag_id("en")
        wanted = [((tag, *s, EOS_ID), (*t, EOS_ID)) for s, t in zip(*sides, strict=True)]
        pairs = [(source, target) for _, source, target in pairs_of(stream.batch(epoch))]
        assert sorted(pairs) == sorted(wanted)
        found.append(set(pairs))
    assert found[0] != found[1], "the ways differ"
    assert found[0] == found[3]


def test_memory_that_is_let_go_is_read_again(
    made_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Stream(made_cache, batch_rows=1024)
    monkeypatch.setattr("m4.data.cache.shards._KEPT_BYTES", 0)
    monkeypatch.setattr("m4.data.stream.stream._RELEASE_GROUPS", 1)
    released = Stream(made_cache, batch_rows=1024)
    for step in range(0, 40, 4):  # each is another group
        assert same(released.batch(step), kept.batch(step))


def test_a_damaged_cache_is_an_error(made_cache: Cache, tmp_path: Path) -> None:
    """Compiled code would read beyond the arrays."""
    folder = tmp_path / "cache"
    shutil.copytree(made_cache.folder, folder)
    tokens, offsets, pairs = (
        folder / f"train.{what}.00000.npy" for what in ("tokens", "offsets", "pairs")
    )
    ids, starts, numbers = np.load(tokens), np.load(offsets), np.load(pairs)

    def every_batch() -> None:
        stream = Stream(Cache(folder), batch_rows=8, layout="single")
        for step in range(200):
            stream.batch(step)

    np.save(tokens, ids[:-5])
    with pytest.raises(ValueError, match=r"damaged, .* ids where .* are expected"):
        every_batch()
    np.save(tokens, ids)
    np.save(offsets, starts[:-50])
    with pytest.raises(ValueError, match=r"damaged, .* sentences where .* are expected"):
        every_batch()
    longer = starts.copy()
    longer[1:300] = longer[300]  # one sentence as long as 300
    np.save(offsets, longer)
    with pytest.raises(ValueError, match=r"damaged, a pair of 'en-gl' is longer than"):
        every_batch()
    np.save(offsets, starts)
    numbers[7] = 10**6
    np.save(pairs, numbers)
    with pytest.raises(ValueError, match=r"damaged, \d+ entries of train\.offsets where"):
        every_batch()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"directions": ["en-gl", "en-eo"]}, "no rate for en-eo; there are rates for en-gl"),
        ({"directions": ["en-eo"], "phases": {"en-eo": 1.0}}, "no pair en-eo; it has en-gl, en-pt"),
        ({"source_length": 10}, r"Stream\.source_length = 10: must be at least \d+, as a training"),
        ({"batch_rows": 0}, r"Stream\.batch_rows = 0"),
        ({"layout": "padded"}, r"Stream\.layout = 'padded': must be one of packed"),
    ],
)
def test_errors(made_cache: Cache, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stream(made_cache, **settings)
