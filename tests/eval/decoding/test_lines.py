"""Lines of text: one translation a line, however long it is."""

from typing import Any

import numpy as np
import pytest

from m4.eval.decoding import translate as module
from m4.eval.decoding.decode import Batch, BatchCounts, Translations
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.translate import Line, Translator, together, translate_lines


class Words:
    """A vocabulary of words, a piece each."""

    def encode_tagged(self, texts: list[str]) -> list[list[int]]:
        return [[7] * len(text.split()) for text in texts]


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers in capitals; the first source has no end."""

    def louder(trained: Translator, sources: Any, **more: Any):
        longest = trained.decoding.max_source_length
        for index, source in enumerate(sources):
            if len(source.split()) + 1 > longest:
                more["on_cut"](index, len(source.split()) + 1, longest)
            best_BT = np.full((2, 3), 5 if index == 0 else 1)
            more["on_batch"](Batch([index], np.ones((2, 4), np.int32)), best_BT)
            more["progress"](index + 1, len(sources), 0)
        return [Translations([source.partition(" ")[2].upper()], [-1.0]) for source in sources]

    monkeypatch.setattr(module, "translations", louder)


def run(*texts: str, longest: int = 4) -> tuple[list[str], dict[str, int], list[str], list[int]]:
    """Translations, sums of counts, what was said of long lines, and the progress.

    The model takes `longest` pieces: the tag, words and EOS.
    """
    said: list[str] = []
    progress: list[int] = []
    translator = Translator(None, {}, Words(), Decoding(max_source_length=longest))  # pyright: ignore
    found = translate_lines(
        translator, [Line(text, "gl") for text in texts], BatchCounts(), progress.append,
        lambda i, about: said.append(f"{i}: {about}"),
    )  # fmt: skip
    sums = {name: sum(counts[name] for _, counts in found) for name in found[0][1]}
    return [each.texts[0] for each, _ in found], sums, said, progress


def test_blank_lines_stay_blank_and_others_have_a_translation() -> None:
    found, counts, said, progress = run("one", "", "two three", "")
    assert found == ["ONE", "", "TWO THREE", ""]
    assert counts == {"lines": 4, "blank": 2, "split": 0, "cut": 0, "chunks": 2, "unended 3": 1}
    assert (said, progress) == ([], [2, 4])


def test_a_line_that_is_too_long_is_translated_by_sentences_and_named() -> None:
    found, counts, said, _ = run("a b", "One two. Three! Four five six.")
    assert found == ["A B", "ONE TWO. THREE! FOUR FIVE SIX."]
    assert said == ["1: 8 pieces, translated in 4 chunks, 1 sentences cut to fit"]
    assert (counts["split"], counts["chunks"], counts["cut"]) == (1, 5, 1)


def test_what_no_cut_makes_fit_is_named_and_counted() -> None:
    found, counts, said, _ = run("a", longest=2)
    assert (found, counts["shortened"]) == (["A"], 1)
    assert said[-1] == "0: 3 pieces, cut to 2"


def test_translations_of_chunks_are_joined_rank_by_rank() -> None:
    found = [Translations(["A.", "a."], [-1.0, -2.0]), Translations(["B\n."], [-3.0])]
    assert together(found, "gl") == Translations(["A. B .", "a. B ."], [-2.0, -2.5])
    assert together(found, "zh").texts == ["A.B .", "a.B ."]
    assert together([], "gl") == Translations([""], [0.0])
    with_gains = [each._replace(utilities=[50.0, 40.0][: len(each.texts)]) for each in found]
    assert together(with_gains, "gl").utilities == [50.0, 45.0]


def test_share_of_real_tokens() -> None:
    counts = BatchCounts()
    # Sources of 3 and 2 tokens in [4, 4], two rows to fill up; translations of 2 and 3 tokens.
    tokens_BL = np.array([[5, 5, 1, 0], [5, 1, 0, 0], [5, 1, 0, 0], [5, 1, 0, 0]])
    best_BT = np.array([[6, 1, 0, 0, 0], [6, 6, 1, 0, 0], [6, 6, 1, 0, 0], [6, 6, 1, 0, 0]])
    counts(Batch([4, 2], tokens_BL), best_BT)
    assert (counts.sentences, counts.tokens, counts.unended) == (2, 5, [])
    assert (counts.real, counts.places) == (3 + 2 + 5, 4 * (4 + 3))
    assert "36% of the batches are real tokens" in counts.said()
