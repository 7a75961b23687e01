"""gettext's catalogues: messages of programs, msgid in English and msgstr its translation.

OPUS's GNOME, KDE4 and Ubuntu are these. Babel parses PO files, Python's gettext MO files.
"""

import gettext
import io
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from babel.messages.catalog import Catalog, Message
from babel.messages.pofile import PoFileError, PoFileParser

from m4.data.sources import Pair
from m4.data.sources.reading.files import chunks
from m4.data.sources.reading.folder import Every, Folder
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Tally
from m4.settings import OneOf, checked

# printf's %s, %1$s, %(name)s; Qt's %1, %L1, %n; {name} and {0}. Not printf's flag ' ', because of
# "100 % of".
_PLACEHOLDER = re.compile(
    r"%%|%(?:\d+\$|\(\w+\))?[-+#0']*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[Lqjzt])?[diouxXeEfFgGaAcspn]"
    r"|%L?\d+|\{\w*\}"
)
_MNEMONIC = re.compile(r"[_&](?=\w)")
# Translations of English into English: en_GB, en-AU, en@shaw.
_ENGLISH = re.compile("en[-_@]")
ENGLISH_CATALOGUE = "a catalogue of English"
# Chinese, Japanese and Korean put the English letter behind the word: 文件(_F).
_MNEMONIC_BEHIND = re.compile(r"\s*[(（][_&]\w[)）]")
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


@checked
@dataclass(eq=False)
class Gettext(Folder):
    """Sentence pairs from PO and MO catalogues; `files` should end in .po or .mo, or in '*'.

    Left out and counted, whatever on_bad_line says: the header; entries that are fuzzy, obsolete
    or not translated; plural forms (which form fits which number depends on the sentence). Two
    messages with one msgid and different msgctxt are two pairs. English variants (en_GB, en@shaw)
    are no languages here, and an MO file next to the PO file of its name is not read. A catalogue
    that msgfmt would refuse is one bad line.

    Attributes:
        placeholders: 'same' leaves out entries whose sides do not have the same %s, %1, {name};
            'drop' leaves out those that have any; 'keep' takes all.
        mnemonics: 'strip' removes the & or _ of '_Open' where both sides have one; 'keep' does not.
    """

    names_say_splits = False  # they are programs' names
    files_rule = {"lang"}, set(), "a pattern with {lang}"

    files: str = "{lang}.po"
    dev_every: Every = 100
    test_every: Every = 50
    placeholders: Annotated[str, OneOf(("same", "drop", "keep"))] = "same"
    mnemonics: Annotated[str, OneOf(("strip", "keep"))] = "strip"

    def _settings(self) -> dict:
        return {"placeholders": self.placeholders, "mnemonics": self.mnemonics}

    def _choose(self, files: list[File]) -> list[File]:
        english = [file for file in files if _ENGLISH.match(file.code or "")]
        for file in english:
            with self.reading.of(file.name, file.path) as tally:
                tally.leave_out(ENGLISH_CATALOGUE)
        names = {file.name for file in files}
        return [
            file
            for file in files
            if file not in english
            and (file.name.endswith(".po")
                 or (file.name.endswith(".mo") and f"{file.name[:-3]}.po" not in names))
        ]  # fmt: skip

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        read = read_po if file.name.endswith(".po") else read_mo
        try:
            entries, obsolete = read(b"".join(chunks(file.path)))
        except CatalogueError as error:
            tally.bad(error.line, f"no catalogue, {error}")
            return
        for _ in range(obsolete):
            tally.leave_out("obsolete")
        for entry in entries:
            if reason := self._unwanted(entry):
                tally.leave_out(reason)
                continue
            english, translation = entry.english, entry.translation
            if self.mnemonics == "strip":
                english, translation = strip_mnemonics(english, translation)
            if pair := tally.pair(entry.line, english, translation):
                yield file.pair or "", pair

    def _unwanted(self, entry: Entry) -> str | None:
        if entry.plural:
            return "plural forms"
        if entry.fuzzy:
            return "fuzzy"
        if not entry.translation.strip():
            return "not translated"
        if self.placeholders == "keep":
            return None
        english, translation = placeholders(entry.english), placeholders(entry.translation)
        if self.placeholders == "drop" and english:
            return "placeholders"
        return "placeholders that differ" if english != translation else None


def placeholders(text: str) -> Counter[str]:
    """Counts placeholders; '%2$s of %1$s' and '%s of %s' have the same."""
    found = (match[0] for match in _PLACEHOLDER.finditer(text))
    return Counter(re.sub(r"^%\d+\$", "%", name) for name in found if name != "%%")


def strip_mnemonics(english: str, translation: str) -> tuple[str, str]:
    """Removes mnemonics: '_Open', 'A_brir' -> 'Open', 'Abrir'; '文件(_F)' -> '文件'.

    Only where each side has exactly one & or _ before a letter, of the same kind, and it is no
    entity (&amp;), no abbreviation (R&D) and no part of a name that both sides have (file_name).
    """
    marks = [_MNEMONIC.findall(side) for side in (english, translation)]
    if len(marks[0]) != 1 or marks[0] != marks[1]:
        return english, translation
    if any(re.search(r"&#?\w+;|[A-Z]&[A-Z]", side) for side in (english, translation)):
        return english, translation
    names = [set(re.findall(r"\w+[_&]\w+", side)) for side in (english, translation)]
    if names[0] & names[1] and english != translation:
        return english, translation
    return _MNEMONIC.sub("", english), _MNEMONIC.sub("", _MNEMONIC_BEHIND.sub("", translation))


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
