import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.directions import pair_of
from m4.data.preprocess import EOS_ID
from m4.data.samplers import Phase
from m4.data.samplers.temperature import temperature
from m4.data.stream.stream import LAYOUTS, Stream
from tests.data.arrays import Ids, of_text, pairs_of, rows_of, same
from tests.data.corpus import Made


@pytest.fixture(scope="module")
def texts(made_cache: Cache) -> dict[str, list[Ids]]:
    """Returns direction -> ids of its training pairs."""
    return {name: of_text(made_cache, name, "train") for name in made_cache.directions}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_exact(made_cache: Cache, layout: str) -> None:
    first = Stream(made_cache, seed=3, batch_rows=16, layout=layout)
    batches = [first.batch(step) for step in range(140)]  # more than a span: of 128, 64, 1 steps
    for step in (139, 0, 127, 128):
        fresh = Stream(made_cache, seed=3, batch_rows=16, layout=layout)
        assert same(fresh.batch(step), batches[step])
        assert same(first.batch(step), batches[step])
    assert not same(Stream(made_cache, seed=4, batch_rows=16, layout=layout).batch(0), batches[0])
    far = 10**9 + 7
    assert same(first.batch(far), fresh.batch(far))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_whole_and_once_before_any_twice(
    made_cache: Cache, texts: dict, layout: str
) -> None:
    """After every single step, not only at the end of an epoch."""
    stream = Stream(made_cache, batch_rows=8, layout=layout)
    counts = {d: Counter(dict.fromkeys(pairs, 0)) for d, pairs in texts.items()}
    for step in range(260):
        batch = stream.batch(step)
        segments, weights = batch["decoder_segment_ids"], batch["decoder_loss_weights"]
        assert np.array_equal(weights, segments > 0)
        assert layout == "packed" or segments.max() == 1
        for direction, *pair in pairs_of(batch):
            of = counts[stream.directions[direction]]
            assert tuple(pair) in of
            of[tuple(pair)] += 1
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
        base | {"seed": 2}, base | {"batch_rows": 16}, base | {"source_length": 91},
        base | {"target_length": 91},
        base | {"layout": {"packed": "single", "single": "packed"}[layout]},
        base | {"directions": ["en-gl", "gl-en"]}, base | {"window": 100},
        base | {"phases": rates | {"en-gl": 0.5}},
        base | {"phases": [Phase(0, rates), Phase(100, rates)]},
    ]  # fmt: skip
    prints = {Stream(made_cache, **arguments).fingerprint() for arguments in [base, *others]}
    assert len(prints) == 1 + len(others)


def test_each_epoch_has_its_way_to_tokenize(made: Made, tmp_path: Path) -> None:
    """Batches of one epoch each: epoch e has way e mod 3 of every sentence."""
    lengths = {"inputs": 140, "targets": 140}
    options = {"vocabulary_size": 300, "segmentations": 3, "sampling_alpha": 0.5, "workers": 1}
    three_ways = CorpusSpec(made, ["sr_Latn", "pt"], lengths=lengths, **options).build(tmp_path)
    rates = {"sr_Latn-en": 1.0}
    stream = Stream(three_ways, list(rates), rates, batch_rows=31, layout="single")
    arrays = [rows_of(three_ways, "train", side) for side in ("second", "first")]
    rows, tag = three_ways.rows("en-sr_Latn", "train"), three_ways.source_vocabulary.tag_id("en")
    found = []
    for epoch in range(5):
        first = epoch % 3 * len(arrays[0]) // 3
        sides = [of[first + rows.start : first + rows.stop] for of in arrays]
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
    monkeypatch.setattr("m4.data.stream.stream._RELEASE_SPANS", 1)
    released = Stream(made_cache, batch_rows=1024)
    for step in range(0, 40, 4):  # each is another span
        assert same(released.batch(step), kept.batch(step))


