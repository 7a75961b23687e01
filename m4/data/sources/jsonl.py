"""JSON lines: one object per line."""

import abc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines
from m4.data.sources.reading.folder import File, Folder
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reason, Tally
from m4.settings import SettingError, checked

_LANG = "{lang}"


@dataclass(eq=False)
class RecordFolder(Folder):
    """A folder of records, which a subclass reads from files.

    'translation.en' is the field en of the field translation.

    Attributes:
        translation_field: Field of the translation, where {lang} is the language code. If neither a
            file's name nor language_field has the language, every matching field is a translation.
        english_field: Field of English, or of the first language in the name of a pair without
            English. Defaults to translation_field with that code.
        language_field: Field of the translation's code, if neither names nor fields have it.
        source_language_field: Field of the code of english_field's language. Defaults to English.
    """

    translation_field: str = "translation.{lang}"
    english_field: str | None = None
    language_field: str | None = None
    source_language_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        setting = f"{self.owner}.translation_field"
        if self.english_field is None and _LANG not in self.translation_field:
            allowed = f"a name with {_LANG}, or {self.owner}.english_field must be set"
            raise SettingError(setting, self.translation_field, allowed)
        *parents, last = self.translation_field.split(".")
        if any(_LANG in parent for parent in parents):
            allowed = f"a name with {_LANG} in its last part"
            raise SettingError(setting, self.translation_field, allowed)
        self._parents, self._last = parents, last
        before, _, after = last.partition(_LANG)
        self._code = re.compile(f"{re.escape(before)}([A-Za-z0-9_@-]+){re.escape(after)}")
        self._language_path = self.language_field.split(".") if self.language_field else None
        if self.source_language_field and not (self.language_field and self.english_field):
            name, value = f"{self.owner}.source_language_field", self.source_language_field
            allowed = f"None, or {self.owner}.language_field and english_field must be set"
            raise SettingError(name, value, allowed)
        by_record = self._language_path is not None or _LANG in last
        if "side" in self.layout.fields or not (self.layout.names_language or by_record):
            allowed = f"a pattern with {{lang}} or {{pair}}; or put {{lang}} in {setting}"
            more = f", or set {self.owner}.language_field"
            raise SettingError(f"{self.owner}.files", self.files, allowed + more)

    @abc.abstractmethod
    def _records(self, file: File, tally: Tally) -> Iterator[Mapping[str, Any] | Reason]:
        """Yields the records of a file, or reasons for bad ones."""

    def _settings(self) -> dict:
        names = ("translation", "english", "language", "source_language")
        return {f"{name}_field": getattr(self, f"{name}_field") for name in names}

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        for number, record in enumerate(self._records(file, tally), 1):
            found = record if isinstance(record, Reason) else self._sides(record, file)
            if isinstance(found, Reason):
                tally.bad(number, found)
                continue
            for pair, first, second in found:
                if texts := tally.pair(number, first, second):
                    yield pair, texts

    def _path(self, code: str) -> list[str]:
        """Returns the path of the first side's field, for this language code."""
        return (self.english_field or self.translation_field.replace(_LANG, code)).split(".")

    def _columns(self, names: Iterable[str], codes: tuple[str, str] | None) -> list[str]:
        """Returns the needed top-level fields, including those missing in `names`."""
        wanted = [self._path(codes[0] if codes else self.english)[0]]
        for field in (self.language_field, self.source_language_field):
            wanted += [] if field is None else field.split(".")[:1]
        if self._parents:
            wanted.append(self._parents[0])
        elif codes is not None or _LANG not in self._last:
            wanted.append(self._last.replace(_LANG, codes[1] if codes else ""))
        elif self._language_path is not None:
            wanted += names  # the language of each record names its field
        else:
            wanted += [name for name in names if self._code.fullmatch(name)]
        return list(dict.fromkeys(wanted))

    def _sides(
        self, record: Mapping[str, Any], file: File
    ) -> list[tuple[str, object, object]] | Reason:
        """Returns (pair of languages, first, second) of a record's pairs."""
        codes = file.codes
        if codes and file.swapped and self.english_field:
            codes = codes[1], codes[0]  # fields without a language are in the order of the name
        if codes is None and self._language_path is not None:
            found = _value(record, self._language_path)
            source = self.english
            if self.source_language_field is not None:
                source = _value(record, self.source_language_field.split("."))
            for code in (source, found):
                if not isinstance(code, str) or not re.fullmatch("[A-Za-z0-9_@-]+", code):
                    return Reason("no language code in the language's field")
            if found == source:
                both = "English" if found == self.english else "that of the source, too"
                return Reason(f"the language is {both}")
            codes = source, found
        first = _value(record, self._path(codes[0] if codes else self.english))
        parent = _value(record, self._parents)
        if not isinstance(parent, Mapping):
            return Reason(f"no field {'.'.join(self._parents)}")
        if codes is not None:
            texts = {codes: parent.get(self._last.replace(_LANG, codes[1]))}
        else:
            fitting = (self._code.fullmatch(name) for name in parent)
            texts = {
                (self.english, match[1]): parent[match[0]]
                for match in fitting
                # A column without text is used by other records.
                if match and match[1] != self.english and parent[match[0]] is not None
            }
        if not texts:
            return Reason("no language but English")
        made = []
        for both, text in texts.items():
            sides = (text, first) if self.layout.swapped(both) else (first, text)
            made.append((self.layout.pair(both), *sides))
        return made


def _value(record: Any, path: list[str]) -> Any:
    for part in path:
        record = record.get(part) if isinstance(record, Mapping) else None
    return record


@checked
@dataclass(eq=False)
class Jsonl(RecordFolder):
    """Sentence pairs from JSON objects, one per line, in UTF-8; files may be compressed.

    The language is in the file's name ({lang} or {pair}), in language_field, or in the names of the
    fields: {"translation": {"en": ..., "gl": ..., "pt": ...}} is two pairs (`RecordFolder`).
    """

    files: str = "{lang}.{split}.jsonl"

    def _records(self, file: File, tally: Tally) -> Iterator[dict[str, Any] | Reason]:
        for number, line in enumerate(lines(file.path, MAX_LINE_BYTES), 1):
            text = tally.text(line, number)
            yield text if isinstance(text, Reason) else _object(text)


def _object(text: str) -> dict | Reason:
    if not text.strip():
        return Reason("an empty line")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # deeply nested brackets exceed the parser's limit
        return Reason("not JSON")
    return record if isinstance(record, dict) else Reason("not a JSON object")
