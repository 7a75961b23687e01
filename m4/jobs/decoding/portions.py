"""The sentences of a portion: of the corpus, or of a test set of its own, which needs no corpus."""

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.cache.corpus_text import text_file
from m4.data.cleaning.keys import digests
from m4.data.sources import SPLITS
from m4.data.splits import normal
from m4.data.testsets import directions_for, segments_for
from m4.eval.decoding.hypotheses import Pairs
from m4.eval.decoding.testsets import Portion
from m4.eval.scoring.score import Subsets
from m4.experiment import Experiment
from m4.jobs.corpus import local_data_dir, open_corpus, open_vocabulary, place_of, test_sets
from m4.parallel import distributed
from m4.settings import InputError
from m4.storage.files import read_json, write_json
from m4.storage.records import flag, listed, named, record, text

_SHOWN = 8  # directions of a line
_MARKS = record({"of": text, "seen": named(listed(flag))})


def open_for(experiment: Experiment, split: str) -> Cache:
    """Returns the corpus, or for a test set of its own the run's vocabulary alone."""
    if split in SPLITS:
        return open_corpus(experiment, test_sets)
    if split not in experiment.testsets:
        known = ", ".join(experiment.testsets) or "none"
        raise InputError(
            f"--testset={split}: this run's config has {known} (experiment.Experiment.testsets); "
            f"--testset={split}.gin reads a file that binds it, too"
        )
    return open_vocabulary(experiment)


def sentences(experiment: Experiment, cache: Cache, portion: Portion) -> Pairs:
    """Returns direction -> (source, reference) of each sentence, or (source, reference, fields)."""
    if portion.split in SPLITS:
        return portion.pairs(cache)
    name = portion.split
    testset = experiment.testsets[name]
    asked = portion.directions or cache.directions
    chosen = directions_for(name, testset, asked)
    if missing := [direction for direction in asked if direction not in chosen]:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        said = f"testset {name}: has no references for {shown}"
        if portion.directions:
            raise InputError(said)
        if distributed.is_primary():
            print(f"{said} (of {len(asked)} directions)", file=sys.stderr)
    return {
        ours: portion.chosen(
            [
                (one.source, one.references[0], one.more())
                for one in segments_for(name, testset, theirs)
            ]
        )
        for ours, theirs in chosen.items()
    }


def subsets(experiment: Experiment, cache: Cache, portion: Portion, decodes: Path) -> Subsets:
    """Returns the subsets of a split, or the marks of a test set's sentences that training saw.

    A sentence is "seen" where its source or a reference is a sentence of the training text, in
    whatever language, but for case, width and spacing. The marks are kept in `decodes`.
    """
    if portion.split in SPLITS:
        return portion.subsets(cache)
    pairs, name = sentences(experiment, cache, portion), portion.name
    texts = {
        direction: [[row[0], row[1], *row[2].get("references", ())] for row in rows]
        for direction, rows in pairs.items()
    }
    of = hashlib.sha256(json.dumps([cache.fingerprint, texts]).encode()).hexdigest()
    path = decodes / f"seen.{name}.json"
    kept = read_json(path, _MARKS) if path.is_file() else {}
    if kept.get("of") != of:
        folder = local_data_dir(place_of(experiment)) / cache.fingerprint
        if not all(path.is_file() for path in _texts(folder, cache)):
            print(f"{name}: not compared with the training text, which is not in {folder}",
                  file=sys.stderr)  # fmt: skip
            return {}
        kept = {"of": of, "seen": _seen(texts, _texts(folder, cache))}
        write_json(path, kept)
    counts = {direction: sum(marks) for direction, marks in kept["seen"].items()}
    if found := [f"{direction} {count:,}" for direction, count in counts.items() if count]:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        print(f"{name}: sentences of training text, which subset unseen leaves out: "
              f"{', '.join(found[:_SHOWN])}{more}", file=sys.stderr)  # fmt: skip
    return {direction: {"seen": marks} for direction, marks in kept["seen"].items() if any(marks)}


def _texts(folder: Path, cache: Cache) -> list[Path]:
    return [text_file(folder, "train", code) for code in cache.languages()]


def _seen(texts: dict[str, list[list[str]]], trained_on: list[Path]) -> dict[str, list[bool]]:
    keys = {text: normal(text) for rows in texts.values() for row in rows for text in row}
    wanted = np.unique(digests([*keys.values()]))
    found = np.zeros(len(wanted), bool)
    for path in trained_on:
        with path.open(encoding="utf-8", newline="\n") as lines:
            while batch := [*islice(lines, 4096)]:
                numbers = digests([*map(normal, batch)])
                place = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
                found[place[wanted[place] == numbers]] = True
    number = dict(zip(keys, digests([*keys.values()]).tolist(), strict=True))
    seen = {*wanted[found].tolist()}
    return {
        direction: [any(number[text] in seen for text in row) for row in rows]
        for direction, rows in texts.items()
    }
