"""Folder: the base class of sources that read a folder of files."""

import abc
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar

from etils import epath

from m4.data.directions import SIDES, in_order, key_of, pair_of
from m4.data.sources import SPLITS, Pair, Shard
from m4.data.sources.reading.files import digest, folder_at, lines
from m4.data.sources.reading.layout import File, FileLayout, named, said_splits
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reading, Tally, side_by_side
from m4.data.splits import HashSplit
from m4.settings import Between, InputError, OneOf, SettingError

_KEPT_CHARACTERS = 1 << 24


class Spool:
    """One file for two languages and a split, in a temporary folder that goes with the object."""

    def __init__(self, pairs: Iterable[tuple[str, str, Pair]], reading: Reading) -> None:
        """Reads all (languages, split, texts); the order within two languages stays.

        `reading` is of these pairs: its `origin` and `tallies` follow `pairs` here, too.
        """
        self._reading, before = reading, {**reading.tallies}
        self._folder = Path(tempfile.mkdtemp(prefix="m4-pairs-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._numbers: dict[tuple[str, str], int] = {}
        kept: dict[tuple[str, str], list[str]] = {}
        self._files: dict[str, int] = {}
        characters = 0
        for pair, split, texts in pairs:
            name, number = reading.origin
            file = self._files.setdefault(name, len(self._files))
            line = f"{texts.first}\t{texts.second}\t{file}\t{number}\n"
            kept.setdefault((pair, split), []).append(line)
            characters += len(line)
            if characters > _KEPT_CHARACTERS:
                self._write(kept)
                characters = 0
        self._write(kept)
        self._tallies = {n: t for n, t in reading.tallies.items() if before.get(n) is not t}

    def _write(self, kept: dict[tuple[str, str], list[str]]) -> None:
        # Opened again every time: hundreds of pairs are more files than may be open at once.
        for key, found in kept.items():
            self._numbers.setdefault(key, len(self._numbers))
            with self._file(key).open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(found)
        kept.clear()

    def _file(self, key: tuple[str, str]) -> Path:
        return self._folder / str(self._numbers[key])

    def language_pairs(self) -> list[str]:
        """Returns the pairs of languages with training text: English first, sorted."""
        return sorted((p for p, split in self._numbers if split == "train"), key=in_order)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of two languages and a split."""
        self._reading.tallies.update(self._tallies)
        if (pair, split) not in self._numbers:
            return
        with self._file((pair, split)).open(encoding="utf-8", newline="\n") as file:
            names = [*self._files]
            for line in file:
                first, second, name, number = line.removesuffix("\n").split("\t")
                self._reading.origin = (names[int(name)], int(number))
                yield Pair(first, second)


# Fields of which a pattern must have one, those that it must not have, and both in words.
FilesRule = tuple[set[str], set[str], str]
LANGUAGE_OR_PAIR: FilesRule = (
    {"lang", "pair"}, {"side"}, "a pattern with {lang} or {pair}, without {side}"
)  # fmt: skip
# One sentence in so many is dev, or test; 0 is none.
Every = Annotated[int, Between(0, 10**9)]


@dataclass(eq=False)
class Folder(abc.ABC):
    """A Source over a folder; a subclass reads the files.

    Nothing is read before sentences, pairs of languages or the identity are asked for. The split of
    a sentence pair is in its file's name ({split} in `files`), or a hash of the first side, which
    is English where there is English, decides it (dev_every, test_every): for all files, or for
    training files where `splits` leaves a split out. The languages are in the name, or in the file:
    then all files are read once and sorted by languages on disk.

    Attributes:
        folder: Folder on disk, or gs://, s3:// and the like.
        files: Pattern of names (`FileLayout`).
        on_bad_line: "fail", or "skip", which counts the line.
        splits: Split -> its word in names. Defaults to train, dev and test.
        codes: m4's code -> the code in names, where they differ by more than '-' and '_'.
        dev_every: One first sentence in so many is dev; 0 is none.
        test_every: One first sentence in so many is test; 0 is none.
        max_line_bytes: Longer lines are bad.
        english: Code of English in names.
    """

    names_say_splits: ClassVar[bool] = True  # words such as test in names of files are splits
    unit: ClassVar[str] = "line"  # what is numbered in a file
    one_language: ClassVar[bool] = False  # a file has one language; without splits it is test
    files_rule: ClassVar[FilesRule] = (set(), set(), "")

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
        self.layout = FileLayout(
            owner, path, self.files, self.english, self.splits, self.codes, self.one_language
        )
        needed, refused, allowed = self.files_rule
        fields = self.layout.fields
        if refused & fields or (needed and not needed & fields):
            raise SettingError(f"{owner}.files", self.files, allowed)
        every = {"dev": self.dev_every, "test": self.test_every}
        self._hashed = {split for split, one in every.items() if one}
        named = {*self.layout.splits} if "split" in self.layout.fields else set()
        if named & self._hashed or not (named or self._hashed or self.one_language):
            allowed = (
                "a pattern without {split} where dev_every and test_every are set, but for splits "
                f"that {owner}.splits leaves out"
                if self._hashed
                else "a pattern with {split}, or dev_every and test_every must be set"
            )
            raise SettingError(f"{owner}.files", self.files, allowed)

    def language_pairs(self) -> list[str]:
        """Returns the pairs that have training data: those of English, then others, sorted."""
        if not self.layout.names_language:
            return self._spool.language_pairs()
        trained = {f.pair for f in self._files if f.pair and self._holds(f, "train")}
        return sorted(trained, key=in_order)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of two languages in the order of files' names and lines.

        Raises:
            InputError: There is no such pair; a line is bad and on_bad_line is "fail".
        """
        for shard in self.shards(pair, split):
            yield from shard.pairs()

    def shards(self, pair: str, split: str) -> list[Shard]:
        """Returns a shard a file, or one of all. InputError: there is no such pair."""
        assert split in SPLITS, split
        pair, by_name = pair_of(pair), self.layout.names_language
        files = self._files_of(pair) if by_name else []
        if not (files if by_name else pair in self.language_pairs()):
            raise InputError(
                f"{self.folder}: no {pair} in files called like {self.files}; there is "
                f"{named(self.language_pairs()) or 'no pair of languages'} ({self.owner}.files, "
                f"{self.owner}.codes)"
            )
        if not by_name:
            return [Shard(None, lambda: self._spool.pairs(pair, split))]
        of_split = (file for file in files if self._holds(file, split))
        return [Shard(file.path, partial(self._pairs_in, file, split)) for file in of_split]

    def _pairs_in(self, file: File, split: str) -> Iterator[Pair]:
        for _, texts in self._pairs_of(file):
            if self._split_of(file, texts) == split:
                yield texts

    def identity(self) -> dict:
        """Returns the settings, and sizes and SHA-256 of the files, by pair if possible."""
        by_pair: dict[str, dict[str, list]] = {}
        common: dict[str, list] = {}
        for file in self._files:
            of = by_pair.setdefault(file.pair, {}) if file.pair else common
            of[file.name] = digest(file.path)
        return {
            "source": type(self).__name__.lower(),
            **self.layout.identity(),
            **self.hash_split.identity(),
            **self.reading.identity(),
            **self._settings(),
            "common": common,
            # Without languages in the names nothing is one pair's alone.
            **({"by_pair": by_pair} if by_pair else {}),
        }

    @abc.abstractmethod
    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        """Yields (pair of languages, sentence pair) of a file."""

    def _files_of(self, pair: str) -> list[File]:
        """Returns the files of two languages."""
        return [file for file in self._files if file.pair == pair]

    def _pairs_of(self, file: File) -> Iterator[tuple[str, Pair]]:
        found = False
        with self.reading.of(file.name, file.path, self.unit) as tally:
            for one in self._read(file, tally):
                found = True
                yield one
            if file.split == "train" and file.codes and not found:
                raise InputError(f"{file.path}: {tally.nothing()}")

    def _zipped(self, first: File, second: File, tally: Tally) -> Iterator[Pair]:
        """Yields the sentence pairs of two files, line by line."""
        both = {of.path: lines(of.path, self.reading.max_line_bytes) for of in (first, second)}
        for number, sides in enumerate(side_by_side(both), 1):
            if texts := tally.pair(number, *(tally.text(line, number) for line in sides)):
                yield texts

    def _settings(self) -> dict:
        """Returns the subclass's settings that decide the text."""
        return {}

    def _choose(self, files: list[File]) -> list[File]:
        """Returns the files that belong to the corpus; InputError where some are missing."""
        return files

    def _holds(self, file: File, split: str) -> bool:
        """Returns whether a file may have pairs of a split; of two files, the second one."""
        if file.side == SIDES[0]:
            return False
        if file.split is None and not self._hashed:
            return split == "test"
        return file.split in (split, None) or (file.split == "train" and split in self._hashed)

    def _split_of(self, file: File, pair: Pair) -> str:
        if self._hashed and file.split in ("train", None):
            return self.hash_split(pair.first)
        return file.split or "test"

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
        """Prints a line of files that are not read, and one of each pair without training."""
        about = []
        if self.layout.not_taken:
            about.append((f"not called like {self.layout.pattern}", self.layout.not_taken))
        trained = {file.pair for file in files if self._holds(file, "train")}
        names: dict[str, list[str]] = {}
        for file in files:
            if file.pair is not None and file.pair not in trained:
                names.setdefault(key_of(file.pair), []).append(file.name)
        alike = {key_of(pair).lower(): key_of(pair) for pair in trained if pair is not None}
        for pair, of_pair in names.items():
            other = alike.get(pair.lower())
            about.append(
                (f"{pair} has no training file" + (f" ({other} has)" if other else ""), of_pair)
            )
        for why, unread in about:
            print(
                f"{self.folder}: not read: {named(sorted(unread))} ({why}; {self.owner}.files)",
                file=sys.stderr,
            )

    @cached_property
    def _spool(self) -> Spool:
        pairs = (
            (pair, self._split_of(file, texts), texts)
            for file in self._files
            for pair, texts in self._pairs_of(file)
        )
        return Spool(pairs, self.reading)
