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
    directions_of,
    is_synthetic,
    languages_of,
    sides_with,
    split_direction,
)
from m4.data.sources import SPLITS
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import TokenArray, Tokenized, id_type, ranges_of, tokenized
from m4.data.vocabulary.vocabulary import EOS_ID, PAD_ID, Vocabulary
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

# Fewer sentences a worker are done before it has started.
_WORKER_SENTENCES, _SENTENCE_BYTES = 200_000, 50
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


def array_name(side: str, role: str | None) -> str:
    """Returns the name of a split's array: 'first', or 'first.source' where roles differ."""
    return f"{side}.{role}" if role else side


def by_role(settings: Mapping[str, Any]) -> bool:
    """Returns whether a side has other ids as a source than as a target."""
    return settings["target_vocabulary_size"] is not None or settings["normalization"] != "nfc"


def arrays_of(folder: Path, settings: dict[str, Any]) -> list[TokenArray]:
    """Returns the arrays that the directions of a corpus need."""
    longest = {"source": settings["source_length"] - 2, "target": settings["target_length"] - 1}
    shared = settings["target_vocabulary_size"] is None
    if not by_role(settings):
        # Every side is source in one direction, with tag and eos, and target in the other, with
        # eos.
        path = vocabulary_file(folder, None)
        return [TokenArray(array_name(s, None), s, path, min(longest.values())) for s in SIDES]
    directions = directions_of(settings["mixture"], settings["language_pairs"])
    return [
        TokenArray(
            array_name(side, role),
            side,
            vocabulary_file(folder, None if shared else role),
            longest[role],
            role,
            role,
        )
        for role in ROLES
        for side in sides_with(role, directions)
    ]


