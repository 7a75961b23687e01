"""Lines through windows: in order, one line for one line, however long they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from m4.eval.decoding.batch_counts import BatchCounts
from m4.eval.decoding.decode import Batch, Translations
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.translate import Translator
from m4.eval.text import translated
from m4.eval.text.inputs import Text
from m4.eval.text.translated import TextTranslator, together, windows


class Words:
    """A vocabulary of words, a piece each."""

    def encode_tagged(self, texts: list[str]) -> list[list[int]]:
        return [[7] * len(text.split()) for text in texts]


class Lines:
    """An output in memory."""

    def __init__(self, lines: int = 0) -> None:
        self.lines, self.found, self.counts = lines, list[str](), list[Any]()

    def append(self, lines: list[str], counts: Any) -> None:
        self.found += lines
        self.lines += len(lines)
        self.counts.append(dict(counts))


def text_of(folder: Path, content: bytes, name: str = "a.txt") -> Text:
    (folder / name).write_bytes(content)
    return Text(epath.Path(folder / name), name)


@pytest.fixture
def translate(monkeypatch: pytest.MonkeyPatch) -> TextTranslator:
    """Stands for a model that takes four pieces: tag, two words and EOS; it answers in capitals."""

    def louder(model: Any, params: Any, pieces: Any, sources: Any, settings: Any, **more: Any):
        for index, source in enumerate(sources):
            if len(source.split()) + 1 > settings.max_source_length:
                more["on_cut"](index, len(source.split()) + 1, settings.max_source_length)
        for index, _ in enumerate(sources):
            more["on_batch"](Batch([index], np.ones((2, 4), np.int32)), np.full((2, 3), 1))
            more["progress"](index + 1, len(sources), 0)
        return [Translations([source.partition(" ")[2].upper()], [-1.0]) for source in sources]

    monkeypatch.setattr(translated, "translations", louder)
    settings = Decoding(max_source_length=4)
    return TextTranslator(Translator(None, {}, Words(), settings))  # pyright: ignore[reportArgumentType]


def run(translate: TextTranslator, texts: Any, most: int = 3) -> None:
    for window in windows(texts, str.strip, most):
        translate(window, lambda done, rate: None)


def test_lines_come_in_order_and_blank_ones_stay_blank(
    translate: TextTranslator, tmp_path: Path
) -> None:
    content = b"\xef\xbb\xbfone\r\n\n \t\ntwo three\n\nfour"
    outputs = {"gl": Lines(), "es": Lines()}
    run(translate, {text_of(tmp_path, content): outputs})
    for output in outputs.values():
        assert output.found == ["ONE", "", "", "TWO THREE", "", "FOUR"]
    assert translate.counts["lines"] == 12
    assert translate.counts["blank"] == 6
    assert translate.counts["chunks"] == 6


def test_each_output_gets_what_it_lacks(translate: TextTranslator, tmp_path: Path) -> None:
    text = text_of(tmp_path, b"a\nb\nc\nd\n")
    outputs = {"gl": Lines(3), "es": Lines(1)}
    run(translate, {text: outputs})
    assert outputs["gl"].found == ["D"]
    assert outputs["es"].found == ["B", "C", "D"]


def test_a_line_that_is_too_long_is_translated_by_sentences_and_named(
    translate: TextTranslator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = text_of(tmp_path, b"a b\nOne two. Three! Four five six.\n"), Lines()
    run(translate, {text: {"gl": output}})
    assert output.found == ["A B", "ONE TWO. THREE! FOUR FIVE SIX."]
    assert (
        "a.txt line 2: 8 pieces, translated in 4 chunks, 1 sentences cut to fit"
        in capsys.readouterr().err
    )
    assert {name: translate.counts[name] for name in ("split", "chunks", "cut", "shortened")} == {
        "split": 1, "chunks": 5, "cut": 1, "shortened": 0,
    }  # fmt: skip


def test_what_no_cut_makes_fit_is_named_and_counted(
    translate: TextTranslator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translate._translator = Translator(None, {}, Words(), Decoding(max_source_length=2))  # pyright: ignore
    output = Lines()
    run(translate, {text_of(tmp_path, b"a\n"): {"gl": output}})
    assert output.found == ["A"]
    assert "a.txt line 1: 3 pieces, cut to 2" in capsys.readouterr().err
    assert translate.counts["shortened"] == 1


def test_of_many_long_lines_a_few_are_named(
    translate: TextTranslator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(tmp_path, b"One two. Three four.\n" * 20)
    run(translate, {text: {"gl": Lines()}})
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6
    assert translate.counts["split"] == 20


def test_a_window_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """Memory does not grow with the text: a line that cannot be read is met in its window."""
    text = text_of(tmp_path, b"a\n" * 7 + b"\xff\n")
    coming = windows({text: {"gl": Lines()}}, str, 3)  # pyright: ignore[reportArgumentType]
    assert [len(next(coming)) for _ in range(2)] == [3, 3]
    with pytest.raises(ValueError, match=r"a\.txt line 8: not UTF-8"):
        next(coming)


def test_long_lines_make_small_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated, "_WINDOW_CHARACTERS", 10)
    text = text_of(tmp_path, b"abcdef\n" * 5)
    assert [len(w) for w in windows({text: {"gl": Lines()}}, str, 100)] == [2, 2, 1]  # pyright: ignore


def test_translations_that_reach_their_limit_are_counted(
    translate: TextTranslator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = translated.translations

    def endless(*arguments: Any, on_batch: Any, **more: Any) -> list[Translations]:
        def counted(batch: Batch, best_BT: np.ndarray) -> None:
            on_batch(batch, np.full((2, 3), 1 if batch.rows == [0] else 5))

        return plain(*arguments, on_batch=counted, **more)

    monkeypatch.setattr(translated, "translations", endless)
    run(translate, {text_of(tmp_path, b"a\nb\nc\n"): {"gl": Lines()}})
    assert translate.counts["unended"] == 2


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
    assert "2 sentences, 5 tokens in" in counts.said()
    assert "36% of the batches are real tokens" in counts.said()
