"""The token cache: every sentence tokenized once, memory-mapped, with a manifest.

A cache is a folder: manifest.json, vocabulary.model, text/<split>.<language>.txt (each sentence of
a language once, one per line), and arrays in shards (`m4.data.cache.shards`): <split>.tokens and
<split>.offsets (ids without tag and eos of the sentences, one language after another), and
<split>.pairs (the sentence numbers of pairs, one language pair after another; a pair's index there
is its row). Next to the text are .origin (where pairs come from; see corpus_text.py) and
.subsets.json. token_counts.npy has how often a model reads each id (see tokens.py). With separate
vocabularies of sources and targets, the names are vocabulary.<role>.model, <split>.<role>.tokens,
token_counts.<role>.npy and so on, with source or target as the role.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.cache.corpus_text import BLOCK, Lines, Origin, pair_file, read_origins, texts_of_pairs
from m4.data.cache.shards import Damaged, PairShards, SentenceShards
from m4.data.cache.tokens import bases, vocabulary_file, whole_factors
from m4.data.cleaning.ledger import Ledger
from m4.data.directions import (
    ROLES,
    Mixture,
    directions_of,
    is_held_out,
    languages_of,
    pair_of,
    sides_of,
    sides_with,
    split_direction,
)
from m4.data.preprocess import EOS_IDS, TAG_IDS
from m4.data.sources import SPLITS, Pair, Source
from m4.data.vocabulary.tokenizing import array_name
from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.settings import InputError, check_value, pasted
from m4.storage import checksums
from m4.storage.files import read_json
from m4.storage.local_copy import BoundedCopy

# Version of the files. It is raised whenever equal settings give other files (see test_format.py).
FORMAT = 11


class Cache:
    """A finished cache, opened for reading. It is also a Source: pairs(), subsets(), identity().

    Attributes:
        bounded: Fetcher of training shards from a bucket. Defaults to none: all files are here.
        fingerprint: Name of the corpus: everything that decides its ids (`fingerprint_of`).
        source_length: Maximum length of a training source, with tag and eos.
        target_length: Maximum length of a training target, with eos.
        separate: True if sources and targets have separate vocabularies.
        has_all_directions: True if the cache has the tokens of all mixtures, not only its own.
        segmentations: Number of ways in which each training sentence is tokenized.
        source_rates: Direction -> rate that the source asks for, or None without such rates.
        marked: True if sources get a tag and all sentences an eos when they are laid out. Otherwise
            the ids are the source's own (`m4.data.sources.IdSource`), eos included.
        extra_ids: Number of ids of a source and of a target that are not in the arrays.
    """

    bounded: BoundedCopy | None = None

    def __init__(self, folder: str | os.PathLike[str], mixture: Mixture | None = None) -> None:
        """Opens a corpus, given by its folder or the folder around it.

        Args:
            mixture: Directions to use. Defaults to those that the corpus was made for, or direct.

        Raises:
            Damaged: The manifest is not as it was written.
            InputError: There is no corpus, there are several, or it has another format.
        """
        self.folder = Path(folder)
        within = [path.parent for path in self.folder.glob("*/manifest.json")]
        if len(within) > 1:
            names = pasted("data", "list", self.folder)
            raise InputError(f"{self.folder}: has {len(within)} corpora; `{names}` names them")
        self.folder = within[0] if within else self.folder
        try:
            self.manifest = read_json(self.folder / "manifest.json")
        except FileNotFoundError as error:
            raise InputError(f"{self.folder}: not a cache, it has no manifest.json") from error
        except InputError as error:
            raise Damaged(self.folder, str(error).removeprefix(f"{self.folder}/")) from error
        if (found := self.manifest.get("format")) != FORMAT:
            raise InputError(f"{self.folder}: cache format {found}, this m4 needs {FORMAT}")
        for pair in self.manifest["language_pairs"]:
            split_direction(pair)  # codes are part of file names
        # Arrays by split and role, and text by split and language, opened so far.
        self._sentences: dict[str, SentenceShards] = {}
        self._lines: dict[str, dict[str, Lines]] = {split: {} for split in SPLITS}
        identity = self.manifest["identity"]
        self.fingerprint: str = self.manifest["fingerprint"]
        self.source_length: int = identity["source_length"]
        self.target_length: int = identity["target_length"]
        self.segmentations: int = identity["segmentations"]
        self.separate: bool = identity["target_vocabulary_size"] is not None
        self.source_rates: dict[str, float] | None = self.manifest.get("rates")
        self.marked = "own_vocabularies" not in identity
        self.extra_ids = (TAG_IDS + EOS_IDS, EOS_IDS) if self.marked else (0, 0)
        made_for = identity["mixture"]
        self.has_all_directions = made_for in (None, "english_centric", "direct", "any_to_any")
        chosen: Mixture = mixture or made_for or "direct"
        self.mixture: Mixture = chosen if isinstance(chosen, str) else [*chosen]
        check_value("Cache.mixture", self.mixture, Mixture)
        if not self.has_all_directions and self.mixture != made_for:
            raise InputError(
                f"{self.folder}: its sources and targets are made for the mixture "
                f"{made_for}, not {self.mixture} (CorpusSpec.mixture)"
            )

    def verify(self, needs: Callable[[str], bool] = lambda name: True) -> None:
        """Compares the files with their SHA-256, to the extent set in `m4.storage.checksums`.

        Raises:
            Damaged: A file is damaged; the message names it.
        """
        files = {name: one for name, one in self.manifest["files"].items() if needs(name)}
        store = checksums.Disk(self.folder)
        if said := checksums.problem(store, files, once=True):
            raise Damaged(self.folder, said)

    def language_pairs(self) -> list[str]:
        """Returns the names of the language pairs, in the order of rows."""
        return list(self.manifest["language_pairs"])

    def tested_pairs(self) -> list[str]:
        """Returns the language pairs with dev and test text, which `pivoted` ones lack."""
        made = self.manifest["identity"].get("pivoted", ())
        return [pair for pair in self.language_pairs() if is_held_out(pair) and pair not in made]

    def languages(self) -> list[str]:
        """Returns the codes of all languages, in the order of the pairs."""
        return languages_of(self.language_pairs())

    @property
    def directions(self) -> list[str]:
        """Directions of the cache's mixture, first those in the order of the pairs' names."""
        return directions_of(self.mixture, self.language_pairs())

    @cached_property
    def source_vocabulary(self) -> Vocabulary:
        """The vocabulary of the sources, which has the tags."""
        return Vocabulary(vocabulary_file(self.folder, "source" if self.separate else None))

    @cached_property
    def target_vocabulary(self) -> Vocabulary:
        """The vocabulary of the targets, which may be that of the sources."""
        if not self.separate:
            return self.source_vocabulary
        return Vocabulary(vocabulary_file(self.folder, "target"))

    @cached_property
    def vocabulary(self) -> Vocabulary | SourceAndTarget:
        """The vocabulary that encodes sources and decodes targets."""
        if not self.separate:
            return self.source_vocabulary
        return SourceAndTarget(self.source_vocabulary, self.target_vocabulary)

    @cached_property
    def length_factors(self) -> dict[str, int]:
        """Target language -> maximum tokens of a translation per source token, if more than 2."""
        return whole_factors(self.manifest["length_factors"], self.directions)

    def sizes(self) -> dict[str, int]:
        """Returns direction -> number of training pairs, for samplers."""
        return {name: self.size(pair_of(name), "train") for name in self.directions}

    def size(self, pair: str, split: str) -> int:
        """Returns the number of sentence pairs."""
        return self._count(pair, split)["pairs"]

    def longest(self, pair: str, role: str = "source") -> dict[str, int]:
        """Returns the length of the longest training sentence of each side with the role.

        The tag and eos do not count.
        """
        longest = self._count(pair, "train")["longest"]
        sides = sides_with(role, self.directions)
        names = {side: array_name(side, self._store(role)) for side in sides}
        return {side: longest[name] for side, name in names.items() if name in longest}

    def mean_pieces(self, direction: str) -> tuple[float, float]:
        """Returns the mean lengths of training sources and targets, without tag and eos."""
        means = self._count(pair_of(direction), "train")["mean_pieces"]
        source, target = map(array_name, sides_of(direction), map(self._store, ROLES))
        return means[source], means[target]

    def rows(self, pair: str, split: str) -> range:
        """Returns the rows of a pair of languages in the split's arrays."""
        return range(*self._count(pair, split)["rows"])

    def pair_numbers(self, split: str) -> PairShards:
        """Returns for each row the numbers of its sentences within their languages."""
        return PairShards(self.folder, split, self.manifest["shards"][split]["pairs"], self.path)

    def sentences(self, split: str, role: str = "source") -> SentenceShards:
        """Returns the ids of the split's sentences; a language's start at `first_sentences`.

        The train split holds its n sentences `segmentations` times: the v-th way to tokenize
        sentence r is entry v * n + r.
        """
        name = array_name(split, store := self._store(role))
        if name not in self._sentences:
            firsts = self.manifest["shards"][split][store]
            self._sentences[name] = SentenceShards(self.folder, name, firsts, self.path)
        return self._sentences[name]

    def first_sentences(self, split: str) -> dict[str, int]:
        """Returns language -> number of its first sentence in the split."""
        return bases(self.manifest["sentences"][split])

    def path(self, name: str, on_remove: Callable[[], object]) -> Path:
        """Returns the path of a shard, which exists until `on_remove` is called."""
        if self.bounded is not None and name in self.bounded.files:
            return self.bounded.path(name, on_remove)
        return self.folder / name

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of two languages, in the order of the rows."""
        rows, pair = self.rows(pair, split), pair_of(pair)
        numbers = self.pair_numbers(split)
        for start in range(rows.start, rows.stop, BLOCK):
            block = numbers.take(np.arange(start, min(start + BLOCK, rows.stop)))
            texts = texts_of_pairs(self.folder, split, pair, block, self._lines[split])
            yield from map(Pair, *texts)

    def origins(self, pair: str, split: str) -> list[Origin] | None:
        """Returns file and line of each pair, in the order of the rows, or None without files."""
        files = self._count(pair, split).get("files", [])
        return read_origins(pair_file(self.folder, split, pair_of(pair), "origin"), files)

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        """Returns the named subsets of a dev or test split, with a flag for each of its `pairs`."""
        self._count(pair, split)
        path = pair_file(self.folder, split, pair_of(pair), "subsets.json")
        return read_json(path) if path.is_file() else {}

    def ledger(self) -> Ledger:
        """Returns the ledger of what was read, kept and dropped."""
        return Ledger.from_json(self.manifest["ledger"])

    def identity(self) -> dict[str, Any]:
        """Returns the SHA-256 of the text by pair and split."""
        return {
            "source": "cache",
            "by_pair": {
                pair: {split: count["sha256"] for split, count in splits.items()}
                for pair, splits in self.manifest["language_pairs"].items()
            },
        }

    def _store(self, role: str) -> str:
        """Returns the name of a role's arrays: the role if roles have separate ids, or ''."""
        assert role in ROLES, role
        return role if self.separate else ""

    def _count(self, pair: str, split: str) -> dict[str, Any]:
        """Returns the counts of a pair; "gl" means "en-gl", as in `CorpusSpec.languages`."""
        if (pair := pair_of(pair)) not in self.manifest["language_pairs"]:
            there = ", ".join(self.language_pairs())
            raise InputError(f"{self.folder}: no pair {pair}; it has {there}")
        return self.manifest["language_pairs"][pair][split]


def identity_of(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the identity of a corpus as JSON: its settings and its text."""
    text = json.loads(json.dumps(source.identity()))
    pairs = settings["language_pairs"]
    if "by_pair" in text:  # files of other language pairs do not matter
        text["by_pair"] = {pair: text["by_pair"].get(pair) for pair in pairs}
    # Pairs are sorted, as their order in a cache does not change any ids.
    return {**settings, "language_pairs": sorted(pairs), "source": text}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Returns the name of a corpus: the SHA-256 of its identity and of the cache's format."""
    text = json.dumps([FORMAT, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(made: Any, now: Any, name: str = "") -> list[str]:
    """Returns a line for every value that differs: 'seed = 0, now 1'."""
    if isinstance(made, dict) and isinstance(now, dict):
        return [
            line
            for key in made | now
            for line in differences(made.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    if made == now:
        return []
    return [f"{name} = {_short(made)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 120 else f"{text[:50]}... ({len(text):,} letters)"
