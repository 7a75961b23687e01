"""A stream that continues another one, with other arguments or a grown text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.preprocess import language_of
from m4.data.samplers import Phase
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.settings import InputError
from tests.data.corpus import Made
from tests.data.stream.test_stream import pairs_of, same

FIRST = {"en-gl": 0.6, "en-pt": 0.2, "sr_Latn-en": 0.2}
SECOND = {"en-pt": 0.1, "sr_Latn-en": 0.7, "en-gl": 0.2}


def given_out(stream: Stream, steps: range, counts: dict[str, Counter]) -> None:
    for step in steps:
        for direction, source, target in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][(source, target)] += 1


def assert_strict(cache: Cache, counts: dict[str, Counter]) -> None:
    """Every pair came once before any came twice."""
    for direction, counter in counts.items():
        size = cache.size(language_of(direction), "train")
        least = min(counter.values()) if len(counter) == size else 0
        assert max(counter.values(), default=0) - least <= 1, direction


@pytest.mark.parametrize(
    ("layouts", "rows"),
    [(("packed",) * 3, (16, 5, 64)), (("packed", "single", "packed"), (16, 16, 8))],
)
def test_epochs_continue_with_other_arguments(
    made_cache: Cache, layouts: tuple[str, ...], rows: tuple[int, ...]
) -> None:
    """In the middle of a group of steps, and in the middle of what the first one left."""
    counts = {direction: Counter() for direction in FIRST}
    stream, begin, start = None, 0, None
    for layout, batch_rows, rates, end in zip(
        layouts, rows, (FIRST, SECOND, FIRST), (23, 27, 40), strict=True
    ):
        stream = Stream(
            made_cache, phases=rates, batch_rows=batch_rows, layout=layout, seed=3, start=start
        )
        for step in range(begin, end):
            given_out(stream, range(step, step + 1), counts)
            assert_strict(made_cache, counts)
            seen = stream.examples_seen(step + 1)
            assert {name: counter.total() for name, counter in counts.items()} == seen
        begin, start = end, json.loads(json.dumps(stream.position(end)))


def test_a_continued_stream_is_a_function_of_its_start(made_cache: Cache) -> None:
    first = Stream(made_cache, phases=FIRST, batch_rows=16, seed=3)
    start = first.position(37)
    one, two = (
        Stream(made_cache, phases=SECOND, batch_rows=8, seed=3, start=start) for _ in range(2)
    )
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint() != Stream(made_cache, phases=SECOND, batch_rows=8).fingerprint()
    assert same(one.batch(400), two.batch(400))
    begun = [stream.begin(40, FIRST) for stream in (one, two)]
    assert begun[0] > 400, "step 400 was given out"
    again = Stream(made_cache, phases=one.phases, batch_rows=8, seed=3, start=start)
    assert again.phases == one.phases == two.phases
    assert same(again.batch(begun[0] + 3), two.batch(begun[0] + 3))
    with pytest.raises(InputError, match="the stream's position is damaged"):
        Stream(made_cache, phases=SECOND, start={"step": 3})


def test_phases_of_a_sampler_keep_their_steps(made_cache: Cache) -> None:
    start = Stream(made_cache, phases=FIRST, batch_rows=64).position(100)
    phases = [Phase(0, FIRST), Phase(90, {"en-pt": 1.0}), Phase(150, {"sr_Latn-en": 1.0})]
    stream = Stream(made_cache, phases=phases, batch_rows=64, start=start)
    assert [phase["first_step"] for phase in stream.phases] == [100, 150]
    starts = {step: {stream.directions[d] for d, *_ in pairs_of(stream.batch(step))}
              for step in (100, 163, 164)}  # fmt: skip
    assert starts == {100: {"en-pt"}, 163: {"en-pt"}, 164: {"sr_Latn-en"}}
    mixture._check_they_begin(phases, stream, 400)


def test_a_grown_text_begins_an_epoch_and_others_continue(
    made_cache: Cache, tmp_path: Path
) -> None:
    first = Stream(made_cache, phases=FIRST, batch_rows=8, seed=3)
    counts = {direction: Counter() for direction in FIRST}
    given_out(first, range(10), counts)
    # pt is longer, el is new; the old vocabulary grows by a tag, so that ids of the others stay.
    grown = CorpusSpec(
        Made({"gl": 300, "el": 50, "pt": 120, "sr_Latn": 31}), vocabulary_size=501,
        vocabulary_from=str(made_cache.folder), lengths={"inputs": 96, "targets": 96},
    ).build(tmp_path / "grown")  # fmt: skip
    start = first.position(10)
    stream = Stream(grown, phases=SECOND | {"el-en": 0.2}, batch_rows=8, seed=3, start=start)
    counts |= {"en-pt": Counter(), "el-en": Counter()}
    seen = stream.examples_seen(10)
    assert seen == first.examples_seen(10) | {"el-en": 0}
    for step in range(10, 60):
        given_out(stream, range(step, step + 1), counts)
        for name in ("en-pt", "el-en", "en-gl"):
            assert_strict(grown, {name: counts[name]})
    # A direction that is not drawn keeps its place for the stream after this one.
    assert (
        Stream(grown, phases={"el-en": 1.0}, start=start).position(10)["places"]["en-gl"]
        == (start["places"]["en-gl"])
    )
