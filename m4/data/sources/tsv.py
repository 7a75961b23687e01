"""A folder of TSV files: gl.train.tsv, gl.dev.tsv, gl.test.tsv, fr-wo.train.tsv ..."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines
from m4.data.sources.reading.folder import LANGUAGE_OR_PAIR, File, Folder
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reason, Tally
from m4.settings import Between, checked


@checked
@dataclass(eq=False)
class Tsv(Folder):
    """Sentence pairs, one per line: english<TAB>translation, in UTF-8; files may be compressed.

    Columns of a pair without English ('fr-wo') are in the order of the name.

    Bad lines (no tab, several tabs, and those of `reading.lines`) are errors, or with
    on_bad_line='skip' skipped and counted.

    Attributes:
        english_column: Column of English: 1, or 2 for translation<TAB>english.
    """

    files_rule = LANGUAGE_OR_PAIR

    files: str = "{lang}.{split}.tsv"
    english_column: Annotated[int, Between(1, 2)] = 1

    def _settings(self) -> dict:
        return {"english_column": self.english_column}

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        assert file.codes is not None
        swapped = self.english_column == 2 if self.english in file.codes else file.swapped
        for number, line in enumerate(lines(file.path, MAX_LINE_BYTES), 1):
            text = tally.text(line, number)
            sides = text.split("\t")
            if isinstance(text, Reason):
                tally.bad(number, text)
            elif len(sides) != 2:
                tabs = "no tab" if len(sides) == 1 else "more than one tab"
                tally.bad(number, tabs if text.strip() else "an empty line")
            elif texts := tally.pair(number, *(sides[::-1] if swapped else sides)):
                yield file.pair or "", texts
