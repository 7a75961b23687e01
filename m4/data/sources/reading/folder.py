"""Folder: the base class of sources that read a folder of files.

A pattern of file names with fields in braces finds its files (`FileLayout`).
"""

import abc
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, ClassVar

from etils import epath

from m4.data.directions import SIDES, in_order, key_of, pair_of
from m4.data.languages import describe, is_english
from m4.data.sources import SPLITS, Pair, Shard
from m4.data.sources.reading.files import digest, folder_at, lines, names_below, unpacked
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reading, Tally, side_by_side
from m4.data.splits import HashSplit
from m4.settings import Between, InputError, OneOf, SettingError, is_one_line, some

# Language codes in file names: gl, zh-Hant, pt_BR, sr@latin, srp_Latn, gl~bt.
_CODE = r"[A-Za-z0-9]+(?:[-_@][A-Za-z0-9]+)*(?:~[a-z0-9]+)?"
_CODE_IN_PAIR = _CODE.replace("[-_@]", "[_@]")
_FIELDS = ("lang", "pair", "side", "split")
# Words for splits in names, between separators or at an end.
SPLIT_WORDS = {
    "train": re.compile(r"train(ing|set)?", re.IGNORECASE),
    "dev": re.compile(
        r"(news|newsdiscuss)?dev(elopment|set)?\d*|valid(ation|set)?|val|tun(e|ing)", re.IGNORECASE
    ),
    "test": re.compile(
        r"((news|newsdiscuss|dev)?test(ing|set)?|tst)\d*|eval(uation)?|blind|heldout|holdout",
        re.IGNORECASE,
    ),
}
_BETWEEN = re.compile(r"[./_-]")
# Sides of a {pair} named by their position, as in the Tatoeba Challenge.
_SIDES = {"src": 0, "source": 0, "trg": 1, "tgt": 1, "target": 1}
_SHOWN = 20  # maximum number of names in a message
# Maximum length of a code, which is part of file names.
_LONGEST_CODE = 64


@dataclass(frozen=True)
class File:
    """A file and the fields in its name; fields that the pattern lacks are None.

    Attributes:
        name: Path below the folder, without .gz, .zst, .xz or .bz2.
        pair: Name of the languages, such as "en-gl"; set by `FileLayout.find`.
        codes: Codes of these languages in the name, in the order of the pair.
        swapped: Whether the name has them in the other order, such as 'wo-fr'; never with English.
        side: Side of the pair in the file, "first" or "second".
        stars: Texts in the places of `*`.
        language: m4's code of the language, for a file with one language.
    """

    path: epath.Path
    name: str
    pair: str | None
    codes: tuple[str, str] | None
    swapped: bool
    split: str | None
    side: str | None
    stars: tuple[str, ...]
    language: str | None = None

    @property
    def code(self) -> str | None:
        """Code of its second language."""
        return self.codes[1] if self.codes else None


def m4_code(code: str) -> str:
    """Converts a code for a direction's name: 'pt-BR' -> 'pt_BR', 'sr@latin' -> 'sr_latin'."""
    return re.sub(r"[^A-Za-z0-9_~]", "_", code)


def said_splits(name: str) -> dict[str, str]:
    """Returns split -> its word, for splits that a file's name mentions."""
    parts = _BETWEEN.split(unpacked(name))
    return {
        split: part
        for split, words in SPLIT_WORDS.items()
        for part in parts[::-1]
        if words.fullmatch(part)
    }


def named(names: Sequence[str]) -> str:
    """Returns text with the first names of files and the number of others."""
    return some([name if is_one_line(name) else repr(name) for name in names], _SHOWN)


