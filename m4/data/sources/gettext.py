"""gettext's catalogues: messages of programs, msgid in English and msgstr its translation.

OPUS's GNOME, KDE4 and Ubuntu are these.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from m4.data.sources import Pair
from m4.data.sources.catalogues import CatalogueError, Entry, read_mo, read_po
from m4.data.sources.reading.files import chunks
from m4.data.sources.reading.folder import Every, Folder
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Tally
from m4.settings import OneOf, SettingError, checked

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

    names_say_splits: ClassVar[bool] = False  # they are programs' names

    files: str = "{lang}.po"
    dev_every: Every = 100
    test_every: Every = 50
    placeholders: Annotated[str, OneOf(("same", "drop", "keep"))] = "same"
    mnemonics: Annotated[str, OneOf(("strip", "keep"))] = "strip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "lang" not in self.layout.fields:
            raise SettingError("Gettext.files", self.files, "a pattern with {lang}")

    def _settings(self) -> dict:
        return {"placeholders": self.placeholders, "mnemonics": self.mnemonics}

    def _choose(self, files: list[File]) -> list[File]:
        names = {file.name for file in files}
        for file in files:
            if _ENGLISH.match(file.code or ""):
                with self.reading.of(file.name, file.path) as tally:
                    tally.leave_out(ENGLISH_CATALOGUE)
        return [
            file
            for file in files
            if re.search(r"\.(po|mo)$", file.name)
            and not _ENGLISH.match(file.code or "")
            and not (file.name.endswith(".mo") and f"{file.name[:-3]}.po" in names)
        ]

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        content = b"".join(chunks(file.path))
        read = read_po if file.name.endswith(".po") else read_mo
        try:
            entries, obsolete = read(content)
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
