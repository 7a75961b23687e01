"""A vocabulary with merges, cut to the pieces of a text."""

import random
from pathlib import Path

from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.trim import trimmed, used_ids
from m4.data.vocabulary.vocabulary import Vocabulary


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
