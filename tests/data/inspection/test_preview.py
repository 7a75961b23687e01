"""The preview's numbers: a recount of the stream's batches, and the arithmetic by hand."""

from __future__ import annotations

import collections
import functools

import pytest

from m4.data.cache.cache import Cache
from m4.data.inspection import preview
from m4.data.inspection.preview import DrawnPair
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from tests.data.arrays import pairs_of


def test_by_hand(made_cache: Cache) -> None:
    # gl has 300 pairs, pt 90, sr_Latn 31. Out of English gl is seen 1.5 times: 150 of its pairs
    # twice; pt in its more frequent direction 3 times and one pair a fourth time; sr not at all.
    seen = {"en-gl": 450, "gl-en": 300, "en-pt": 200, "pt-en": 271}
    drawn = preview.drawn_of(made_cache, seen)
    assert drawn["gl"]._replace(tokens=0, token_share=0.0) == DrawnPair(
        pairs=750, pair_share=750 / 1221, tokens=0, token_share=0.0, epochs=1.5, repeated=150,
        times=2,
    )  # fmt: skip
    pt = drawn["pt"]
    assert (pt.pairs, pt.repeated, pt.times) == (471, 90, 4)
    assert pt.epochs == pytest.approx(271 / 90)
    assert drawn["sr_Latn"] == DrawnPair(0, 0.0, 0, 0.0, 0.0, 0, 0)
    tokens = {c: sum(seen[d] * mixture.pair_tokens(made_cache, d) for d in (f"en-{c}", f"{c}-en"))
              for c in ("gl", "pt")}  # fmt: skip
    assert drawn["gl"].tokens == round(tokens["gl"])
    assert drawn["gl"].token_share == pytest.approx(tokens["gl"] / sum(tokens.values()))
    assert drawn["gl"].token_share + pt.token_share == pytest.approx(1.0)


@pytest.mark.parametrize(
    "sampler", [temperature, Schedule([(0, uniform, ["gl"]), (9, uniform, None)])]
)
def test_a_recount_of_the_batches(made_cache: Cache, sampler: mixture.Sampler) -> None:
    """Every pair by its ids: how many come more than once, and how often the most frequent."""
    steps = 60
    single = functools.partial(Stream, layout="single")  # leaves nothing out
    stream = mixture.make_stream(made_cache, sampler, stream=single, batch_rows=24, seed=5)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for step in range(steps):
        for direction, *ids in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][tuple(ids)] += 1
    drawn = preview.drawn_of(made_cache, stream.examples_seen(steps))
    total = sum(sum(count.values()) for count in counts.values())
    assert total == steps * 24
    for code, one in drawn.items():
        mine = [counts[d] for d in (f"en-{code}", f"{code}-en") if d in counts]
        assert one.pairs == sum(sum(count.values()) for count in mine)
        assert one.pair_share == pytest.approx(one.pairs / total)
        most = max(mine, key=lambda count: sum(count.values()))
        assert one.epochs == pytest.approx(sum(most.values()) / made_cache.size(code, "train"))
        assert one.repeated == sum(number > 1 for number in most.values())
        assert one.times == max(most.values())


def test_warnings() -> None:
    many = DrawnPair(900, 0.9, 9000, 0.8, 0.9, 0, 1)
    few = DrawnPair(100, 0.1, 2250, 0.2, 20.0, 5, 20)
    drawn = {"es": many, "gl": few}
    assert preview.repeated_more_than(drawn, 16) == {"gl": 20.0}
    assert preview.repeated_more_than(drawn, 20) == {}  # more than, not as often as
    (repeated,) = preview.warnings(drawn, 16)
    assert repeated.startswith(
        "1 of 2 pairs of languages would be seen more than 16 times (gl 20.0): lower "
    )
    assert preview.warnings(drawn, 20) == []
    never = DrawnPair(0, 0.0, 0, 0.0, 0.0, 0, 0)
    assert preview.warnings({"es": many, "gl": never}, 16) == ["never drawn: gl"]


def test_corpus_sizes(made_cache: Cache) -> None:
    pairs, tokens = preview.corpus_sizes(made_cache)
    assert list(pairs.items()) == [("gl", 300), ("pt", 90), ("sr_Latn", 31)]
    assert list(tokens) == list(pairs)
    by_direction = mixture.sizes(made_cache, "tokens")
    assert [tokens[code] for code in tokens] == [by_direction[f"en-{code}"] for code in tokens]


def test_the_matrix_of_directions() -> None:
    """Sources en, fr and wo; targets fr and wo."""
    made = preview.matrix({"en-fr": 3000, "fr-wo": 20, "wo-fr": 7})
    columns = {str(one.header): [*one.cells] for one in made.columns}
    assert columns == {
        "pairs drawn": ["en", "fr", "wo"],
        "→ fr": ["3k", "", "7"],
        "→ wo": ["", "20", ""],
    }
