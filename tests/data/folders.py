"""Small folders of sentence pairs in every layout that `m4 new` knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.data.corpora import quoted, write

_WHO = ("she", "your brother", "that teacher", "this man", "her friend")
_WHAT = ("would like to see", "has not found", "was looking for", "can read", "will not sell")
_THINGS = ("the red book", "a letter from his mother", "the house with the garden", "two horses")
# Another word for every English one: no language, and no English.
_ENDS = {"gl": "ou", "fy": "je", "pt": "ão"}


def pairs(language: str, sentences: int = 100) -> list[tuple[str, str]]:
    """English, the same with every language, and its "translation"."""
    english = [f"{who} {what} {thing}" for who in _WHO for what in _WHAT for thing in _THINGS]
    end = _ENDS[language]
    made = [(text, " ".join(f"{word[::-1]}{end}" for word in text.split())) for text in english]
    return made[:sentences]


def parts(languages: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    for language in languages.split():
        found = pairs(language)
        yield language, "test", found[:10]
        yield language, "dev", found[10:18]
        yield language, "train", found[18:]


def tsv(folder: Path, languages: str = "gl fy pt", *, swapped: str = "") -> Path:
    """swapped: languages whose columns are the wrong way round."""
    for language, split, found in parts(languages):
        order = -1 if language in swapped.split() else 1
        text = "".join("\t".join(pair[::order]) + "\n" for pair in found)
        write(folder / f"{language}.{split}.tsv", text)
    return folder


def plain_tsv(folder: Path) -> Path:
    for language in _ENDS:
        write(folder / f"{language}.tsv.gz", "".join(f"{e}\t{f}\n" for e, f in pairs(language)))
    return folder


def train_only(folder: Path) -> Path:
    for language in _ENDS:
        text = "".join(f"{e}\t{f}\n" for e, f in pairs(language))
        write(folder / f"{language}.train.tsv", text)
    return folder


def moses(folder: Path) -> Path:
    for language, split, found in parts("gl fy"):
        name = f"{split}.en-{language}"
        for side, texts in zip(("en", language), zip(*found, strict=True), strict=True):
            write(folder / f"{name}.{side}", "".join(f"{text}\n" for text in texts))
    return folder


def opus(folder: Path) -> Path:
    for language in ("gl", "fy"):
        for side, texts in zip(("en", language), zip(*pairs(language), strict=True), strict=True):
            text = "".join(f"{text}\n" for text in texts)
            write(folder / f"en-{language}" / f"Made.en-{language}.{side}", text)
    return folder


def json_by_language(folder: Path) -> Path:
    for language, split, found in parts("gl fy"):
        rows = [{"translation": {"en": e, language: f}} for e, f in found]
        _jsonl(folder / f"{language}.{split}.jsonl", rows)
    return folder


def json_mixed(folder: Path) -> Path:
    rows = [{"lang": of, "source": e, "target": f} for of in ("gl", "fy") for e, f in pairs(of)]
    _jsonl(folder / "all.jsonl", rows)
    return folder


def json_many(folder: Path) -> Path:
    for split, part in (("train", slice(18, None)), ("valid", slice(10, 18)), ("test", slice(10))):
        found = zip(pairs("gl")[part], pairs("fy")[part], strict=True)
        rows = [{"en": gl[0], "gl": gl[1], "fy": fy[1]} for gl, fy in found]
        _jsonl(folder / f"{split}.jsonl", rows)
    return folder


def _jsonl(path: Path, rows: list[dict]) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def po(folder: Path) -> Path:
    for language in ("gl", "fy"):
        _po(folder / f"{language}.po", language)
    return folder


def installed_po(folder: Path) -> Path:
    for language in ("gl", "pt_BR"):
        _po(folder / "locale" / language / "LC_MESSAGES" / "made.po", language[:2])
    return folder


def _po(path: Path, language: str) -> None:
    head = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    entries = [f"msgid {quoted(e)}\nmsgstr {quoted(f)}\n" for e, f in pairs(language)]
    write(path, "\n".join([head, *entries]))
