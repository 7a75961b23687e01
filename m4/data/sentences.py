"""Splitting of texts that are too long to translate in one piece."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import regex

from m4.data.languages import describe

# Unicode's Sentence_Break (UAX #29): STerm are the terminators of all scripts (! ? 。 । ۔ ។ ...),
# ATerm the full stop, Close quotes and brackets. ASCII's terminators also stand inside of words
# (URLs, 3.5, Yahoo!) and end a sentence before a space only; a full stop not before a small letter,
# nor after an initial.
_END = regex.compile(
    r"""(?: [\p{SB=STerm}--[!?]]+
          | [!?]+ (?=\p{SB=Close}*\s)
          | (?<!\b\p{Lu}) [\p{SB=ATerm}…]+ (?=\p{SB=Close}*\s+[^\p{Ll}\s]) )
        (?: \p{SB=Close}* (?=\s|$) | [\p{SB=Close}--[\p{Ps}\p{Pi}]]* )""",
    regex.VERSION1 | regex.VERBOSE,
)
_SPACES = regex.compile(r"\s+")
_CHARACTERS = regex.compile(r"\X")  # grapheme clusters: a letter with its marks, or one emoji
# Scripts without spaces between sentences.
_WITHOUT_SPACES = ("Jpan", "Hans", "Hant")


class Chunks(NamedTuple):
    """A text in chunks; `cut` counts sentences that were cut at a space or inside a word."""

    texts: list[str]
    cut: int


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text, without the spaces between them."""
    ends = [match.end() for match in _END.finditer(text)]
    return _pieces(text, ends)


def chunks(text: str, fits: Callable[[str], bool]) -> Chunks:
    """Returns the sentences of a text, each halved until it fits.

    A sentence is cut at the space, the character or, at last, the code point nearest to the middle.
    """
    found, cut = [], 0
    for sentence in sentences(text):
        pieces = list(_fitting(sentence, fits))
        found.extend(pieces)
        cut += len(pieces) > 1
    return Chunks(found, cut)


def joined(translations: Sequence[str], language: str) -> str:
    """Joins the translations of a text's chunks into one text."""
    if len(translations) == 1:
        return translations[0]
    space = "" if describe(language).script in _WITHOUT_SPACES else " "
    return space.join(filter(None, map(str.strip, translations)))


def _fitting(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    if fits(text) or len(text) < 2:
        yield text
        return
    for half in _halves(text):
        yield from _fitting(half, fits)


def _halves(text: str) -> list[str]:
    for boundary in (_SPACES, _CHARACTERS):
        ends = (match.end() for match in boundary.finditer(text))
        nearest = min(ends, key=lambda end: abs(end - len(text) / 2), default=0)
        if len(pieces := _pieces(text, [nearest])) > 1:
            return pieces
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def _pieces(text: str, ends: Sequence[int]) -> list[str]:
    pieces = (text[a:b].strip() for a, b in itertools.pairwise([0, *ends, len(text)]))
    return [piece for piece in pieces if piece]
