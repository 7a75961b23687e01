"""What is in a corpus, language by language: pairs, lengths in pieces, overlap, bad lines, columns.

The pairs go through the cleaning that they would be trained after; nothing is kept on disk.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.clean import DEFAULT, Cleaner
from m4.data.cleaning.ledger import Ledger
from m4.data.inspection.columns import Columns
from m4.data.scripts import COMMON, NUMBERS, script_numbers, scripts_of
from m4.data.sources import SPLITS, Pair
from m4.data.sources.reading.folder import Folder
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary, least_size

# Of each language: pairs that are tokenized, and the longest in addition.
_SAMPLE, _LONGEST = 1000, 8
# Sentences that the vocabulary of the lengths is trained on.
_VOCABULARY_SENTENCES = 40_000
# (done, total, what)
Progress = Callable[[int, int, str], None]


class BadLines(NamedTuple):
    """Lines of a file that are no pair. where: ' (line 3, 17, ...)'."""

    file: str
    lines: int
    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.file}: {self.lines:,} skipped: {self.reason}{self.where}"


@dataclass
class Sampled:
    """Pairs of one language at even distances, and the longest."""

    pairs: list[Pair] = field(default_factory=list)
    longest: list[tuple[int, int, Pair]] = field(default_factory=list)
    seen: int = 0
    step: int = 1

    def add(self, chunk: Chunk) -> None:
        lengths = chunk.lengths("english") + chunk.lengths("translation")
        for row in np.argsort(-lengths, kind="stable")[:_LONGEST].tolist():
            pair = Pair(chunk.english[row], chunk.translation[row])
            heapq.heappush(self.longest, (int(lengths[row]), self.seen + row, pair))
            if len(self.longest) > _LONGEST:
                heapq.heappop(self.longest)
        for row in range(-self.seen % self.step, len(chunk), self.step):
            self.pairs.append(Pair(chunk.english[row], chunk.translation[row]))
        self.seen += len(chunk)
        while len(self.pairs) >= 2 * _SAMPLE:
            self.pairs, self.step = self.pairs[::2], 2 * self.step


@dataclass(frozen=True)
class Counted:
    """A corpus as it was read and cleaned. sizes: language -> split -> pairs that are left.
    english: codes of the folder that are English too, which are not read."""

    sizes: Mapping[str, Mapping[str, int]]
    sampled: Mapping[str, Sampled]
    ledger: Ledger
    bad: Sequence[BadLines]
    columns: Columns
    english: Sequence[str] = ()

    def overlap(self, language: str) -> float:
        """The share of the training pairs that are left out for a side in a dev or test set."""
        train = self.ledger.count(language, "train")
        return sum(
            pairs for why, pairs in train.dropped.items() if why.startswith("overlap:")
        ) / max(train.read, 1)


def count(source: Folder, languages: Sequence[str], progress: Progress) -> Counted:
    """Reads and cleans a corpus once.

    ValueError: files that cannot be read, or do not belong together.
    """
    columns = Columns()
    sizes: dict[str, dict[str, int]] = {code: {} for code in languages}
    sampled = {code: Sampled() for code in languages}
    total, done = len(SPLITS) * len(languages), 0
    with tempfile.TemporaryDirectory(prefix="m4-new-") as spool:
        cleaner = Cleaner(DEFAULT, source, languages, Path(spool), on_read=columns.add)
        for split in reversed(SPLITS):  # training text overlaps with what came before it
            for code in languages:
                progress(done, total, f"{split} {code}")
                sizes[code][split] = 0
                for chunk in cleaner.pairs(code, split):
                    sizes[code][split] += len(chunk)
                    if split == "train":
                        sampled[code].add(chunk)
                done += 1
        ledger = cleaner.finish()
    progress(total, total, "")
    return Counted(sizes, sampled, ledger, _bad_lines(source), columns)


def _bad_lines(source: Folder) -> list[BadLines]:
    """Mistakes by file; then what is left out by rule, such as fuzzy messages, by reason."""
    found, others = [], dict[str, list[int]]()
    for (file, reason), lines in sorted(source.skipped.items()):
        if where := source.reading.where(file, reason):
            found.append(BadLines(file, lines, reason, where))
        else:
            others.setdefault(reason, []).append(lines)
    found += [BadLines(f"{len(by)} files", sum(by), why, "") for why, by in others.items()]
    return found


def share_of_scripts(language: str, sampled: Sampled) -> float | None:
    """The share of the sample's letters that the language is written in; None: nothing is known of
    the code, or there are no letters."""
    scripts = scripts_of(language)
    text = "".join(pair.translation for pair in sampled.pairs)
    numbers = script_numbers(np.frombuffer(text.encode("utf-32-le"), np.uint32))
    letters = numbers[~np.isin(numbers, [NUMBERS[script] for script in COMMON])]
    if not scripts or not len(letters):
        return None
    return float(np.isin(letters, [NUMBERS[script] for script in scripts]).mean())


@dataclass(frozen=True)
class Lengths:
    """Pieces of the sentences of a language's sample, with tag and eos: the longer side of each
    pair, and the mean of both sides."""

    longer: npt.NDArray[np.int64]
    mean: float

    def percentile(self, percent: float) -> int:
        return int(np.percentile(self.longer, percent))

    def too_long(self, length: int) -> float:
        """The share of pairs that training would leave out."""
        return float((self.longer > length).mean())


def lengths(counted: Counted, vocabulary_size: int) -> tuple[dict[str, Lengths], int]:
    """Language -> lengths of its sample in pieces of a vocabulary that is trained on it; and the
    size of that vocabulary, smaller where the text has no more."""
    languages = [*counted.sampled]
    every = max(1, 2 * sum(len(s.pairs) for s in counted.sampled.values()) // _VOCABULARY_SENTENCES)
    texts = [
        text for one in counted.sampled.values() for pair in one.pairs[::every] for text in pair
    ]
    tags = ["en", *languages]
    with tempfile.TemporaryDirectory(prefix="m4-new-") as folder:
        path = Path(folder) / "vocabulary.model"
        vocabulary.train(path, texts, max(vocabulary_size, least_size(len(tags))), tags)
        made = Vocabulary(path)
        found = {code: _lengths_of(one, made) for code, one in counted.sampled.items()}
        return found, made.size


def _lengths_of(sampled: Sampled, made: Vocabulary) -> Lengths:
    pairs = sampled.pairs
    sides = [
        np.array([len(ids) for ids in made.encode(list(texts))], np.int64) + 2
        for texts in zip(*pairs, strict=True)
    ]
    longer = np.maximum(*sides)
    mean = float(np.mean(sides))
    # A longest pair counts as what it is of all pairs, not of the sample: only for the maximum.
    longest = [len(ids) + 2 for *_, pair in sampled.longest for ids in made.encode([*pair])]
    most = max([int(longer.max()), *longest])
    longer = np.sort(longer)
    longer[-1] = most
    return Lengths(longer, mean)
