"""The origins of a corpus's pairs: file and line of the source, a few bits a pair.

text/<split>.<pair>.origin holds for each pair, in the order of the rows, the number file * 2^32 +
line, as differences, compressed: mostly ones. The files' names are in the manifest ("files").
"""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.sources import Pair, Source

FILE = 1 << 32


class Origin(NamedTuple):
    """A file of the source, by its name in the source's folder, and the line of a pair in it."""

    file: str
    line: int


class Recorded:
    """A source that notes where the pairs that are read from it come from.

    It holds those of two languages and a split, 8 bytes a pair. Of a source that does not know (one
    without `reading`) it notes nothing.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.knows = hasattr(source, "reading")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        return self.noted(self._source.pairs(pair, split))

    def noted(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Yields pairs that are read from the source, and forgets those before."""
        source: Any = self._source
        self._files: dict[str, int] = {}
        self._places = array("q")
        for texts in pairs:
            if self.knows:
                name, line = source.reading.origin
                self._places.append(self._files.setdefault(name, len(self._files)) * FILE + line)
            yield texts

    def keep(self, numbers: npt.NDArray[np.int64], path: Path) -> None:
        """Writes the origins of the pairs that stay, by their numbers in the source, from 1."""
        if self.knows:
            with path.open("ab") as file:
                np.frombuffer(self._places, np.int64)[numbers - 1].tofile(file)

    def found(self) -> tuple[list[str] | None, npt.NDArray[np.int64]]:
        """Returns the files, and of each pair the number of its file * FILE + its line."""
        return [*self._files] if self.knows else None, np.array(self._places)

    def end(self, path: Path) -> dict[str, list[str]]:
        """Returns what the manifest says of the files that were read."""
        if not self.knows:
            return {}
        path.touch()  # no pair may be left
        return {"files": [*self._files]}


def compress_origins(path: Path, kept: npt.NDArray[np.bool_]) -> None:
    """Compresses what `Recorded` has written, of the pairs that are kept, if it has."""
    if path.is_file():
        deltas = np.diff(np.fromfile(path, np.int64)[kept], prepend=0)
        path.write_bytes(zlib.compress(deltas.tobytes(), 1))


def read_origins(path: Path, files: Sequence[str]) -> list[Origin] | None:
    """Returns the origin of each row of a split's pairs, or None if its source knew none."""
    if not path.is_file():
        return None
    places = np.cumsum(np.frombuffer(zlib.decompress(path.read_bytes()), np.int64))
    return [Origin(files[int(place) // FILE], int(place) % FILE) for place in places]
