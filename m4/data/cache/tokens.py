"""The token arrays of a cache: every sentence of a language tokenized once, in shards."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.beam import Engine
from m4.data.cache.corpus_text import (
    BLOCK,
    Progress,
    lines_of_pairs,
    pair_file,
    remove_numbers,
    take_numbers,
    text_file,
)
from m4.data.cache.origins import compress_origins
from m4.data.cache.shards import Folder, PairShards, SentenceShards, write_pairs, write_sentences
from m4.data.directions import (
    ROLES,
    SIDES,
    Mixture,
    directions_of,
    is_synthetic,
    languages_of,
    pair_of,
    sides_of,
    sides_with,
    split_direction,
)
from m4.data.preprocess import EOS_IDS, TAG_IDS
from m4.data.sources import SPLITS
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import (
    TokenArray,
    Tokenized,
    array_name,
    id_type,
    ranges_of,
    tokenized,
)
from m4.data.vocabulary.vocabulary import EOS_ID, PAD_ID, Vocabulary
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

# Fewer sentences a worker are done before it has started.
_WORKER_SENTENCES, _SENTENCE_BYTES = 200_000, 50
# Tokens of a translation, whatever its source; and its tokens a token of the source, at least.
SPARE_TOKENS, LEAST_FACTOR = 16, 2
_MOST_PAIRS = 1_000_000  # that decide a direction's length factor
Ints, Numbers = npt.NDArray[np.int64], npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
Counts = dict[str, dict[str, dict[str, Any]]]


def vocabulary_file(folder: Path, role: str | None) -> Path:
    """Returns the file of a vocabulary.

    Args:
        folder: A corpus's folder, or a SentencePiece model (FILE.model), which is the file itself.
        role: source or target, or None for the vocabulary that they share.
    """
    if folder.suffix == ".model":
        return folder
    return folder / (f"vocabulary.{role}.model" if role else "vocabulary.model")


# Where Hugging Face's folders have the SentencePiece model.
PRETRAINED_VOCABULARIES = ("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model")


def pretrained_vocabulary(folder: Path) -> Path | None:
    """Returns the SentencePiece model in a folder of Hugging Face's layout; None: it has none."""
    found = (folder / name for name in PRETRAINED_VOCABULARIES)
    return next((path for path in found if path.is_file()), None)


def by_role(settings: Mapping[str, Any]) -> bool:
    """Returns whether a side has other ids as a source than as a target."""
    return settings["target_vocabulary_size"] is not None or settings["normalization"] != "nfc"


def arrays_of(folder: Path, settings: Mapping[str, Any]) -> list[TokenArray]:
    """Returns the arrays that the directions of a corpus need."""
    longest = {"source": settings["source_length"] - 2, "target": settings["target_length"] - 1}
    shared = settings["target_vocabulary_size"] is None
    if not by_role(settings):
        # Every side is source in one direction, with tag and eos, and target in the other, with
        # eos.
        path = vocabulary_file(folder, None)
        return [TokenArray(s, path, min(longest.values())) for s in SIDES]
    directions = directions_of(settings["mixture"], settings["language_pairs"])
    return [
        TokenArray(
            side, vocabulary_file(folder, None if shared else role), longest[role], role, role
        )
        for role in ROLES
        for side in sides_with(role, directions)
    ]


