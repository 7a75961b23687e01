"""BPE-dropout: other ways to tokenize a sentence than the best one.

Source: Provilkov et al. 2020, arXiv 1910.13267, algorithm 1.

SentencePiece can do this too, but its random numbers differ from process to process, whatever the
seed (measured with 0.2.3): a corpus that is built twice would not be the same.
"""

import numpy as np
import numpy.typing as npt

from m4.data.compiled import compiled
from m4.data.permutation import GOLDEN, mix
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import SPACE, Vocabulary

_mix = compiled(mix)
Ids = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]


class Dropout:
    """Leaves merges out at random, of the best segmentation's ids, which are taken apart."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = vocabulary.pieces
        # Special pieces, tags and bytes are left whole.
        whole = {*range(vocabulary.byte_ids.stop), *vocabulary.tag_ids}
        number = {piece: i for i, piece in enumerate(pieces) if i not in whole}
        self._characters = Ragged.of(
            [[i] if i in whole else [number[c] for c in p] for i, p in enumerate(pieces)]
        )
        self._space = number.get(SPACE, -1) if vocabulary.by_words else -1
        # A merged piece's id is its priority: merges stand in the order in which they were learned.
        pairs = [
            (number[p[:cut]] * len(pieces) + number[p[cut:]], merged)
            for p, merged in number.items()
            for cut in range(1, len(p))
            if p[:cut] in number and p[cut:] in number
        ]
        keys, merged = np.array(pairs or np.zeros((0, 2)), np.int64).T
        self._size = len(pieces)
        self._keys, self._merged = _table(keys.copy(), merged.astype(np.int32))

    def sample(self, best: Ragged, alpha: float, seeds: npt.NDArray[np.uint64]) -> Ragged:
        """Returns other segmentations of texts, from the best ones.

        Each merge is left out with probability `alpha`, drawn again at every step. A text's ids
        depend on its own seed alone.
        """
        characters = self._characters.take(best.ids)
        # The ends of each text's characters. np.add.reduceat has no empty rows.
        ends = np.concatenate([[0], np.cumsum(characters.lengths)])[np.cumsum(best.lengths)]
        table = (self._keys, self._merged, self._size)
        ends = ends.astype(np.int64)
        return Ragged(*_sample(characters.ids, ends, table, self._space, alpha, seeds))


@compiled
def _place(keys: Keys, key: int | np.int64) -> int:
    """Returns the place of a key in the table, or the next free one."""
    mask = len(keys) - 1
    place = (np.uint64(key) * GOLDEN) >> np.uint64(20)
    index = np.int64(place & np.uint64(mask))
    while keys[index] != -1 and keys[index] != key:
        index = (index + 1) & mask
    return int(index)


@compiled
def _table(keys: Keys, values: Ids) -> tuple[Keys, Ids]:
    """Makes a hash table with open addressing, at most half full; free places have the key -1."""
    size = 2
    while size < 2 * len(keys) + 2:
        size *= 2
    places, found = np.full(size, -1, np.int64), np.full(size, -1, np.int32)
    for i in range(len(keys)):
        index = _place(places, keys[i])
        places[index], found[index] = keys[i], values[i]
    return places, found


@compiled
def _merged(table: tuple[Keys, Ids, int], left: int, right: int) -> int:
    """Returns the piece that two pieces make, or -1."""
    keys, values, size = table
    return int(values[_place(keys, np.int64(left) * size + right)])


@compiled
def _sample(
    characters: Ids,
    ends: Keys,
    table: tuple[Keys, Ids, int],
    space: int,
    alpha: float,
    seeds: npt.NDArray[np.uint64],
) -> tuple[Ids, Keys]:
    """Returns ids and their number by text; `ends` are the ends of each text's characters."""
    ids, lengths = np.empty(len(characters), np.int32), np.zeros(len(ends), np.int64)
    pair = np.empty(len(characters), np.int32)  # the piece that a symbol makes with the next one
    limit = np.uint64(alpha * 2.0**53)
    written, start = 0, 0
    for text in range(len(ends)):
        state, before = seeds[text], written
        while start < ends[text]:
            stop = start + 1
            while stop < ends[text] and characters[stop] != space:
                stop += 1
            # A word is taken apart where its ids will be.
            count, word, pairs = stop - start, ids[written:], pair[written:]
            for i in range(count):
                word[i] = characters[start + i]
            for i in range(count - 1):
                pairs[i] = _merged(table, word[i], word[i + 1])
            while True:
                chosen = -1
                for i in range(count - 1):
                    if pairs[i] < 0:
                        continue
                    drawn = _mix(state)
                    state += GOLDEN
                    if (drawn >> np.uint64(11)) < limit:
                        continue
                    if chosen < 0 or pairs[i] < pairs[chosen]:
                        chosen = i
                if chosen < 0:
                    break
                word[chosen] = pairs[chosen]
                count -= 1
                for i in range(chosen + 1, count):
                    word[i], pairs[i - 1] = word[i + 1], pairs[i]
                if chosen > 0:
                    pairs[chosen - 1] = _merged(table, word[chosen - 1], word[chosen])
                if chosen < count - 1:
                    pairs[chosen] = _merged(table, word[chosen], word[chosen + 1])
            written += count
            start = stop
        lengths[text] = written - before
    return ids[:written].copy(), lengths
