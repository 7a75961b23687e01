"""Builds a cache's folder: text, vocabulary, token arrays, manifest. See cache.py for its use."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data import permutation
from m4.data.cache import given_ids
from m4.data.cache.cache import manifest_digest
from m4.data.cache.corpus_text import Progress, text_file, write_text
from m4.data.cache.identity import FORMAT, fingerprint_of
from m4.data.cache.lengths import length_factors
from m4.data.cache.tokens import ROLES, tokenize, vocabulary_file
from m4.data.cleaning.clean import Cleaning
from m4.data.cleaning.ledger import LEDGER_FILE
from m4.data.directions import SIDES, SIDES_OF
from m4.data.normalization import Form, normalised
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS, Source, gives_ids
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.grow import grow
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.storage import checksums
from m4.storage.files import write_text as write_text_file

_BLOCK = 1 << 18


def build(
    folder: Path,
    source: Source,
    settings: dict[str, Any],
    cleaning: Cleaning,
    progress: Progress,
    workers: int | None,
    identity: Mapping[str, Any],
    grown_from: Path | None = None,
    untrained: Collection[str] = (),
) -> None:
    """Writes a corpus into an empty folder.

    Args:
        progress: Called with (stage, done, total).
        workers: Number of processes; it changes no file.
        identity: Everything that decides the corpus, for the manifest.
        grown_from: The folder of the vocabularies that this corpus's grow from, if there is one.
        untrained: Languages that may lack training pairs.
    """
    languages = settings["languages"]
    (folder / "text").mkdir(parents=True)
    if gives_ids(source):
        counts, ledger, made = given_ids.write(folder, source, settings, progress)
    else:
        counts, ledger = write_text(folder, source, languages, cleaning, progress, untrained)
        pairs = {code: counts[code]["train"]["pairs"] for code in languages}
        made = _train_vocabularies(folder, pairs, settings, progress, grown_from)
        tokenize(folder, languages, counts, settings, progress, workers)
    for code, splits in counts.items():
        for split, count in splits.items():
            ledger.count(code, split).leave_out("pieces: too long", count.pop("too_long"), split)
    ledger.check()
    write_text_file(folder / LEDGER_FILE, json.dumps(ledger.as_json(), ensure_ascii=False))
    texts = [[counts[c][s]["sha256"] for s in SPLITS] for c in languages]
    corpus = _sha256(json.dumps(dict(zip(languages, texts, strict=True))))
    store = checksums.Disk(folder)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "identity": identity,
        "languages": counts,
        "vocabularies": made,
        "length_factors": length_factors(folder, settings, counts),
        **({"rates": rates()} if (rates := getattr(source, "rates", None)) else {}),
        "ledger": ledger.as_json(examples=False),
        "corpus": corpus,
        "fingerprint": fingerprint_of(identity),
        "files": checksums.hashes(store, [n for n in sorted(store.list()) if n[0] != "."]),
    }
    manifest["sha256"] = manifest_digest(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _train_vocabularies(
    folder: Path,
    pairs: dict[str, int],
    settings: dict[str, Any],
    progress: Progress,
    grown_from: Path | None,
) -> dict[str, dict[str, Any]]:
    """Trains the shared vocabulary, or one for sources and one for targets.

    Only the sources' vocabulary needs the tags.

    Args:
        pairs: Language -> number of training pairs.

    Returns:
        Role ("shared", or "source" and "target") -> what the manifest says of the vocabulary.
    """
    size, target_size = settings["vocabulary_size"], settings["target_vocabulary_size"]
    tags, text = ["en", *pairs], settings.get("vocabulary_text", pairs)
    wanted: list[tuple[str | None, int, Sequence[str], list[str]]] = [(None, size, SIDES, tags)]
    if target_size is not None:
        sides = SIDES_OF[settings["mixture"]]
        wanted = [("source", size, sides["source"], tags)]
        wanted += [("target", target_size, sides["target"], [])]
        assert [role for role, *_ in wanted] == list(ROLES)
    made = {}
    for done, (role, pieces, sides, tags) in enumerate(wanted):
        form: Form = "nfc" if role == "target" else settings["normalization"]
        # A shared vocabulary sees each text as it is as a source, and as a target.
        forms: dict[Form, None] = dict.fromkeys([form] if role else [form, "nfc"])
        progress("vocabulary", done, len(wanted))
        path = vocabulary_file(folder, role)
        texts = sample(
            folder,
            {code: pairs[code] for code in pairs if code in text},
            sides,
            settings["vocabulary_sentences"],
            settings["vocabulary_temperature"],
        )
        texts = (normalised(text, each) for text in texts for each in forms)
        if grown_from is None:
            about = vocabulary.train(path, texts, pieces, tags, form=form)
        else:
            old = Vocabulary(vocabulary_file(grown_from, role))
            about = grow(path, old, texts, pieces, tags)
        made[role or "shared"] = {**about, "fingerprint": Vocabulary(path).fingerprint}
    progress("vocabulary", len(wanted), len(wanted))
    return made


def sample(
    folder: Path,
    pairs: dict[str, int],
    sides: Sequence[str],
    sentences: int,
    temperature_: float,
) -> Iterator[str]:
    """Yields training sentences for a vocabulary, of English and every language by temperature.

    A language's share is taken from a keyed permutation of its sentences, as many times over as it
    needs. The text is read once.

    Args:
        pairs: Language -> number of training pairs.
        sides: english, translation or both.
        sentences: Number of sentences in all.
        temperature_: Temperature of the languages' shares.
    """
    total = sum(pairs.values())
    sizes = ({"en": total} if "english" in sides else {}) | (
        pairs if "translation" in sides else {}
    )
    rates = dict.fromkeys(sizes, 0.0) | temperature(
        {code: size for code, size in sizes.items() if size}, temperature_
    )
    budget = min(sentences, sum(sizes.values()))
    first = 0
    for code, size in pairs.items():
        with text_file(folder, "train", code).open("rb") as file:
            for start in range(0, size, _BLOCK):
                stop = min(start + _BLOCK, size)
                # English sentences are counted over all languages; each file gives its own stretch.
                rows = {"translation": (size, start, stop, code)}
                rows["english"] = (total, first + start, first + stop, "en")
                times = {
                    side: _times(*rows[side], round(budget * rates[rows[side][-1]]))
                    for side in SIDES[::-1]
                    if side in sides
                }
                needed = np.any([*times.values()], axis=0)
                lines = compress(islice(file, stop - start), needed.tobytes())
                for row, line in zip(np.flatnonzero(needed).tolist(), lines, strict=True):
                    pair = dict(zip(SIDES, line.decode().rstrip("\n").split("\t"), strict=True))
                    for side, of_row in times.items():
                        for _ in range(of_row[row]):
                            yield pair[side]
        first += size


def _times(size: int, start: int, stop: int, name: str, wanted: int) -> npt.NDArray[np.int64]:
    """Returns how often each row from start to stop - 1 of `size` is in a sample of `wanted`."""
    rows = np.arange(start, stop, dtype=np.uint64)
    keys = np.full_like(rows, permutation.key("vocabulary", name))
    place = permutation.permute(rows, np.full_like(rows, size), keys).astype(np.int64)
    return wanted // size + (place < wanted % size)
