"""A vocabulary that has grown, or is trimmed to the pieces of a text."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.vocabulary import Ragged, vocabulary
from m4.data.vocabulary.pieces import grow, trimmed, used_ids
from m4.data.vocabulary.tokenizing import Dropout
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.settings import InputError
from tests.data.corpus import Made

OLD_TEXT = [pair.first for pair in Made({"gl": 400}).pairs("en-gl", "train")]
NEW_TEXT = ["ψαλμός του Δαβίδ", "ο Δαβίδ έγραψε ψαλμούς"] * 30


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, Vocabulary]:
    folder = tmp_path_factory.mktemp("grown")
    vocabulary.train(folder / "old.model", OLD_TEXT, 400, ["en", "gl"])
    old = Vocabulary(folder / "old.model")
    made = grow(folder / "new.model", old, [*OLD_TEXT, *NEW_TEXT], 460, ["en", "gl", "el"])
    assert (made["size"], made["grown_from"]) == (460, 400)
    return old, Vocabulary(folder / "new.model")


def test_old_pieces_keep_their_ids(both: tuple[Vocabulary, Vocabulary]) -> None:
    old, new = both
    assert new.pieces[: old.size] == old.pieces
    assert new.languages == ["en", "gl", "el"]
    assert new.tag_id("el") == old.size
    assert new.byte_ids == old.byte_ids


def test_text_comes_back_in_fewer_pieces(both: tuple[Vocabulary, Vocabulary]) -> None:
    _, new = both
    texts = [*OLD_TEXT[:20], *NEW_TEXT[:2], "<2el> x"]
    assert new.decode(new.encode(texts[:-1])) == texts[:-1]
    pieces_before, pieces_now = (sum(map(len, v.encode(NEW_TEXT[:2]))) for v in both)
    assert pieces_now < pieces_before / 2  # Greek was spelled in bytes, two a letter
    assert new.encode_tagged([texts[-1]])[0][0] == new.tag_id("el")


def test_other_segmentations_leave_new_tags_whole(both: tuple[Vocabulary, Vocabulary]) -> None:
    _, new = both
    best = Ragged.of(new.encode_tagged(["<2el> " + NEW_TEXT[0]]))
    sampled = Dropout(new).sample(best, 0.5, np.array([3], np.uint64))
    assert sampled.ids[0] == new.tag_id("el")
    assert new.decode([sampled.ids[1:].tolist()]) == [NEW_TEXT[0]]
    assert len(sampled.ids) > len(best.ids)


def test_without_room_for_pieces_none_are_learned(
    both: tuple[Vocabulary, Vocabulary], tmp_path: Path
) -> None:
    old, _ = both
    text = iter(NEW_TEXT)
    made = grow(tmp_path / "new.model", old, text, 401, ["en", "gl", "el"])
    assert made == {"requested_size": 401, "size": 401, "grown_from": 400}
    assert next(text) == NEW_TEXT[0]  # nothing was read
    assert Vocabulary(tmp_path / "new.model").tag_id("el") == old.size


def test_no_room_for_a_tag_is_one_line(both: tuple[Vocabulary, Vocabulary], tmp_path: Path) -> None:
    old, _ = both
    with pytest.raises(InputError, match=r"vocabulary_size = 400: .* at least 401"):
        grow(tmp_path / "v.model", old, OLD_TEXT, 400, ["en", "gl", "el"])


def test_a_corpus_grows_by_the_text_of_new_languages_alone(tmp_path: Path) -> None:
    """However much text there is of those that have a tag: it would take all new pieces."""

    def corpus(sizes: dict[str, int], **more: Any) -> Cache:
        size = 420 if more else 400
        return CorpusSpec(Made(sizes), vocabulary_size=size, **more).build(tmp_path / "data")

    old = str(corpus({"gl": 90, "pt": 90}).folder)
    new = corpus({"gl": 90, "pt": 90, "de": 30}, vocabulary_from=old)
    alone = corpus({"de": 30}, vocabulary_from=old)
    assert new.source_vocabulary.pieces == alone.source_vocabulary.pieces
    assert "vocabulary_text" not in alone.manifest["identity"]
    same = corpus({"gl": 90, "pt": 95}, vocabulary_from=old)  # none is new: all text
    assert "vocabulary_text" not in same.manifest["identity"]


def test_the_text_keeps_its_merges(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcd", k=rng.randint(1, 9))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=5)) for _ in range(600)]
    vocabulary.train(tmp_path / "old.model", texts, 700, ["en", "gl", "pt"])
    old = Vocabulary(tmp_path / "old.model")
    for seed in range(20):
        # Other words, too: of pieces in an order that training has not seen.
        part = [*random.Random(seed).sample(texts, 3), "".join(rng.choices("abcd", k=30))]
        kept = used_ids(old, part, ["en", "gl"])
        (tmp_path / "new.model").write_bytes(trimmed(old, kept))
        new = Vocabulary(tmp_path / "new.model")
        assert new.pieces == [old.pieces[i] for i in kept]
        assert (new.languages, new.byte_ids) == (["en", "gl"], range(5, 261))
        assert new.size < old.size - 100
        for ids, other in zip(new.encode(part), old.encode(part), strict=True):
            assert [kept[i] for i in ids] == other
    alone = used_ids(old, [])
    assert [old.pieces[i] for i in alone[:3]] == ["<pad>", "</s>", "<unk>"]
    assert len(alone) == 3 + 3 + 256  # special pieces, tags and bytes
