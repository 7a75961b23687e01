"""JSON lines: one object a line."""

import abc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines
from m4.data.sources.reading.folder import Folder
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Reason, Tally
from m4.settings import SettingError, checked

_LANG = "{lang}"


@dataclass(eq=False)
class RecordFolder(Folder):
    """A folder of records; a subclass reads them from a file.

    'translation.en' is the field en of the field translation. The object before '.{lang}' may also
    be {'language': [codes], 'translation': [texts]}, as datasets of TED talks have it.

    Attributes:
        translation_field: Field of the translation; {lang} in it is the language's code. Where
            neither a file's name nor language_field has the language, every field that fits is one.
        english_field: Field of English, or of the first language in the name of a pair without
            English. Defaults to translation_field with its code.
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
            allowed = f"None, or {self.owner}.language_field and english_field must be set"
            raise SettingError(
                f"{self.owner}.source_language_field", self.source_language_field, allowed
            )
        by_record = self._language_path is not None or _LANG in last
        if "side" in self.layout.fields or not (self.layout.names_language or by_record):
            raise SettingError(
                f"{self.owner}.files",
                self.files,
                f"a pattern with {{lang}} or {{pair}}; or put {{lang}} in {setting}, or set "
                f"{self.owner}.language_field",
            )

    @abc.abstractmethod
    def _records(self, file: File, tally: Tally) -> Iterator[Mapping[str, Any] | Reason]:
        """Yields the records of a file, or reasons why there is none."""

    def _settings(self) -> dict:
        names = ("translation", "english", "language", "source_language")
        return {f"{name}_field": getattr(self, f"{name}_field") for name in names}

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        for number, record in enumerate(self._records(file, tally), 1):
            if isinstance(record, Reason):
                tally.bad(number, record)
                continue
            for pair, first, second in self._sides(record, file):
                if texts := tally.pair(number, first, second):
                    yield pair, texts

    def _path(self, code: str) -> list[str]:
        """Returns the path of the first side's field, whose language has this code."""
        return (self.english_field or self.translation_field.replace(_LANG, code)).split(".")

    def _columns(self, names: Iterable[str], codes: tuple[str, str] | None) -> list[str]:
        """Returns the top-level fields that are needed, including those missing in `names`."""
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

    def _sides(self, record: Mapping[str, Any], file: File) -> Iterator[tuple[str, object, object]]:
        """Yields (pair of languages, first, second) of a record's pairs; a side may be a Reason."""
        codes = file.codes
        if codes and file.swapped and self.english_field:
            codes = codes[1], codes[0]  # fields without a language are in the order of the name
        if codes is None and self._language_path is not None:
            found = self._value(record, self._language_path)
            source = self.english
            if self.source_language_field is not None:
                source = self._value(record, self.source_language_field.split("."))
            for code in (source, found):
                if not isinstance(code, str) or not re.fullmatch("[A-Za-z0-9_@-]+", code):
                    yield "", Reason("no language code in the language's field"), None
                    return
            if found == source:
                both = "English" if found == self.english else "that of the source, too"
                yield "", Reason(f"the language is {both}"), None
                return
            codes = source, found
        first = self._value(record, self._path(codes[0] if codes else self.english))
        if isinstance(first, list):  # several English texts of one sentence: the first
            first = first[0] if first else None
        parent = self._value(record, self._parents)
        if not isinstance(parent, Mapping):
            yield "", Reason(f"no field {'.'.join(self._parents)}"), None
            return
        if codes is not None:
            names = {codes[1]: self._last.replace(_LANG, codes[1])}
        else:
            fitting = (self._code.fullmatch(name) for name in _names(parent))
            names = {match[1]: match[0] for match in fitting if match and match[1] != self.english}
        found = False
        for code, name in names.items():
            texts = _texts(parent, name)
            if codes is None and texts == [None]:
                continue  # a column that other records use
            both = codes or (self.english, code)
            pair, swapped = self.layout.pair(both), self.layout.swapped(both)
            for text in texts:
                found = True
                yield (pair, text, first) if swapped else (pair, first, text)
        if not found:
            yield "", Reason("no language but English"), None

    def _value(self, record: Mapping[str, Any], path: list[str]) -> Any:
        value: Any = record
        for part in path:
            if not isinstance(value, Mapping):
                return None
            texts = _texts(value, part)
            value = texts[0] if len(texts) == 1 else texts
        return value


def _is_variable(parent: Mapping[str, Any]) -> bool:
    return parent.keys() == {"language", "translation"} and all(
        isinstance(side, list) for side in parent.values()
    )


def _names(parent: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(map(str, parent["language"]))) if _is_variable(parent) else [*parent]


def _texts(parent: Mapping[str, Any], name: str) -> list[Any]:
    """Returns an object's texts under a name, or [None]."""
    if not _is_variable(parent):
        return [parent.get(name)]
    pairs = zip(parent["language"], parent["translation"], strict=False)
    return [text for code, text in pairs if code == name] or [None]


@checked
@dataclass(eq=False)
class Jsonl(RecordFolder):
    """Sentence pairs from JSON objects, UTF-8, one a line; files may be compressed.

    The language is in the file's name ({lang} or {pair}), in language_field, or in the names of the
    fields: {"translation": {"en": ..., "gl": ..., "pt": ...}} is two pairs (`RecordFolder`).
    """

    files: str = "{lang}.{split}.jsonl"

    def _records(self, file: File, tally: Tally) -> Iterator[dict[str, Any] | Reason]:
        for number, line in enumerate(lines(file.path, self.reading.max_line_bytes), 1):
            text = tally.text(line, number)
            yield text if isinstance(text, Reason) else _object(text)


def _object(text: str) -> dict | Reason:
    if not text.strip():
        return Reason("an empty line")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # a line of brackets is nested too deep for the parser
        return Reason("not JSON")
    return record if isinstance(record, dict) else Reason("not a JSON object")
