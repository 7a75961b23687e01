"""JSON lines: one object a line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from m4.data.sources.reading.files import lines
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Reason, Tally
from m4.data.sources.reading.records import RecordFolder
from m4.settings import checked


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
