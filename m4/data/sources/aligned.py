"""Aligned folders, for training text and test sets: a file per language, line by line."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from m4.data.directions import directions_of, in_order, pair_of, split_direction
from m4.data.sources import Pair
from m4.data.sources.reading.folder import File, Folder
from m4.data.sources.reading.lines import Tally, side_by_side, text_lines
from m4.data.testsets import MOST_BYTES, Segment, segments_of_pairs
from m4.settings import checked


@checked
@dataclass(eq=False)
class Aligned(Folder):
    """Files in any number of languages, where line n of each translates line n of the others.

    Any two languages are a pair if the names of their files differ only by {lang}. Files of
    different lengths are an error. Without {split}, dev_every and test_every, a folder is a test
    set. Several files of a language in it are several references; the first by name is translated.

    Attributes:
        files: Pattern of names with {lang}, the language of a file.
        documents: File with the document of each line of a test set. Defaults to none.
    """

    one_language = True
    files_rule = {"lang"}, {"pair", "side"}, "a pattern with {lang}, without {pair} and {side}"

    files: str = "{split}/{lang}"
    documents: str | None = None

    def language_pairs(self) -> list[str]:
        """Returns the language pairs with training data, sorted, those with English first."""
        return self._pairs_with("train", self._groups.values())

    def directions(self) -> list[str]:
        """Returns the directions of the test set."""
        tested = {file.language: file for file in self._files if self._holds(file, "test")}
        groups = self._groups.values() if self._hashed else [tested]
        return directions_of("direct", self._pairs_with("test", groups))

    def segments(self, direction: str) -> list[Segment]:
        """Returns the lines of the test set. Raises InputError for files of different lengths."""
        if self._hashed:  # pairs of training files
            return segments_of_pairs(self, direction)
        source, targets = (
            [f.path for f in self._files if f.language == code and self._holds(f, "test")]
            for code in split_direction(direction)
        )
        documents = [self.layout.folder / self.documents] if self.documents else []
        paths = [source[0], *targets, *documents]
        rows = side_by_side({path: text_lines(path, MOST_BYTES) for path in paths})
        last = 1 + len(targets)
        return [Segment(row[0], row[1:last], row[last] if documents else None) for row in rows]

    def _pairs_with(self, split: str, groups: Iterable[Mapping[str | None, File]]) -> list[str]:
        there = ([code for code, of in group.items() if self._holds(of, split)] for group in groups)
        found = {pair_of(f"{a}-{b}") for codes in there for a, b in combinations(codes, 2)}
        return sorted(found, key=in_order)

    @cached_property
    def _groups(self) -> dict[tuple, dict[str | None, File]]:
        """Yields parallel files by language."""
        found: dict[tuple, dict[str | None, File]] = {}
        for file in self._files:
            found.setdefault((file.split, file.stars), {})[file.language] = file
        return found

    def _name_unread(self, files: Sequence[File]) -> None:
        if any(self._holds(file, "train") for file in files):  # published test sets have more
            super()._name_unread(files)

    def _files_of(self, pair: str) -> list[File]:
        first, second = split_direction(pair)
        return [
            replace(group[second], pair=pair, name=f"{group[first].name} and {group[second].name}")
            for group in self._groups.values()
            if first in group and second in group
        ]

    def _files_with(self, file: File) -> tuple[File, File]:
        assert file.pair is not None
        return self._groups[file.split, file.stars][split_direction(file.pair)[0]], file

    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        return self._zipped(*self._files_with(file), tally)
