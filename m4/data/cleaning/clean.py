"""Cleaning: passes a source's pairs through stages and counts everything in the ledger.

Training pairs are dropped or changed. Dev and test pairs pass through the same stages but are only
flagged; the cache normalises their text (`Cleaning.normalise`), as models read and write normalised
text.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from m4.data.arrays import Mask
from m4.data.cleaning import AnyCheck, Check, CleaningStage, Findings, FirstCheck, FittedCheck
from m4.data.cleaning.chunk import Chunk, Digests, chunks
from m4.data.cleaning.language_id import LanguageId
from m4.data.cleaning.ledger import ANY, Count, Ledger
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.overlap import Overlap
from m4.data.cleaning.script import Script
from m4.data.cleaning.stages import Duplicates, Empty, Identical, Length, LengthRatio
from m4.data.directions import SIDES
from m4.data.preprocess import normalised
from m4.data.sources import Pair, Source
from m4.data.sources.reading.lines import Tally, plain
from m4.settings import InputError, SettingError, checked, configurable

# (reason, language pair, split, number, the pair), for every dropped training pair.
OnDrop = Callable[[str, str, str, int, Pair], None]
# (language pair, split, sentence pairs), for everything that is read.
OnRead = Callable[[str, str, Chunk], None]
_Told = TypeVar("_Told")
Checks = Mapping[str, AnyCheck]  # checks by name of their stage, in order


@checked
@dataclass(frozen=True)
class Cleaning:
    """Cleaning of a corpus, by stages in order, before tokenization.

    Attributes:
        stages: Stages. The default leaves a sound corpus unchanged; `thorough` has all stages.
    """

    stages: Sequence[CleaningStage] = (Normalise(), Empty(), Duplicates(), Overlap())

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise SettingError("Cleaning.stages", names, "stages of different kinds")

    def identity(self) -> dict[str, Any]:
        """Returns what decides the result, as JSON: {stage: settings}, and their order."""
        settings = {stage.name: stage.identity() for stage in self.stages}
        return json.loads(json.dumps({"order": list(settings), **settings}))

    def normalise(self, text: str) -> str:
        """Normalises a text like training text, also for what users translate and score."""
        text = plain(text)
        for stage in self.stages:
            if isinstance(stage, Normalise):
                text, _ = stage.fix(text)
        return normalised(text)

    def normalise_all(self, chunk: Chunk) -> Chunk:
        """Returns pairs with both sides normalised."""
        sides = ([*map(self.normalise, chunk.side(side))] for side in SIDES)
        return Chunk(chunk.numbers, *sides)


# The default cleaning.
DEFAULT = Cleaning()
# No cleaning: the corpus is already clean.
NOTHING = Cleaning(())


@configurable
def english_overlap() -> Cleaning:
    """Returns a cleaning that drops training pairs whose first side is in a dev or test set.

    It suits a generated corpus with English as that side, such as cldr.
    """
    return Cleaning([Overlap(sides=["first"])])


@configurable
def thorough(stages: Sequence[CleaningStage] = ()) -> Cleaning:
    """Returns a cleaning of all stages, some of which may be replaced.

    Args:
        stages: Replacements for the stages of their kind. The others have their defaults, except
            that duplicates also disregard case, width and spacing.
    """
    every: tuple[CleaningStage, ...] = (
        Normalise(), Empty(), Length(), Identical(), Script(), LanguageId(),
        Duplicates(normalised=True), Overlap(), LengthRatio(),
    )  # fmt: skip
    given = {stage.name: stage for stage in Cleaning(stages).stages}
    return Cleaning(tuple(given.pop(stage.name, stage) for stage in every) + tuple(given.values()))


class Cleaner:
    """One cleaning of a corpus: test of all languages first, then dev, then train.

    Training text overlaps only with text that was read before it.

    Args:
        spool: Folder for text that must be read twice.
        on_drop: Called for every dropped training pair.
        on_read: Called for every chunk.
    """

    def __init__(
        self, cleaning: Cleaning, source: Source, language_pairs: Sequence[str], spool: Path,
        on_drop: OnDrop | None = None, on_read: OnRead = lambda *_: None,
    ) -> None:  # fmt: skip
        self.cleaning, self._source, self._spool = cleaning, source, spool
        self._on_drop, self._on_read = on_drop, on_read
        self.ledger = Ledger({stage.name: stage.identity() for stage in cleaning.stages})
        self.opened = {stage.name: stage.open(language_pairs) for stage in cleaning.stages}
        # Counts of the files read last, if the source has files.
        self.tallies: dict[str, Tally] = getattr(getattr(source, "reading", None), "tallies", {})
        # File -> its counts, and the (language pair, split) for which it was read.
        self._files: dict[str, tuple[Tally, set[tuple[str, str]]]] = {}

    def checks(self, pair: str, split: str) -> tuple[Checks, dict[str, str]]:
        """Returns the checks of a language pair and split, and why other stages cannot judge."""
        found = {name: opened(pair, split) for name, opened in self.opened.items()}
        return (
            {name: one for name, one in found.items() if not isinstance(one, str)},
            {name: one for name, one in found.items() if isinstance(one, str)},
        )

    def pairs(self, pair: str, split: str) -> Iterator[Chunk]:
        """Yields what is left of a split, whose counts are complete at the end."""
        checks, not_checked = self.checks(pair, split)
        part = Part(pair, split, self.ledger.count(pair, split), self._on_drop)
        part.where = getattr(self._source, "where", part.where)
        self.tallies.clear()
        read = part.read(self._source.pairs(pair, split), self._on_read)
        yield from (self._drop if split == "train" else self._flag)(part, checks, read)
        self._keep_tallies(pair, split, self.tallies)
        part.leave_to_others(not_checked)

    def add(self, pair: str, split: str, count: Count, tallies: Mapping[str, Tally]) -> None:
        """Adds the counts of a part of a split that was cleaned elsewhere."""
        self.ledger.count(pair, split).add(count)
        self._keep_tallies(pair, split, tallies)

    def _keep_tallies(self, pair: str, split: str, tallies: Mapping[str, Tally]) -> None:
        for name, tally in tallies.items():
            if tally.skipped or tally.normalised:
                read_for = self._files[name][1] if name in self._files else set()
                self._files[name] = tally, read_for | {(pair, split)}

    def finish(self) -> Ledger:
        """Returns the ledger, with the source's lines that were not pairs.

        Lines of a file with several language pairs or splits are listed under `ANY`.
        """
        for name, (tally, read_for) in sorted(self._files.items()):
            self.tallies[name] = tally
            pairs, splits = (set(of) for of in zip(*read_for, strict=True))
            pair = pairs.pop() if len(pairs) == 1 else ANY
            count = self.ledger.count(pair, splits.pop() if len(splits) == 1 else ANY)
            for reason, lines in sorted(tally.skipped.items()):
                count.read += lines
                count.dropped[f"source: {reason}"] += lines
            for what, lines in sorted(tally.normalised.items()):
                count.changed[f"source: {what}"] += lines
        self.ledger.check()
        return self.ledger

    def _flag(self, part: Part, checks: Checks, read: Iterator[Chunk]) -> Iterator[Chunk]:
        """Flags dev or test pairs, in memory, and yields them unchanged."""
        seen = original = list(read)
        for name, check in checks.items():
            look = alone(part, name, check, lambda seen=seen: iter(seen))
            changed = []
            for chunk in seen:
                found = part.told(name, look, chunk)
                part.note("flagged", name, {**found.change, **found.drop})
                part.note("not_checked", name, found.not_checked)
                changed.append(found.chunk or chunk)
            seen = changed
        yield from original

    def _drop(self, part: Part, checks: Checks, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields kept training pairs; a check that must see all pairs first uses the spool."""
        for number, (name, check) in enumerate(checks.items()):
            spool = self._spool / f"{part.split}.{part.pair}.{number}.jsonl"
            if isinstance(check, FittedCheck):
                _write_spool(spool, stream)
                stream = _read_spool(spool, remove=True)
            look = alone(part, name, check, lambda spool=spool: _read_spool(spool))
            stream = part.checked(name, look, stream)
        return stream