class Codes:
    """Converts language codes to m4's. Raises InputError if two codes give one language.

    Args:
        given: m4's code -> the code in the data.
    """

    def __init__(self, owner: str, given: Mapping[str, str], folder: epath.Path) -> None:
        self._owner, self._folder = owner, folder
        self._by_code = {code: language for language, code in given.items()}
        self._seen: dict[str, tuple[str, epath.Path | None]] = {}

    def plain(self, code: str) -> str:
        """Returns m4's code without comparison with others."""
        plain, *origin = code.split("~")
        return "~".join([self._by_code.get(plain) or m4_code(plain), *origin])

    def __call__(self, code: str, path: epath.Path | None = None) -> str:
        """Returns m4's code; `path` is the file with the code, or None if a record has it."""
        language = self.plain(code)
        if len(language) > _LONGEST_CODE:
            said = f"{code[:20]}... of {len(code)} letters: must have at most {_LONGEST_CODE}"
            more = f"(another name: {self._owner}.codes)"
            raise InputError(f"{path or self._folder}: language code {said} {more}")
        other, place = self._seen.setdefault(language, (code, path))
        if code != other:
            raise InputError(
                f"{path or self._folder}: language code {code!r} next to {other!r}"
                f"{f' of {place}' if place else ''}: both would be {language!r}; use one code, "
                f"or give one another name: {self._owner}.codes = {{'{language}_2': {code!r}}}"
            )
        return language


