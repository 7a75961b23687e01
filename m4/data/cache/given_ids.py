"""A cache of a source that gives ids in its own vocabulary: nothing is tokenized or cleaned.

The arrays hold the ids as they are, eos included. The text is what decoding reads and metrics
compare with: the source's own where its vocabulary makes the same ids of it, else the ids decoded.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.cache.corpus_text import Progress, TextWriter
from m4.data.cache.tokens import ArrayWriter, Unfinished, vocabulary_file
from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.ledger import Ledger
from m4.data.directions import ROLES, SIDES, split_direction
from m4.data.preprocess import EOS_ID, PAD_ID
from m4.data.sources import SPLITS, IdBlock, IdSource
from m4.data.sources.reading.lines import plain
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import TokenArray
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.settings import InputError


def write(
    folder: Path, source: IdSource, settings: dict[str, Any], progress: Progress
) -> tuple[dict[str, dict[str, dict[str, Any]]], Ledger, dict[str, Any]]:
    """Writes text, arrays and vocabularies of all pairs of languages.

    Returns:
        The manifest's counts, the ledger, and what it says of vocabularies and arrays.
    """
    pairs = settings["language_pairs"]
    made = _write_vocabularies(folder, source)
    roles = [None, None] if "shared" in made else list(ROLES)
    longest = settings["source_length"], settings["target_length"]
    arrays = [
        TokenArray(side, vocabulary_file(folder, own), most, role, own or "")
        for side, own, most, role in zip(SIDES, roles, longest, ROLES, strict=True)
    ]
    blocks = _Blocks(source, arrays)
    parts, done = len(SPLITS) * len(pairs), 0
    counts: dict[str, dict[str, dict[str, Any]]] = {
        pair: {split: {} for split in SPLITS} for pair in pairs
    }
    for split in SPLITS:
        writer = TextWriter(folder, split, pairs, once=False)
        for pair in pairs:
            unfinished = [Unfinished(folder, split, c, arrays) for c in split_direction(pair)]
            for chunk, sides in blocks.of(split, pair):
                writer.add(pair, chunk)
                for array, side, of in zip(arrays, sides, unfinished, strict=True):
                    of.append({array.store: [side]})
            writer.end(pair)
            done += 1
            progress("tokens", done, parts)
    arrays_made = ArrayWriter(folder, pairs, arrays, counts, marked=False).write("from_english")
    return counts, blocks.ledger, {"vocabularies": made, **arrays_made}


def _write_vocabularies(folder: Path, source: IdSource) -> dict[str, dict[str, Any]]:
    models = source.vocabularies()
    if models["source"] == models["target"]:
        models = {None: models["source"]}
    made = {}
    for role, model in models.items():
        path = vocabulary_file(folder, role)
        path.write_bytes(model)
        vocabulary = Vocabulary(path)
        vocabulary.check_special()
        size, fingerprint = vocabulary.size, vocabulary.fingerprint
        made[role or "shared"] = {"size": size, "fingerprint": fingerprint}
    return made


class _Blocks:
    """A source's blocks as what the cache is written from, and the ledger of them."""

    def __init__(self, source: IdSource, arrays: Sequence[TokenArray]) -> None:
        self._source, self.ledger = source, Ledger()
        self._vocabularies = [Vocabulary(array.vocabulary) for array in arrays]

    def of(self, split: str, pair: str) -> Iterator[tuple[Chunk, tuple[Ragged, Ragged]]]:
        """Yields a task's pairs as text and as ids."""
        count = self.ledger.count(pair, split)
        read = 0
        for block in self._source.blocks(pair, split):
            sides = block.inputs, block.targets
            self._check(sides, pair, split, read)
            numbers = np.arange(read + 1, read + 1 + len(block.texts))
            read += len(numbers)
            count.read, count.kept = read, read
            columns = self._texts(block, count.flagged if split != "train" else None)
            yield Chunk(numbers, *columns), sides
        if split == "train" and not read:
            raise InputError(f"{pair} has no training pairs: the source has none")

    def _check(self, sides: Sequence[Ragged], pair: str, split: str, before: int) -> None:
        """InputError: an example without ids, or an id that the vocabulary does not have."""
        for side, vocabulary, name in zip(
            sides, self._vocabularies, ("inputs", "targets"), strict=True
        ):
            if (empty := np.flatnonzero(side.lengths == 0)).size:
                raise InputError(
                    f"{pair}, {split}: example {before + int(empty[0])} has no {name}: the "
                    "task's preprocessors must give at least an eos"
                )
            low, high = int(side.ids.min(initial=1)), int(side.ids.max(initial=1))
            if low <= PAD_ID or high >= vocabulary.size:
                raise InputError(
                    f"{pair}, {split}: {name} have ids from {low} to {high}, and the "
                    f"vocabulary has 1 to {vocabulary.size - 1}"
                )

    def _texts(self, block: IdBlock, flagged: Any) -> list[list[str]]:
        """The text of each side: one that gives the ids, if there is one."""
        columns = []
        for side, vocabulary, given in zip(
            (block.inputs, block.targets),
            self._vocabularies,
            zip(*block.texts, strict=True),
            strict=True,
        ):
            bare = [row[:-1] if row[-1:] == [EOS_ID] else row for row in side.rows()]
            texts = [plain(text) for text in given]
            again = vocabulary.encode(texts)
            decoded = vocabulary.decode(bare)
            columns.append(
                [
                    text if text and same == row else plain(other)
                    for text, same, row, other in zip(texts, again, bare, decoded, strict=True)
                ]
            )
            if flagged is not None:
                other = vocabulary.encode(columns[-1])
                if differ := sum(a != b for a, b in zip(other, bare, strict=True)):
                    flagged["ids: their text gives others"] += differ
        return columns