@pytest.mark.parametrize(
    ("array", "change", "said"),
    [
        ("tokens", lambda ids: ids[:-5], ".* ids where .* are expected"),
        ("offsets", lambda starts: starts[:-50], ".* sentences where .* are expected"),
        # One sentence is as long as 300.
        ("offsets", lambda starts: np.maximum(starts, starts[300] * (np.arange(len(starts)) > 0)),
         "a pair of 'en-gl' is longer than"),
        ("pairs", lambda numbers: numbers + 10**6, r"\d+ entries of train\.offsets where"),
    ],
)  # fmt: skip
def test_a_damaged_cache_is_an_error(
    made_cache: Cache, tmp_path: Path, array: str, change: Callable[[Any], Any], said: str
) -> None:
    """Compiled code would read beyond the arrays."""
    path = shutil.copytree(made_cache.folder, tmp_path / "cache") / f"train.{array}.00000.npy"
    np.save(path, change(np.load(path)))
    stream = Stream(Cache(tmp_path / "cache"), batch_rows=8, layout="single")
    with pytest.raises(ValueError, match=f"damaged: {said}"):
        list(map(stream.batch, range(200)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"directions": ["en-gl", "en-eo"]}, "no rate for en-eo; there are rates for en-gl"),
        ({"directions": ["en-eo"], "phases": {"en-eo": 1.0}}, "no pair en-eo; it has en-gl, en-pt"),
        ({"source_length": 10}, r"Stream\.source_length = 10: must be at least \d+, as a training"),
        ({"phases": [Phase(5, {"en-gl": 1})]}, r"phases begin at steps \[5\]: the first one must"),
        ({"directions": ["en-gl"], "phases": []}, "no phases: nothing to draw"),
        ({"phases": [Phase(step, {"en-gl": 1}) for step in (0, 20, 10)]},
         "begins at step 10, the one before it at step 20"),
        ({"phases": {"en-gl": -1.0, "en-pt": 1.0}}, "en-gl: the rate is -1"),
    ],
)  # fmt: skip
def test_errors(made_cache: Cache, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stream(made_cache, **settings)


# Rates that change: where phases begin, what they draw, and that they can be written down.

FIRST = {"en-gl": 0.5, "en-pt": 0.5}
SECOND = {"en-pt": 0.2, "sr_Latn-en": 0.8, "en-gl": 0.0}
PHASES = [Phase(0, FIRST), Phase(70, SECOND)]
# Groups of 2,048 / 64 = 32 steps packed, 1 single: the first that begins from 70 on.
STARTS = {"packed": 96, "single": 70}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_phase_begins_with_a_span_of_steps(made_cache: Cache, layout: str) -> None:
    stream = Stream(made_cache, phases=PHASES, batch_rows=64, layout=layout)
    assert stream.directions == ["en-gl", "en-pt", "sr_Latn-en"], "all of them, as in the cache"
    start = STARTS[layout]
    for step in (0, start - 1, start, start + 70):
        drawn = {stream.directions[d] for d, _, _ in pairs_of(stream.batch(step))}
        assert drawn == ({"en-gl", "en-pt"} if step < start else {"en-pt", "sr_Latn-en"})
    before, after = stream.examples_seen(start), stream.examples_seen(start + 10_000)
    assert before["sr_Latn-en"] == 0
    assert after["en-gl"] == before["en-gl"]
    # Exact shares: off by 1 after whole blocks of 4,096, inside one by less than 5 sigma.
    new = sum(after.values()) - sum(before.values())
    assert after["sr_Latn-en"] == pytest.approx(0.8 * new, abs=5 * (4096 * 0.16) ** 0.5)


@pytest.mark.parametrize("layout", ["packed", "single"])
def test_epochs_continue_from_phase_to_phase(made_cache: Cache, layout: str) -> None:
    """Every pair once before any twice, over four phases of other rates."""
    rates = [{"en-gl": 0.9, "en-pt": 0.1}, SECOND, FIRST, SECOND]
    phases = [Phase(70 * i, rate) for i, rate in enumerate(rates)]
    stream = Stream(made_cache, phases=phases, batch_rows=16, layout=layout)
    counts = {direction: Counter() for direction in stream.directions}
    for step in range(600):
        for direction, source, target in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][(source, target)] += 1
        for direction, counter in counts.items():
            # A pair that was never seen counts 0: until all were seen once, none may be seen twice.
            size = made_cache.size(pair_of(direction), "train")
            least = min(counter.values()) if len(counter) == size else 0
            assert max(counter.values(), default=0) - least <= 1, (step, direction)
        seen = stream.examples_seen(step + 1)
        assert {d: counter.total() for d, counter in counts.items()} == seen


