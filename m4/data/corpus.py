"""Settings of a corpus: `CorpusSpec(source=...).build(data_dir)` returns its token cache.

A corpus is its fingerprint: the SHA-256 of everything that decides its token ids (text, cleaning,
vocabulary settings, format). It appears whole in `data_dir/<fingerprint>/` and is never changed, so
several runs may share a data_dir, whatever their corpora are.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from m4.data.beam import Engine
from m4.data.cache.cache import FORMAT, Cache, fingerprint_of, identity_of
from m4.data.cache.corpus_text import Progress, write_pivots, write_text
from m4.data.cache.tokens import (
    PRETRAINED_VOCABULARIES,
    pretrained_vocabulary,
    tokenize,
    train_vocabularies,
    vocabulary_file,
    write_given,
)
from m4.data.cleaning import clean
from m4.data.directions import (
    ROLES,
    Mixture,
    base_language,
    directions_of,
    languages_of,
    pair_of,
    pivoted,
    split_direction,
)
from m4.data.sources import SPLITS, Source, gives_ids
from m4.data.vocabulary.vocabulary import Vocabulary, least_size
from m4.settings import MUTABLE, Between, InputError, SettingError, checked
from m4.storage import checksums
from m4.storage.files import check_output, whole_folder, write_json
from m4.storage.local_copy import fetched

# Room for a tag, a piece and eos.
Length = Annotated[int, Between(3, 2**20)]
Pieces = Annotated[int, Between(1, 2**24)]


@checked
@dataclass(frozen=True)
class CorpusSpec:
    """Everything that decides a corpus's token ids. Nothing is read before `settings` or `build`.

    Attributes:
        source: Source of the sentence pairs, or a function that makes it, so that a run can be read
            without its text. No vocabulary is trained for a source of ids.
        languages: Language pairs ("fr-wo"), or languages paired with English ("gl"). Defaults to
            all of the source for which the mixture has directions.
        mixture: Directions: to_english, from_english, english_centric, direct (all of the text's),
            any_to_any (also between languages whose pairs share sentences), or a list.
        lengths: {"inputs": ..., "targets": ...}, in pieces: longer training pairs are dropped.
        vocabulary_size: Number of pieces of the vocabulary, or of that of the sources if
            target_vocabulary_size is set.
        vocabulary_temperature: Sampling temperature of languages in the vocabulary's training text.
        vocabulary_sentences: Number of sentences of that text.
        target_vocabulary_size: Number of pieces of a separate vocabulary for targets; each is then
            trained on its side's text in the mixture. Defaults to one vocabulary for all text.
        vocabulary_from: A corpus or run whose vocabularies grow: pieces keep their ids, and new
            tags and pieces come behind them (`m4.data.vocabulary.pieces`), learned from the text of
            languages without a tag there, if any. Or a SentencePiece model such as T5's or mT5's
            (FILE.model), or a pretrained model's folder with one. Defaults to training anew.
        segmentations: Segmentations of each training sentence: the best, and others by BPE-dropout.
        sampling_alpha: Probability with which BPE-dropout leaves out a merge.
        workers: Number of processes, without effect on the result. Defaults to as many as help.
        cleaning: Cleaning before tokenization.
    """

    source: Source | Callable[[], Source]
    languages: Sequence[str] | None = None
    mixture: Mixture = "direct"
    lengths: Mapping[str, Length] = field(default_factory=lambda: {"inputs": 128, "targets": 128})
    vocabulary_size: Pieces = 8000
    vocabulary_temperature: Annotated[float, Between(1, 1e6)] = 5.0
    vocabulary_sentences: Annotated[int, Between(1, 10**9)] = 200_000
    target_vocabulary_size: Pieces | None = None
    vocabulary_from: str | None = None
    segmentations: Annotated[int, Between(1, 1000)] = 1
    sampling_alpha: Annotated[float, Between(0, 1, above=True, below=True)] = 0.1
    workers: Annotated[int | None, Between(1, 1024), MUTABLE] = None
    cleaning: clean.Cleaning = clean.DEFAULT

    def __post_init__(self) -> None:
        if self.languages is not None:
            _pairs_of(self.languages)
        if set(self.lengths) != {"inputs", "targets"}:
            allowed = "{'inputs': ..., 'targets': ...}"
            raise SettingError("CorpusSpec.lengths", dict(self.lengths), allowed)

    @functools.cached_property
    def opened_source(self) -> Source:
        """The source; opening it looks for its files."""
        return self.source() if callable(self.source) else self.source

    def settings(self) -> dict[str, Any]:
        """Returns, as JSON, everything but the text that decides the ids."""
        separate = self.target_vocabulary_size is not None
        given, pairs = self._given_ids(), self.language_pairs()
        more = sorted({*pairs} - {*self.read_pairs()}, key=pairs.index)
        mixture = self.mixture if isinstance(self.mixture, str) else [*self.mixture]
        return {
            "language_pairs": pairs,
            "vocabulary_size": self.vocabulary_size,
            "vocabulary_sentences": self.vocabulary_sentences,
            "vocabulary_temperature": float(self.vocabulary_temperature),
            "source_length": self.lengths["inputs"],
            "target_length": self.lengths["targets"],
            "target_vocabulary_size": self.target_vocabulary_size,
            # None if they decide nothing, so that the same cache is used for any value.
            "mixture": mixture if separate or given else None,
            "normalization": "nfc",
            "segmentations": self.segmentations,
            "sampling_alpha": float(self.sampling_alpha) if self.segmentations > 1 else None,
            "cleaning": (clean.NOTHING if given else self.cleaning).identity(),
            **self._grown_from_identity(pairs),
            **({"pivoted": more} if more else {}),
            **given,
        }

    def _given_ids(self) -> dict[str, Any]:
        """Returns the entries of `settings` for a source of ids, or {} for one of text."""
        source = self.opened_source
        if not gives_ids(source):
            return {}
        own = {role: hashlib.sha256(m).hexdigest() for role, m in source.vocabularies().items()}
        separate = own["source"] != own["target"]
        whose = "as the source gives ids in its own vocabulary"
        for name, right, allowed in (
            ("mixture", self.mixture == "from_english", "'from_english'"),
            ("segmentations", self.segmentations == 1, "1"),
            ("vocabulary_from", self.vocabulary_from is None, "None"),
            ("cleaning", self.cleaning in (clean.DEFAULT, clean.NOTHING), "not set"),
            (
                "target_vocabulary_size",
                (self.target_vocabulary_size is not None) == separate,
                "set, since those of inputs and targets differ" if separate else "None",
            ),
        ):
            if not right:
                value = getattr(self, name)
                raise SettingError(f"CorpusSpec.{name}", value, f"{allowed}, {whose}")
        return {"own_vocabularies": own}

    def identity(self) -> dict[str, Any]:
        """Returns, as JSON, everything that decides the corpus."""
        return identity_of(self.opened_source, self.settings())

    def language_pairs(self) -> list[str]:
        """Returns the language pairs: those asked for, or all of the mixture.

        Pairs with English come first. Raises SettingError like `read_pairs`.
        """
        read = self.read_pairs()
        more = pivoted(read) if self.mixture == "any_to_any" else []
        return sorted([*read, *more], key=lambda pair: not pair.startswith("en-"))

    def read_pairs(self) -> list[str]:
        """Returns the language pairs to read from the source.

        Raises:
            SettingError: The mixture has no directions of a requested pair, or of any pair.
        """
        asked = self.languages is not None
        pairs = _pairs_of(self.languages or self.opened_source.language_pairs())
        if not isinstance(self.mixture, str):
            for direction in self.mixture:
                if "-" not in direction or pair_of(direction) not in pairs:
                    allowed = f"directions of the pairs {', '.join(pairs[:20])}"
                    raise SettingError("CorpusSpec.mixture", direction, allowed)
        used = set(map(pair_of, directions_of(self.mixture, pairs)))
        unused = [pair for pair in pairs if pair not in used]
        if len(unused) == len(pairs) or (asked and unused):
            allowed = f"a mixture with directions of {', '.join(unused[:5])}, as 'direct'"
            raise SettingError("CorpusSpec.mixture", self.mixture, allowed)
        # Pairs with English come first, as findings of their cleaning count for others (`Overlap`).
        return sorted((pair for pair in pairs if pair in used), key=lambda p: p[:3] != "en-")

    def directions(self, languages: Sequence[str] = ()) -> list[str]:
        """Returns the mixture's directions for the spec's languages, or for these."""
        return directions_of(self.mixture, [*map(pair_of, self.languages or languages)])

    def build(
        self, data_dir: str | os.PathLike[str], *, identity: Mapping[str, Any] | None = None,
        progress: Progress = lambda *_: None, untrained: Collection[str] = (),
        engine: Engine | None = None,
    ) -> Cache:  # fmt: skip
        """Returns the corpus in `data_dir/<fingerprint>`, which is built unless it exists.

        If two processes build it at once, the first one to finish puts it there.

        Args:
            identity: Result of `identity`, if it is known already.
            progress: Called with (stage, done, total); the stages are text, vocabulary, tokens.
            untrained: Language pairs that may lack training pairs.
            engine: Engine that cleans and tokenizes. Defaults to this machine.

        Raises:
            InputError: A file of the corpus is damaged; a language has no training pairs.
        """
        data_dir, settings = Path(data_dir), self.settings()
        identity = self.identity() if identity is None else identity
        folder = data_dir / fingerprint_of(identity)
        if (folder / "manifest.json").is_file():
            cache = Cache(folder, self.mixture)
            cache.verify()
            return cache
        codes = languages_of(settings["language_pairs"])
        for name, tags in (("vocabulary_size", len(codes)), ("target_vocabulary_size", 0)):
            size, least = getattr(self, name), least_size(tags)
            if size is not None and size < least and not gives_ids(self.opened_source):
                needs = f"3 special pieces, {tags} tags, 256 bytes and 16 others"
                raise SettingError(f"CorpusSpec.{name}", size, f"at least {least} ({needs})")
        if engine is not None:
            engine.check(self.opened_source, self.cleaning)
            engine.progress = progress
        check_output(folder, f"data_dir = {data_dir}")
        with whole_folder(folder, replace=False) as unfinished:
            self._write(unfinished, settings, identity, progress, untrained, engine)
        return Cache(folder, self.mixture)

    def _write(
        self, folder: Path, settings: dict[str, Any], identity: Mapping[str, Any],
        progress: Progress, untrained: Collection[str], engine: Engine | None,
    ) -> None:  # fmt: skip
        """Writes the corpus into an empty folder."""
        source, names = self.opened_source, settings["language_pairs"]
        (folder / "text").mkdir(parents=True)
        if gives_ids(source):
            counts, ledger, made = write_given(folder, source, settings, progress)
        else:
            pivoted = settings.get("pivoted", ())
            names = [name for name in names if name not in pivoted]
            given = self.cleaning, progress, untrained, engine
            counts, ledger = write_text(folder, source, names, *given)
            sizes = {pair: counts[pair]["train"]["pairs"] for pair in names}
            for pair, of_pair in write_pivots(folder, names, pivoted).items():
                count, counts[pair] = ledger.count(pair, "train"), of_pair
                count.read = count.kept = of_pair["train"]["pairs"]
            names, old = [*counts], self._grown_from()
            made = {"vocabularies": train_vocabularies(folder, sizes, settings, progress, old)}
            made |= tokenize(folder, names, counts, settings, progress, self.workers, engine)
        for pair, splits in counts.items():
            for split, count in splits.items():
                too_long = count.pop("too_long")
                ledger.count(pair, split).leave_out("pieces: too long", too_long, split)
        ledger.check()
        texts = {pair: [counts[pair][split]["sha256"] for split in SPLITS] for pair in names}
        store = checksums.Disk(folder)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "identity": identity,
            "language_pairs": counts,
            **made,
            **({"rates": rates()} if (rates := getattr(source, "rates", None)) else {}),
            "ledger": ledger.as_json(),
            "corpus": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            "fingerprint": fingerprint_of(identity),
            "files": checksums.hashes(store, [n for n in sorted(store.list()) if n[0] != "."]),
        }
        write_json(folder / "manifest.json", manifest, indent=1)

    def _grown_from(self) -> Path | None:
        """Returns the folder or file of the vocabularies in `vocabulary_from`."""
        if self.vocabulary_from is None:
            return None
        if self.vocabulary_from.endswith(".model"):
            return self._grown_from_file(Path(self.vocabulary_from))
        names = ("vocabulary", *PRETRAINED_VOCABULARIES)
        run = fetched(self.vocabulary_from, lambda name: name.startswith(names))
        if (path := pretrained_vocabulary(run)) is not None:
            return self._grown_from_file(path)
        role = None if self.target_vocabulary_size is None else "source"
        for folder in (run, run / "vocabulary"):
            if vocabulary_file(folder, role).is_file():
                return folder
        allowed = f"the folder of a corpus or a run that has {vocabulary_file(run, role).name}"
        raise SettingError("CorpusSpec.vocabulary_from", self.vocabulary_from, allowed)

    def _grown_from_file(self, path: Path) -> Path:
        """Returns another program's vocabulary. Raises SettingError if m4 cannot extend it."""
        if (size := self.target_vocabulary_size) is not None:
            allowed = "None: a SentencePiece model is one vocabulary for sources and targets"
            raise SettingError("CorpusSpec.target_vocabulary_size", size, allowed)
        if self.segmentations > 1 and not Vocabulary(path).has_merges:
            allowed = f"1: {path} is no BPE model, which has merges to leave out"
            raise SettingError("CorpusSpec.segmentations", self.segmentations, allowed)
        return path

    def _grown_from_identity(self, pairs: Sequence[str]) -> dict[str, Any]:
        """Returns the entries of `settings` for `vocabulary_from`, or {} without one."""
        if (folder := self._grown_from()) is None:
            return {}
        roles = (None,) if self.target_vocabulary_size is None else ROLES
        grown = [Vocabulary(vocabulary_file(folder, role)) for role in roles]
        known = {*grown[0].languages}
        new = sorted(p for p in pairs if {*map(base_language, split_direction(p))} - known - {"en"})
        text = {"vocabulary_text": new} if len(new) in range(1, len(pairs)) else {}
        return {"vocabulary_from": [each.fingerprint for each in grown], **text}


def bilingual(
    parent: Cache, pair: str, vocabulary_size: int, lengths: Mapping[str, int] | None = None,
    **vocabularies: Any,
) -> CorpusSpec:  # fmt: skip
    """Returns a bilingual corpus from a multilingual one, with its own small vocabulary.

    It has the parent's text, which is clean, and its one or two directions of the pair, at equal
    rates. It depends only on that pair's text: other pairs of the parent may change. Lengths
    default to the parent's. `vocabularies` has target_vocabulary_size, segmentations and
    sampling_alpha.
    """
    listed = not isinstance(parent.mixture, str)
    return CorpusSpec(
        source=parent,
        languages=[pair],
        mixture=directions_of(parent.mixture, [pair_of(pair)]) if listed else parent.mixture,
        lengths=lengths or {"inputs": parent.source_length, "targets": parent.target_length},
        vocabulary_size=vocabulary_size,
        vocabulary_temperature=1.0,
        vocabulary_sentences=parent.manifest["identity"]["vocabulary_sentences"],
        workers=1,
        cleaning=clean.NOTHING,
        **vocabularies,
    )


def _pairs_of(languages: Sequence[str]) -> list[str]:
    """Returns pairs, with 'gl' as 'en-gl'. Raises SettingError for a repeated or invalid one."""
    pairs = []
    for name in languages:
        try:
            pairs.append(pair_of(name))
        except InputError as error:
            allowed = "languages as 'gl', which is paired with English, or pairs as 'fr-wo'"
            raise SettingError("CorpusSpec.languages", name, allowed) from error
    if len(set(pairs)) < len(pairs) or not pairs:
        raise SettingError("CorpusSpec.languages", [*languages], "at least one code, each once")
    return pairs
