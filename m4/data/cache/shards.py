"""The arrays of a cache in shards: pairs as numbers of sentences, and the sentences' token ids.

A split's sentences are numbered, those of its first language before those of the next one. Each is
stored once, however many pairs have it. A shard is a range of sentences in two files, `<stem>.
tokens.<shard>.npy` (flat ids) and `<stem>.offsets.<shard>.npy` (uint32, from 0: sentence r has ids
offsets[r] to offsets[r + 1]). A sentence is in the shard that would have its first id if all ids
were divided into equal parts. `<split>.pairs.<shard>.npy` has the pairs, [pairs, 2]: the numbers of
the sentences in the first and the second language.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.arrays import Array, Ints
from m4.data.compiled import compiled
from m4.data.vocabulary import Ragged
from m4.settings import InputError

# Maximum bytes of a shard's ids, and of a shard's pairs.
SHARD_BYTES = 1 << 28
_HEADER_BYTES = 128  # bytes of the header of a .npy file with one axis
# Arrays with fewer bytes stay in memory.
_KEPT_BYTES = 1 << 30


def file_name(stem: str, shard: int) -> str:
    """Returns the name of a shard's file; the stem is 'train.tokens', 'train.pairs' and so on."""
    return f"{stem}.{shard:05}.npy"


class Damaged(InputError):
    """A damaged file of a cache."""

    def __init__(self, folder: Path, said: str) -> None:
        remedy = "remove that folder, and the corpus is built again"
        super().__init__(f"{folder}: damaged: {said}; {remedy}")


# (name of a file, function to call when it is removed) -> its path.
PathOf = Callable[[str, Callable[[], object]], Path]


@dataclasses.dataclass
class _Growing:
    """Writer of an array in shards, .npy files whose rows are not kept in memory.

    Each shard begins with `zeros` zeros, which are not entries. `firsts` has the first entry of
    each closed shard, and the number of all entries.
    """

    folder: Path
    stem: str
    kind: npt.DTypeLike
    columns: tuple[int, ...] = ()
    zeros: int = 0

    def __post_init__(self) -> None:
        self.firsts = [0]
        self._open()

    def _open(self) -> None:
        self._file = (self.folder / file_name(self.stem, len(self.firsts) - 1)).open("wb")
        self._file.seek(_HEADER_BYTES)
        self.rows = 0
        self.append(np.zeros(self.zeros))

    def append(self, rows: Array) -> None:
        rows.astype(self.kind).tofile(self._file)
        self.rows += len(rows)

    def next_shard(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        """Writes the header, whose length does not depend on the number of rows."""
        about: dict[str, Any] = {"descr": np.dtype(self.kind).str, "fortran_order": False}
        about["shape"] = (self.rows, *self.columns)
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, about)
        assert self._file.tell() == _HEADER_BYTES
        self._file.close()
        self.firsts.append(self.firsts[-1] + self.rows - self.zeros)


def write_sentences(
    folder: Path, stem: str, blocks: Iterable[Ragged], kind: type[np.generic]
) -> list[list[int]]:
    """Writes sentences in the order of their numbers, with one block in memory at a time.

    Args:
        stem: The split, with the role if roles have separate ids: 'train', 'train.source'.
        blocks: Sentences in blocks of any size.
        kind: Type of the ids.

    Returns:
        First sentence of each shard and the number of all, and the same for ids.
    """
    tokens = _Growing(folder, f"{stem}.tokens", kind)
    offsets = _Growing(folder, f"{stem}.offsets", np.uint32, zeros=1)
    ids_of_shard, ids = SHARD_BYTES // np.dtype(kind).itemsize, 0
    for block in blocks:
        ends, done = np.cumsum(block.lengths), 0
        starts = ids + ends - block.lengths
        while True:
            stop = int(np.searchsorted(starts, len(tokens.firsts) * ids_of_shard))
            begin, end = (int(ends[n - 1]) if n else 0 for n in (done, stop))
            offsets.append(tokens.rows + ends[done:stop] - begin)
            tokens.append(block.ids[begin:end])
            if stop == len(ends):
                break
            tokens.next_shard()
            offsets.next_shard()
            done = stop
        ids += len(block.ids)
    tokens.close()
    offsets.close()
    return [offsets.firsts, tokens.firsts]