def alone(part: Part, name: str, check: AnyCheck, chunks: Callable[[], Iterator[Chunk]]) -> Check:
    """Returns a check for a single process; a `FittedCheck` looks at all `chunks` in advance."""
    if isinstance(check, FittedCheck):
        counts: Counter[Any] = Counter()
        for chunk in chunks():
            counts.update(part.told(name, check.measure, chunk))
        fitted = check.fit(counts)
        return lambda chunk: check.judge(chunk, fitted)
    if isinstance(check, FirstCheck):
        seen: dict[int, Digests] = defaultdict(Digests)

        def look(chunk: Chunk) -> Findings:
            keys = enumerate(check.keys(chunk))
            return check.judge(chunk, [~seen[kind].add(of_kind) for kind, of_kind in keys])

        return look
    return check


class Part:
    """Pairs of two languages and a split on their way through the checks, with counts."""

    def __init__(self, pair: str, split: str, count: Count, on_drop: OnDrop | None = None) -> None:
        self.pair, self.split, self.count, self._on_drop = pair, split, count, on_drop

    def read(self, pairs: Iterable[Pair], on_read: OnRead = lambda *_: None) -> Iterator[Chunk]:
        """Yields and counts chunks as they are read."""
        for chunk in chunks(pairs):
            self.count.read += len(chunk)
            self.count.kept += len(chunk)
            on_read(self.pair, self.split, chunk)
            yield chunk

    def where(self, number: int) -> str:
        """Returns where the source has a pair that was read, for messages."""
        return f"pair {number}"

    def told(self, name: str, stage: Callable[[Chunk], _Told], chunk: Chunk) -> _Told:
        """Returns what a stage says of a chunk. InputError: It raises, and for which pair."""
        try:
            return stage(chunk)
        except InputError:
            raise
        except Exception as error:
            rows = np.arange(len(chunk))
            for row in rows if len(chunk) > 1 else ():
                self.told(name, stage, chunk.take(rows == row))
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            place = f"{self.pair} {self.split}, {self.where(int(chunk.numbers[0]))}"
            raise InputError(f"{place}: stage {name!r} raises {said}") from error

    def leave_to_others(self, not_checked: Mapping[str, str]) -> None:
        """Counts everything read as not judged by some stages: {name: reason}."""
        for name, why in not_checked.items() if self.count.read else ():
            self.count.not_checked[f"{name}: {why}"] += self.count.read

    def checked(self, name: str, check: Check, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields the stream with a check's changes, without the pairs that it drops."""
        for chunk in stream:
            found = self.told(name, check, chunk)
            self.note("not_checked", name, found.not_checked)
            self.note("changed", name, found.change)
            chunk = found.chunk or chunk
            gone = np.zeros(len(chunk), bool)
            for reason, mask in found.drop.items():
                mask = mask & ~gone
                gone |= mask
                self.count.drop(f"{name}: {reason}", int(mask.sum()))
                self._tell(f"{name}: {reason}", chunk, mask)
            chunk = chunk.take(~gone)
            if len(chunk):
                yield chunk

    def note(self, what: str, name: str, masks: Mapping[str, Mask]) -> None:
        """Counts pairs that a stage has changed, flagged or not judged."""
        for reason, mask in masks.items():
            if pairs := int(mask.sum()):
                getattr(self.count, what)[f"{name}: {reason}"] += pairs

    def _tell(self, reason: str, chunk: Chunk, mask: Mask) -> None:
        if self._on_drop is not None:
            for row in np.flatnonzero(mask).tolist():
                texts = Pair(chunk.first[row], chunk.second[row])
                self._on_drop(reason, self.pair, self.split, int(chunk.numbers[row]), texts)


def sentence_lines(texts: Sequence[str], chunk: Chunk, pair: str, split: str) -> bytes:
    """Returns a chunk's sentences as lines. Raises InputError for a tab or line break inside."""
    lines = "".join([f"{text}\n" for text in texts])
    if lines.count("\n") != len(texts) or "\t" in lines or "\r" in lines:
        pairs = map(Pair, chunk.first, chunk.second)
        bad = next(texts for texts in pairs if re.search("[\t\n\r]", "".join(texts)))
        raise InputError(f"{pair} {split}: a tab or line end inside a sentence: {bad!r}")
    return lines.encode()


def _write_spool(path: Path, stream: Iterator[Chunk]) -> None:
    """Writes chunks as JSON lines."""
    with path.open("w", encoding="utf-8", errors="surrogatepass") as file:
        for chunk in stream:
            columns = chunk.numbers.tolist(), chunk.first, chunk.second
            file.write(json.dumps(columns, ensure_ascii=False) + "\n")


def _read_spool(path: Path, remove: bool = False) -> Iterator[Chunk]:
    """Yields the chunks of a file by `_write_spool`, which may be removed afterwards."""
    with path.open(encoding="utf-8", errors="surrogatepass") as file:
        for line in file:
            numbers, first, second = json.loads(line)
            yield Chunk(np.array(numbers, np.int64), first, second)
    if remove:
        path.unlink()
