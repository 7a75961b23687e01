"""Moses' format: two files of a pair of languages, line n of one the translation of line n."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from m4.data.sources import Pair
from m4.data.sources.reading.files import lines
from m4.data.sources.reading.folder import Folder
from m4.data.sources.reading.layout import File
from m4.data.sources.reading.lines import Tally
from m4.settings import InputError, SettingError, checked


@checked
@dataclass(eq=False)
class Moses(Folder):
    """Sentence pairs from files like train.en-gl.en and train.en-gl.gl, UTF-8; also compressed.

    `files` must have {side}. With the other language in the name ({pair} or {lang}) the two files
    of a pair have all but {side} in common; without it ('{split}/{side}.txt') all languages share
    one English file, as in many-way test sets. Files of different lengths are an error
    whatever on_bad_line says, because it is not known which of their lines belong together.
    """

    files: str = "{split}.{pair}.{side}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "side" not in self.layout.fields:
            raise SettingError(
                "Moses.files", self.files, "a pattern with {side}, the code of a file's language"
            )

    def _choose(self, files: list[File]) -> list[File]:
        self._english = {
            (file.language, file.split, file.stars): file for file in files if file.english
        }
        for file in files:
            if not file.english:
                self._english_of(file)
        translation = {(f.language, f.split, f.stars) for f in files if not f.english}
        for of, file in self._english.items():
            if file.language and of not in translation:
                raise InputError(f"{file.path}: its {file.code} side is missing (Moses.files)")
        return files

    def _english_of(self, file: File) -> File:
        for language in (file.language, None):  # None: all languages share it
            if english := self._english.get((language, file.split, file.stars)):
                return english
        raise InputError(f"{file.path}: its English side is missing (Moses.files)")

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        english = self._english_of(file)
        most = self.reading.max_line_bytes
        count = [0, 0]
        for number, sides in enumerate(
            zip_longest(lines(english.path, most), lines(file.path, most)), 1
        ):
            for side, line in enumerate(sides):
                count[side] += line is not None
            if None in sides:
                continue  # read on, to report both counts
            first, second = (tally.text(line, number) for line in sides)
            if pair := tally.pair(number, first, second):
                yield file.language or "", pair
        if count[0] != count[1]:
            raise InputError(
                f"{english.path} has {count[0]} lines and {file.path} {count[1]}: "
                "they are not translations of each other line by line"
            )