def write_pairs(folder: Path, split: str, blocks: Iterable[Array]) -> list[list[int]]:
    """Writes blocks of [n, 2] sentence numbers; returns each shard's first pair, and the total."""
    most, pairs = SHARD_BYTES // 8, _Growing(folder, f"{split}.pairs", np.uint32, (2,))
    for block in blocks:
        while len(block):
            if pairs.rows == most:
                pairs.next_shard()
            room = most - pairs.rows
            pairs.append(block[:room])
            block = block[room:]
    pairs.close()
    return [pairs.firsts]


class _Shards:
    """Files of one array, memory-mapped at the first read."""

    def __init__(
        self, folder: Path, stem: str, firsts: Any, what: str, path: PathOf | None, more: int = 0
    ) -> None:
        """Prepares to read.

        `firsts` has the first entry of each shard and the number of all, `what` names the entries,
        `path` fetches files that are not in the folder, and a shard's array has `more` entries.
        """
        self._folder, self._stem, self._what, self._more = folder, stem, what, more
        self._path = path or (lambda name, _: folder / name)
        self._firsts = np.array(firsts, np.int64)
        self._open: dict[int, Array] = {}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def names(self, entries: Ints) -> list[str]:
        """Returns the files with these entries."""
        return [file_name(self._stem, number) for number, _ in self.parts(entries)]

    def release(self) -> None:
        """Releases the read pages of files, as memory would otherwise grow to the corpus's size."""
        maps = [array.base for array in self._open.values()]
        maps = [of.base for of in maps if isinstance(of, np.memmap) and isinstance(of.base, mmap)]
        if sum(map(len, maps)) > _KEPT_BYTES:
            for one in maps:
                one.madvise(MADV_DONTNEED)

    def parts(self, entries: Ints) -> Iterator[tuple[int, Ints]]:
        """Yields the shards that have any of the entries, with these entries."""
        if len(entries) and entries.max() >= len(self):
            wanted = int(entries.max()) + 1
            said = f"{len(self)} entries of {self._stem} where {wanted} are expected"
            raise Damaged(self._folder, said)
        if len(self._firsts) == 2:
            yield 0, np.arange(len(entries))
            return
        shard = np.searchsorted(self._firsts, entries, side="right") - 1
        order = np.argsort(shard, kind="stable")
        numbers, starts = np.unique(shard[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)

    def shard(self, number: int) -> Array:
        """Returns the array of a shard."""
        if number not in self._open:
            name = file_name(self._stem, number)
            closed = functools.partial(self._open.pop, number, None)
            path = self._path(name, closed)
            empty = path.stat().st_size <= _HEADER_BYTES  # an empty array cannot be mapped
            array = _read_only(np.load(path, mmap_mode=None if empty else "r"))
            wanted = int(self._firsts[number + 1] - self._firsts[number])
            if (found := len(array) - self._more) != wanted:
                said = f"{found} {self._what} where {wanted} are expected: {name}"
                raise Damaged(self._folder, said)
            self._open[number] = array
        return self._open[number]


class PairShards(_Shards):
    """Pairs of a split, in shards."""

    def __init__(self, folder: Path, split: str, firsts: Any, path: PathOf | None = None) -> None:
        super().__init__(folder, f"{split}.pairs", firsts[0], "pairs", path)

    def take(self, rows: Ints) -> Array:
        """Returns the [n, 2] sentence numbers of rows."""
        found = np.empty((len(rows), 2), np.uint32)
        for number, index in self.parts(rows):
            _pairs(rows, self._firsts[number], index, self.shard(number), found)
        return found


class SentenceShards(_Shards):
    """The token ids of a split's sentences, by their numbers."""

    def __init__(self, folder: Path, stem: str, firsts: Any, path: PathOf | None = None) -> None:
        super().__init__(folder, f"{stem}.offsets", firsts[0], "sentences", path, more=1)
        # The ids are opened on demand, as some processes need only the lengths.
        self._ids = _Shards(folder, f"{stem}.tokens", firsts[1], "ids", path)

    def places(self, entries: Ints, more: int = 0) -> tuple[Ints, Ints]:
        """Returns [n] starts of sentences among all ids, and [n] lengths plus `more`."""
        starts, lengths = np.empty(len(entries), np.int64), np.empty(len(entries), np.int64)
        for number, index in self.parts(entries):
            first, first_id = self._firsts[number], self._ids._firsts[number]
            _places(entries, first, first_id, index, self.shard(number), more, starts, lengths)
        return starts, lengths

    def flat(self, starts: Ints, lengths: Ints, more: int, chosen: Ints) -> tuple[Array, Ints]:
        """Returns an array with the chosen sentences' ids, and the start of each in it.

        With a single shard, the array is the shard's own; with several, it is a copy of these ids.
        """
        if len(self._firsts) == 2:
            return self._ids.shard(0), starts
        wanted = np.maximum(lengths[chosen] - more, 0)
        found, begins = np.zeros(len(starts), np.int64), starts[chosen]
        found[chosen] = np.cumsum(wanted) - wanted
        flat = np.empty(0, np.uint16)
        some = np.flatnonzero(wanted)
        for number, part in self._ids.parts(begins[some]):
            ids, part = self._ids.shard(number), some[part]
            if not len(flat):
                flat = np.empty(int(wanted.sum()), ids.dtype)
            at = begins[part] - self._ids._firsts[number]
            if not _gather(ids, at, wanted[part], found[chosen[part]], flat):
                raise Damaged(self._folder, "a sentence is longer than its shard")
        return _read_only(flat), found

    def names(self, entries: Ints) -> list[str]:
        """Returns the files with the lengths and ids of these entries."""
        offsets = super().names(entries)
        return [*offsets, *(name.replace(".offsets.", ".tokens.") for name in offsets)]

    def take(self, entries: Ints) -> Ragged:
        """Returns the ids of sentences."""
        starts, lengths = self.places(entries)
        flat, starts = self.flat(starts, lengths, 0, np.arange(len(entries)))
        return Ragged.within(flat, starts, lengths)

    def release(self) -> None:
        super().release()
        self._ids.release()


@compiled
def _places(entries, first, first_id, index, offsets, more, starts, lengths):
    """Writes starts and lengths of the sentences in `index` that belong to a shard."""
    for k in index:
        entry = entries[k] - first
        start = np.int64(offsets[entry])
        starts[k] = first_id + start
        lengths[k] = np.int64(offsets[entry + 1]) - start + more


@compiled
def _pairs(rows, first, index, pairs, found):
    """Writes the pairs of the rows in `index` that belong to a shard."""
    for k in index:
        found[k, 0] = pairs[rows[k] - first, 0]
        found[k, 1] = pairs[rows[k] - first, 1]


@compiled
def _gather(ids, begins, lengths, starts, flat):
    """Copies sentences of a shard to their places; returns False if one is not in the shard."""
    for k in range(len(begins)):
        begin, start = np.uint64(begins[k]), np.uint64(starts[k])
        if lengths[k] < 0 or begin + np.uint64(lengths[k]) > np.uint64(len(ids)):
            return False
        for j in range(np.uint64(lengths[k])):
            flat[start + j] = ids[begin + j]
    return True


def _read_only(array: Array) -> Array:
    """Returns a read-only view, which is the type of array for which the loops are compiled."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