def tokenize(
    folder: Path,
    pairs: Sequence[str],
    counts: Counts,
    settings: Mapping[str, Any],
    progress: Progress,
    workers: int | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Tokenizes the text and writes the arrays; returns what the manifest says of these.

    Args:
        workers: Number of processes, which changes nothing. Defaults to as many as there are cores
            and enough text.
        engine: Tokenizes. Defaults to these processes.
    """
    arrays, ways = arrays_of(folder, settings), settings["segmentations"]
    spans = {
        (split, code): list(
            ranges_of(text_file(folder, split, code), split == "train", of, is_synthetic(code))
        )
        for split in SPLITS
        for code, of in _stores(arrays, pairs).items()
    }
    every = [span for of_file in spans.values() for span in of_file]
    total = sum(span.stop - span.start for span in every)
    if workers is None:
        sentences = total // _SENTENCE_BYTES * ways
        workers = min(len(available_cpus()), sentences // _WORKER_SENTENCES)
    run = functools.partial(tokenized, workers=workers) if engine is None else engine.tokenized
    results = run(every, arrays, ways, settings["sampling_alpha"])
    done = 0
    for (split, code), of_file in spans.items():
        unfinished = Unfinished(folder, split, code, arrays)
        for span in of_file:
            unfinished.append(next(results))
            done += span.stop - span.start
            progress("tokens", done, total)
    return ArrayWriter(folder, pairs, arrays, counts, ways).write(settings["mixture"])


def _stores(arrays: Sequence[TokenArray], pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns language -> the stores that have its sentences."""
    found: dict[str, dict[str, None]] = {code: {} for code in languages_of(pairs)}
    for pair in pairs:
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            found[code] |= {a.store: None for a in arrays if a.side == side}
    return {code: tuple(of) for code, of in found.items()}


class Unfinished:
    """The ids of a language's sentences before it is known which are used: on disk, by way."""

    def __init__(self, folder: Path, split: str, code: str, arrays: Sequence[TokenArray]) -> None:
        self._stem = folder / f"{split}.{code}"
        self._types = {a.store: np.dtype(id_type(a.vocabulary)) for a in arrays}

    def append(self, found: Tokenized) -> None:
        """Adds sentences in the order of their numbers."""
        for store, ways in found.items():
            for way, part in enumerate(ways):
                with self._path(store, way, "ids").open("ab") as file:
                    part.ids.astype(self._types[store]).tofile(file)
                with self._path(store, way, "lengths").open("ab") as file:
                    part.lengths.astype(np.int32).tofile(file)

    def lengths(self, store: str, way: int = 0) -> npt.NDArray[np.int32]:
        """Returns [n] lengths, none where the language has no sentences in a store."""
        path = self._path(store, way, "lengths")
        there = path.is_file() and path.stat().st_size
        return np.memmap(path, np.int32, "r") if there else np.zeros(0, np.int32)

    def used(self, store: str, way: int, used: Mask) -> Iterator[Ragged]:
        """Yields the sentences that are used, and removes them here."""
        lengths = self.lengths(store, way)
        if not len(lengths):  # the language has none in this role, but its numbers stay
            yield Ragged(np.zeros(0, self._types[store]), np.zeros(int(used.sum()), np.int64))
        else:
            with self._path(store, way, "ids").open("rb") as file:
                for start in range(0, len(lengths), BLOCK):
                    of_block = lengths[start : start + BLOCK].astype(np.int64)
                    ids = np.fromfile(file, self._types[store], int(of_block.sum()))
                    rows = np.flatnonzero(used[start : start + BLOCK])
                    yield Ragged(ids, of_block).take(rows)
        for what in ("ids", "lengths"):
            self._path(store, way, what).unlink(missing_ok=True)

    def _path(self, store: str, way: int, what: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{store}.{way}.{what}")


class ArrayWriter:
    """Writes the token arrays of a corpus, from its text and the unfinished ids.

    Args:
        pairs: Pairs of languages.
        arrays: What their directions need.
        counts: Gets what the manifest says of each pair of languages and split.
        ways: Number of ways in which training sentences are tokenized.
        marked: Whether the arrays lack tag and eos (`Cache.marked`).
    """

    def __init__(
        self,
        folder: Path,
        pairs: Sequence[str],
        arrays: Sequence[TokenArray],
        counts: Counts,
        ways: int = 1,
        marked: bool = True,
    ) -> None:
        self._folder, self._pairs, self._arrays, self._counts = folder, pairs, arrays, counts
        self._ways, self._marked = ways, marked
        self._made: dict[str, Any] = {"sentences": {}, "shards": {}}

    def write(self, mixture: Mixture | None) -> dict[str, Any]:
        """Writes all arrays, without training pairs that are too long.

        Sentences that no pair has any more leave the text, too.

        Returns:
            "sentences", their number by split and language; "shards", by split the first entry of
            each shard of each array; "length_factors" of the mixture's directions.

        Raises:
            InputError: All training pairs of two languages are too long.
        """
        for split in SPLITS:
            self._write_split(split)
        self._write_token_counts()
        return {**self._made, "length_factors": self._length_factors(mixture or "direct")}

    def _write_split(self, split: str) -> None:
        folder, arrays = self._folder, self._arrays
        unfinished = {c: Unfinished(folder, split, c, arrays) for c in languages_of(self._pairs)}
        used = {
            code: np.zeros(max(len(of.lengths(a.store)) for a in arrays), bool)
            for code, of in unfinished.items()
        }
        kept = {}
        for pair in self._pairs:
            numbers = take_numbers(folder, split, pair)
            kept[pair] = self._kept(pair, split, numbers, unfinished)
            for side, code in enumerate(split_direction(pair)):
                used[code][numbers[kept[pair], side]] = True
        shards = self._made["shards"][split] = {}
        for array in {a.store: a for a in arrays}.values():
            sentences = (
                block
                for way in self._ways_of(split)
                for code, of in unfinished.items()
                for block in of.used(array.store, way, used[code])
            )
            name, kind = array_name(split, array.store), id_type(array.vocabulary)
            shards[array.store] = write_sentences(folder, name, sentences, kind)
        numbers_now = {code: _leave_out(folder, split, code, of) for code, of in used.items()}
        self._made["sentences"][split] = {code: int(of.sum()) for code, of in used.items()}
        shards["pairs"] = write_pairs(folder, split, self._finish_pairs(split, kept, numbers_now))

    def _ways_of(self, split: str) -> range:
        return range(self._ways if split == "train" else 1)

    def _kept(
        self,
        pair: str,
        split: str,
        numbers: Numbers,
        unfinished: Mapping[str, Unfinished],
    ) -> Mask:
        """Returns which rows of a pair of languages stay, and counts those that are too long."""
        long = np.zeros(len(numbers), bool)
        for array in self._arrays:
            side = SIDES.index(array.side)
            lengths = unfinished[split_direction(pair)[side]].lengths(array.store)
            long |= lengths[numbers[:, side]] > array.longest
        self._counts[pair][split]["too_long"] = int(long.sum())
        if split != "train":
            return np.ones(len(numbers), bool)
        if len(numbers) and long.all():
            raise InputError(
                f"{pair} has no training pairs: all {len(numbers)} are longer "
                f"than {min(a.longest for a in self._arrays)} pieces (CorpusSpec.lengths)"
            )
        return ~long

    def _store(self, split: str, store: str) -> SentenceShards:
        shards = self._made["shards"][split][store]
        return SentenceShards(Folder(self._folder), array_name(split, store), shards)

    def _finish_pairs(
        self, split: str, kept: Mapping[str, Mask], numbers_now: Mapping[str, Numbers]
    ) -> Iterator[Ints]:
        """Yields the numbers of each pair's sentences, and counts for the manifest."""
        folder, sizes, row, lines = self._folder, self._made["sentences"][split], 0, {}
        first, total, ways = bases(sizes), sum(sizes.values()), self._ways_of(split)
        stores = {a.store: self._store(split, a.store) for a in self._arrays}
        for pair in self._pairs:
            old, codes = take_numbers(folder, split, pair), split_direction(pair)
            lines = {code: lines[code] for code in codes if code in lines}
            compress_origins(pair_file(folder, split, pair, "origin"), kept[pair])
            remove_numbers(folder, split, pair)
            columns = [numbers_now[code][old[kept[pair], side]] for side, code in enumerate(codes)]
            numbers, digest = np.stack(columns, axis=1).astype(np.int64), hashlib.sha256()
            for texts in lines_of_pairs(folder, split, pair, numbers, lines):
                block = "".join([f"{a}\t{b}\n" for a, b in zip(*texts, strict=True)])
                digest.update(block.encode())
            means, most = {}, {}
            for array in self._arrays:
                side = SIDES.index(array.side)
                entries = numbers[:, side] + first[codes[side]]
                lengths = [stores[array.store].places(entries + way * total)[1] for way in ways]
                mean = sum(int(of.sum()) for of in lengths) / max(len(numbers) * len(ways), 1)
                means[array.name] = round(mean, 3)
                most[array.name] = max(int(of.max(initial=0)) for of in lengths)
            self._counts[pair][split] |= {
                "pairs": len(numbers),
                "rows": [row, row + len(numbers)],
                "mean_pieces": means,
                "longest": most,
                "sha256": digest.hexdigest(),
            }
            row += len(numbers)
            yield numbers

    def _write_token_counts(self) -> None:
        """Writes token_counts.npy, [V]: how often a model takes in each id.

        Every training pair comes once each way in all its segmentations. Each side is a source,
        with tag and eos, and a target, whose eos is predicted and not taken in; the decoder's first
        input is pad. With separate vocabularies there are token_counts.source.npy, of what the
        encoder takes in, and token_counts.target.npy, of the decoder.
        """
        sizes = self._made["sentences"]["train"]
        rows, first, total = self._training_pairs(), bases(sizes), sum(sizes.values())
        totals: dict[Path, Ints] = {}
        for array in self._arrays:
            vocabulary, side = Vocabulary(array.vocabulary), SIDES.index(array.side)
            of = totals.setdefault(array.vocabulary, np.zeros(vocabulary.size, np.int64))
            store = self._store("train", array.store)
            for pair in self._pairs:
                codes, (start, stop) = split_direction(pair), self._counts[pair]["train"]["rows"]
                number = self._ways * (stop - start)
                for begin in range(start, stop, BLOCK):
                    numbers = rows.take(np.arange(begin, min(begin + BLOCK, stop)))[:, side]
                    for way in range(self._ways):
                        found = store.take(numbers + (first[codes[side]] + way * total))
                        ids = np.bincount(found.ids, minlength=vocabulary.size)
                        of += (1 if array.role else 2) * ids
                        if not self._marked and array.role == "target":
                            ends = found.ids[np.cumsum(found.lengths) - 1]
                            of -= np.bincount(ends, minlength=vocabulary.size)
                if self._marked and array.role != "target":
                    # The tag in front of a side asks for the other one's language.
                    of[vocabulary.tag_id(codes[1 - side])] += number
                    of[EOS_ID] += number
                if array.role != "source":
                    of[PAD_ID] += number
        for path, of in totals.items():
            name = path.name.replace("vocabulary", "token_counts").replace(".model", ".npy")
            np.save(self._folder / name, of)

    def _length_factors(self, mixture: Mixture) -> dict[str, float]:
        """Returns direction -> a, so that targets of 99.9% of the pairs fit a L + 16 tokens.

        L is the number of a source's tokens with tag and EOS, and a target has an EOS, too.
        """
        more = (TAG_IDS + EOS_IDS, EOS_IDS) if self._marked else (0, 0)
        pairs, first = self._training_pairs(), bases(self._made["sentences"]["train"])
        stores = [
            self._store("train", next(a.store for a in self._arrays if a.role in (role, None)))
            for role in ROLES
        ]
        factors = {}
        for direction in directions_of(mixture, self._pairs):
            begin, end = self._counts[pair_of(direction)]["train"]["rows"]
            if begin == end:
                continue
            numbers = pairs.take(np.arange(begin, end, max(1, (end - begin) // _MOST_PAIRS)))
            sides = zip(sides_of(direction), stores, split_direction(direction), strict=True)
            lengths = [
                store.places(numbers[:, SIDES.index(side)] + first[code])[1]
                for side, store, code in sides
            ]
            needed = (lengths[1] + more[1] - SPARE_TOKENS) / (lengths[0] + more[0])
            factors[direction] = round(float(np.quantile(needed, 0.999, method="higher")), 3)
        return factors

    def _training_pairs(self) -> PairShards:
        return PairShards(Folder(self._folder), "train", self._made["shards"]["train"]["pairs"])


def bases(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns language -> the number of its first sentence among all."""
    ends = np.cumsum([*sizes.values()]).tolist()
    return {code: end - size for (code, size), end in zip(sizes.items(), ends, strict=True)}


def _leave_out(folder: Path, split: str, code: str, used: Mask) -> Numbers:
    """Leaves sentences that are not used out of a text; returns [n] the numbers of all."""
    if not used.all():
        path = text_file(folder, split, code)
        part = path.with_suffix(".used")
        with path.open("rb") as file, part.open("wb") as left:
            left.writelines(compress(file, used.tobytes()))
        part.replace(path)
    return np.cumsum(used, dtype=np.uint32) - np.uint32(1)


def whole_factors(factors: Mapping[str, float], directions: Sequence[str]) -> dict[str, int]:
    """Returns target language -> a as a whole number, for the languages that need more than 2."""
    whole: dict[str, int] = {}
    for direction in directions:
        to, factor = split_direction(direction)[1], int(np.ceil(factors.get(direction, 0)))
        if factor > whole.get(to, LEAST_FACTOR):
            whole[to] = factor
    return whole
