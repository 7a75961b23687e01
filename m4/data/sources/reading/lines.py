"""Reading of lines and fields as pairs, alike for every source.

A line is skipped if it is too long or not UTF-8, if it has control characters (NUL, a carriage
return in the middle ...) or lone surrogates, or if a side is empty. Corrections concern byte order
marks, CRLF line ends, marks of writing direction, Unicode's own line ends, tabs and line ends
inside sentences of formats that allow them, and runs of any spaces, which become one blank. All are
counted, except spaces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

from etils import epath

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines, packing
from m4.settings import InputError, counted

Line = TypeVar("Line", str, bytes)

# Part of a source's identity: raised when other lines are skipped or corrected.
READING = 2
MAX_LINE_BYTES = 65_536
# Maximum number of skipped lines to remember for each file and reason.
_PLACES = 5
BOM = b"\xef\xbb\xbf"

# U+0009, U+000A: see _PUT_RIGHT. U+0080 to U+009F are control characters too.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_SURROGATE = "\ud800-\udfff"
_MARKS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# U+061C, 200E, 200F marks; 202A-202E embeddings and overrides; 2066-2069 isolates. They only
# control how text is shown, and a model would have to guess them. The joiners U+200C and U+200D are
# part of spelling (Persian, Indic scripts) and stay.
_PUT_RIGHT = (
    ("a mark of writing direction", re.compile(f"[{_MARKS}]"), ""),
    ("a byte order mark", re.compile("\ufeff"), ""),
    ("a Unicode line end (U+2028, U+2029)", re.compile("[\u2028\u2029]"), " "),
    ("a tab or line end inside", re.compile("[\t\n]|\r\n"), " "),
)
_SUSPECT = re.compile(f"[{_CONTROL}{_SURROGATE}{_MARKS}\t\n\u2028\u2029\ufeff]")
_NO_SENTENCE = re.compile(f"[{_CONTROL}{_SURROGATE}]")


def plain(text: str) -> str:
    """Corrects a text like `Tally.pair`, with blanks for characters for which it skips pairs."""
    if not text.isprintable():
        for _, pattern, instead in _PUT_RIGHT:
            text = pattern.sub(instead, text)
        text = _NO_SENTENCE.sub(" ", text)
    return " ".join(text.split())


class Reason(str):
    """The reason why something is not a sentence or a pair."""


_TOO_LONG = Reason(f"longer than {MAX_LINE_BYTES} bytes")


def line_of(line: bytes) -> str | Reason:
    """Returns a line's text without the CR of a CRLF, or the reason why it is not text."""
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError:
        return Reason("not UTF-8")
    return carriage_return(text) or text


def carriage_return(text: str) -> Reason | None:
    """Returns a reason for a text with a carriage return, which others take for a line break."""
    return Reason("a control character: a carriage return (CR) inside") if "\r" in text else None


def text_lines(path: epath.Path, most_bytes: int, shown: str = "") -> Iterator[str]:
    """Yields the lines of a text file, without line ends and byte order mark.

    Args:
        shown: Name of the file in messages. Defaults to its path.

    Raises:
        InputError: A line is not UTF-8, longer than `most_bytes`, or has a carriage return inside.
    """
    for number, line in enumerate(lines(path, most_bytes), 1):
        long = len(line) > most_bytes
        text = Reason(f"longer than {most_bytes:,} bytes") if long else line_of(line)
        if isinstance(text, Reason):
            raise InputError(f"{shown or path} line {number}: {text}")
        yield text.removeprefix("\ufeff") if number == 1 else text


def side_by_side(files: Mapping[epath.Path, Iterable[Line]]) -> Iterator[tuple[Line, ...]]:
    """Yields line n of every file together. Raises InputError at the end for unequal lengths."""
    counts = [0] * len(files)
    for row in zip_longest(*files.values()):
        for place, line in enumerate(row):
            counts[place] += line is not None
        if None not in row:
            yield row
    first, *others = zip(files, counts, strict=True)
    for path, count in others:
        if count != first[1]:
            said = f"{first[0]} has {first[1]} lines and {path} {count}"
            raise InputError(f"{said}: they are not translations of each other line by line")


