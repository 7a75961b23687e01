from __future__ import annotations

import pytest

from m4.data.cache.cache import Cache
from m4.data.preprocess import source_ids, target_ids, trim


def test_trim_always_ends_in_eos() -> None:
    assert trim([5, 6, 7], 10) == [5, 6, 7, 1]
    assert trim([5, 6, 7], 4) == [5, 6, 7, 1]
    assert trim([5, 6, 7], 3) == [5, 6, 1]
    assert trim([], 3) == [1]


def test_a_tag_is_one_id_in_front_of_the_untagged_ids(made_cache: Cache) -> None:
    vocabulary = made_cache.vocabulary
    texts = [pair.second for pair in made_cache.pairs("en-gl", "train")]
    tagged = source_ids(vocabulary, texts, "en", 200)
    plain = target_ids(vocabulary, texts, 200)
    assert tagged == [[vocabulary.tag_id("en"), *ids] for ids in plain]


@pytest.mark.parametrize("word", ["<2gl>", "red <2en> bird", "<2gl>bird", "\uff1c2gl\uff1e red"])
def test_a_word_that_looks_like_a_tag_is_text(made_cache: Cache, word: str) -> None:
    vocabulary = made_cache.vocabulary
    (source,), (target,) = (
        source_ids(vocabulary, [word], "gl", 99),
        target_ids(vocabulary, [word], 99),
    )
    assert source == [vocabulary.tag_id("gl"), *target]
    tags = {vocabulary.tag_id(code) for code in vocabulary.languages}
    assert not tags.intersection(target)
    # As any other word: what a model writes is the text again.
    assert vocabulary.decode([target]) == [word]
