"""Names of pairs of languages and of directions, and mixtures."""

from __future__ import annotations

import pytest

from m4.data import directions
from m4.data.directions import directions_of, key_of, label_of, pair_of, side_of, sides_of

PAIRS = ["en-gl", "en-pt", "fr-wo"]


@pytest.mark.parametrize(
    ("name", "pair", "key"),
    [
        ("gl", "en-gl", "gl"),
        ("gl-en", "en-gl", "gl"),
        ("en-ar", "en-ar", "ar"),  # English comes first, whatever the other code
        ("wo-fr", "fr-wo", "fr-wo"),
        ("zh_Hant-gl", "gl-zh_Hant", "gl-zh_Hant"),
    ],
)
def test_a_pair_has_one_name(name: str, pair: str, key: str) -> None:
    assert (pair_of(name), key_of(pair), pair_of(key)) == (pair, key, pair)


def test_sides_and_labels_of_directions() -> None:
    for direction, sides, side, label in (
        ("en-gl", ("first", "second"), "en->xx", "gl"),
        ("gl-en", ("second", "first"), "xx->en", "gl"),
        ("fr-wo", ("first", "second"), "xx->yy", "fr-wo"),
        ("wo-fr", ("second", "first"), "xx->yy", "wo-fr"),
    ):
        assert (sides_of(direction), side_of(direction)) == (sides, side)
        assert label_of(direction) == label


def test_mixtures() -> None:
    assert directions_of("to_english", PAIRS) == ["gl-en", "pt-en"]
    assert directions_of("from_english", PAIRS) == ["en-gl", "en-pt"]
    assert directions_of("english_centric", PAIRS) == ["en-gl", "en-pt", "gl-en", "pt-en"]
    assert directions_of("direct", PAIRS) == [*PAIRS, "gl-en", "pt-en", "wo-fr"]
    assert directions.languages_of(PAIRS) == ["en", "gl", "pt", "fr", "wo"]
    assert directions.sides_with("source", ["gl-en", "wo-fr"]) == ["second"]
    assert directions.sides_with("target", ["gl-en", "fr-wo"]) == ["first", "second"]
