"""The token cache: every pair tokenized once, memory-mapped, with a manifest that names it.

A cache is a folder: manifest.json, vocabulary.model, <split>.<side>.{tokens,offsets}.npy (flat
ids without tag and eos; the offsets of each sentence; side is english or foreign; the languages
one after another), text/<split>.<lang>.tsv, the same pairs in the same order, and
token_counts.npy (how often a model takes in each id; see tokens.py). Where sources and targets have
vocabularies of their own: vocabulary.<role>.model, <split>.<side>.<role>.*.npy and
token_counts.<role>.npy, role being source or target.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.cache import build
from m4.data.cache.corpus_text import Report, read_pairs, text_file
from m4.data.cache.identity import check, checked_languages, differences, identity_of
from m4.data.cache.tokens import ROLES, array_name, vocabulary_file
from m4.data.cleaning import clean
from m4.data.cleaning.ledger import LEDGER_FILE, Ledger
from m4.data.preprocess import language_of, split_direction
from m4.data.sources import SPLITS, Pair, Source
from m4.data.sources.files import remembering
from m4.data.vocabulary.chunks import SIDES
from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.storage.files import whole_folder

# Raised whenever the same settings would give other files (test_format.py notices).
FORMAT = 6
MIXTURES = ("to_english", "from_english", "any_to_any")


class Corpus(NamedTuple):
    """What a cache is made of: the source, the cleaning, and all settings that decide the ids."""

    folder: Path
    source: Source
    settings: dict[str, Any]
    cleaning: clean.Cleaning


class OtherFormat(ValueError):
    """A cache of another version of m4."""


class Cache:
    """A ready cache, opened for reading. Also a Source: pairs(), subsets(), identity()."""

    def __init__(self, folder: str | os.PathLike[str], mixture_name: str | None = None) -> None:
        """mixture_name defaults to the one that the cache was made for, or else any_to_any."""
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{self.folder}: not a cache, it has no manifest.json") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: damaged, delete the folder: {error}") from error
        if self.manifest.get("format") != FORMAT:
            raise OtherFormat(
                f"{self.folder}: cache format {self.manifest.get('format')}, this m4 needs {FORMAT}"
                " (rebuild it: cache.prepare.rebuild = True)"
            )
        made_for = self.manifest["identity"]["mixture"]
        self.mixture_name = _checked_mixture(mixture_name or made_for or "any_to_any")
        if not self.has_all_directions and self.mixture_name != made_for:
            raise ValueError(
                f"{self.folder}: its source and target vocabularies are made for the mixture "
                f"{made_for}, not {self.mixture_name} (jobs.Setup.mixture; cache.prepare.rebuild)"
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text, the vocabulary and the settings: everything that decides ids."""
        return self.manifest["fingerprint"]

    @property
    def replaced(self) -> str | None:
        """Why it was made anew, in one line; None: it was the first in its folder."""
        return self.manifest["replaced"]

    def languages(self) -> list[str]:
        """The codes, English left out, in the order of the rows."""
        return list(self.manifest["languages"])

    @property
    def directions(self) -> list[str]:
        """The directions of the cache's mixture: those out of English first."""
        return directions_of(self.mixture_name, self.languages())

    @property
    def source_length(self) -> int:
        """No training source is longer, with tag and eos."""
        return self.manifest["identity"]["source_length"]

    @property
    def target_length(self) -> int:
        """No training target is longer, with eos."""
        return self.manifest["identity"]["target_length"]

    @property
    def separate(self) -> bool:
        """Whether sources and targets have vocabularies of their own."""
        return self.manifest["identity"]["target_vocabulary_size"] is not None

    @property
    def has_all_directions(self) -> bool:
        """Whether every mixture's tokens are there; else only those of the one it was made for."""
        return self.manifest["identity"]["mixture"] in (None, "any_to_any")

    @cached_property
    def source_vocabulary(self) -> Vocabulary:
        """Of what a model reads; it has the tags."""
        return Vocabulary(vocabulary_file(self.folder, "source" if self.separate else None))

    @cached_property
    def target_vocabulary(self) -> Vocabulary:
        """Of what a model writes; the same one as source_vocabulary if they are not separate."""
        if not self.separate:
            return self.source_vocabulary
        return Vocabulary(vocabulary_file(self.folder, "target"))

    @cached_property
    def vocabulary(self) -> Vocabulary | SourceAndTarget:
        """What a model reads and writes with: encodes sources, decodes targets."""
        if not self.separate:
            return self.source_vocabulary
        return SourceAndTarget(self.source_vocabulary, self.target_vocabulary)

    @property
    def segmentations(self) -> int:
        """How many ways each training sentence is tokenized; 1: the best one alone."""
        return self.manifest["identity"]["segmentations"]

    def sizes(self) -> dict[str, int]:
        """Direction of the mixture -> training pairs: what a sampler makes rates of."""
        pairs = {code: self.size(code, "train") for code in self.languages()}
        return {name: pairs[language_of(name)] for name in self.directions}

    def size(self, language: str, split: str) -> int:
        """Number of pairs."""
        return self._count(language, split)["pairs"]

    def longest(self, language: str, role: str = "source") -> dict[str, int]:
        """Ids of the longest training sentence of each side that has the role, without tag and
        eos."""
        longest = self._count(language, "train")["longest"]
        names = {side: self._array_name(side, role) for side in SIDES}
        return {side: longest[name] for side, name in names.items() if name in longest}

    def mean_pieces(self, direction: str, split: str) -> tuple[float, float]:
        """Mean ids of a source and of a target, without tag and eos, over all segmentations."""
        source, target = split_direction(direction)
        means = self._count(target if source == "en" else source, split)["mean_pieces"]
        sides = ("english", "foreign") if source == "en" else ("foreign", "english")
        return (
            means[self._array_name(sides[0], "source")],
            means[self._array_name(sides[1], "target")],
        )

    def rows(self, language: str, split: str) -> range:
        """The rows of a language in the split's arrays."""
        return range(*self._count(language, split)["rows"])

    def tokens(
        self, split: str, side: str, role: str = "source"
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """(flat ids, offsets): sentence r is flat[offsets[r] : offsets[r + 1]]. Memory-mapped.

        side: english or foreign. role: source or target, which differ where the two have
        vocabularies of their own. The train split holds its sentences `segmentations` times: the
        v-th way to tokenize sentence r of R is entry v * R + r.
        """
        assert split in SPLITS, split
        assert side in SIDES, side
        stem = self.folder / f"{split}.{self._array_name(side, role)}"
        assert not self.separate or stem.with_name(f"{stem.name}.offsets.npy").is_file(), (
            f"{self.mixture_name} has no {role} that is {side}"
        )
        # An empty file cannot be mapped.
        offsets = np.load(f"{stem}.offsets.npy", mmap_mode="r")
        flat = np.load(f"{stem}.tokens.npy", mmap_mode="r" if len(offsets) > 1 else None)
        return flat, offsets

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """The text, in the order of the rows."""
        return read_pairs(self.text_file(language, split))

    def text_file(self, language: str, split: str) -> Path:
        """A split's text: english<TAB>foreign, UTF-8, in the order of the rows."""
        self._count(language, split)
        return text_file(self.folder, split, language)

    def subsets(self, language: str, split: str) -> dict[str, list[bool]]:
        """Named parts of a dev or test split, parallel to pairs(); empty where there are none."""
        path = self.text_file(language, split).with_suffix(".subsets.json")
        return json.loads(path.read_text()) if path.is_file() else {}

    def summary(self) -> dict[str, Any]:
        """What the manifest says of the text, as JSON, for a checkpoint: settings, sizes, hashes,
        and the ledger's counts."""
        return {
            "identity": self.manifest["identity"],
            "languages": {
                code: {
                    split: {k: count[k] for k in ("pairs", "sha256")} for split, count in of.items()
                }
                for code, of in self.manifest["languages"].items()
            },
            "ledger": self.manifest["ledger"]["languages"],
        }

    def ledger(self) -> Ledger:
        """What was read, kept and dropped, with examples."""
        return Ledger.from_json(json.loads((self.folder / LEDGER_FILE).read_text(encoding="utf-8")))

    def identity(self) -> dict[str, Any]:
        """SHA-256 of the text by language and split."""
        return {
            "source": "cache",
            "by_language": {
                code: {split: count["sha256"] for split, count in splits.items()}
                for code, splits in self.manifest["languages"].items()
            },
        }

    def _array_name(self, side: str, role: str) -> str:
        assert role in ROLES, role
        return array_name(side, role if self.separate else None)

    def _count(self, language: str, split: str) -> dict[str, Any]:
        if language not in self.manifest["languages"]:
            raise ValueError(
                f"{self.folder}: no language {language!r}; it has {', '.join(self.languages())}"
            )
        return self.manifest["languages"][language][split]


def prepare(
    folder: str | os.PathLike[str],
    source: Source,
    languages: Sequence[str] | None = None,
    mixture_name: str = "any_to_any",
    vocabulary_size: int = 8000,
    vocabulary_temperature: float = 5.0,
    source_length: int = 128,
    target_length: int = 128,
    vocabulary_sentences: int = 200_000,
    target_vocabulary_size: int | None = None,
    segmentations: int = 1,
    sampling_alpha: float = 0.1,
    workers: int | None = None,
    cleaning: clean.Cleaning = clean.DEFAULT,
    rebuild: bool = False,
    report: Report | None = None,
    instead: Callable[[Corpus], Any] | None = None,
) -> Cache:
    """The cache of `source` in `folder`: opened if it is there, else built.

    languages default to all of the source's. Training pairs longer than the lengths (in ids, with
    tag and eos) are dropped and counted, as are those that the stages of `cleaning` drop.
    A folder that was made with other settings, from other text or by another format is an error, or
    with rebuild=True made anew (`Cache.replaced` says why). report(stage, done, total) is called
    with the stages text, vocabulary, tokens.

    target_vocabulary_size: None: one vocabulary for all text. Else sources have one of
    vocabulary_size pieces and targets one of this size, each made of the text that is source or
    target in the mixture.
    segmentations: ways to tokenize each training sentence that are kept: the best one, and others
    by BPE-dropout with probability sampling_alpha. workers: processes; None: as many as are of use.
    instead: called with what the cache would be made of, in the place of everything else; its
    result is this function's.
    """
    settings = {
        "languages": checked_languages(source.languages() if languages is None else languages),
        "vocabulary_size": vocabulary_size,
        "vocabulary_sentences": vocabulary_sentences,
        "vocabulary_temperature": float(vocabulary_temperature),
        "source_length": source_length,
        "target_length": target_length,
        "target_vocabulary_size": target_vocabulary_size,
        # What decides nothing is not in the way of a cache that is there.
        "mixture": None if target_vocabulary_size is None else mixture_name,
        "segmentations": segmentations,
        "sampling_alpha": float(sampling_alpha) if segmentations > 1 else None,
        "cleaning": cleaning.identity(),
    }
    if instead is not None:
        return instead(Corpus(Path(folder), source, settings, cleaning))
    return _open_or_build(
        folder, source, settings, mixture_name, rebuild, report, workers, cleaning
    )


def subset(
    cache: Cache,
    folder: str | os.PathLike[str],
    language: str,
    vocabulary_size: int = 1000,
    source_length: int | None = None,
    target_length: int | None = None,
    rebuild: bool = False,
    report: Report | None = None,
) -> Cache:
    """A bilingual cache out of a multilingual one, with a small vocabulary of its own.

    It has the same pairs (the parent's text), the directions en-xx and xx-en at equal rates, and
    depends on that language's text only: other languages of the parent may change. Lengths
    default to the parent's.
    """
    settings = {
        "languages": [language],
        "vocabulary_size": vocabulary_size,
        "vocabulary_sentences": cache.manifest["identity"]["vocabulary_sentences"],
        "vocabulary_temperature": 1.0,
        "source_length": source_length or cache.source_length,
        "target_length": target_length or cache.target_length,
        "target_vocabulary_size": None,
        "mixture": None,
        "segmentations": 1,
        "sampling_alpha": None,
    }
    nothing = clean.NOTHING  # the parent's text is clean
    settings["cleaning"] = nothing.identity()
    return _open_or_build(folder, cache, settings, "any_to_any", rebuild, report, 1, nothing)


def _open_or_build(
    folder: str | os.PathLike[str],
    source: Source,
    settings: dict[str, Any],
    mixture_name: str,
    rebuild: bool,
    report: Report | None,
    workers: int | None,
    cleaning: clean.Cleaning,
) -> Cache:
    folder, report = Path(folder), report or (lambda *_: None)
    _checked_mixture(mixture_name)
    # Beside the cache: it outlives one that is made anew, and one that is not finished.
    with remembering(folder.with_name(f".{folder.name}.hashes.json")):
        identity = identity_of(source, settings)
    replaced = None
    if (folder / "manifest.json").is_file():
        try:
            cache = Cache(folder, mixture_name)
            if different := differences(cache.manifest["identity"], identity):
                raise ValueError(
                    f"{folder}: this cache was made with {'; '.join(different[:3])}"
                    f"{f' and {len(different) - 3} more' if len(different) > 3 else ''}"
                    " (another folder, or cache.prepare.rebuild = True, makes it anew)"
                )
            return cache
        except ValueError as error:
            if not rebuild:
                raise
            replaced = str(error).partition(" (")[0]
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: neither a cache nor empty; give another folder")
    check(settings, workers)
    with whole_folder(folder) as unfinished:
        manifest = {
            "format": FORMAT,
            "identity": identity,
            "replaced": replaced,
            **build.build(unfinished, source, settings, cleaning, report, workers),
        }
        text = json.dumps([identity, manifest["corpus"], manifest["vocabularies"]], sort_keys=True)
        manifest["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (unfinished / "manifest.json").write_text(text, encoding="utf-8")
    return Cache(folder, mixture_name)


def directions_of(mixture_name: str, languages: Sequence[str]) -> list[str]:
    """'any_to_any', ['gl'] -> ['en-gl', 'gl-en']."""
    from_english, to_english = ([f"en-{c}" for c in languages], [f"{c}-en" for c in languages])
    return {
        "from_english": from_english,
        "to_english": to_english,
        "any_to_any": from_english + to_english,
    }[mixture_name]


def _checked_mixture(name: str) -> str:
    if name not in MIXTURES:
        raise ValueError(
            f"mixture {name!r}: must be one of {', '.join(MIXTURES)} (jobs.Setup.mixture)"
        )
    return name
