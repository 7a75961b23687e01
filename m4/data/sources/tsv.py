"""A folder of TSV files: <lang>.train.tsv, <lang>.dev.tsv, <lang>.test.tsv."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from m4.data.sources import SPLITS, Pair

_BOM = b"\xef\xbb\xbf"


class Tsv:
    """Sentence pairs from a folder: one pair a line, english<TAB>foreign, UTF-8.

    A language without dev or test file has no such pairs; without train file it is an error.
    A byte order mark, CRLF line ends and spaces around a side are taken off. Bad lines (see
    `_parse`) are errors, or with on_bad_line='skip' left out and counted in `skipped`.
    """

    def __init__(self, folder: str | os.PathLike[str], on_bad_line: str = "fail") -> None:
        self.folder = Path(folder)
        self.on_bad_line = on_bad_line
        # (file name, reason) -> lines left out, of every split read so far.
        self.skipped: dict[tuple[str, str], int] = {}
        if on_bad_line not in ("fail", "skip"):
            raise ValueError(
                f"on_bad_line is {on_bad_line!r}: must be 'fail' or 'skip' (tsv.Tsv.on_bad_line)"
            )
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: no such folder (tsv.Tsv.folder)")

    def languages(self) -> list[str]:
        """The codes that have a train file, sorted."""
        return sorted(path.name.removesuffix(".train.tsv") for path in self._files("*.train.tsv"))

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """The pairs of one file in its order; ValueError at the first bad line, or skip it."""
        assert split in SPLITS, split
        path = self.folder / f"{language}.{split}.tsv"
        if not path.is_file():
            if split == "train":
                raise ValueError(
                    f"{path}: no such file; {self.folder} has training data of "
                    f"{', '.join(self.languages()) or 'no language'}"
                )
            return
        skipped, found = Counter[str](), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                pair = _parse(line.removeprefix(_BOM) if number == 1 else line)
                if isinstance(pair, Pair):
                    found += 1
                    yield pair
                elif self.on_bad_line == "fail":
                    raise ValueError(
                        f"{path} line {number}: {pair} "
                        "(tsv.Tsv.on_bad_line = 'skip' counts such lines instead)"
                    )
                else:
                    skipped[pair] += 1
        # Set, not added: reading a file again must not count its lines again.
        self.skipped |= {(path.name, reason): count for reason, count in skipped.items()}
        if split == "train" and not found:
            raise ValueError(f"{path}: no pairs in it")

    def identity(self) -> dict:
        """Names, sizes and SHA-256 of the files, by language; and how bad lines are treated."""
        by_language: dict[str, dict[str, list]] = {}
        for split in SPLITS:
            for path in self._files(f"*.{split}.tsv"):
                language = path.name.removesuffix(f".{split}.tsv")
                content = path.read_bytes()
                by_language.setdefault(language, {})[path.name] = [
                    len(content),
                    hashlib.sha256(content).hexdigest(),
                ]
        return {"source": "tsv", "on_bad_line": self.on_bad_line, "by_language": by_language}

    def warnings(self) -> list[str]:
        """One line for every file and reason of which lines were left out, for the log."""
        return [
            f"{self.folder / name}: {count} lines skipped: {reason}"
            for (name, reason), count in sorted(self.skipped.items())
        ]

    def _files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern))


def _parse(line: bytes) -> Pair | str:
    """A pair, or why the line is none."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\0" in text:
        return "a NUL character"
    text = text.strip("\r\n")
    if not text.strip():
        return "an empty line"
    sides = text.split("\t")
    if len(sides) == 1:
        return "no tab"
    if len(sides) > 2:
        return "more than one tab"
    english, foreign = (" ".join(side.split()) for side in sides)
    if not english:
        return "an empty English side"
    if not foreign:
        return "an empty foreign side"
    return Pair(english, foreign)
