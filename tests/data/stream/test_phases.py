"""Rates that change: where phases begin, what they draw, and that they can be written down."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from m4.data.samplers import Phase
from m4.data.stream.stream import LAYOUTS, Stream
from tests.data.arrays import pairs_of, same

FIRST = {"en-gl": 0.5, "en-pt": 0.5}
SECOND = {"en-pt": 0.2, "sr_Latn-en": 0.8, "en-gl": 0.0}
PHASES = [Phase(0, FIRST), Phase(70, SECOND)]
# Groups of 2,048 / 64 = 32 steps packed, 1 single: the first that begins from 70 on.
STARTS = {"packed": 96, "single": 70}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_phase_begins_with_a_group_of_steps(made_cache: Cache, layout: str) -> None:
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
    stream.examples_seen(70)  # of the third group, which is planned for that, and again below
    # 32 steps are done and the 33rd (step 32, of the second group) is loading: the third group.
    assert stream.begin(32, SECOND) == 64
    # 63 are done; the batch of step 63 is the last of the second group.
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


def test_errors(made_cache: Cache) -> None:
    with pytest.raises(ValueError, match=r"phases begin at steps \[5\]: the first one must"):
        Stream(made_cache, phases=[Phase(5, FIRST)])
    with pytest.raises(ValueError, match="no phases: nothing to draw"):
        Stream(made_cache, ["en-gl"], phases=[])
    with pytest.raises(ValueError, match="begins at step 10, the one before it at step 20"):
        Stream(made_cache, phases=[Phase(0, FIRST), Phase(20, FIRST), Phase(10, FIRST)])
    with pytest.raises(ValueError, match="en-gl: the rate is -1"):
        Stream(made_cache, phases={"en-gl": -1.0, "en-pt": 1.0})
    stream = Stream(made_cache, phases=FIRST)
    before = [*stream._phases.entries]
    with pytest.raises(ValueError, match="rates for sr_Latn-en: not in this stream"):
        stream.begin(0, SECOND)
    with pytest.raises(ValueError, match="all rates are 0"):
        stream.begin(0, {"en-gl": 0.0})
    assert stream._phases.entries == before