class Reading:
    """A source's treatment of bad lines, with counts by file and reason.

    Attributes:
        owner: Class of the source, for messages.
        tallies: File or dataset -> its counts.
        origin: File and line of the last pair, or split and example of a dataset.
    """

    def __init__(self, owner: str, on_bad_line: str) -> None:
        self.owner, self.on_bad_line = owner, on_bad_line
        self.tallies: dict[str, Tally] = {}
        self.origin: tuple[str, int] = ("", 0)

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        """(file, reason) -> number of skipped lines."""
        every = self.tallies.items()
        return {(name, why): n for name, of in every for why, n in of.skipped.items()}

    def identity(self) -> dict:
        """Returns the settings that decide the text."""
        own = {"reading": READING, "on_bad_line": self.on_bad_line}
        return {**own, "max_line_bytes": MAX_LINE_BYTES}

    @contextmanager
    def of(self, name: str, path: object, unit: str = "line") -> Iterator[Tally]:
        """Counts one reading of a file, named `name` in `tallies`, with numbered `unit` items.

        At its end, the counts replace earlier ones.
        """
        tally = Tally(self, name + packing(path), path, unit)
        yield tally
        self.tallies[name] = tally  # replaced: a file read again counts once


class Tally:
    """Counts of one file: reason -> skipped lines, correction -> corrected lines.

    Attributes:
        places: Reason -> numbers of the first skipped lines.
    """

    def __init__(self, reading: Reading, name: str, path: object, unit: str) -> None:
        self._reading, self._name, self._path, self._unit = reading, name, path, unit
        self.skipped: Counter[str] = Counter()
        self.normalised: Counter[str] = Counter()
        self.places: dict[str, list[int]] = {}
        self._notes: set[str] = set()

    def text(self, line: bytes, number: int) -> str | Reason:
        """Returns a line's text without line end and, on the first line, byte order mark."""
        if len(line) > MAX_LINE_BYTES:
            return _TOO_LONG
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
            self._notes.add("a byte order mark")
        if line.endswith(b"\r"):
            self._notes.add("a CRLF line end")
        return line_of(line)

    def pair(self, number: int, first: object, second: object) -> Pair | None:
        """Returns the two sides as a pair, or None after counting a bad one (`bad`)."""
        self._reading.origin = (self._name, number)
        # Nearly all text is plain and needs no check. A character has at most 4 bytes.
        if (
            type(first) is str
            and type(second) is str
            and first.isprintable()
            and second.isprintable()
            and 4 * max(len(first), len(second)) <= MAX_LINE_BYTES
        ):
            plain = Pair(" ".join(first.split()), " ".join(second.split()))
            if all(plain):
                if self._notes:
                    self.normalised.update(self._notes)
                    self._notes.clear()
                return plain
        sides = []
        for name, side in (("first", first), ("second", second)):
            found = side if isinstance(side, Reason) else self._sentence(side, name)
            if isinstance(found, Reason):
                self.bad(number, found)
                return None
            sides.append(found)
        self.normalised.update(self._notes)
        self._notes.clear()
        return Pair(*sides)

    def bad(self, number: int, reason: str) -> None:
        """Counts line `number` as bad, or raises InputError, depending on on_bad_line."""
        self._notes.clear()
        if self._reading.on_bad_line == "fail":
            remedy = f"{self._reading.owner}.on_bad_line = 'skip' counts such lines instead"
            raise InputError(f"{self._path} {self._unit} {number}: {reason} ({remedy})")
        self.skipped[reason] += 1
        if self.skipped[reason] <= _PLACES:
            self.places.setdefault(reason, []).append(number)

    def leave_out(self, reason: str) -> None:
        """Counts something unwanted that is not a mistake, with any on_bad_line."""
        self._notes.clear()
        self.skipped[reason] += 1

    def where(self, reason: str) -> str:
        """Returns the first lines skipped for a reason, ' (line 3, 17)', or ''."""
        numbers = self.places.get(reason, [])
        more = ", ..." if self.skipped[reason] > len(numbers) else ""
        return f" (line {', '.join(map(str, numbers))}{more})" if numbers else ""

    def nothing(self) -> str:
        """Returns a message on a file without pairs, with its most frequent reason."""
        if not self.skipped:
            return "no pairs in it"
        lines, reason = max((lines, reason) for reason, lines in self.skipped.items())
        return f"no pairs in it; {counted(lines, 'line')} skipped: {reason}{self.where(reason)}"

    def _sentence(self, text: object, side: str) -> str | Reason:
        if text is None:
            return Reason(f"no {side} side")
        if not isinstance(text, str):
            return Reason(f"the {side} side is no text")
        # In a format without lines, nothing was measured yet.
        if len(text.encode("utf-8", "surrogatepass")) > MAX_LINE_BYTES:
            return _TOO_LONG
        if _SUSPECT.search(text):
            for what, pattern, instead in _PUT_RIGHT:
                text, count = pattern.subn(instead, text)
                if count:
                    self._notes.add(what)
            if found := _SUSPECT.search(text):
                if found[0] == "\0":
                    return Reason("a NUL character")
                alone = "\ud800" <= found[0] <= "\udfff"
                return Reason("a lone surrogate" if alone else "a control character")
        return " ".join(text.split()) or Reason(f"an empty {side} side")
