"""A folder of TSV files: <lang>.train.tsv, <lang>.dev.tsv, <lang>.test.tsv."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from m4.data.sources import Pair
from m4.data.sources.files import lines
from m4.data.sources.folder import Folder
from m4.data.sources.layout import File
from m4.data.sources.lines import MAX_LINE_BYTES, Reason


class Tsv(Folder):
    """Sentence pairs, one a line: english<TAB>foreign, UTF-8. Files may be .gz or .zst.

    Bad lines (no tab, several tabs, and sources/lines.py) are errors, or with on_bad_line='skip'
    left out and counted.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        on_bad_line: str = "fail",
        files: str = "{lang}.{split}.tsv",
        splits: Mapping[str, str] | None = None,
        codes: Mapping[str, str] | None = None,
        dev_every: int = 0,
        test_every: int = 0,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        super().__init__(
            "tsv.Tsv",
            folder,
            files,
            "en",
            splits,
            codes,
            dev_every,
            test_every,
            on_bad_line,
            max_line_bytes,
        )
        if "side" in self.layout.fields or not {"lang", "pair"} & self.layout.fields:
            raise ValueError(f"tsv.Tsv.files = {files!r}: needs {{lang}} or {{pair}}, no {{side}}")

    def _read(self, files: Sequence[File]) -> Iterator[tuple[str, Pair]]:
        for file in files:
            found = 0
            with self.reading.of(file.name, file.path) as tally:
                for number, line in enumerate(lines(file.path, self.reading.max_line_bytes), 1):
                    text = tally.text(line, number)
                    sides = _sides(text) if not isinstance(text, Reason) else text
                    if isinstance(sides, Reason):
                        tally.bad(number, sides)
                    elif pair := tally.pair(number, *sides):
                        found += 1
                        yield file.language or "", pair
            if file.split == "train" and not found:
                raise ValueError(f"{file.path}: no pairs in it")


def _sides(text: str) -> tuple[str, str] | Reason:
    sides = text.split("\t")
    if len(sides) == 2:
        return sides[0], sides[1]
    if not text.strip():
        return Reason("an empty line")
    return Reason("no tab" if len(sides) == 1 else "more than one tab")
