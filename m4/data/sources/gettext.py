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
from typing import Annotated

from babel.messages.catalog import Catalog, Message
from babel.messages.pofile import PoFileError, PoFileParser

from m4.data.sources import Pair
from m4.data.sources.reading.files import chunks
from m4.data.sources.reading.folder import Every, File, Folder
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
            messages, obsolete = read(b"".join(chunks(file.path)))
        except PoFileError as error:
            tally.bad(error.lineno + 1, f"no catalogue, {str(error).rsplit(' on ', 1)[0]}")
            return
        for _ in range(obsolete):
            tally.leave_out("obsolete")
        for message in messages:
            if reason := self._unwanted(message):
                tally.leave_out(reason)
                continue
            sides = str(message.id), str(message.string)
            if self.mnemonics == "strip":
                sides = strip_mnemonics(*sides)
            if pair := tally.pair(message.lineno or 0, *sides):
                yield file.pair or "", pair

    def _unwanted(self, message: Message) -> str | None:
        if not isinstance(message.id, str):
            return "plural forms"
        if message.fuzzy:
            return "fuzzy"
        if not (translation := str(message.string)).strip():
            return "not translated"
        if self.placeholders == "keep":
            return None
        english, other = placeholders(message.id), placeholders(translation)
        if self.placeholders == "drop" and english:
            return "placeholders"
        return "placeholders that differ" if english != other else None


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
    names = [set(re.findall(r"\w+[_&]\w+", side)) for side in (english, translation)]
    in_both = names[0] & names[1] and english != translation
    if in_both or re.search(r"&#?\w+;|[A-Z]&[A-Z]", f"{english}\n{translation}"):
        return english, translation
    return _MNEMONIC.sub("", english), _MNEMONIC.sub("", _MNEMONIC_BEHIND.sub("", translation))


def read_po(content: bytes) -> tuple[list[Message], int]:
    """Returns the messages of a PO file, without its header, and the number of obsolete ones.

    Raises:
        PoFileError: msgfmt would refuse it, or its charset is not what it says.
    """
    charset = re.search(rb"charset=([A-Za-z0-9_.:-]+)", content[:65_536])
    name = charset[1].decode() if charset and charset[1] != b"CHARSET" else "utf-8"
    catalog, obsolete, lines = _Collected(), 0, []
    try:
        text = content.decode(name).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        raise PoFileError(f"not {name}", catalog, "", line) from error
    except (LookupError, UnicodeError) as error:  # UnicodeError: of the codec "undefined"
        raise PoFileError(f"unknown charset {name}", catalog, "", 0) from error
    for number, line in enumerate(map(str.strip, text.split("\n"))):
        obsolete += bool(re.match(r"#~\s*msgid\s", line))
        if line.startswith(("#~", "#|")):
            line = ""  # obsolete entries, and what fuzzy ones were before
        elif line and not line.startswith("#"):
            if (parts := _LINE.fullmatch(line)) is None:
                raise PoFileError("a line that is none of PO's", catalog, line, number)
            line = " ".join(filter(None, parts.groups()))
        lines.append(line)
    PoFileParser(catalog, ignore_obsolete=True, abort_invalid=True).parse(lines)
    return [message for message in catalog.found if message.id], obsolete


def read_mo(content: bytes) -> tuple[list[Message], int]:
    """Returns the messages of an MO file, numbered from 1, without its header; and 0.

    Raises:
        PoFileError: It is damaged, or no MO file.
    """
    try:
        # No public name gives the messages. Babel's read_mo refuses headers with odd dates.
        catalog: dict = gettext.GNUTranslations(io.BytesIO(content))._catalog  # type: ignore
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise PoFileError(f"not an MO file: {error}", Catalog(), "", 0) from error
    messages = []
    for number, (key, translation) in enumerate(catalog.items(), 1):
        # Plural forms are (msgid, 0), (msgid, 1) ...; a context before a msgid ends in EOT.
        name, form = key if isinstance(key, tuple) else (key, None)
        if (english := name.rpartition("\x04")[2]) and not form:
            found = english if form is None else (english, english)
            messages.append(Message(found, translation, lineno=number))
    return messages, 0
