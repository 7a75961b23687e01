"""How a folder's files are to be read: the source, its pattern of names, and its other settings."""

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
from m4.data.sources.reading.files import folder_at, lines, unpacked_name
from m4.data.sources.reading.folder import Folder
from m4.data.sources.reading.layout import File, FileLayout
from m4.data.sources.reading.lines import MAX_LINE_BYTES
from m4.data.sources.tsv import Tsv
from m4.settings import InputError

EXPECTED = (
    "expected sentence pairs of English and two other languages or more, in files called like "
    "gl.train.tsv, gl.tsv, train.en-gl.en and train.en-gl.gl, gl.train.jsonl or gl.po"
)
# One English sentence in so many is dev, or test, where files do not say.
_EVERY = {"dev": 100, "test": 50}
# The patterns of names that are tried; of two that fit as many files the first one counts.
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
# Ends of names that Moses' sides do not have.
_NO_SIDES = ("tsv", "jsonl", "json", "po", "mo", "txt", "md", "csv", "html", "zip")


@dataclasses.dataclass(frozen=True)
class FoundCorpus:
    """How a folder is read. settings: arguments of the source but the folder, those that are not
    its defaults; not_read: files that are not part of it; hashed: the splits, dev and test or one
    of them, that names do not say."""

    source: type[Folder]
    settings: Mapping[str, Any]
    not_read: tuple[str, ...]
    hashed: tuple[str, ...]

    @property
    def module(self) -> str:
        """Of m4/data/sources: 'tsv'."""
        return self.source.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """As the gin file names it: 'tsv.Tsv'."""
        return f"{self.module}.{self.source.__name__}"

    @property
    def hashes(self) -> str:
        """What a hash of the English would decide: 'dev 1 in 100, test 1 in 50'; '': nothing."""
        return ", ".join(f"{split} 1 in {_EVERY[split]}" for split in self.hashed)

    @property
    def files(self) -> str:
        """The pattern of names."""
        return self.settings.get("files", self.source.files)

    def but(self, **settings: Any) -> FoundCorpus:
        """The same with other settings."""
        return dataclasses.replace(self, settings={**self.settings, **settings})

    @property
    def english_side(self) -> str:
        """Where English is."""
        if self.source is Tsv:
            return f"column {self.settings.get('english_column', 1)}"
        if self.source is Gettext:
            return "msgid"
        return self.settings.get("english_field") or self.settings.get("english", "en")

    def swapped(self) -> FoundCorpus | None:
        """The same with English on the other side; None: the names of files or fields say it."""
        if self.source is Tsv:
            return self.but(english_column=3 - self.settings.get("english_column", 1))
        if "english_field" in self.settings:
            english, other = self.settings["english_field"], self.settings["translation_field"]
            return self.but(english_field=other, translation_field=english)
        return None

    def opened(self, folder: str) -> Folder:
        """The source; bad lines are counted, not an error."""
        return self.source(folder, **{"on_bad_line": "skip", **self.settings})


def look(folder: str) -> FoundCorpus:
    """The layout that most of the files fit. InputError: none does; what was seen."""
    root = folder_at(folder, "FOLDER")
    names = sorted(_names(root, "", _DEPTH))
    if not names:
        raise InputError(f"{folder}: {EXPECTED}; saw no files")
    splits = _splits(names)
    best: tuple[int, type[Folder], str, str, list[File]] | None = None
    for source, patterns in _PATTERNS.items():
        for pattern in patterns:
            for english in _ENGLISH:
                fitting = _fitting(root, source, pattern, english, splits)
                if fitting and (best is None or len(fitting) > best[0]):
                    best = len(fitting), source, pattern, english, fitting
    if best is None:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InputError(f"{folder}: {EXPECTED}; saw {', '.join(names[:3])}{more}")
    _, source, pattern, english, fitting = best
    fields: dict[str, Any] = {}
    if source is Jsonl:
        record, place = _first_record(root, fitting[0].name)
        if any(name in record for name in _LANGUAGE_FIELDS):
            pattern = pattern.replace("{lang}", "*")  # 'all.jsonl' is no language
        fields = _fields(record, place, pattern, english)
    if not {"dev", "test"} & {*splits}:
        pattern = pattern.replace("{split}", splits.get("train", ""))
    by_name = splits if "{split}" in pattern else {}
    hashed = tuple(split for split in _EVERY if split not in by_name)
    _check_partners(folder, fitting, splits)
    asked = {
        "files": pattern,
        "english": english,
        "splits": by_name or None,
        **{f"{split}_every": every if split in hashed else 0 for split, every in _EVERY.items()},
        **fields,
    }
    if splits == {split: split for split in splits} and len(splits) == len(_SPLIT_WORDS):
        asked["splits"] = None
    known = {field.name: field.default for field in dataclasses.fields(source)}
    settings = {name: value for name, value in asked.items() if value != known[name]}
    # "gl.train.tsv.gz" is not left out where "gl.train.tsv" fits.
    taken = {file.name for file in fitting}
    left = tuple(name for name in names if _plain(name) not in taken)
    return FoundCorpus(source, settings, left, hashed)


def _names(folder: epath.Path, before: str, depth: int) -> Iterator[str]:
    """The files below a folder, without hidden ones."""
    for number, path in enumerate(folder.iterdir()):
        if number > _MOST_FILES or path.name.startswith("."):
            continue
        if not path.is_dir():
            yield f"{before}{path.name}"
        elif depth > 1:
            yield from _names(path, f"{before}{path.name}/", depth - 1)


def _plain(name: str) -> str:
    path = epath.Path(name)
    return name[: len(name) - len(path.name)] + unpacked_name(path)


def _splits(names: list[str]) -> dict[str, str]:
    """Split -> its word in these names, of those that have one."""
    parts = {part for name in names for part in _plain(name).replace("/", ".").split(".")}
    found = {
        split: next((word for word in words if word in parts), None)
        for split, words in _SPLIT_WORDS.items()
    }
    return {split: word for split, word in found.items() if word}


def _fitting(
    root: epath.Path, source: type[Folder], pattern: str, english: str, splits: dict[str, str]
) -> list[File]:
    """The files that fit; none where they are no corpus."""
    if "{split}" in pattern and "train" not in splits:
        return []
    if english != "en" and not ("{pair}" in pattern or "{side}" in pattern):
        return []  # nothing in such names is English
    layout = FileLayout(
        source.__name__, root, pattern, english, splits if "train" in splits else None
    )
    files = [file for file in layout.find() if file.code not in _NO_SIDES]
    if source is Moses and not any(file.english for file in files):
        return []
    return files


def _check_partners(folder: str, files: list[File], splits: dict[str, str]) -> None:
    """InputError: a language has dev or test sentences, and none to train on."""
    trained = {file.code for file in files if file.split in ("train", None)}
    for file in files:
        if file.code not in trained and None not in trained:
            wanted = file.name.replace(splits[file.split or "train"], splits["train"])
            raise InputError(f"{folder}: expected {wanted} next to {file.name}; saw none")


def _first_record(root: epath.Path, name: str) -> tuple[dict[str, Any], str]:
    """The first object of a file of JSON lines, and its place."""
    path = next(p for p in (root / f"{name}{end}" for end in ("", ".gz", ".zst")) if p.exists())
    try:
        record = json.loads(next(lines(path, MAX_LINE_BYTES), b""))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise InputError(f"{path} line 1: {EXPECTED}; saw no JSON object")
    return record, f"{path} line 1"


def _fields(record: dict[str, Any], place: str, pattern: str, english: str) -> dict[str, Any]:
    """The fields of JSON lines, by their first object."""
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
