"""The stage overlap, which drops training text that is in a dev or test set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
from etils import epath

from m4.data.arrays import U64, Mask
from m4.data.cleaning import Check, CleaningStage, Findings, Opened
from m4.data.cleaning.chunk import PAIRS, Chunk, Digests, chunks
from m4.data.cleaning.normalise import Normalise
from m4.data.directions import SIDES, base_language, split_direction
from m4.data.sources import Source
from m4.data.sources.reading.files import digest
from m4.data.sources.reading.lines import MAX_LINE_BYTES, plain, text_lines
from m4.settings import InputError, OneOf, SettingError, checked

HELD_OUT = ("test", "dev")
# The other sides of training pairs that were dropped: translations of held-out sentences.
TRANSLATED = "a translation of a test set"


@checked
@dataclass(frozen=True)
class Overlap(CleaningStage):
    """Drops a training pair with a side that is in a dev or test set.

    Sentences are compared normalised (`Normalise`), without case, width and spacing, within their
    language, whatever the other side's: a model that has seen a test sentence's English paired with
    French has seen what it must produce from Galician. The corpus's own dev and test sets always
    count. For pairs without English, which are cleaned after those with English, so does the other
    side of each dropped pair with English, as it is a translation of a test sentence.

    Attributes:
        sides: Sides to compare: "first", "second" or both.
        sources: Name -> Source whose dev and test pairs count too.
        files: Name -> {language: path or paths} of files whose lines count too.
    """

    name: ClassVar[str] = "overlap"
    sides: Sequence[Annotated[str, OneOf(SIDES)]] = SIDES
    sources: Mapping[str, Source] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str | Sequence[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sides:
            raise SettingError("Overlap.sides", self.sides, f"one or both of {', '.join(SIDES)}")
        allowed = "another name: the corpus's own sets have it"
        for given, argument in ((self.sources, "sources"), (self.files, "files")):
            if taken := {*HELD_OUT} & {*given}:
                raise SettingError(f"Overlap.{argument}", min(taken), allowed)

    def identity(self) -> dict[str, Any]:
        return {
            "sides": sorted(self.sides),
            "sources": {name: source.identity() for name, source in self.sources.items()},
            "files": {
                name: {code: [digest(path) for path in _paths(of)] for code, of in at.items()}
                for name, at in self.files.items()
            },
        }

    def open(self, language_pairs: Sequence[str]) -> Opened:
        registered = _Registered(self.sides)
        for name, source in self.sources.items():
            for pair in source.language_pairs():
                for split in HELD_OUT:
                    for chunk in chunks(source.pairs(pair, split)):
                        registered.add(name, pair, chunk)
        for name, at in self.files.items():
            for code, of in at.items():
                for path in _paths(of):
                    registered.add_file(name, code, path)
        return registered


class _Registered:
    """Sentences of all dev and test sets: (set, language) -> 64-bit hashes."""

    def __init__(self, sides: Sequence[str]) -> None:
        self._sides = sides
        self._seen: dict[tuple[str, str], Digests] = {}

    def __call__(self, pair: str, split: str) -> Check:
        def look(chunk: Chunk) -> Findings:
            # Test, dev and train come in this order, and each is compared with earlier splits.
            drop = self._found(pair, split, _normal(chunk))
            if split in HELD_OUT:
                self.add(split, pair, chunk)
            elif drop and pair.startswith("en-"):
                self.add(TRANSLATED, pair, chunk.take(np.any([*drop.values()], axis=0)))
            return Findings(drop)

        return look

    def arrays(self) -> dict[str, U64]:
        return {"\t".join(key): seen.numbers() for key, seen in self._seen.items()}

    def load(self, arrays: Mapping[str, U64]) -> None:
        keys = (key.partition("\t") for key in arrays)
        self._seen = {(name, code): Digests(arrays[f"{name}\t{code}"]) for name, _, code in keys}

    def add(self, name: str, pair: str, chunk: Chunk) -> None:
        chunk = _normal(chunk)
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            self._of(name, code).add(chunk.normal_digests(side))

    def add_file(self, name: str, language: str, path: epath.Path) -> None:
        sentences = filter(None, map(plain, text_lines(path, MAX_LINE_BYTES)))
        while part := [*islice(sentences, PAIRS)]:
            chunk = _normal(Chunk(np.arange(len(part)), part, part))
            self._of(name, language).add(chunk.normal_digests("first"))

    def _found(self, pair: str, split: str, chunk: Chunk) -> dict[str, Mask]:
        drop, names = {}, dict.fromkeys(name for name, _ in self._seen)
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            for name in names if side in self._sides else ():
                seen = self._seen.get((name, base_language(code)))
                other = name not in (split, TRANSLATED if pair.startswith("en-") else "")
                if seen is not None and other:
                    drop[f"{side} side in {name}"] = seen.contains(chunk.normal_digests(side))
        return drop

    def _of(self, name: str, code: str) -> Digests:
        return self._seen.setdefault((name, base_language(code)), Digests())


def _normal(chunk: Chunk) -> Chunk:
    """Returns normalised pairs, whatever other stages there are."""
    return Normalise().check(chunk).chunk or chunk


def _paths(of: str | Sequence[str]) -> list[epath.Path]:
    """Returns one path or several as a list. Raises InputError if a file does not exist."""
    found = [epath.Path(path) for path in ([of] if isinstance(of, str) else of)]
    for path in found:
        if not path.is_file():
            raise InputError(f"{path}: no such file (Overlap.files)")
    return found
