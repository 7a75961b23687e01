"""Finds how the files of a folder are to be read: which source, with which settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from m4.data.directions import SIDES
from m4.data.languages import describe, is_english
from m4.data.sources.aligned import Aligned
from m4.data.sources.gettext import Gettext
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.reading.files import folder_at, lines, names_below, unpacked
from m4.data.sources.reading.folder import SPLIT_WORDS, File, FileLayout, Folder, said_splits
from m4.data.sources.reading.lines import MAX_LINE_BYTES
from m4.data.sources.tmx import Tmx
from m4.data.sources.tsv import Tsv
from m4.settings import InputError

EXPECTED = (
    "expected sentence pairs, in files called like gl.train.tsv, "
    "fr-wo.train.tsv, gl.tsv, train.en-gl.en and train.en-gl.gl, train/fr and train/wo, "
    "gl.train.jsonl, en-gl.tmx or gl.po"
)
# Where files do not tell the split, one English sentence in so many is dev, or test.
_EVERY = {"dev": 100, "test": 50}


def _with_split(name: str, separators: str = "./-_") -> list[str]:
    """Returns patterns of a name with {split} behind it or in front, joined in all ways."""
    behind = [f"{name}{by}{{split}}" for by in separators]
    return [*behind, *(f"{{split}}{by}{name}" for by in separators)]


def _starting(start: str, names: Iterable[str]) -> list[str]:
    return [f"{start}{name}" for name in names if "/" not in name]


_PAIRS, _LANGUAGES = _with_split("{pair}"), _with_split("{lang}")
_TABLES = (
    *_PAIRS, *_LANGUAGES, *_starting("*.", _PAIRS + _LANGUAGES), *_starting("{pair}/*.", _PAIRS),
    "{pair}", "{lang}",
)  # fmt: skip
_ANY = ("{split}/*", *_with_split("*", ".-_"))
# Patterns of names in the order of preference: of two that fit as many files, the first one is
# taken.
_PATTERNS: dict[type[Folder], tuple[str, ...]] = {
    Tsv: tuple(f"{name}.tsv" for name in _TABLES),
    Moses: (
        *(f"{name}.{{side}}" for name in (
            *_PAIRS, "{split}", *_starting("*.", _PAIRS), *_starting("{pair}/*.", _PAIRS),
            *_starting("{pair}/", _PAIRS), *_starting("{pair}/", _ANY[1:]), "{split}/*.{pair}",
            *_ANY, "*.{pair}", "{pair}", "{pair}/*",
        )),
        "{split}/{side}.{split}", "{split}/{side}.txt", "{side}.{split}",
    ),
    Aligned: (
        *_with_split("{lang}", "./"), "{split}/{lang}.txt", "{split}/{lang}.{split}",
        "{split}/{split}.{lang}",
    ),
    Tmx: tuple(f"{name}.tmx" for name in (*_TABLES, "*.{pair}")),
    Jsonl: tuple(
        f"{name}.jsonl"
        for name in (*_PAIRS, *_LANGUAGES, "{split}", *_ANY, "{pair}", "{lang}", "*")
    ),
    Gettext: tuple(
        f"{at}{name}.{end}"
        for end in ("po", "mo")
        for name in ("{lang}/LC_MESSAGES/*", "{lang}")
        for at in ("", "*/", "*/*/", "*/*/*/")
    ),
}  # fmt: skip
_MOST_CHOICES = 24  # patterns of words for splits
_ENGLISH = ("en", "eng", "en_US", "english", "eng_Latn")
_ENGLISH_FIELDS = ("en", "eng", "english", "source", "src")
_LANGUAGE_FIELDS = ["lang", "language", "target_lang", "target_language", "tgt_lang", "lang_code"]
_SOURCE_LANGUAGE_FIELDS = ("source_lang", "source_language", "src_lang")
_DEPTH = 5
# Ends of file names that look like the language code of a Moses file.
_NO_SIDES = ("tsv", "jsonl", "json", "po", "mo", "txt", "md", "csv", "html", "zip")


@dataclasses.dataclass(frozen=True)
class Detected:
    """The way in which a folder is to be read.

    Attributes:
        settings: Its arguments besides the folder, where they differ from the defaults.
        by_hash: Splits that file names do not tell, which a hash of the English side decides.
    """

    source: type[Folder]
    settings: Mapping[str, Any]
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
        if self.source is Tsv:
            change: dict[str, Any] = {"english_column": 3 - self.settings.get("english_column", 1)}
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
    names = dict(sorted(names_below(root, _DEPTH)))
    if not names:
        raise InputError(f"{folder}: {EXPECTED}; saw no files")
    choices = _choices(names)
    english_codes = [code for code in _ENGLISH if any(code in name for name in names)] or ["en"]
    fits = (
        _fit(root, source, *way, names)
        for source, patterns in _PATTERNS.items()
        for way in itertools.product(patterns, english_codes, choices)
    )
    best = max(filter(None, fits), key=lambda fit: fit.agree, default=None)  # the first of them
    if best is None:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        held_out = sorted({word for name in names for word in said_splits(name).values()})
        if held_out and not any("train" in said_splits(name) for name in names):
            more += f"; text whose name says {' or '.join(held_out)} is never trained on"
        raise InputError(f"{folder}: {EXPECTED}; saw {', '.join([*names][:3])}{more}")
    source, pattern = best.source, best.pattern
    used = {file.split for file in best.files}
    words = {split: best.words[split] for split in SPLIT_WORDS if split in used}
    _check_splits(folder, best, names)
    asked: dict[str, Any] = {"english": best.english}
    if source is Jsonl:
        pattern, fields = _fields(best.files[0].path, pattern, best.english)
        asked |= fields
    if not {"dev", "test"} & {*words}:
        pattern = pattern.replace("{split}", words.get("train", ""))
    named = words if "{split}" in pattern else {}
    by_hash = tuple(split for split in _EVERY if split not in named)
    asked |= {f"{split}_every": _EVERY[split] if split in by_hash else 0 for split in _EVERY}
    asked["files"] = pattern
    if named and named != {split: split for split in SPLIT_WORDS}:
        asked["splits"] = named
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    settings = {name: value for name, value in asked.items() if value != defaults[name]}
    return Detected(source, settings, by_hash)


class _Fit(NamedTuple):
    """A pattern that fits files of a folder, by their unpacked names."""

    source: type[Folder]
    pattern: str
    english: str
    words: dict[str, str]
    files: list[File]
    agree: int  # files that are used as the splits that their names say


def _choices(names: Iterable[str]) -> list[dict[str, str]]:
    """Returns the ways in which these names may call the splits: {split: word}, likely ones first.

    Of test sets of several years the latest is test, and without a dev set the one before it dev.
    """
    words: dict[str, dict[str, None]] = {split: {} for split in SPLIT_WORDS}
    for name in names:
        for split, word in said_splits(name).items():
            words[split][word] = None
    tests = sorted(words["test"], key=lambda w: (any(map(str.isdigit, w)), w), reverse=True)
    dev = [*words["dev"]] or tests[1:]
    ways = itertools.product([*words["train"]] or [""], dev or [""], tests or [""])
    found = [
        {split: word for split, word in zip(SPLIT_WORDS, way, strict=True) if word}
        for way in itertools.islice(ways, _MOST_CHOICES)
        if way[1] != way[2] or not way[1]
    ]
    return found or [{}]


def _fit(
    root: epath.Path, source: type[Folder], pattern: str, english: str, words: dict[str, str],
    names: Mapping[str, epath.Path],
) -> _Fit | None:  # fmt: skip
    """Returns the files that fit a pattern, or None where they would be no corpus."""
    if "{split}" in pattern and "train" not in words:
        return None
    ending = pattern.rpartition(".")[2]
    if "{" not in ending and not any(f".{ending}" in name for name in names):
        return None
    splits = words if "train" in words else None
    name, one = source.__name__, source.one_language
    layout = FileLayout(name, root, pattern, english, splits, one_language=one)
    found = (layout.file(name, path) for name, path in names.items())
    files = [file for file in found if file is not None and file.code not in _NO_SIDES]
    if not files or (source is Moses and not any(file.side == SIDES[0] for file in files)):
        return None
    if all(file.split in ("dev", "test") for file in files):
        return None
    languages = {file.language for file in files}
    if one and (len(languages) < 2 or (languages & {*_ENGLISH} and english not in languages)):
        return None
    agree = sum(_agrees(file.name, file.split, words) for file in files)
    return _Fit(source, pattern, english, words, files, agree)


def _agrees(name: str, split: str | None, words: Mapping[str, str]) -> bool:
    """Returns whether a file that is used as a split (None: trained on) may be, by its name."""
    said = said_splits(name)
    if split in ("dev", "test"):
        return split in said or words[split] in said.values()
    return not {"dev", "test"} & {*said}


def _check_splits(folder: str, fit: _Fit, names: Iterable[str]) -> None:
    """Raises InputError for a file whose name says a split that it is not used as."""
    read = {file.name: file for file in fit.files}
    endings = {name.rpartition(".")[2] for name in read}
    for name in map(unpacked, names):
        # Folders of catalogues are parts of programs.
        said = said_splits(name.rpartition("/")[2] if fit.source is Gettext else name)
        file = read.get(name)
        if not said or (file is None and name.rpartition(".")[2] not in endings):
            continue
        if file is None or not _agrees(name, file.split, fit.words):
            use = "not be read" if file is None else f"be used as {file.split or 'training text'}"
            why = f"its name says {' and '.join(said.values())}, and it would {use}"
            remedy = f"call all files like {fit.pattern}, or move it out of the folder"
            raise InputError(f"{folder}: {name!r}: {why}; {remedy}")


def _fields(path: epath.Path, pattern: str, english: str) -> tuple[str, dict[str, Any]]:
    """Returns the pattern, and settings of `Jsonl` that name fields, by a file's first object."""
    try:
        record = json.loads(next(lines(path, MAX_LINE_BYTES), b""))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise InputError(f"{path} line 1: {EXPECTED}; saw no JSON object")
    if any(name in record for name in _LANGUAGE_FIELDS):
        pattern = pattern.replace("{lang}", "*")  # 'all.jsonl' names no language
    within = record.get("translation")
    if isinstance(within, dict) and english in within:
        return pattern, {}
    texts = [name for name, value in record.items() if isinstance(value, str)]
    codes = [name for name in texts if name in _LANGUAGE_FIELDS]
    source_codes = [name for name in texts if name in _SOURCE_LANGUAGE_FIELDS]
    texts = [name for name in texts if name not in (*codes, *source_codes)]
    if english in texts and all(describe(name).script for name in texts):
        return pattern, {"translation_field": "{lang}"}
    sources = [name for name in _ENGLISH_FIELDS if name in texts]
    others = [name for name in texts if name not in sources[:1]]
    has_language = "{lang}" in pattern or "{pair}" in pattern
    if len(others) != 1 or not sources or not (codes or has_language):
        raise InputError(
            f"{path} line 1: expected an object such as "
            '{"translation": {"en": ..., "gl": ...}}, {"en": ..., "gl": ...} or '
            '{"lang": "gl", "source": ..., "target": ...}; saw the fields '
            f"{', '.join(record) or '(none)'}"
        )
    sides, source_code = [sources[0], others[0]], None
    if source_codes and codes and not is_english(record[source_codes[0]]):
        if is_english(record[codes[0]]):
            sides, codes = sides[::-1], source_codes
        else:
            source_code = source_codes[0]
    return pattern, {
        "english_field": sides[0],
        "translation_field": sides[1],
        "language_field": codes[0] if codes and not has_language else None,
        "source_language_field": None if has_language else source_code,
    }
