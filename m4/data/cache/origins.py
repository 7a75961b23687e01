"""The origins of a corpus's pairs: file and line of the source, a few bits a pair.

text/<split>.<lang>.origin holds for each pair, in the order of the rows, the number file * 2^32 +
line, as differences, compressed: mostly ones. The files' names are in the manifest ("files").
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.sources import Pair, Source

_BLOCK = 1 << 16
_FILE = 1 << 32
Ints = npt.NDArray[np.int64]


class Origin(NamedTuple):
    """A file of the source, by its name in the source's folder, and the line of a pair in it."""

    file: str
    line: int


def origin_file(text: Path) -> Path:
    """Next to a split's text."""
    return text.with_suffix(".origin")


class Recorded:
    """A source that notes where the pairs that are read from it come from.

    Those of one language and split at a time, on disk; of a source that does not know (one without
    `origin`), nothing.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.knows = hasattr(type(source), "origin")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        if not self.knows:
            yield from self._source.pairs(language, split)
            return
        source: Any = self._source
        found: list[int] = []
        for pair in source.pairs(language, split):
            name, line = source.origin
            found.append(self._files.setdefault(name, len(self._files)) * _FILE + line)
            yield pair
            if len(found) == _BLOCK:
                self._write(found)
        self._write(found)

    def begin(self, text: Path) -> None:
        """From now on the pairs of `text` are read."""
        if not self.knows:
            return
        self._files: dict[str, int] = {}
        self._read, self._kept = text.with_suffix(".read"), text.with_suffix(".numbers")
        self._origin = origin_file(text)
        for path in (self._read, self._kept):
            path.write_bytes(b"")

    def keep(self, numbers: Ints) -> None:
        """The pairs that stay, by their numbers in the order of the source, from 1."""
        if not self.knows:
            return
        with self._kept.open("ab") as file:
            numbers.astype(np.int64).tofile(file)

    def end(self) -> dict[str, list[str]]:
        """Returns what the manifest says of the files.

        The origins of the pairs that stay are in their file, one after the other, until they are
        `Compressed`.
        """
        if not self.knows:
            return {}
        kept = np.fromfile(self._kept, np.int64)
        places = np.memmap(self._read, np.int64, "r") if len(kept) else kept
        with self._origin.open("wb") as file:
            for start in range(0, len(kept), _BLOCK):
                places[kept[start : start + _BLOCK] - 1].tofile(file)
        self._kept.unlink()
        self._read.unlink()
        return {"files": [*self._files]}

    def _write(self, found: list[int]) -> None:
        with self._read.open("ab") as file:
            np.array(found, np.int64).tofile(file)
        found.clear()


class Compressed:
    """Compresses what `Recorded` has written, without the pairs that leave the text."""

    def __init__(self, text: Path) -> None:
        path = origin_file(text)
        self._path = path if path.is_file() else None
        self._place, self._last = 0, 0
        self._compress = zlib.compressobj(1)
        self._parts: list[bytes] = []

    def append(self, pairs: int, kept: npt.NDArray[np.int64] | None) -> None:
        """Takes the next `pairs` pairs, of which those in `kept` stay, or all."""
        if self._path is None:
            return
        found = np.fromfile(self._path, np.int64, pairs, offset=8 * self._place)
        self._place += pairs
        found = found if kept is None else found[kept]
        deltas = np.diff(found, prepend=self._last)
        self._parts.append(self._compress.compress(deltas.tobytes()))
        self._last = int(found[-1]) if len(found) else self._last

    def finish(self) -> None:
        if self._path is not None:
            self._path.write_bytes(b"".join([*self._parts, self._compress.flush()]))


def read_origins(text: Path, files: Sequence[str]) -> list[Origin] | None:
    """Returns the origin of each row of a split's text, or None if its source knew none."""
    path = origin_file(text)
    if not path.is_file():
        return None
    places = np.cumsum(np.frombuffer(zlib.decompress(path.read_bytes()), np.int64))
    return [Origin(files[int(place) // _FILE], int(place) % _FILE) for place in places]
