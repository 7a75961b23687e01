"""Small folders of sentence pairs in every layout that `m4 new` knows."""

from __future__ import annotations

import json
from pathlib import Path

from m4.data.sources import Pair
from tests.data.corpora import Texts, parts, tmx_of, write, write_po

_WHO = ("she", "your brother", "that teacher", "this man", "her friend")
_WHAT = ("would like to see", "has not found", "was looking for", "can read", "will not sell")
_THINGS = ("the red book", "a letter from his mother", "the house with the garden", "two horses")
# Another word for every English one: no language, and no English.
_ENDS = {"gl": "ou", "fy": "je", "pt": "ão"}
_PARTS = {"test": slice(10), "dev": slice(10, 18), "train": slice(18, None)}


def pairs(language: str) -> list[Pair]:
    """A hundred pairs: English, the same with every language, and its "translation"."""
    english = [f"{who} {what} {thing}" for who in _WHO for what in _WHAT for thing in _THINGS]
    end = _ENDS[language]
    return [Pair(text, " ".join(f"{word[::-1]}{end}" for word in text.split())) for text in english]


def texts(languages: str) -> Texts:
    found = {code: pairs(code) for code in languages.split()}
    return {code: {s: of[part] for s, part in _PARTS.items()} for code, of in found.items()}


def tsv(folder: Path, languages: str = "gl fy pt", *, swapped: str = "") -> Path:
    """swapped: languages whose columns are the wrong way round."""
    for language, split, found in parts(texts(languages)):
        order = -1 if language in swapped.split() else 1
        text = "".join("\t".join(pair[::order]) + "\n" for pair in found)
        write(folder / f"{language}.{split}.tsv", text)
    return folder


def plain_tsv(folder: Path, ending: str = "tsv.gz") -> Path:
    for language in _ENDS:
        text = "".join(f"{e}\t{f}\n" for e, f in pairs(language))
        write(folder / f"{language}.{ending}", text)
    return folder


def train_only(folder: Path) -> Path:
    return plain_tsv(folder, "train.tsv")


def moses(folder: Path) -> Path:
    for language, split, found in parts(texts("gl fy")):
        _sides(folder / f"{split}.en-{language}", language, found)
    return folder


def tmx(folder: Path) -> Path:
    """A file a pair, as OPUS publishes them."""
    for language in ("gl", "fy"):
        write(folder / f"en-{language}.tmx.gz", tmx_of("en", language, pairs(language)))
    return folder


def opus(folder: Path) -> Path:
    for language in ("gl", "fy"):
        name = f"en-{language}"
        _sides(folder / name / f"Made.{name}", language, pairs(language))
    return folder


def _sides(stem: Path, language: str, found: list[Pair]) -> None:
    for side, lines in zip(("en", language), zip(*found, strict=True), strict=True):
        write(stem.with_name(f"{stem.name}.{side}"), "".join(f"{line}\n" for line in lines))


def json_by_language(folder: Path) -> Path:
    for language, split, found in parts(texts("gl fy")):
        rows = [{"translation": {"en": e, language: f}} for e, f in found]
        _jsonl(folder / f"{language}.{split}.jsonl", rows)
    return folder


def json_mixed(folder: Path) -> Path:
    rows = [{"lang": of, "source": e, "target": f} for of in ("gl", "fy") for e, f in pairs(of)]
    _jsonl(folder / "all.jsonl", rows)
    return folder


def json_many(folder: Path) -> Path:
    for split, part in _PARTS.items():
        found = zip(pairs("gl")[part], pairs("fy")[part], strict=True)
        rows = [{"en": gl[0], "gl": gl[1], "fy": fy[1]} for gl, fy in found]
        _jsonl(folder / f"{split.replace('dev', 'valid')}.jsonl", rows)
    return folder


def _jsonl(path: Path, rows: list[dict]) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def po(folder: Path) -> Path:
    write_po(folder, texts("gl fy"), "{lang}.po")
    return folder


def installed_po(folder: Path) -> Path:
    made = {"gl": texts("gl")["gl"], "pt_BR": texts("pt")["pt"]}
    write_po(folder, made, "locale/{lang}/LC_MESSAGES/made.po")
    return folder