def test_begin(made_cache: Cache) -> None:
    everything = {"en-gl": 0.5, "en-pt": 0.25, "sr_Latn-en": 0.25}
    stream = Stream(made_cache, phases=everything, batch_rows=64)
    fingerprint = stream.fingerprint()
    stream.examples_seen(1000)  # looking ahead is no batch: it does not put off the beginning
    first = [stream.batch(step) for step in range(33)]
    stream.examples_seen(70)  # plans the third span, as does the call below
    # 32 steps are done and the 33rd (step 32, of the second span) is loading: the third span.
    assert stream.begin(32, SECOND) == 64
    # 63 are done; the batch of step 63 is the last of the second span.
    assert stream.begin(63, FIRST) == 64, "no pair of the phase before had been drawn"
    assert stream.begin(64, SECOND) == 96, "step 64 may be loading"
    assert stream.fingerprint() == fingerprint, "of what there was at the beginning"
    for step in range(64, 96):
        drawn = {stream.directions[d] for d, _, _ in pairs_of(stream.batch(step))}
        assert drawn == {"en-gl", "en-pt"}
    assert same(stream.batch(31), first[31])

    assert [phase.first_step for phase in stream._phases.entries] == [0, 64, 96]
    again = Stream(made_cache, phases=everything, batch_rows=64)
    assert again.begin(63, FIRST) == 64
    assert again.begin(95, SECOND) == 96
    assert again.fingerprint() == fingerprint
    assert again.examples_seen(500) == stream.examples_seen(500)
    assert all(same(again.batch(step), stream.batch(step)) for step in (0, 63, 64, 95, 96, 400))


def test_a_batch_that_was_given_out_stays(made_cache: Cache) -> None:
    """Whoever loads further ahead than the training loop: the phase waits."""
    stream = Stream(made_cache, phases=FIRST, batch_rows=64)
    batch = stream.batch(100)
    assert stream.begin(10, {"en-gl": 1.0}) == 128
    assert same(stream.batch(100), batch)


def test_begin_while_a_thread_loads(made_cache: Cache) -> None:
    """The step at which a phase starts does not depend on how far the thread is."""
    wanted = Stream(made_cache, phases=FIRST, batch_rows=16)
    starts = [wanted.begin(step, {"en-gl": 1.0, "en-pt": step}) for step in range(1, 400, 40)]
    stream = Stream(made_cache, phases=FIRST, batch_rows=16)
    found = []
    for step in range(400):
        loading = threading.Thread(target=stream.batch, args=(step,))
        loading.start()
        if step % 40 == 1:
            found.append(stream.begin(step, {"en-gl": 1.0, "en-pt": step}))
        loading.join()
    assert found == starts
    assert stream._phases.entries == wanted._phases.entries
    for step in (0, 130, 300, 500):
        assert same(stream.batch(step), wanted.batch(step))


def test_a_phase_that_cannot_begin(made_cache: Cache) -> None:
    stream = Stream(made_cache, phases=FIRST)
    before = [*stream._phases.entries]
    with pytest.raises(ValueError, match="rates for sr_Latn-en: not in this stream"):
        stream.begin(0, SECOND)
    with pytest.raises(ValueError, match="all rates are 0"):
        stream.begin(0, {"en-gl": 0.0})
    assert stream._phases.entries == before