def tokenize(
    folder: Path,
    pairs: Sequence[str],
    counts: Counts,
    settings: dict[str, Any],
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
    stores = _stores(arrays, pairs)
    spans = {
        (split, code): list(
            ranges_of(text_file(folder, split, code), split == "train", of, is_synthetic(code))
        )
        for split in SPLITS
        for code, of in stores.items()
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
    made = write_arrays(folder, pairs, arrays, counts, ways)
    write_token_counts(folder, pairs, arrays, counts, made, ways)
    return made


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

    def used(self, store: str, way: int, used: npt.NDArray[np.bool_]) -> Iterator[Ragged]:
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


def write_arrays(
    folder: Path,
    pairs: Sequence[str],
    arrays: Sequence[TokenArray],
    counts: Counts,
    ways: int = 1,
) -> dict[str, Any]:
    """Writes the arrays of every split, without training pairs that are too long.

    Sentences that no pair has any more leave the text, too.

    Args:
        counts: Gets what the manifest says of each pair of languages and split.
        ways: Number of ways in which training sentences are tokenized.

    Returns:
        "sentences", their number by split and language, and "shards", by split the first entry of
        each shard of each array.

    Raises:
        InputError: All training pairs of two languages are too long.
    """
    made: dict[str, Any] = {"sentences": {}, "shards": {}}
    for split in SPLITS:
        split_ways = ways if split == "train" else 1
        unfinished = {c: Unfinished(folder, split, c, arrays) for c in languages_of(pairs)}
        used = {
            code: np.zeros(max(len(of.lengths(a.store)) for a in arrays), bool)
            for code, of in unfinished.items()
        }
        kept = {}
        for pair in pairs:
            numbers = take_numbers(folder, split, pair)
            kept[pair] = _kept(pair, numbers, arrays, unfinished, counts[pair][split], split)
            for side, code in enumerate(split_direction(pair)):
                used[code][numbers[kept[pair], side]] = True
        shards = {}
        for store in dict.fromkeys(array.store for array in arrays):
            sentences = (
                block
                for way in range(split_ways)
                for code, of in unfinished.items()
                for block in of.used(store, way, used[code])
            )
            kind = next(id_type(array.vocabulary) for array in arrays if array.store == store)
            shards[store] = write_sentences(folder, stem(split, store), sentences, kind)
        numbers_now = {code: _leave_out(folder, split, code, of) for code, of in used.items()}
        sizes = {code: int(of.sum()) for code, of in used.items()}
        made["sentences"][split] = sizes
        stores = {
            store: SentenceShards(Folder(folder), stem(split, store), firsts)
            for store, firsts in shards.items()
        }
        pairs_written = _finish_pairs(
            folder, split, pairs, arrays, counts, kept, numbers_now, sizes, stores, split_ways
        )
        made["shards"][split] = {**shards, "pairs": write_pairs(folder, split, pairs_written)}
    return made


def stem(split: str, store: str) -> str:
    """Returns the first part of the names of a split's token arrays."""
    return f"{split}.{store}" if store else split


def bases(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns language -> the number of its first sentence among all."""
    ends = np.cumsum([*sizes.values()]).tolist()
    return {code: end - size for (code, size), end in zip(sizes.items(), ends, strict=True)}


def _kept(
    pair: str,
    numbers: npt.NDArray[np.uint32],
    arrays: Sequence[TokenArray],
    unfinished: Mapping[str, Unfinished],
    count: dict[str, Any],
    split: str,
) -> npt.NDArray[np.int64]:
    """Returns the rows of a pair of languages that stay, and counts those that are too long."""
    long = np.zeros(len(numbers), bool)
    for array in arrays:
        side = SIDES.index(array.side)
        lengths = unfinished[split_direction(pair)[side]].lengths(array.store)
        long |= lengths[numbers[:, side]] > array.longest
    count["too_long"] = int(long.sum())
    if split != "train":
        return np.arange(len(numbers))
    if len(numbers) and long.all():
        raise InputError(
            f"{pair} has no training pairs: all {len(numbers)} are longer "
            f"than {min(a.longest for a in arrays)} pieces (CorpusSpec.lengths)"
        )
    return np.flatnonzero(~long)


def _leave_out(
    folder: Path, split: str, code: str, used: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Leaves sentences that are not used out of a text; returns [n] the numbers of all."""
    if not used.all():
        path = text_file(folder, split, code)
        part = path.with_suffix(".used")
        with path.open("rb") as file, part.open("wb") as left:
            left.writelines(compress(file, used.tobytes()))
        part.replace(path)
    return np.cumsum(used) - 1


def _finish_pairs(
    folder: Path,
    split: str,
    pairs: Sequence[str],
    arrays: Sequence[TokenArray],
    counts: Counts,
    kept: Mapping[str, npt.NDArray[np.int64]],
    numbers_now: Mapping[str, npt.NDArray[np.int64]],
    sizes: Mapping[str, int],
    stores: Mapping[str, SentenceShards],
    ways: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the numbers of each pair's sentences, and counts for the manifest."""
    row, lines, first, total = 0, {}, bases(sizes), sum(sizes.values())
    for pair in pairs:
        old, codes = take_numbers(folder, split, pair), split_direction(pair)
        compress_origins(pair_file(folder, split, pair, "origin"), kept[pair])
        remove_numbers(folder, split, pair)
        columns = [numbers_now[code][old[kept[pair], side]] for side, code in enumerate(codes)]
        numbers = np.stack(columns, axis=1)
        digest, sums = hashlib.sha256(), dict.fromkeys((a.name for a in arrays), 0)
        most = dict(sums)
        for texts in lines_of_pairs(folder, split, pair, numbers, lines):
            block = "".join([f"{a}\t{b}\n" for a, b in zip(*texts, strict=True)])
            digest.update(block.encode())
        for array in arrays:
            side = SIDES.index(array.side)
            entries = numbers[:, side] + first[codes[side]]
            for way in range(ways):
                _, lengths = stores[array.store].places(entries + way * total)
                sums[array.name] += int(lengths.sum())
                most[array.name] = max(most[array.name], int(lengths.max(initial=0)))
        counts[pair][split] |= {
            "pairs": len(numbers),
            "rows": [row, row + len(numbers)],
            "mean_pieces": {
                name: round(sum_ / max(len(numbers) * ways, 1), 3) for name, sum_ in sums.items()
            },
            "longest": most,
            "sha256": digest.hexdigest(),
        }
        row += len(numbers)
        yield numbers


def write_token_counts(
    folder: Path,
    pairs: Sequence[str],
    arrays: Sequence[TokenArray],
    counts: Counts,
    made: Mapping[str, Any],
    ways: int = 1,
    marked: bool = True,
) -> None:
    """Writes token_counts.npy, [V]: how often a model takes in each id.

    Every training pair comes once each way in all its segmentations. Each side is a source, with
    tag and eos, and a target, whose eos is predicted and not taken in; the decoder's first input is
    pad. With separate vocabularies there are token_counts.source.npy, of what the encoder takes in,
    and token_counts.target.npy, of the decoder.

    Args:
        made: The result of `write_arrays`.
        marked: Whether the arrays lack tag and eos (`Cache.marked`).
    """
    rows = PairShards(Folder(folder), "train", made["shards"]["train"]["pairs"])
    first, total = bases(made["sentences"]["train"]), sum(made["sentences"]["train"].values())
    totals: dict[Path, npt.NDArray[np.int64]] = {}
    for array in arrays:
        vocabulary, side = Vocabulary(array.vocabulary), SIDES.index(array.side)
        of = totals.setdefault(array.vocabulary, np.zeros(vocabulary.size, np.int64))
        firsts = made["shards"]["train"][array.store]
        store = SentenceShards(Folder(folder), stem("train", array.store), firsts)
        for pair in pairs:
            codes, (start, stop) = split_direction(pair), counts[pair]["train"]["rows"]
            number = ways * (stop - start)
            for begin in range(start, stop, BLOCK):
                numbers = rows.take(np.arange(begin, min(begin + BLOCK, stop)))[:, side]
                for way in range(ways):
                    found = store.take(numbers + (first[codes[side]] + way * total))
                    ids = np.bincount(found.ids, minlength=vocabulary.size)
                    of += (1 if array.role else 2) * ids
                    if not marked and array.role == "target":
                        ends = found.ids[np.cumsum(found.lengths) - 1]
                        of -= np.bincount(ends, minlength=vocabulary.size)
            if marked and array.role != "target":
                # The tag in front of a side asks for the other one's language.
                of[vocabulary.tag_id(codes[1 - side])] += number
                of[EOS_ID] += number
            if array.role != "source":
                of[PAD_ID] += number
    for path, of in totals.items():
        name = path.name.replace("vocabulary", "token_counts").replace(".model", ".npy")
        np.save(folder / name, of)
