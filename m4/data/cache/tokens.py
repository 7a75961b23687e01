"""The token arrays of a cache: every sentence tokenized once, flat, with offsets."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.beam import Engine
from m4.data.cache.corpus_text import Progress, text_file
from m4.data.cache.origins import Compressed
from m4.data.directions import (
    ROLES,
    SIDES,
    directions_of,
    is_synthetic,
    sides_with,
    split_direction,
)
from m4.data.sources import SPLITS
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import (
    TokenArray,
    Tokenized,
    id_type,
    ranges_of,
    tokenized,
)
from m4.data.vocabulary.vocabulary import EOS_ID, PAD_ID, Vocabulary
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

# Fewer pairs a worker are done before it has started.
_WORKER_PAIRS = 100_000
_BLOCK = 1 << 22


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
        )
        for role in ROLES
        for side in sides_with(role, directions)
    ]


def tokenize(
    folder: Path,
    pairs: Sequence[str],
    counts: dict[str, dict[str, dict[str, Any]]],
    settings: dict[str, Any],
    progress: Progress,
    workers: int | None = None,
    engine: Engine | None = None,
) -> None:
    """Text -> <split>.<name>.{tokens,offsets}.npy; too long train pairs leave the text too.

    workers: processes; None: as many as there are cores and enough text. They change nothing.
    """
    total = sum(counts[pair][split]["pairs"] for split in SPLITS for pair in pairs)
    arrays = arrays_of(folder, settings)
    ways = settings["segmentations"]
    spans = {
        (split, pair): list(ranges_of(text_file(folder, split, pair), split == "train", synthetic))
        for split in SPLITS
        for pair in pairs
        for synthetic in [_synthetic_sides(pair)]
    }
    every = [span for of_file in spans.values() for span in of_file]
    if workers is None:
        workers = min(len(available_cpus()), total * ways // _WORKER_PAIRS)
    run = functools.partial(tokenized, workers=workers) if engine is None else engine.tokenized
    results = run(every, arrays, ways, settings["sampling_alpha"])
    done = 0

    def of(split: str, pair: str) -> Iterator[Tokenized]:
        nonlocal done
        for _ in spans[split, pair]:
            result = next(results)
            done += result.pairs + (result.too_long if split == "train" else 0)
            progress("tokens", done, total)
            yield result

    write_arrays(folder, pairs, arrays, counts, of, ways)
    sizes = {pair: counts[pair]["train"]["pairs"] for pair in pairs}
    write_token_counts(folder, arrays, sizes, ways)


def _synthetic_sides(pair: str) -> tuple[str, ...]:
    """Returns the sides of a pair that a model wrote."""
    sides = zip(SIDES, split_direction(pair), strict=True)
    return tuple(side for side, code in sides if is_synthetic(code))


def write_arrays(
    folder: Path,
    pairs: Sequence[str],
    arrays: Sequence[TokenArray],
    counts: dict[str, dict[str, dict[str, Any]]],
    results: Callable[[str, str], Iterator[Tokenized]],
    ways: int = 1,
) -> None:
    """Writes the arrays of every split, and leaves pairs that are too long out of its text.

    Args:
        counts: Gets what the manifest says of each pair of languages and split.
        results: (split, pair of languages) -> its tokenized sentence pairs.
        ways: Number of ways in which training sentences are tokenized.

    Raises:
        InputError: All training pairs of two languages are too long.
    """
    for split in SPLITS:
        kind = ways if split == "train" else 1
        files = {a.name: _ArrayFile(folder / f"{split}.{a.name}", a, kind) for a in arrays}
        row = 0
        for pair in pairs:
            part = _Part(files, text_file(folder, split, pair))
            for result in results(split, pair):
                part.append(result)
            counts[pair][split] |= part.finish(row)
            row += part.pairs
            if split == "train" and not part.pairs and part.too_long:
                least = min(a.longest for a in arrays)
                raise InputError(
                    f"{pair} has no training pairs: all {part.too_long} are longer "
                    f"than {least} pieces (CorpusSpec.lengths)"
                )
        for file in files.values():
            file.finish()


class _Part:
    """Two languages' part of a split, as it is written: its text and its rows of the arrays."""

    def __init__(self, files: dict[str, _ArrayFile], path: Path) -> None:
        self._files, self._path = files, path
        self._unfinished = path.with_suffix(".kept")
        self._unfinished.write_bytes(b"")
        self._digest = hashlib.sha256()
        self._sums, self._most = dict.fromkeys(files, 0), dict.fromkeys(files, 0)
        self.pairs = self.too_long = 0
        self._origins = Compressed(path)

    def append(self, result: Tokenized) -> None:
        with self._unfinished.open("ab") as file:
            file.write(result.text)
        self._digest.update(result.text)
        self.pairs += result.pairs
        self.too_long += result.too_long
        left = result.too_long if result.kept is not None else 0
        self._origins.append(result.pairs + left, result.kept)
        for name, ways in result.arrays.items():
            self._files[name].append(ways)
            self._sums[name] += sum(len(way.ids) for way in ways)
            longest = (int(way.lengths.max(initial=0)) for way in ways)
            self._most[name] = max(self._most[name], *longest)

    def finish(self, row: int) -> dict[str, Any]:
        """For the manifest. row: the first one of the part."""
        self._unfinished.replace(self._path)
        self._origins.finish()
        return {
            "pairs": self.pairs,
            "rows": [row, row + self.pairs],
            "too_long": self.too_long,
            "mean_pieces": {
                name: round(sum_ / max(self.pairs * self._files[name].ways, 1), 3)
                for name, sum_ in self._sums.items()
            },
            "longest": self._most,
            "sha256": self._digest.hexdigest(),
        }


