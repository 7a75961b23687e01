"""Reads gettext's PO files with Babel's parser, and MO files with Python's gettext."""

import gettext
import io
import re
import struct
from typing import NamedTuple

from babel.messages.catalog import Catalog, Message
from babel.messages.pofile import PoFileError, PoFileParser

_LINE = re.compile(
    r'(?:(msgctxt|msgid|msgid_plural|msgstr(?:\[\d{1,2}\])?)\s*)?("(?:[^"\\]|\\.)*")'
)


# An escaped backslash; or C's other escapes, the bytes of the file's charset one after another.
_ESCAPED = re.compile(r"\\\\|(?:\\(?:[0-7]{1,3}|x[0-9A-Fa-f]{2}|[abfv]))+")
_FOR_BABEL = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LETTERS = {"a": 7, "b": 8, "f": 12, "v": 11}


class Entry(NamedTuple):
    """One message of a catalogue; `line` is its line in a PO file, its number in an MO file."""

    line: int
    english: str
    translation: str
    fuzzy: bool = False
    plural: bool = False


class CatalogueError(Exception):
    """Error in a catalogue, at `line`."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class _Collected(Catalog):
    """Keeps the messages as they come.

    Babel's own catalogue unites equal ones and parses the header, which fails on many real ones
    (dates, plural forms left to be filled in).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Message] = []

    @property
    def num_plurals(self) -> int:
        return 100  # none is looked at, none is one too many

    def __setitem__(self, id: object, message: Message) -> None:
        self.found.append(message)


def read_po(content: bytes) -> tuple[list[Entry], int]:
    """Returns the entries of a PO file, without its header, and the number of obsolete ones.

    Raises:
        CatalogueError: msgfmt would refuse it, or its charset is not what it says.
    """
    charset = re.search(rb"charset=([A-Za-z0-9_.:-]+)", content[:65_536])
    name = charset[1].decode() if charset and charset[1] != b"CHARSET" else "utf-8"
    text = _decode(content, name)
    if text.startswith("\ufeff"):
        text = text[1:]
    catalog, obsolete = _Collected(), 0
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        obsolete += bool(re.match(r"#~\s*msgid\s", line))
        if line.startswith(("#~", "#|")):
            line = ""  # obsolete entries, and what fuzzy ones were before
        elif line and not line.startswith("#"):
            parts = _LINE.fullmatch(line)
            if parts is None:
                raise CatalogueError(number, "a line that is none of PO's")
            quoted = _unescaped(parts[2], name, number)
            line = f"{parts[1]} {quoted}" if parts[1] else quoted
        lines.append(line)
    try:
        PoFileParser(catalog, ignore_obsolete=True, abort_invalid=True).parse(lines)
    except PoFileError as error:
        raise CatalogueError(error.lineno + 1, str(error).rsplit(" on ", 1)[0]) from error
    entries = [
        Entry(
            message.lineno or 0,
            message.id if isinstance(message.id, str) else message.id[0],
            message.string if isinstance(message.string, str) else "",
            message.fuzzy,
            not isinstance(message.id, str),
        )
        for message in catalog.found
    ]
    return [entry for entry in entries if entry.english], obsolete


def read_mo(content: bytes) -> tuple[list[Entry], int]:
    """Returns the entries of an MO file, without its header, and 0; CatalogueError if damaged."""
    file = io.BytesIO(content)
    try:
        # No public name gives the messages; the attribute is as old as the module.
        messages: dict = gettext.GNUTranslations(file)._catalog  # type: ignore
    except (OSError, ValueError, LookupError, IndexError, struct.error) as error:
        raise CatalogueError(1, f"not an MO file: {error}") from error
    entries = []
    for number, (key, translation) in enumerate(messages.items(), 1):
        # Plural forms are (msgid, 0), (msgid, 1) ...; a context before a msgid ends in EOT.
        plural = isinstance(key, tuple)
        if plural and key[1]:
            continue
        english = (key[0] if plural else key).rpartition("\x04")[2]
        if english:
            entries.append(Entry(number, english, translation, False, plural))
    return entries, 0


def _unescaped(quoted: str, charset: str, number: int) -> str:
    """Replaces the escapes that Babel leaves as they are: \\101, \\x41, \\a."""

    def character(match: re.Match[str]) -> str:
        if match[0] == r"\\":
            return match[0]
        codes = re.findall(r"\\(x..|[0-7]{1,3}|.)", match[0])
        numbers = [
            _LETTERS[code]
            if code in _LETTERS
            else int(code[1:], 16)
            if code[0] == "x"
            else int(code, 8) & 255
            for code in codes
        ]
        try:
            text = bytes(numbers).decode(charset)
        except UnicodeDecodeError as error:
            raise CatalogueError(number, f"escapes that are not {charset}") from error
        return "".join(_FOR_BABEL.get(one, one) for one in text)

    return _ESCAPED.sub(character, quoted)


def _decode(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CatalogueError(line, f"not {charset}") from error
    except (LookupError, UnicodeError) as error:  # UnicodeError: of the codec "undefined"
        raise CatalogueError(1, f"unknown charset {charset}") from error
