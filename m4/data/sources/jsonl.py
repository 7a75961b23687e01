"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines
from m4.data.sources.reading.folder import Folder
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Reason
from m4.data.sources.reading.records import Fields
from m4.settings import checked


@checked
@dataclass(eq=False)
class Jsonl(Folder):
    """Sentence pairs from JSON objects, UTF-8, one a line; files may be .gz or .zst.

    The language is in the file's name ({lang} or {pair}), in language_field, or in the names of
    the fields: {"translation": {"en": ..., "gl": ..., "pt": ...}} is two pairs. The fields:
    `Fields` in sources/records.py.
    """

    files: str = "{lang}.{split}.jsonl"
    translation_field: str = "translation.{lang}"
    english_field: str | None = None
    language_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fields = Fields(
            self.owner,
            self.english,
            self.translation_field,
            self.english_field,
            self.language_field,
            self.layout.language,
        )
        self.fields.check(self.owner, self.layout)

    def _settings(self) -> dict:
        return self.fields.identity()

    def _read(self, files: Sequence[File]) -> Iterator[tuple[str, Pair]]:
        for file in files:
            with self.reading.of(file.name, file.path) as tally:
                for number, line in enumerate(lines(file.path, self.reading.max_line_bytes), 1):
                    text = tally.text(line, number)
                    record = text if isinstance(text, Reason) else _object(text)
                    if isinstance(record, Reason):
                        tally.bad(number, record)
                        continue
                    for language, english, translation in self.fields.sides(record, file.code):
                        if pair := tally.pair(number, english, translation):
                            yield language, pair


def _object(text: str) -> dict | Reason:
    if not text.strip():
        return Reason("an empty line")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # a line of brackets is nested too deep for the parser
        return Reason("not JSON")
    return record if isinstance(record, dict) else Reason("not a JSON object")
