"""Small folders of sentence pairs in every layout that `m4 new` knows."""

from pathlib import Path

from m4.data.sources import Pair
from tests.data.corpora import Texts, joined, json_lines, write, write_files

_WHO = ("she", "your brother", "that teacher", "this man", "her friend")
_WHAT = ("would like to see", "has not found", "was looking for", "can read", "will not sell")
_THINGS = ("the red book", "a letter from his mother", "the house with the garden", "two horses")
# Another word for every English one: no language, and no English.
_ENDS = {"gl": "ou", "fy": "je", "pt": "ão"}
_PARTS = {"test": slice(10), "dev": slice(10, 18), "train": slice(18, None)}


def pairs(language: str) -> list[Pair]:
    """Returns 100 pairs: English, the same for every language, and its "translation"."""
    english = [f"{who} {what} {thing}" for who in _WHO for what in _WHAT for thing in _THINGS]
    end = _ENDS[language]
    return [Pair(text, " ".join(f"{word[::-1]}{end}" for word in text.split())) for text in english]


def texts(languages: str) -> Texts:
    found = {code: pairs(code) for code in languages.split()}
    return {code: {s: of[part] for s, part in _PARTS.items()} for code, of in found.items()}


def tsv(folder: Path, languages: str = "gl fy pt", *, swapped: str = "") -> Path:
    """Writes TSV files, with the columns of the languages in `swapped` exchanged."""
    made = texts(languages)
    for code in swapped.split():
        made[code] = {s: [Pair(b, a) for a, b in of] for s, of in made[code].items()}
    return write_files(folder, "{lang}.{split}.tsv", made)


def whole(folder: Path, name: str, languages: str = "gl fy") -> Path:
    """Writes one file or two with all pairs of each language."""
    return write_files(folder, name, joined(texts(languages)))


def plain_tsv(folder: Path) -> Path:
    return whole(folder, "{lang}.tsv.gz", "gl fy pt")


def json_mixed(folder: Path) -> Path:
    rows = [{"lang": of, "source": e, "target": f} for of in ("gl", "fy") for e, f in pairs(of)]
    write(folder / "all.jsonl", json_lines(rows))
    return folder


def json_many(folder: Path) -> Path:
    for split, part in _PARTS.items():
        found = zip(pairs("gl")[part], pairs("fy")[part], strict=True)
        rows = ({"en": gl[0], "gl": gl[1], "fy": fy[1]} for gl, fy in found)
        write(folder / f"{split.replace('dev', 'valid')}.jsonl", json_lines(rows))
    return folder


def po(folder: Path) -> Path:
    return whole(folder, "{lang}.po")


def installed_po(folder: Path) -> Path:
    made = {"gl": texts("gl")["gl"], "pt_BR": texts("pt")["pt"]}
    return write_files(folder, "locale/{lang}/LC_MESSAGES/made.po", joined(made))
