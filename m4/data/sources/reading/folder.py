"""Folder: the base class of sources that read a folder of files."""

import abc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from etils import epath

from m4.data.sources import SPLITS, Pair
from m4.data.sources.reading.files import digest, folder_at
from m4.data.sources.reading.layout import File, FileLayout, named, said_splits
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reading, Tally
from m4.data.sources.reading.spool import Spool
from m4.data.splits import HashSplit
from m4.settings import Between, InputError, OneOf, SettingError

# One sentence in so many is dev, or test; 0 is none.
Every = Annotated[int, Between(0, 10**9)]


@dataclass(eq=False)
class Folder(abc.ABC):
    """A Source over a folder; a subclass reads the files.

    Nothing is read before pairs, languages or the identity are asked for. The split of a pair is in
    its file's name ({split} in `files`), or a hash of the English side decides it (dev_every,
    test_every): for all files, or for training files where `splits` leaves a split out. The
    language is in the name, or in the file: then all files are read once and sorted by language on
    disk.

    Attributes:
        folder: Folder on disk, or gs://, s3:// and the like.
        files: Pattern of names (`FileLayout`).
        on_bad_line: "fail", or "skip", which counts the line.
        splits: Split -> its word in names. Defaults to train, dev and test.
        codes: m4's code -> the code in names, where they differ by more than '-' and '_'.
        dev_every: One English sentence in so many is dev; 0 is none.
        test_every: One English sentence in so many is test; 0 is none.
        max_line_bytes: Longer lines are bad.
        english: Code of English in names.
    """

    names_say_splits: ClassVar[bool] = True  # words such as test in names of files are splits
    unit: ClassVar[str] = "line"  # what is numbered in a file

    folder: str | os.PathLike[str]
    files: str
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "fail"
    splits: Mapping[str, str] | None = None
    codes: Mapping[str, str] | None = None
    dev_every: Every = 0
    test_every: Every = 0
    max_line_bytes: Annotated[int, Between(1, 2**30)] = MAX_LINE_BYTES
    english: str = "en"

    def __post_init__(self) -> None:
        self.owner = owner = type(self).__name__
        self.reading = Reading(owner, self.on_bad_line, self.max_line_bytes)
        self.hash_split = HashSplit(owner, self.dev_every, self.test_every)
        path = epath.Path(self.folder)
        self.layout = FileLayout(owner, path, self.files, self.english, self.splits, self.codes)
        every = {"dev": self.dev_every, "test": self.test_every}
        self._hashed = {split for split, one in every.items() if one}
        named = {*self.layout.splits} if "split" in self.layout.fields else set()
        if named & self._hashed or not (named or self._hashed):
            allowed = (
                "a pattern without {split} where dev_every and test_every are set, but for splits "
                f"that {owner}.splits leaves out"
                if self._hashed
                else "a pattern with {split}, or dev_every and test_every must be set"
            )
            raise SettingError(f"{owner}.files", self.files, allowed)

    def languages(self) -> list[str]:
        """Returns the codes that have training data, sorted."""
        if not self.layout.names_language:
            return self._spool.languages()
        return sorted(
            {
                file.language
                for file in self._files
                if file.language and not file.english and self._has(file, "train")
            }
        )

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of a language in the order of the files' names and lines.

        A language without files of a split has no such pairs.

        Raises:
            InputError: There is no such language; a line is bad and on_bad_line is "fail".
        """
        assert split in SPLITS, split
        if language not in self.languages() and (
            not self.layout.names_language or language not in {f.language for f in self._files}
        ):
            raise InputError(
                f"{self.folder}: no {language!r} in files called like {self.files}; there is "
                f"{', '.join(self.languages()) or 'no language'} ({self.owner}.files, "
                f"{self.owner}.codes)"
            )
        if not self.layout.names_language:
            yield from self._spool.pairs(language, split)
            return
        for file in self._files:
            if file.language == language and not file.english and self._has(file, split):
                for _, pair in self._pairs_of(file):
                    if self._split_of(file, pair) == split:
                        yield pair

    def identity(self) -> dict:
        """Returns the settings, and sizes and SHA-256 of the files, by language if possible."""
        by_language: dict[str, dict[str, list]] = {}
        common: dict[str, list] = {}
        for file in self._files:
            of = by_language.setdefault(file.language, {}) if file.language else common
            of[file.name] = digest(file.path)
        return {
            "source": type(self).__name__.lower(),
            **self.layout.identity(),
            **self.hash_split.identity(),
            **self.reading.identity(),
            **self._settings(),
            "common": common,
            # Without languages in the names nothing is one language's alone.
            **({"by_language": by_language} if by_language else {}),
        }

    @abc.abstractmethod
    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        """Yields (language, pair) of a file."""

    def _pairs_of(self, file: File) -> Iterator[tuple[str, Pair]]:
        with self.reading.of(file.name, file.path, self.unit) as tally:
            yield from self._read(file, tally)

    def _settings(self) -> dict:
        """Returns the subclass's settings that decide the text."""
        return {}

    def _choose(self, files: list[File]) -> list[File]:
        """Returns the files that belong to the corpus; InputError where some are missing."""
        return files

    def _has(self, file: File, split: str) -> bool:
        """Returns whether a file may have pairs of a split."""
        return file.split in (split, None) or (file.split == "train" and split in self._hashed)

    def _split_of(self, file: File, pair: Pair) -> str:
        if file.split is None or (file.split == "train" and self._hashed):
            return self.hash_split(pair.english)
        return file.split

    @cached_property
    def _files(self) -> list[File]:
        folder_at(self.folder, f"{self.owner}.folder")
        files = self._choose(self.layout.find())
        if not files:
            said = f"no file is called like {self.files} ({self.owner}.files)"
            raise InputError(f"{self.folder}: {said}")
        self._name_unread(files)
        self._check_splits(files)
        return files

    def _check_splits(self, files: Sequence[File]) -> None:
        """Raises InputError for a file to train on whose name says that it is dev or test."""
        # What a setting says itself is meant so.
        asked = {*said_splits(self.layout.pattern).values(), self.layout.splits["train"]}
        for file in files if self.names_say_splits else ():
            said = [word for split, word in said_splits(file.name).items() if split != "train"]
            if file.split in (None, "train") and (wrong := sorted({*said} - asked)):
                raise InputError(
                    f"{file.path}: its name says {' and '.join(wrong)}, and it would be trained "
                    f"on; move it out of the folder, or name its split ({self.owner}.files, "
                    f"{self.owner}.splits)"
                )

    def _name_unread(self, files: Sequence[File]) -> None:
        """Prints a line of files that are not read, and one of each language without training."""
        about = []
        if self.layout.not_taken:
            about.append((f"not called like {self.layout.pattern}", self.layout.not_taken))
        trained = {file.language for file in files if self._has(file, "train")}
        names: dict[str, list[str]] = {}
        for file in files:
            if file.language is not None and file.language not in trained:
                names.setdefault(file.language, []).append(file.name)
        alike = {code.lower(): code for code in trained if code is not None}
        for code, of_code in names.items():
            other = alike.get(code.lower())
            about.append(
                (f"{code} has no training file" + (f" ({other} has)" if other else ""), of_code)
            )
        for why, unread in about:
            print(
                f"{self.folder}: not read: {named(sorted(unread))} ({why}; {self.owner}.files)",
                file=sys.stderr,
            )

    @cached_property
    def _spool(self) -> Spool:
        pairs = (
            (language, self._split_of(file, pair), pair)
            for file in self._files
            for language, pair in self._pairs_of(file)
        )
        return Spool(pairs, self.reading)