class _ArrayFile:
    """A token array in the making, on disk: none of it stays in memory.

    The array holds all sentences in one segmentation, then all in the next; until the end each
    segmentation has its own files.
    """

    def __init__(self, stem: Path, array: TokenArray, ways: int) -> None:
        self.ways, self._stem, self._dtype = ways, stem, np.dtype(id_type(array.vocabulary))
        for path in self._parts("ids") + self._parts("lengths"):
            path.write_bytes(b"")

    def _parts(self, what: str) -> list[Path]:
        return [self._stem.with_name(f"{self._stem.name}.{w}.{what}") for w in range(self.ways)]

    def append(self, ways: Sequence[Ragged]) -> None:
        for ids, lengths, way in zip(self._parts("ids"), self._parts("lengths"), ways, strict=True):
            with ids.open("ab") as file:
                way.ids.tofile(file)
            with lengths.open("ab") as file:
                way.lengths.astype(np.int32).tofile(file)

    def finish(self) -> None:
        """Writes .tokens.npy and .offsets.npy."""
        sizes = [path.stat().st_size // self._dtype.itemsize for path in self._parts("ids")]
        with open(f"{self._stem}.tokens.npy", "wb") as file:
            header = {"descr": self._dtype.str, "fortran_order": False, "shape": (sum(sizes),)}
            np.lib.format.write_array_header_1_0(file, header)
            for path in self._parts("ids"):
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file)
                path.unlink()
        rows = sum(path.stat().st_size // 4 for path in self._parts("lengths"))
        offsets = np.lib.format.open_memmap(
            f"{self._stem}.offsets.npy", "w+", np.int64, shape=(rows + 1,)
        )
        row = last = 0
        for path in self._parts("lengths"):
            # Nothing cannot be mapped.
            mapped = np.memmap(path, np.int32, "r") if path.stat().st_size else np.zeros(0)
            for lengths in blocks_of(mapped):
                np.cumsum(lengths, out=offsets[row + 1 : row + 1 + len(lengths)])
                offsets[row + 1 : row + 1 + len(lengths)] += last
                row += len(lengths)
                last = int(offsets[row])
            path.unlink()
        assert last == sum(sizes), self._stem
        offsets.flush()


def blocks_of(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(array), _BLOCK):
        yield array[start : start + _BLOCK]


def write_token_counts(
    folder: Path,
    arrays: Sequence[TokenArray],
    pairs: dict[str, int],
    ways: int = 1,
    marked: bool = True,
) -> None:
    """Writes token_counts.npy, [V]: how often a model takes in each id.

    Every training pair comes once each way in all its segmentations. Each side is a source, with
    tag and eos, and a target, whose eos is predicted and not taken in; the decoder's first input is
    pad. With separate vocabularies there are token_counts.source.npy, of what the encoder takes in,
    and token_counts.target.npy, of the decoder.

    Args:
        marked: Whether the arrays lack tag and eos (`Cache.marked`).
    """
    of: dict[Path, list[TokenArray]] = {}
    for array in arrays:
        of.setdefault(array.vocabulary, []).append(array)
    for path, members in of.items():
        vocabulary = Vocabulary(path)
        totals = np.zeros(vocabulary.size, np.int64)
        for array in members:
            flat, offsets = (
                np.load(folder / f"train.{array.name}.{what}.npy", mmap_mode="r")
                for what in ("tokens", "offsets")
            )
            for block in blocks_of(flat):
                totals += (1 if array.role else 2) * np.bincount(block, minlength=vocabulary.size)
            if not marked and array.role == "target":
                for ends in blocks_of(offsets[1:]):
                    totals -= np.bincount(flat[ends - 1], minlength=vocabulary.size)
            if marked and array.role != "target":
                # The tag in front of a side asks for the other one's language.
                other = 1 - SIDES.index(array.side)
                for pair, number in pairs.items():
                    totals[vocabulary.tag_id(split_direction(pair)[other])] += ways * number
                totals[EOS_ID] += ways * sum(pairs.values())
            if array.role != "source":
                totals[PAD_ID] += ways * sum(pairs.values())
        np.save(
            folder / path.name.replace("vocabulary", "token_counts").replace(".model", ".npy"),
            totals,
        )