class FileLayout:
    """A pattern such as '{split}.{pair}.{side}' or '{lang}/*.po', to find files in a folder.

    {lang} is the code of a language paired with English, {pair} is 'en-gl', 'gl-en' or 'fr-wo',
    {side} is the code of the file's side, {split} is train, dev, test or a word in `splits`, and
    '*' is any part of a name. Every name may end in .gz, .zst, .xz or .bz2.

    Args:
        splits: Split -> its word in names, for existing splits. Defaults to train, dev and test.
        codes: m4's code -> the code in names, if they differ by more than '-' and '_'.
        one_language: Whether {lang} is the language of the file's text, which may be English.
    """

    def __init__(
        self, owner: str, folder: epath.Path, pattern: str, english: str = "en",
        splits: Mapping[str, str] | None = None, codes: Mapping[str, str] | None = None,
        one_language: bool = False,
    ) -> None:  # fmt: skip
        self.one_language = one_language
        self.owner, self.folder, self.pattern, self.english = owner, folder, pattern, english
        self.splits = dict(splits or {split: split for split in SPLITS})
        self.codes = dict(codes or {})
        self._by_word = {word: split for split, word in self.splits.items()}
        self.language = Codes(owner, {"en": english, **self.codes}, folder)
        self._pairs: dict[tuple[str, str], str] = {}
        for name, given in (("splits", self.splits), ("codes", self.codes)):
            if len({*given.values()}) < len(given):
                raise SettingError(f"{owner}.{name}", given, "a dictionary of different values")
        if not {"train"} <= {*self.splits} <= {*SPLITS}:
            raise SettingError(f"{owner}.splits", self.splits, "of train (needed), dev and test")
        self.fields = {*re.findall(r"\{(\w*)\}", pattern)}
        self.names_language = bool({"lang", "pair", "side"} & self.fields)
        if wrong := sorted(self.fields.difference(_FIELDS)):
            known = ", ".join(f"{{{field}}}" for field in _FIELDS)
            allowed = f"a pattern of {known} and *, not {{{wrong[0]}}}"
            raise SettingError(f"{owner}.files", pattern, allowed)
        if {"", ".", ".."} & {*pattern.split("/")}:
            raise SettingError(f"{owner}.files", pattern, f"a path below {owner}.folder")
        self._whole = re.compile(self._expression())
        self.not_taken: list[str] = []

    def _expression(self) -> str:
        """Returns the pattern as a regular expression; a repeated field must be the same text."""
        english = re.escape(self.english)
        fields = {
            "lang": _CODE,
            "side": _CODE,
            "pair": f"{english}-(?P<after>{_CODE})|(?P<before>{_CODE})-{english}"
            f"|(?P<one>{_CODE_IN_PAIR})-(?P<other>{_CODE_IN_PAIR})",
            # Longest words come first, so that 'test2' is not taken for 'test'.
            "split": "|".join(map(re.escape, sorted(self._by_word, key=len, reverse=True))),
        }

        def group(match: re.Match[str]) -> str:
            if (field := match[1]) is None:
                return "([^/]*)"
            expression = fields.pop(field, None)
            return f"(?P={field})" if expression is None else f"(?P<{field}>{expression})"

        return re.sub(r"\\{(\w+)\\}|\\\*", group, re.escape(self.pattern))

    def find(self) -> list[File]:
        """Returns the matching files, sorted by name; `not_taken` has all others.

        Raises:
            InputError: A file exists compressed and plain, or two codes in names are one language.
        """
        found: dict[str, File] = {}
        self.not_taken = []
        for name, path in names_below(self.folder, self.pattern.count("/") + 1):
            if (file := self.file(name, path)) is None:
                self.not_taken.append(name)
                continue
            if (plain := file.name) in found:
                raise InputError(f"{path}: {found[plain].path} is there too; remove one of them")
            found[plain] = file
        # The note of `m4 decode --format=tsv` may be beside a file.
        self.not_taken = [n for n in self.not_taken if n.removesuffix(".json") not in found]
        return [
            replace(file, pair=self.pair(file.codes, file.path))
            if file.codes
            else replace(file, language=file.language and self.language(file.language, file.path))
            for _, file in sorted(found.items())
        ]

    def swapped(self, codes: tuple[str, str]) -> bool:
        """Returns whether the pair's name has two codes in the other order."""
        return self._place(codes[0]) > self._place(codes[1])

    def pair(self, codes: tuple[str, str], path: epath.Path | None = None) -> str:
        """Returns the name of the pair of two language codes in names or data."""
        if path is None and codes in self._pairs:
            return self._pairs[codes]
        first, second = (self.language(code, path) for code in codes)
        if first == second:
            place = path or self.folder
            raise InputError(f"{place}: {codes[0]!r} and {codes[1]!r} are one language")
        return self._pairs.setdefault(codes, pair_of(f"{first}-{second}"))

    def file(self, name: str, path: epath.Path) -> File | None:
        """Returns a file by its name below the folder, without `pair`, or None."""
        name = unpacked(name)
        match = self._whole.fullmatch(name)
        if match is None:
            return None
        field = match.groupdict()
        lang, side = field.get("lang"), field.get("side")
        codes: tuple[str, str] | None = None
        language = None
        if self.one_language:
            language, lang = lang, None
            if not language or not (self._known(language) or is_english(language)):
                return None  # 'train/README'
        if field.get("pair"):
            first, second = field["before"] or field["one"], field["after"] or field["other"]
            codes = first or self.english, second or self.english
            if codes[0] == codes[1] or not (field["one"] is None or all(map(self._known, codes))):
                return None
        elif (code := lang or side) != self.english:
            codes = (self.english, code) if code else None
        if codes and side in _SIDES:
            side = codes[_SIDES[side]]
        if any(code and code not in (codes or (self.english,)) for code in (lang, side)):
            return None  # 'en-gl.pt': the side is neither
        if lang and lang == self.english:
            return None
        ordered = (codes[1], codes[0]) if codes and self.swapped(codes) else codes
        groups = set(match.re.groupindex.values())
        return File(
            path=path,
            name=name,
            pair=None,
            codes=ordered,
            swapped=bool(codes and codes != ordered and self.english not in codes),
            split=self._by_word[field["split"]] if field.get("split") else None,
            side=None if side is None else SIDES[ordered.index(side)] if ordered else SIDES[0],
            stars=tuple(match[n] for n in range(1, match.re.groups + 1) if n not in groups),
            language=language,
        )

    def _known(self, code: str) -> bool:
        """Returns whether a code may be paired with English: "en~bt" may, "en_GB" may not."""
        known = code in self.codes.values() or bool(describe(code).script)
        return known and ("~" in code or not is_english(code))

    def _place(self, code: str) -> tuple[bool, str]:
        """Returns a code's position in the name of a pair (`directions.pair_of`)."""
        return code != self.english, self.language.plain(code)

    def identity(self) -> dict:
        """Returns the settings that decide the text, apart from the files."""
        more = {"splits": self.splits, "codes": self.codes}
        return {"files": self.pattern, "english": self.english, **more}


