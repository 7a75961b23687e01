"""Trains a cache's vocabularies, and writes its arrays in shards."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from pathlib import Path
from typing import Any

import numpy as np

from m4.data import permutation
from m4.data.arrays import U32, Int32, Ints, Mask
from m4.data.beam import Engine
from m4.data.cache.corpus_text import (
    BLOCK,
    Counts,
    Progress,
    TextWriter,
    compress_origins,
    numbers_file,
    on_disk,
    pair_file,
    take_numbers,
    text_file,
    texts_of_pairs,
)
from m4.data.cache.shards import PairShards, SentenceShards, write_pairs, write_sentences
from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.ledger import Ledger
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
from m4.data.preprocess import EOS_IDS, TAG_IDS, normalised
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS, IdSource
from m4.data.sources.reading.lines import plain
from m4.data.stream import numba_loops
from m4.data.vocabulary import Ragged, vocabulary
from m4.data.vocabulary.pieces import grow
from m4.data.vocabulary.tokenizing import (
    TextRange,
    TokenArray,
    Tokenized,
    array_name,
    id_type,
    in_parts,
    tokenized,
)
from m4.data.vocabulary.vocabulary import EOS_ID, PAD_ID, Vocabulary
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

# Minimum sentences per worker, as fewer would be done before it has started; and their bytes.
_WORKER_SENTENCES, _SENTENCE_BYTES = 200_000, 50
# Tokens that any translation may have, and minimum factor of a source's tokens.
SPARE_TOKENS, LEAST_FACTOR = 16, 2
_SAMPLED_PAIRS = 1_000_000  # one to two times as many pairs decide a direction's length factor


def vocabulary_file(folder: Path, role: str | None) -> Path:
    """Returns the file of a vocabulary.

    Args:
        folder: A corpus's folder, or a SentencePiece model (FILE.model), which is the file itself.
        role: source or target, or None for the vocabulary that they share.
    """
    if folder.suffix == ".model":
        return folder
    return folder / (f"vocabulary.{role}.model" if role else "vocabulary.model")


# Names of the SentencePiece model in Hugging Face's folders.
PRETRAINED_VOCABULARIES = ("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model")


def pretrained_vocabulary(folder: Path) -> Path | None:
    """Returns the SentencePiece model in a folder with Hugging Face's layout, or None."""
    found = (folder / name for name in PRETRAINED_VOCABULARIES)
    return next((path for path in found if path.is_file()), None)


