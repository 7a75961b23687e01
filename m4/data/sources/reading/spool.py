"""Sorts sentence pairs of many languages and splits, which come mixed, once on disk."""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from m4.data.directions import in_order
from m4.data.sources import Pair
from m4.data.sources.reading.lines import Reading

_KEPT_CHARACTERS = 1 << 24


class Spool:
    """One file for two languages and a split, in a temporary folder that goes with the object."""

    def __init__(self, pairs: Iterable[tuple[str, str, Pair]], reading: Reading) -> None:
        """Reads all pairs.

        Args:
            pairs: (languages, split, texts) in any order; the order within two languages stays.
            reading: Reading of these pairs; its `origin` and `tallies` follow `pairs` here, too.
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
