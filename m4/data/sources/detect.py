"""Finds how the files of a folder are to be read: which source, with which settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from m4.data.languages import describe
from m4.data.sources.gettext import Gettext
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.reading.files import COMPRESSED, folder_at, lines, unpacked_name
from m4.data.sources.reading.folder import Folder
from m4.data.sources.reading.layout import File, FileLayout
from m4.data.sources.reading.lines import MAX_LINE_BYTES
from m4.data.sources.tsv import Tsv
from m4.settings import InputError

EXPECTED = (
    "expected sentence pairs of English and two other languages or more, in files called like "
    "gl.train.tsv, gl.tsv, train.en-gl.en and train.en-gl.gl, gl.train.jsonl or gl.po"
)
# Where files do not tell the split, one English sentence in so many is dev, or test.
_EVERY = {"dev": 100, "test": 50}
# Patterns of names in the order of preference: of two that fit as many files, the first one is
# taken.
_PATTERNS: dict[type[Folder], tuple[str, ...]] = {
    Tsv: (
        "{pair}.{split}.tsv", "{split}.{pair}.tsv", "{pair}/{split}.tsv", "{split}/{pair}.tsv",
        "{lang}.{split}.tsv", "{split}.{lang}.tsv", "{lang}/{split}.tsv", "{split}/{lang}.tsv",
        "{pair}.tsv", "{lang}.tsv",
    ),
    Moses: (
        "{split}.{pair}.{side}", "{pair}.{split}.{side}", "{pair}/{split}.{side}",
        "{split}/{pair}.{side}", "{split}.{side}", "*.{pair}.{side}", "{pair}.{side}",
        "{pair}/*.{side}",
    ),
    Jsonl: (
        "{pair}.{split}.jsonl", "{split}.{pair}.jsonl", "{lang}.{split}.jsonl",
        "{split}.{lang}.jsonl", "{lang}/{split}.jsonl", "{split}/{lang}.jsonl", "{split}.jsonl",
        "{pair}.jsonl", "{lang}.jsonl", "*.jsonl",
    ),
    Gettext: tuple(
        f"{at}{name}.{end}"
        for end in ("po", "mo")
        for name in ("{lang}/LC_MESSAGES/*", "{lang}")
        for at in ("", "*/", "*/*/", "*/*/*/")
    ),
}  # fmt: skip
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "dev": ("dev", "valid", "validation", "val", "tune"),
    "test": ("test", "devtest", "eval"),
}
_ENGLISH = ("en", "eng", "en_US", "english")
_ENGLISH_FIELDS = ("en", "eng", "english", "source", "src")
_LANGUAGE_FIELDS = ("lang", "language", "target_lang", "tgt_lang", "lang_code")
_DEPTH, _MOST_FILES = 5, 200_000
# Ends of file names that look like the language code of a Moses file.
_NO_SIDES = ("tsv", "jsonl", "json", "po", "mo", "txt", "md", "csv", "html", "zip")


@dataclasses.dataclass(frozen=True)
class Detected:
    """The way in which a folder is to be read.

    Attributes:
        settings: Its arguments besides the folder, where they differ from the defaults.
        not_read: Names of the files that do not belong to the corpus.
        by_hash: Splits that file names do not tell, which a hash of the English side decides.
    """

    source: type[Folder]
    settings: Mapping[str, Any]
    not_read: tuple[str, ...]
    by_hash: tuple[str, ...]

    @property
    def module(self) -> str:
        """Name of the source's module in m4/data/sources, as 'tsv'."""
        return self.source.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Name of the source in gin files, as 'tsv.Tsv'."""
        return f"{self.module}.{self.source.__name__}"

    @property
    def files(self) -> str:
        """Pattern of the file names."""
        return self.settings.get("files", self.source.files)

    @property
    def hash_rule(self) -> str:
        """Rule of the hash, as 'dev 1 in 100, test 1 in 50'."""
        return ", ".join(f"{split} 1 in {_EVERY[split]}" for split in self.by_hash)

    def english_side(self) -> str:
        """Returns the place of English: a column, a field or a code in file names."""
        if self.source is Tsv:
            return f"column {self.settings.get('english_column', 1)}"
        if self.source is Gettext:
            return "msgid"
        return self.settings.get("english_field") or self.settings.get("english", "en")

    def swapped(self) -> Detected | None:
        """Returns the same with English on the other side, or None where names tell the side."""
        change: dict[str, Any]
        if self.source is Tsv:
            change = {"english_column": 3 - self.settings.get("english_column", 1)}
        elif "english_field" in self.settings:
            sides = ("english_field", "translation_field")
            change = dict(zip(sides, (self.settings[side] for side in sides[::-1]), strict=True))
        else:
            return None
        return dataclasses.replace(self, settings={**self.settings, **change})

    def opened(self, folder: str) -> Folder:
        """Returns the source over the folder; it counts bad lines instead of failing."""
        return self.source(folder, **{"on_bad_line": "skip", **self.settings})


def detect(folder: str) -> Detected:
    """Returns the layout that most of the folder's files fit.

    Raises:
        InputError: No layout fits, with what was expected and what is there.
    """
    root = folder_at(folder, "FOLDER")
    names = sorted(_names(root, "", _DEPTH))
    if not names:
        raise InputError(f"{folder}: {EXPECTED}; saw no files")
    words = _split_words(names)
    found = [
        (fitting, source, pattern, english)
        for source, patterns in _PATTERNS.items()
        for pattern in patterns
        for english in _ENGLISH
        if (fitting := _fitting(root, source, pattern, english, words))
    ]
    if not found:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InputError(f"{folder}: {EXPECTED}; saw {', '.join(names[:3])}{more}")
    fitting, source, pattern, english = max(found, key=lambda one: len(one[0]))
    _check_training_files(folder, fitting, words)
    asked: dict[str, Any] = {"english": english}
    if source is Jsonl:
        record, place = _first_record(root, fitting[0].name)
        if any(name in record for name in _LANGUAGE_FIELDS):
            pattern = pattern.replace("{lang}", "*")  # 'all.jsonl' names no language
        asked |= _fields(record, place, pattern, english)
    if not {"dev", "test"} & {*words}:
        pattern = pattern.replace("{split}", words.get("train", ""))
    named = words if "{split}" in pattern else {}
    by_hash = tuple(split for split in _EVERY if split not in named)
    asked["files"] = pattern
    asked |= {f"{split}_every": _EVERY[split] if split in by_hash else 0 for split in _EVERY}
    if named and named != {split: split for split in _SPLIT_WORDS}:
        asked["splits"] = named
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    settings = {name: value for name, value in asked.items() if value != defaults[name]}
    read = {file.name for file in fitting}
    not_read = tuple(name for name in names if _unpacked(name) not in read)
    return Detected(source, settings, not_read, by_hash)


def _names(folder: epath.Path, before: str, depth: int) -> Iterator[str]:
    """Yields the paths of the files below a folder, without hidden ones."""
    for number, path in enumerate(folder.iterdir()):
        if number > _MOST_FILES or path.name.startswith("."):
            continue
        if not path.is_dir():
            yield f"{before}{path.name}"
        elif depth > 1:
            yield from _names(path, f"{before}{path.name}/", depth - 1)


def _unpacked(name: str) -> str:
    path = epath.Path(name)
    return name[: len(name) - len(path.name)] + unpacked_name(path)


def _split_words(names: list[str]) -> dict[str, str]:
    """Returns split -> its word in these names, for the splits that have one."""
    parts = {part for name in names for part in _unpacked(name).replace("/", ".").split(".")}
    found = {s: next((w for w in words if w in parts), "") for s, words in _SPLIT_WORDS.items()}
    return {split: word for split, word in found.items() if word}


def _fitting(
    root: epath.Path, source: type[Folder], pattern: str, english: str, words: dict[str, str]
) -> list[File]:
    """Returns the files that fit a pattern, or none where they would be no corpus."""
    if "{split}" in pattern and "train" not in words:
        return []
    if english != "en" and not ("{pair}" in pattern or "{side}" in pattern):
        return []  # such names do not have the code of English
    splits = words if "train" in words else None
    files = FileLayout(source.__name__, root, pattern, english, splits).find()
    files = [file for file in files if file.code not in _NO_SIDES]
    if source is Moses and not any(file.english for file in files):
        return []
    return files


def _check_training_files(folder: str, files: list[File], words: dict[str, str]) -> None:
    """Raises InputError where a language has dev or test files and no training file."""
    trained = {file.code for file in files if file.split in ("train", None)}
    for file in files:
        if file.code not in trained and None not in trained:
            wanted = file.name.replace(words[file.split or "train"], words["train"])
            raise InputError(f"{folder}: expected {wanted} next to {file.name}; saw none")


def _first_record(root: epath.Path, name: str) -> tuple[dict[str, Any], str]:
    """Returns the first object of a file of JSON lines, and its place for messages."""
    ends = ("", *COMPRESSED)
    path = next(path for end in ends if (path := root / f"{name}{end}").exists())
    try:
        record = json.loads(next(lines(path, MAX_LINE_BYTES), b""))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise InputError(f"{path} line 1: {EXPECTED}; saw no JSON object")
    return record, f"{path} line 1"


def _fields(record: dict[str, Any], place: str, pattern: str, english: str) -> dict[str, Any]:
    """Returns the settings of `Jsonl` that name the fields, by the first object of a file."""
    within = record.get("translation")
    if isinstance(within, dict) and english in within:
        return {}
    texts = [name for name, value in record.items() if isinstance(value, str)]
    codes = [name for name in texts if name in _LANGUAGE_FIELDS]
    texts = [name for name in texts if name not in codes]
    if english in texts and all(describe(name).script for name in texts):
        return {"translation_field": "{lang}"}
    sources = [name for name in _ENGLISH_FIELDS if name in texts]
    others = [name for name in texts if name not in sources[:1]]
    has_language = "{lang}" in pattern or "{pair}" in pattern
    if len(others) != 1 or not sources or not (codes or has_language):
        raise InputError(
            f"{place}: expected an object such as "
            '{"translation": {"en": ..., "gl": ...}}, {"en": ..., "gl": ...} or '
            '{"lang": "gl", "source": ..., "target": ...}; saw the fields '
            f"{', '.join(record) or '(none)'}"
        )
    return {
        "english_field": sources[0],
        "translation_field": others[0],
        "language_field": None if has_language else codes[0],
    }