class Spool:
    """Sentence pairs by language pair and split, in a temporary file that the object owns."""

    def __init__(self, rows: Iterable[tuple[str, str, Pair]], reading: Reading) -> None:
        """Reads all (languages, split, texts), keeping their order within a language pair.

        `reading` is that of these pairs; `pairs` here also sets its `origin` and `tallies`.
        """
        self._reading, before = reading, {**reading.tallies}
        folder = tempfile.mkdtemp(prefix="m4-pairs-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._table = sqlite3.connect(f"{folder}/pairs", check_same_thread=False)
        weakref.finalize(self, self._table.close)
        self._table.execute("CREATE TABLE pairs (pair, split, first, second, file, line)")
        self._table.executemany(
            "INSERT INTO pairs VALUES (?, ?, ?, ?, ?, ?)",
            ((pair, split, *texts, *reading.origin) for pair, split, texts in rows),
        )
        self._table.execute("CREATE INDEX of_pair ON pairs (pair, split)")
        self._table.commit()
        self._tallies = {n: t for n, t in reading.tallies.items() if before.get(n) is not t}

    def language_pairs(self) -> list[str]:
        """Returns the language pairs with training text, sorted, English first."""
        found = self._table.execute("SELECT DISTINCT pair FROM pairs WHERE split = 'train'")
        return sorted((pair for (pair,) in found), key=in_order)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of two languages and a split."""
        self._reading.tallies.update(self._tallies)
        of = "SELECT * FROM pairs WHERE pair = ? AND split = ? ORDER BY rowid"
        for _, _, first, second, *origin in self._table.execute(of, (pair, split)):
            self._reading.origin = tuple(origin)
            yield Pair(first, second)


# Fields of which a pattern must have one, fields that it must not have, and both in words.
FilesRule = tuple[set[str], set[str], str]
_LANGUAGE_OR_PAIR = "a pattern with {lang} or {pair}, without {side}"
LANGUAGE_OR_PAIR: FilesRule = ({"lang", "pair"}, {"side"}, _LANGUAGE_OR_PAIR)
# One in this number of sentences is dev or test; 0 means none.
Every = Annotated[int, Between(0, 10**9)]


@dataclass(eq=False)
class Folder(abc.ABC):
    """A Source over a folder, whose files a subclass reads.

    Nothing is read before sentences, language pairs or the identity are needed. The split of a pair
    is in its file's name ({split} in `files`), or a hash of the first side (English if there is
    English) decides it (dev_every, test_every): for all files, or for training files if `splits`
    leaves out a split. The languages are in the name, or in the file; in the latter case all files
    are read once and sorted by language on disk.

    Attributes:
        folder: Folder on disk, or gs://, s3:// and the like.
        files: Pattern of names (`FileLayout`).
        on_bad_line: Reaction to a bad line: "fail", or "skip", which counts it.
        splits: Split -> its word in names. Defaults to train, dev and test.
        codes: m4's code -> the code in names, if they differ by more than '-' and '_'.
        dev_every: One in this number of first sentences is dev; 0 means none.
        test_every: One in this number of first sentences is test; 0 means none.
        english: Code of English in names.
    """

    names_say_splits: ClassVar[bool] = True  # whether words such as test in file names are splits
    unit: ClassVar[str] = "line"  # name of the numbered items in a file
    one_language: ClassVar[bool] = False  # a file has one language; without splits it is test
    files_rule: ClassVar[FilesRule] = (set(), set(), "")

    folder: str | os.PathLike[str]
    files: str
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "fail"
    splits: Mapping[str, str] | None = None
    codes: Mapping[str, str] | None = None
    dev_every: Every = 0
    test_every: Every = 0
    english: str = "en"

    def __post_init__(self) -> None:
        self.owner = owner = type(self).__name__
        self.reading = Reading(owner, self.on_bad_line)
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
        """Returns the language pairs with training data, sorted, those with English first."""
        if not self.layout.names_language:
            return self._spool.language_pairs()
        trained = {f.pair for f in self._files if f.pair and self._holds(f, "train")}
        return sorted(trained, key=in_order)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of two languages, ordered by file name and line.

        Raises:
            InputError: There is no such pair, or a line is bad and on_bad_line is "fail".
        """
        for shard in self.shards(pair, split):
            yield from shard.pairs()

    def shards(self, pair: str, split: str) -> list[Shard]:
        """Returns a shard per file, or a single one. Raises InputError for an unknown pair."""
        assert split in SPLITS, split
        pair, by_name = pair_of(pair), self.layout.names_language
        files = self._files_of(pair) if by_name else []
        if not (files if by_name else pair in self.language_pairs()):
            there = named(self.language_pairs()) or "no pair of languages"
            said = f"no {pair} in files called like {self.files}; there is {there}"
            raise InputError(f"{self.folder}: {said} ({self.owner}.files, {self.owner}.codes)")
        if not by_name:
            return [Shard((), lambda: self._spool.pairs(pair, split))]
        of_split = (file for file in files if self._holds(file, split))
        paths = {file: tuple(f.path for f in self._files_with(file)) for file in of_split}
        return [Shard(of, partial(self._pairs_in, file, split)) for file, of in paths.items()]

    def _pairs_in(self, file: File, split: str) -> Iterator[Pair]:
        for _, texts in self._pairs_of(file):
            if self._split_of(file, texts) == split:
                yield texts

    def identity(self) -> dict:
        """Returns the settings, and sizes and SHA-256 of the files, if possible by pair."""
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
            # Without languages in names, no file belongs to only one pair.
            **({"by_pair": by_pair} if by_pair else {}),
        }

    @abc.abstractmethod
    def _read(self, file: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        """Yields (pair of languages, sentence pair) of a file."""

    def _files_of(self, pair: str) -> list[File]:
        """Returns the files of two languages."""
        return [file for file in self._files if file.pair == pair]

    def _files_with(self, file: File) -> tuple[File, ...]:
        """Returns the files that have the pairs of a file: of two that are aligned, both."""
        return (file,)

    def _pairs_of(self, file: File) -> Iterator[tuple[str, Pair]]:
        found = False
        with self.reading.of(file.name, file.path, self.unit) as tally:
            for one in self._read(file, tally):
                found = True
                yield one
            if file.split == "train" and file.codes and not found:
                raise InputError(f"{file.path}: {tally.nothing()}")

    def _zipped(self, first: File, second: File, tally: Tally) -> Iterator[tuple[str, Pair]]:
        """Yields (pair of languages, sentence pair) of two files, line by line."""
        both = {of.path: lines(of.path, MAX_LINE_BYTES) for of in (first, second)}
        for number, sides in enumerate(side_by_side(both), 1):
            if texts := tally.pair(number, *(tally.text(line, number) for line in sides)):
                yield second.pair or "", texts

    def _settings(self) -> dict:
        """Returns the subclass's settings that decide the text."""
        return {}

    def _choose(self, files: list[File]) -> list[File]:
        """Returns the files of the corpus. Raises InputError if some are missing."""
        return files

    def _holds(self, file: File, split: str) -> bool:
        """Returns whether a file, the second of two, may have pairs of a split."""
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
        """Raises InputError for a training file whose name mentions dev or test."""
        # A word in the setting itself is intended.
        asked = {*said_splits(self.layout.pattern).values(), self.layout.splits["train"]}
        for file in files if self.names_say_splits else ():
            said = [word for split, word in said_splits(file.name).items() if split != "train"]
            if file.split in (None, "train") and (wrong := sorted({*said} - asked)):
                said = f"its name says {' and '.join(wrong)}, and it would be trained on"
                remedy = "move it out of the folder, or name its split"
                settings = f"({self.owner}.files, {self.owner}.splits)"
                raise InputError(f"{file.path}: {said}; {remedy} {settings}")

    def _name_unread(self, files: Sequence[File]) -> None:
        """Prints a line on files that are not read, and one on each pair without training files."""
        trained = {file.pair for file in files if self._holds(file, "train")}
        alike = {key_of(pair).lower(): key_of(pair) for pair in trained if pair is not None}
        about = {f"not called like {self.layout.pattern}": self.layout.not_taken}
        for file in files:
            if file.pair is not None and file.pair not in trained:
                other = alike.get((pair := key_of(file.pair)).lower())
                why = f"{pair} has no training file{f' ({other} has)' if other else ''}"
                about.setdefault(why, []).append(file.name)
        for why, names in about.items():
            if names:
                said = f"not read: {named(sorted(names))} ({why}; {self.owner}.files)"
                print(f"{self.folder}: {said}", file=sys.stderr)

    @cached_property
    def _spool(self) -> Spool:
        pairs = (
            (pair, self._split_of(file, texts), texts)
            for file in self._files
            for pair, texts in self._pairs_of(file)
        )
        return Spool(pairs, self.reading)
