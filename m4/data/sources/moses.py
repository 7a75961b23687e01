"""Moses' format: two files for a language pair, where equal line numbers are translations."""

from collections.abc import Iterator
from dataclasses import dataclass

from m4.data.directions import SIDES, split_direction
from m4.data.sources import Pair
from m4.data.sources.reading.folder import File, Folder
from m4.data.sources.reading.lines import Tally
from m4.settings import InputError, checked


@checked
@dataclass(eq=False)
class Moses(Folder):
    """Sentence pairs from files like train.en-gl.en and train.en-gl.gl, UTF-8; also compressed.

    `files` must have {side}. With both languages in the name ({pair} or {lang}), the names of the
    two files of a pair differ only in {side}. Without them ('{split}/{side}.txt'), all languages
    share one English file, as in many-way test sets. Files of different lengths are an error with
    any on_bad_line, because it is unknown which of their lines belong together.
    """

    files_rule = {"side"}, set(), "a pattern with {side}, the code of a file's language"

    files: str = "{split}.{pair}.{side}"

    def _choose(self, files: list[File]) -> list[File]:
        self._first = {(f.pair, f.split, f.stars): f for f in files if f.side == SIDES[0]}
        second = {(f.pair, f.split, f.stars): f for f in files if f.side == SIDES[1]}
        for file in second.values():
            self._first_of(file)
        for of, file in self._first.items():
            if file.pair and of not in second:
                raise InputError(f"{file.path}: its {file.code} side is missing (Moses.files)")
        return files

    def _first_of(self, file: File) -> File:
        for pair in (file.pair, None):  # None: all languages share its English file
            if first := self._first.get((pair, file.split, file.stars)):
                return first
        side = split_direction(file.pair)[0] if file.pair else "English"
        raise InputError(f"{file.path}: its {side} side is missing (Moses.files)")

    def _files_with(self, file: File) -> tuple[File, File]:
        return self._first_of(file), file

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        return self._zipped(*self._files_with(file), tally)
