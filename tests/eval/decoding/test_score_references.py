"""Log-probabilities of given translations: what the search says of its own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from m4.eval.decoding.sampling import Sampling
from m4.settings import InputError, SettingError
from tests.eval.small_model import SETTINGS, Words, score_references, sentences, tiny, translations

TEXTS = sentences(16, seed=1)
PREFIXES = ["w3 w5", "", "w9", ""] + [""] * 12


class Spelt(Words):
    """Vocabulary of words that show padding, and EOS at the end."""

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode_targets([text.removesuffix(" end") for text in texts])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        texts = []
        for row in ids:
            end = [*row, 1].index(1)
            said = [f"w{i - 4}" if i else "pad" for i in row[:end]]
            texts.append(" ".join([*said, "end"] if end < len(row) else said))
        return texts


@pytest.mark.parametrize(
    "sampling", [None, pytest.param(Sampling(top_p=0.9), marks=pytest.mark.thorough)]
)
def test_the_score_of_what_a_search_found_is_the_search_s(sampling: Sampling | None) -> None:
    made = tiny()
    # Random weights like EOS no more than any word, and padding as much.
    table_VM = made[1]["token_embedder"]["embedding"]
    table_VM[0], table_VM[1] = 0.1 * table_VM[0], 2.5 * table_VM[1]
    settings = replace(SETTINGS, beams=4, n_best=4, sampling=sampling, batch_rows=8)
    found = translations(made, TEXTS, settings, Spelt(), prefixes=PREFIXES)
    sources = [text for text, each in zip(TEXTS, found, strict=True) for _ in each.texts]
    targets = [text for each in found for text in each.texts]
    scores = [score for each in found for score in each.scores]
    for prefix, each in zip(PREFIXES, found, strict=True):
        assert all(text.startswith(prefix) for text in each.texts)
    # A search may say padding, of which a given text has none, and may end without EOS; its scores
    # are without prefixes.
    begun = [bool(prefix) for prefix, each in zip(PREFIXES, found, strict=True) for _ in each.texts]
    plain = [row for row, text in enumerate(targets)
             if text.endswith(" end") and "pad" not in text and not begun[row]]  # fmt: skip
    assert len(plain) >= 6
    sources, targets = ([each[row] for row in plain] for each in (sources, targets))
    given = score_references(made, sources, targets, settings, Spelt())
    assert [one.tokens for one in given] == [len(text.split()) for text in targets]
    np.testing.assert_allclose(
        [one.score for one in given], [scores[row] for row in plain], rtol=1e-4
    )
    # Another size of the batches, another order: the same to rounding.
    alone = replace(settings, batch_rows=1)
    back = score_references(made, sources[::-1], targets[::-1], alone, Spelt())
    np.testing.assert_allclose(back[::-1], given, rtol=1e-5)


def test_prefixes_that_cannot_be_are_one_line() -> None:
    made = tiny()
    with pytest.raises(SettingError, match=r"Decoding.prefix = .*less than .*= 10 pieces"):
        translations(made, TEXTS[:1], prefixes=["w1 " * 10])
    with pytest.raises(InputError, match="1 prefixes for 2 lines"):
        translations(made, TEXTS[:2], prefixes=["w1"])
