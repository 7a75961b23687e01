"""TMX (Translation Memory eXchange 1.4), as OPUS publishes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any
from xml.parsers import expat

from m4.data.languages import base_of, describe
from m4.data.sources import Pair
from m4.data.sources.reading.files import chunks
from m4.data.sources.reading.folder import LANGUAGE_OR_PAIR, File, Folder
from m4.data.sources.reading.lines import Reason, Tally
from m4.settings import InputError, checked

_MARKUP = ("bpt", "ept", "it", "ph", "ut")  # elements with formatting codes instead of text


@checked
@dataclass(eq=False)
class Tmx(Folder):
    """Sentence pairs from TMX files, one per language pair; they may be compressed.

    xml:lang gives the languages; its territory matters only if a file has two of one language. A
    file that declares entities, or is not XML, is an error.
    """

    files_rule = LANGUAGE_OR_PAIR

    files: str = "{pair}.{split}.tmx"

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        assert file.codes is not None
        for number, unit in _units(file):
            if texts := tally.pair(number, *(_side(unit, code) for code in file.codes)):
                yield file.pair or "", texts


@lru_cache
def _place(codes: tuple[str, ...], wanted: str) -> str | None:
    """Returns the code that equals a language's, or does so without territory."""
    known = {describe(code).code: code for code in codes}
    bases = {base_of(code): code for code in codes[::-1]}
    return known.get(describe(wanted).code) or bases.get(base_of(wanted))


def _side(unit: dict[str, str], wanted: str) -> str | Reason:
    place = _place((*unit,), wanted)
    there = ", ".join(unit) or "none"
    return Reason(f"no xml:lang {wanted!r}, there is {there}") if place is None else unit[place]


def _units(file: File) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line, xml:lang -> text) of each <tu>, holding one piece of the file in memory."""
    parser = expat.ParserCreate()
    found: list[tuple[int, dict[str, str]]] = []
    line, unit, code = 0, {}, ""
    text: list[str] | None = None
    markup = 0

    def refuse(*_: Any) -> None:
        raise _damaged(file, parser, "it declares or uses an entity, which is not read")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal line, unit, code, text, markup
        if name == "tu":
            line, unit = parser.CurrentLineNumber, {}
        elif name == "tuv":
            code = attributes.get("xml:lang") or attributes.get("lang") or ""
        elif name == "seg":
            text = []
        markup += name in _MARKUP

    def end(name: str) -> None:
        nonlocal text, markup
        markup -= name in _MARKUP
        if name == "seg" and text is not None:
            unit.setdefault(code.replace("-", "_"), "".join(text))
            text = None
        elif name == "tu":
            found.append((line, unit))

    def characters(piece: str) -> None:
        if text is not None and not markup:
            text.append(piece)

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = characters
    parser.EntityDeclHandler = parser.SkippedEntityHandler = refuse  # type: ignore[assignment]
    for piece in chain(chunks(file.path), [b""]):
        try:
            parser.Parse(piece, not piece)
        except expat.ExpatError as error:
            raise _damaged(file, parser, expat.ErrorString(error.code)) from error
        except LookupError as error:  # its encoding
            raise _damaged(file, parser, str(error)) from error
        yield from found
        found.clear()


def _damaged(file: File, parser: expat.XMLParserType, why: str) -> InputError:
    place = f"{parser.CurrentLineNumber} column {parser.CurrentColumnNumber + 1}"
    return InputError(f"{file.path} line {place}: not TMX that can be read: {why}")