def train_vocabularies(
    folder: Path, sizes: dict[str, int], settings: Mapping[str, Any], progress: Progress,
    grown_from: Path | None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Trains the shared vocabulary, or one for sources (with the tags) and one for targets.

    Args:
        sizes: Pair of languages -> number of training pairs.
        settings: `CorpusSpec.settings`.
        grown_from: Folder of the vocabularies that these grow from, if any.

    Returns:
        Role ("shared", or "source" and "target") -> the manifest's entry on the vocabulary.
    """
    size, target_size = settings["vocabulary_size"], settings["target_vocabulary_size"]
    tags, text = languages_of(sizes), settings.get("vocabulary_text", sizes)
    wanted: list[tuple[str | None, int, Mapping[str, Sequence[str]], list[str]]]
    wanted = [(None, size, dict.fromkeys(sizes, SIDES), tags)]
    if target_size is not None:
        directions = {pair: directions_of(settings["mixture"], [pair]) for pair in sizes}
        source, target = (
            {pair: sides_with(role, own) for pair, own in directions.items()} for role in ROLES
        )
        wanted = [("source", size, source, tags), ("target", target_size, target, [])]
    made, lines = {}, {}
    for done, (role, pieces, sides, tags) in enumerate(wanted):
        progress("vocabulary", done, len(wanted))
        path = vocabulary_file(folder, role)
        texts = sample(
            lambda pair, rows: texts_of_pairs(
                folder, "train", pair, take_numbers(folder, "train", pair)[rows], lines
            ),
            {pair: size for pair, size in sizes.items() if pair in text},
            sides,
            settings["vocabulary_sentences"],
            settings["vocabulary_temperature"],
        )
        given = map(normalised, texts), pieces, tags
        if grown_from is None:
            about = vocabulary.train(path, *given)
        else:
            about = grow(path, Vocabulary(vocabulary_file(grown_from, role)), *given)
        made[role or "shared"] = {**about, "fingerprint": Vocabulary(path).fingerprint}
    progress("vocabulary", len(wanted), len(wanted))
    return made


def sample(
    text: Callable[[str, Ints], tuple[list[str], list[str]]], sizes: Mapping[str, int],
    sides: Mapping[str, Sequence[str]], sentences: int, temperature_: float,
) -> Iterator[str]:  # fmt: skip
    """Yields training sentences for a vocabulary, sampled over languages by temperature.

    A language has the sentences of all its pairs, one after another. Its share is taken from a
    keyed permutation of them, repeated as often as needed. No other text is read.

    Args:
        text: Function of a language pair and rows that returns both sides of them.
        sizes: Pair -> number of training pairs.
        sides: Pair -> sides to use.
        sentences: Total number of sentences.
    """
    totals: dict[str, int] = {}
    # Pair -> for each side: side, language, and number of its first sentence in the language.
    parts: dict[str, list[tuple[int, str, int]]] = {pair: [] for pair in sizes}
    for pair, size in sizes.items():
        for side, code in enumerate(split_direction(pair)):
            if SIDES[side] in sides[pair]:
                parts[pair].insert(0, (side, code, totals.get(code, 0)))
                totals[code] = totals.get(code, 0) + size
    there = {code: size for code, size in totals.items() if size}
    rates = dict.fromkeys(totals, 0.0) | temperature(there, temperature_)
    budget = min(sentences, sum(totals.values()))
    for pair, size in sizes.items():
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            times = [
                _times(totals[code], first + start, first + stop, code, round(budget * rates[code]))
                for _, code, first in parts[pair]
            ]
            needed = np.flatnonzero(np.any([*times, np.zeros(stop - start, bool)], axis=0))
            texts = text(pair, start + needed) if len(needed) else ()
            for place, row in enumerate(needed.tolist()):
                for (side, *_), of_row in zip(parts[pair], times, strict=True):
                    yield from [texts[side][place]] * int(of_row[row])


def _times(size: int, start: int, stop: int, name: str, wanted: int) -> Ints:
    """Returns how often rows start to stop - 1 of `size` are in a sample of `wanted`."""
    rows = np.arange(start, stop, dtype=np.uint64)
    key = np.uint64(permutation.key("vocabulary", name))
    place = numba_loops.permute_each(rows, np.uint64(size), key).astype(np.int64)
    return wanted // size + (place < wanted % size)


# The arrays.


def arrays_of(folder: Path, settings: Mapping[str, Any]) -> list[TokenArray]:
    """Returns the token arrays that the directions of a corpus need."""
    longest = {"source": settings["source_length"] - 2, "target": settings["target_length"] - 1}
    if settings["target_vocabulary_size"] is None:
        # Every side is a source in one direction, with tag and eos, and a target in the other.
        path = vocabulary_file(folder, None)
        return [TokenArray(s, path, min(longest.values())) for s in SIDES]
    directions = directions_of(settings["mixture"], settings["language_pairs"])
    return [
        TokenArray(side, vocabulary_file(folder, role), longest[role], role, role)
        for role in ROLES
        for side in sides_with(role, directions)
    ]


def tokenize(
    folder: Path, pairs: Sequence[str], counts: Counts, settings: Mapping[str, Any],
    progress: Progress, workers: int | None = None, engine: Engine | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Tokenizes the text and writes the arrays; returns the manifest's entries on them.

    Args:
        workers: Number of processes, without effect on the result. Defaults to as many as help.
        engine: Engine that tokenizes. Defaults to these processes.
    """
    arrays, ways = arrays_of(folder, settings), settings["segmentations"]
    spans = {}
    for split, (code, stores) in product(SPLITS, _stores(arrays, pairs).items()):
        path, mark = text_file(folder, split, code), is_synthetic(code)
        text = TextRange(path, 0, path.stat().st_size, split == "train", stores, mark)
        spans[split, code] = [*in_parts(text)]
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
    """Returns language -> stores that have its sentences."""
    found: dict[str, dict[str, None]] = {code: {} for code in languages_of(pairs)}
    for pair, array in product(pairs, arrays):
        found[split_direction(pair)[SIDES.index(array.side)]][array.store] = None
    return {code: tuple(of) for code, of in found.items()}


class Unfinished:
    """Ids of a language's sentences on disk, by segmentation, before the used ones are known."""

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

    def lengths(self, store: str, way: int = 0) -> Int32:
        """Returns [n] lengths, which are empty if the language has no sentences in a store."""
        path = self._path(store, way, "lengths")
        there = path.is_file() and path.stat().st_size
        return np.memmap(path, np.int32, "r") if there else np.zeros(0, np.int32)

    def blocks(self, store: str, way: int, used: Mask) -> Iterator[tuple[int, Ragged, Ints]]:
        """Yields and removes blocks: number of the first sentence, the sentences, and used rows."""
        lengths = self.lengths(store, way)
        if not len(lengths):  # the language has no sentences in this role, but keeps their numbers
            count = int(used.sum())
            yield 0, Ragged(np.zeros(0, self._types[store]), np.zeros(count, int)), np.arange(count)
        else:
            with self._path(store, way, "ids").open("rb") as file:
                for start in range(0, len(lengths), BLOCK):
                    of_block = lengths[start : start + BLOCK].astype(np.int64)
                    ids = np.fromfile(file, self._types[store], int(of_block.sum()))
                    rows = np.flatnonzero(used[start : start + BLOCK])
                    yield start, Ragged(ids, of_block), rows
        for what in ("ids", "lengths"):
            self._path(store, way, what).unlink(missing_ok=True)

    def _path(self, store: str, way: int, what: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{store}.{way}.{what}")


@dataclass
class ArrayWriter:
    """Writer of a corpus's token arrays, from its text and the unfinished ids.

    Attributes:
        pairs: Language pairs.
        arrays: Token arrays that their directions need.
        counts: Receives the manifest's entry for each language pair and split.
        ways: Number of segmentations of training sentences.
        marked: Whether the arrays lack tag and eos (`Cache.marked`).
    """

    folder: Path
    pairs: Sequence[str]
    arrays: Sequence[TokenArray]
    counts: Counts
    ways: int = 1
    marked: bool = True

    def __post_init__(self) -> None:
        self._made: dict[str, Any] = {"sentences": {}, "shards": {}}
        # Vocabulary -> how often a model reads each id.
        files = {a.vocabulary for a in self.arrays}
        self._tokens = {path: np.zeros(Vocabulary(path).size, np.int64) for path in files}

    def write(self, mixture: Mixture | None) -> dict[str, Any]:
        """Writes all arrays, without training pairs that are too long and sentences only in them.

        Returns:
            "sentences" with their number by split and language; "shards" with the first entry of
            each shard of each array by split; "length_factors" of the mixture's directions.

        Raises:
            InputError: All training pairs of two languages are too long.
        """
        for split in SPLITS:
            self._write_split(split)
        self._write_token_counts()
        return {**self._made, "length_factors": self._length_factors(mixture or "direct")}

    def _write_split(self, split: str) -> None:
        folder, arrays = self.folder, self.arrays
        unfinished = {c: Unfinished(folder, split, c, arrays) for c in languages_of(self.pairs)}
        sizes = {c: max(len(of.lengths(a.store)) for a in arrays) for c, of in unfinished.items()}
        used = {code: on_disk(folder, size, np.bool_) for code, size in sizes.items()}
        # How often a model reads each sentence.
        uses = {
            (a.store, a.role): {c: on_disk(folder, size, np.int32) for c, size in sizes.items()}
            for a in arrays
        }
        kept, row = {}, 0
        for pair in self.pairs:
            numbers, codes = take_numbers(folder, split, pair), split_direction(pair)
            kept[pair] = self._kept(pair, split, row, unfinished)
            row += self.counts[pair][split]["pairs"]
            for start in range(0, len(numbers), BLOCK):
                stop = start + BLOCK
                sides = numbers[start:stop][kept[pair][start:stop]].T
                for code, side in zip(codes, sides, strict=True):
                    used[code][side] = True
                for a in arrays:
                    side = SIDES.index(a.side)
                    np.add.at(uses[a.store, a.role][codes[side]], sides[side], 1 if a.role else 2)
        shards = self._made["shards"][split] = {}
        for array in {a.store: a for a in arrays}.values():
            sentences = self._sentences(split, array, unfinished, used, uses)
            name, kind = array_name(split, array.store), id_type(array.vocabulary)
            shards[array.store] = write_sentences(folder, name, sentences, kind)
        numbers_now = {code: _leave_out(folder, split, code, of) for code, of in used.items()}
        self._made["sentences"][split] = {code: int(of.sum()) for code, of in used.items()}
        shards["pairs"] = write_pairs(folder, split, self._finish_pairs(split, kept, numbers_now))

    def _sentences(
        self, split: str, array: TokenArray, unfinished: Mapping[str, Unfinished],
        used: Mapping[str, Mask], uses: Mapping[tuple[str, str | None], Mapping[str, Int32]],
    ) -> Iterator[Ragged]:  # fmt: skip
        """Yields the sentences of an array, counting their ids as often as they are used."""
        of = self._tokens[array.vocabulary]
        for way, code in product(self._ways_of(split), unfinished):
            for start, block, rows in unfinished[code].blocks(array.store, way, used[code]):
                yield block if len(rows) == len(block.lengths) else block.take(rows)
                for (store, role), times in uses.items():
                    if split != "train" or store != array.store or not len(block.ids):
                        continue
                    n = times[code][start : start + len(block.lengths)]
                    of += np.bincount(block.ids, np.repeat(n, block.lengths), len(of)).astype(int)
                    if not self.marked and role == "target":
                        ends = block.ids[np.cumsum(block.lengths) - 1]
                        of -= np.bincount(ends, n, len(of)).astype(int)

    def _ways_of(self, split: str) -> range:
        return range(self.ways if split == "train" else 1)

    def _kept(self, pair: str, split: str, row: int, unfinished: Mapping[str, Unfinished]) -> Mask:
        """Returns and counts the pairs of two languages to keep; `row` is the first pair's row."""
        numbers, codes = take_numbers(self.folder, split, pair), split_direction(pair)
        kept, ways = on_disk(self.folder, len(numbers), np.bool_), self._ways_of(split)
        count, too_long = self.counts[pair][split], 0
        sides = [(a, SIDES.index(a.side)) for a in self.arrays]
        lengths = {
            a.name: [unfinished[codes[side]].lengths(a.store, way) for way in ways]
            for a, side in sides
        }
        pieces, most = dict.fromkeys(lengths, 0), dict.fromkeys(lengths, 0)
        for start in range(0, len(numbers), BLOCK):
            block = slice(start, start + BLOCK)
            found = {
                a.name: np.stack([of_way[numbers[block, side]] for of_way in lengths[a.name]])
                for a, side in sides
            }
            long = np.any([found[a.name][0] > a.longest for a in self.arrays], axis=0)
            too_long += int(long.sum())
            kept[block] = ~long if split == "train" else True
            for name, of_ways in found.items():
                pieces[name] += int(of_ways[:, kept[block]].sum())
                most[name] = max(most[name], int(of_ways[:, kept[block]].max(initial=0)))
        size = int(kept.sum())
        if split == "train" and len(numbers) and not size:
            raise InputError(
                f"{pair} has no training pairs: all {len(numbers)} are longer "
                f"than {min(a.longest for a in self.arrays)} pieces (CorpusSpec.lengths)"
            )
        several = max(size * len(ways), 1)
        count |= {
            "too_long": too_long,
            "pairs": size,
            "rows": [row, row + size],
            "mean_pieces": {name: round(of / several, 3) for name, of in pieces.items()},
            "longest": most,
        }
        return kept

    def _finish_pairs(
        self, split: str, kept: Mapping[str, Mask], numbers_now: Mapping[str, U32]
    ) -> Iterator[Ints]:
        """Yields the sentence numbers of each pair, and hashes their text for the manifest."""
        folder, lines = self.folder, {}
        for pair in self.pairs:
            old, codes = take_numbers(folder, split, pair), split_direction(pair)
            lines = {code: lines[code] for code in codes if code in lines}
            compress_origins(pair_file(folder, split, pair, "origin"), kept[pair])
            numbers_file(folder, split, pair).unlink()
            digest = hashlib.sha256()
            for start in range(0, len(old), BLOCK):
                block = old[start : start + BLOCK][kept[pair][start : start + BLOCK]].T
                now = [numbers_now[code][of] for code, of in zip(codes, block, strict=True)]
                numbers = np.stack(now, axis=1).astype(np.int64)
                texts = texts_of_pairs(folder, split, pair, numbers, lines)
                text = "".join([f"{a}\t{b}\n" for a, b in zip(*texts, strict=True)])
                digest.update(text.encode())
                yield numbers
            self.counts[pair][split]["sha256"] = digest.hexdigest()

    def _write_token_counts(self) -> None:
        """Writes token_counts.npy, [V]: how often a model reads each id.

        Every training pair counts once in each direction, in all its segmentations. Each side is a
        source, with tag and eos, and a target, whose first input is pad and whose eos is not read.
        With separate vocabularies, token_counts.source.npy counts the encoder's ids and
        token_counts.target.npy the decoder's.
        """
        for array in self.arrays:
            vocabulary, side = Vocabulary(array.vocabulary), SIDES.index(array.side)
            of = self._tokens[array.vocabulary]
            for pair in self.pairs:
                start, stop = self.counts[pair]["train"]["rows"]
                number = self.ways * (stop - start)
                if self.marked and array.role != "target":
                    # The tag in front of a side names the other side's language.
                    of[vocabulary.tag_id(split_direction(pair)[1 - side])] += number
                    of[EOS_ID] += number
                if array.role != "source":
                    of[PAD_ID] += number
        for path, of in self._tokens.items():
            name = path.name.replace("vocabulary", "token_counts").replace(".model", ".npy")
            np.save(self.folder / name, of)

    def _length_factors(self, mixture: Mixture) -> dict[str, float]:
        """Returns direction -> `a`, so that a L + 16 tokens suffice for targets of 99.9% of pairs.

        L is the number of a source's tokens with tag and eos; targets count with eos.
        """
        more = (TAG_IDS + EOS_IDS, EOS_IDS) if self.marked else (0, 0)
        shards, first = self._made["shards"]["train"], bases(self._made["sentences"]["train"])
        pairs = PairShards(self.folder, "train", shards["pairs"])
        names = [next(a.store for a in self.arrays if a.role in (role, None)) for role in ROLES]
        stores = [
            SentenceShards(self.folder, array_name("train", name), shards[name]) for name in names
        ]
        factors = {}
        for direction in directions_of(mixture, self.pairs):
            begin, end = self.counts[pair_of(direction)]["train"]["rows"]
            if begin == end:
                continue
            numbers = pairs.take(np.arange(begin, end, max(1, (end - begin) // _SAMPLED_PAIRS)))
            sides = zip(sides_of(direction), stores, split_direction(direction), strict=True)
            lengths = [
                store.places(numbers[:, SIDES.index(side)] + first[code])[1]
                for side, store, code in sides
            ]
            needed = (lengths[1] + more[1] - SPARE_TOKENS) / (lengths[0] + more[0])
            factors[direction] = round(float(np.quantile(needed, 0.999, method="higher")), 3)
        return factors


def bases(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns language -> number of its first sentence among those of all languages."""
    ends = np.cumsum([*sizes.values()]).tolist()
    return {code: end - size for (code, size), end in zip(sizes.items(), ends, strict=True)}


def _leave_out(folder: Path, split: str, code: str, used: Mask) -> U32:
    """Removes unused sentences from a text; returns [n] new numbers of all sentences."""
    if not used.all():
        path = text_file(folder, split, code)
        part = path.with_suffix(".used")
        with path.open("rb") as file, part.open("wb") as left:
            left.writelines(compress(file, used.data))
        part.replace(path)
    numbers = on_disk(folder, len(used), np.uint32)
    np.cumsum(used, out=numbers)
    numbers -= 1
    return numbers


def whole_factors(factors: Mapping[str, float], directions: Sequence[str]) -> dict[str, int]:
    """Returns target language -> factor `a` rounded up, for languages that need more than 2."""
    whole: dict[str, int] = {}
    for direction in directions:
        to, factor = split_direction(direction)[1], int(np.ceil(factors.get(direction, 0)))
        if factor > whole.get(to, LEAST_FACTOR):
            whole[to] = factor
    return whole


# A source of ids.


def write_given(
    folder: Path, source: IdSource, settings: dict[str, Any], progress: Progress
) -> tuple[Counts, Ledger, dict[str, Any]]:
    """Writes text, arrays and vocabularies of a source of ids in its own vocabulary.

    Nothing is tokenized or cleaned: the arrays have the ids unchanged, with eos. The text, for
    decoding and metrics, is the source's own if its vocabulary turns it into the same ids;
    otherwise, it is decoded from the ids.

    Returns:
        The manifest's counts, the ledger, and the manifest's entries on vocabularies and arrays.
    """
    pairs, ledger = settings["language_pairs"], Ledger()
    made = _write_vocabularies(folder, source)
    roles = [None, None] if "shared" in made else list(ROLES)
    longest = settings["source_length"], settings["target_length"]
    arrays = [
        TokenArray(side, vocabulary_file(folder, own), most, role, own or "")
        for side, own, most, role in zip(SIDES, roles, longest, ROLES, strict=True)
    ]
    vocabularies = [Vocabulary(array.vocabulary) for array in arrays]
    counts: Counts = {pair: {split: {} for split in SPLITS} for pair in pairs}
    for done, split in enumerate(SPLITS):
        writer = TextWriter(folder, split, pairs, once=False)
        for number, pair in enumerate(pairs):
            progress("tokens", done * len(pairs) + number, len(SPLITS) * len(pairs))
            unfinished = [Unfinished(folder, split, c, arrays) for c in split_direction(pair)]
            count = ledger.count(pair, split)
            for block in source.blocks(pair, split):
                sides, columns = (block.inputs, block.targets), []
                texts = zip(*block.texts, strict=True)
                names = ("inputs", "targets")
                for name, side, of, given in zip(names, sides, vocabularies, texts, strict=True):
                    _check(side, of, f"{pair}, {split}", name, count.read)
                    flagged = count.flagged if split != "train" else Counter()
                    columns.append(_texts(side, of, given, flagged))
                numbers = np.arange(count.read + 1, count.read + 1 + len(block.texts))
                count.read = count.kept = count.read + len(numbers)
                writer.add(pair, Chunk(numbers, *columns))
                for array, side, ids in zip(arrays, sides, unfinished, strict=True):
                    ids.append({array.store: [side]})
            if split == "train" and not count.read:
                raise InputError(f"{pair} has no training pairs: the source has none")
            writer.end(pair)
    arrays_made = ArrayWriter(folder, pairs, arrays, counts, marked=False).write("from_english")
    return counts, ledger, {"vocabularies": made, **arrays_made}


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
        made[role or "shared"] = {"size": vocabulary.size, "fingerprint": vocabulary.fingerprint}
    return made


def _check(side: Ragged, vocabulary: Vocabulary, where: str, name: str, before: int) -> None:
    """Raises InputError for an example without ids, or with ids outside the vocabulary."""
    if (empty := np.flatnonzero(side.lengths == 0)).size:
        raise InputError(
            f"{where}: example {before + int(empty[0])} has no {name}: the task's preprocessors "
            "must give at least an eos"
        )
    low, high = int(side.ids.min(initial=1)), int(side.ids.max(initial=1))
    if low <= PAD_ID or high >= vocabulary.size:
        allowed = f"the vocabulary has 1 to {vocabulary.size - 1}"
        raise InputError(f"{where}: {name} have ids from {low} to {high}, and {allowed}")


def _texts(
    side: Ragged, vocabulary: Vocabulary, given: tuple[str, ...], flagged: Counter[str]
) -> list[str]:
    """Returns the texts of a side: given ones that yield the ids, otherwise decoded ones."""
    bare = [row[:-1] if row[-1:] == [EOS_ID] else row for row in side.rows()]
    texts = [plain(text) for text in given]
    both = zip(texts, vocabulary.encode(texts), bare, vocabulary.decode(bare), strict=True)
    found = [text if text and same == row else plain(other) for text, same, row, other in both]
    again = vocabulary.encode(found)
    if differ := sum(a != b for a, b in zip(again, bare, strict=True)):
        flagged["ids: their text gives others"] += differ
    return found
