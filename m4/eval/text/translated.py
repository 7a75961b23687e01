"""Lines of texts through a model, window by window, into their outputs in the order of the input.

A window has about as many lines as fill batches of every length well, whatever the size of the
text: `m4.eval.decoding.decode` sorts them by length and gives them back in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

from m4.data.preprocess import tag
from m4.data.sentences import Chunks, chunks, joined
from m4.eval.decoding.batch_counts import BatchCounts
from m4.eval.decoding.decode import Translations, translations, warn
from m4.eval.decoding.translate import Translator, json_line
from m4.eval.text.inputs import Text
from m4.eval.text.t5x import t5x_line
from m4.parallel import distributed

# Characters that a window of lines may have in all: a text of long lines has fewer of them.
_WINDOW_CHARACTERS = 1 << 20
_NAMED = 5  # lines that are too long


class Output(Protocol):
    """Where translations go: `m4.eval.text.work_file.WorkFile`. lines: how many are there."""

    @property
    def lines(self) -> int: ...
    def append(self, lines: Sequence[str], counts: Mapping[str, int]) -> None: ...


class Line(NamedTuple):
    """A line to translate into a language: its number from 1, how it is and how it is translated,
    and its output."""

    text: Text
    number: int
    given: str
    source: str
    to: str
    output: Output


def windows(
    texts: Mapping[Text, Mapping[str, Output]],
    normalise: Callable[[str], str],
    most_lines: int,
) -> Iterator[list[Line]]:
    """The lines that are missing in the outputs, of each text into each language.

    texts: text -> language -> output. A window does not look at what earlier ones wrote.
    """
    window: list[Line] = []
    characters = 0
    for text, outputs in texts.items():
        there = {to: output.lines for to, output in outputs.items()}
        for number, line in enumerate(text.lines(), 1):
            missing = [to for to, lines in there.items() if number > lines]
            source = normalise(line) if missing else ""
            for to in missing:
                window.append(Line(text, number, line, source, to, outputs[to]))
                characters += len(source)
            if len(window) >= most_lines or characters > _WINDOW_CHARACTERS:
                yield window
                window, characters = [], 0
    if window:
        yield window


# (line, its translations, their language) -> what is written of it.
LineOf = Callable[[str, Translations, str], str]


def _first(line: str, found: Translations, to: str) -> str:
    return found.texts[0]


# Of the best translation its text; of all `n_best` ones JSON, or T5X's JSON.
LINES: Mapping[str, LineOf] = {"text": _first, "json": json_line, "t5x": t5x_line}


class TextTranslator:
    """Translates windows of lines; on stderr it names the first few lines that are too long.

    line: what an output has for each line, of `LINES`.

    counts: lines, blank, split (lines in chunks), chunks, cut (sentences that were cut to fit),
        shortened (sources that no cut makes fit), unended (translations at their limit). batches:
        of what the model translated.
    """

    def __init__(self, translator: Translator, line: LineOf = _first) -> None:
        self.counts, self.batches = Counter[str](), BatchCounts()
        self._translator, self._line, self._named = translator, line, 0

    def __call__(self, window: Sequence[Line], shown: Callable[[int, str], None]) -> None:
        """Translates a window and appends it to its outputs.

        shown: called after every batch with the lines that are done, about, and the rate.
        """
        each = self._chunks(window)
        counts = [
            Counter(lines=1, blank=not found.texts, split=len(found.texts) > 1, cut=found.cut,
                    chunks=len(found.texts))
            for found in each
        ]  # fmt: skip
        sources = [(i, text) for i, found in enumerate(each) for text in found.texts]

        def on_cut(index: int, pieces: int, limit: int) -> None:
            line = sources[index][0]
            counts[line]["shortened"] += 1
            self._name(window[line], f"{pieces} pieces, cut to {limit}")

        def progress(done: int, sentences: int, _: int) -> None:
            rate = f"{self.batches.tokens / self.batches.seconds:,.0f} tokens/s"
            shown(len(window) * done // sentences, rate)

        of, self.batches.unended = self._translator, []
        done = translations(
            of.model, of.params, of.vocabulary, [tag(text, window[i].to) for i, text in sources],
            of.decoding, progress=progress, on_cut=on_cut, on_batch=self.batches, layout=of.layout,
        )  # fmt: skip
        for index in self.batches.unended:
            counts[sources[index][0]]["unended"] += 1
        coming = iter(done)
        whole = [
            together([next(coming) for _ in found.texts], line.to)
            for line, found in zip(window, each, strict=True)
        ]
        lines = [
            self._line(line.given, found, line.to)
            for line, found in zip(window, whole, strict=True)
        ]
        for output in {id(line.output): line.output for line in window}.values():
            mine = [i for i, line in enumerate(window) if line.output is output]
            sums = sum((counts[i] for i in mine), Counter[str]())
            output.append([lines[i] for i in mine], sums)
            self.counts.update(sums)

    def _chunks(self, window: Sequence[Line]) -> list[Chunks]:
        """What is translated of each line: of a blank one nothing, else it, or its sentences."""
        most = self._translator.decoding.max_source_length

        def pieces(texts: Sequence[str], to: Sequence[str]) -> list[int]:
            tagged = [tag(text, language) for text, language in zip(texts, to, strict=True)]
            return [len(ids) + 1 for ids in self._translator.vocabulary.encode_tagged(tagged)]

        found = []
        sizes = pieces([line.source for line in window], [line.to for line in window])
        for line, size in zip(window, sizes, strict=True):
            split = Chunks([line.source] if line.source else [], 0)
            if size > most:
                split = chunks(
                    line.source, lambda text, to=line.to: pieces([text], [to])[0] <= most
                )
                more = f", {split.cut} sentences cut to fit" if split.cut else ""
                self._name(line, f"{size} pieces, translated in {len(split.texts)} chunks{more}")
            found.append(split)
        return found

    def _name(self, line: Line, said: str) -> None:
        self._named += distributed.is_primary()
        if 0 < self._named <= _NAMED:
            warn(f"{line.text.shown} line {line.number}: {said}")
        elif self._named == _NAMED + 1:
            warn("more lines are too long; their number comes at the end")


def together(chunks: Sequence[Translations], to: str) -> Translations:
    """A line's translations from those of its chunks, rank by rank; their scores are means. One
    without so many has its last. Of no chunks: an empty one."""
    if not chunks:
        return Translations([""], [0.0])
    most = max(len(each.texts) for each in chunks)
    ranks = [[min(rank, len(each.texts) - 1) for each in chunks] for rank in range(most)]

    def means(values: Sequence[Sequence[float]]) -> list[float]:
        return [fmean(each[k] for each, k in zip(values, rank, strict=True)) for rank in ranks]

    gains = [each.utilities for each in chunks if each.utilities is not None]
    # Byte fallback can spell a line break; a line must stay one line.
    texts = [
        joined(
            [" ".join(each.texts[k].splitlines()) for each, k in zip(chunks, rank, strict=True)], to
        )
        for rank in ranks
    ]
    return Translations(
        texts, means([each.scores for each in chunks]), means(gains) if gains else None
    )
