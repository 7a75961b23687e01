"""Sentences of a split of the corpus or of a separate test set, and their translation.

The module also computes how probable given translations are, of test sets or a user's files.
"""

import dataclasses
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.cache.corpus_text import text_file
from m4.data.cleaning.chunk import digests
from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.data.sources import SPLITS
from m4.data.splits import normal
from m4.data.testsets import directions_for, segments_for
from m4.eval.decoding.decode import Batch, BatchCounts, as_json, cut_said, translations, warn
from m4.eval.decoding.hypotheses import Pairs, Translate, decode_to_files, missing, write_tasks
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.routing_counter import RoutingCounter
from m4.eval.decoding.score_references import score_references
from m4.eval.decoding.testsets import Portion, train_pairs
from m4.eval.decoding.translate import Translator, check_language
from m4.eval.scoring.score import Subsets
from m4.eval.text import aligned_lines
from m4.experiment import Experiment
from m4.jobs.corpus import open_corpus, open_vocabulary, place_of, test_sets
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError, pasted, some
from m4.storage import run_folder
from m4.storage.files import read_json, read_jsonl, write_json
from m4.storage.local_copy import local_place
from m4.storage.records import flag, listed, named, record, text
from m4.storage.steps import digest, whole_step

_SHOWN = 8  # names listed in a message
_MARKS = record({"of": text, "seen": named(listed(flag))})


@distributed.by_primary("checkpoints")
def trained_step(folder: Path, step: int | None = None) -> int:
    """Returns the step of the model in a folder (default: the last complete one)."""
    found = whole_step(folder / "checkpoints", step, used=True)
    if found is None:
        raise InputError(f"{folder}: no checkpoints; train first, or give another MODEL_DIR")
    return found


def decodes_folder(experiment: Experiment, step: int | None = None) -> Path:
    """Returns the folder of a model's translations, decodes/[<trial>/][<step>/].

    A trial has other decoding settings than the run's config, and its name says which.
    """
    trial = experiment.decoding.trial(run_folder.decoding_of(experiment.folder))
    parts = [trial, "" if step is None else str(step)]
    return experiment.folder.joinpath("decodes", *filter(None, parts))


def scores_folder(experiment: Experiment, step: int | None = None) -> Path:
    """Returns the folder of scores and report: that of the run, a trial or a step."""
    folder = decodes_folder(experiment, step)
    return experiment.folder if folder.name == "decodes" else folder


def command_of(experiment: Experiment, *words: str) -> str:
    """Returns a command to paste, for this run with this decoding."""
    return pasted(*words, f"--model_dir={experiment.model_dir}", *trial_flags(experiment))


def trial_flags(experiment: Experiment) -> list[str]:
    """Returns the flags that select this decoding: none for the run's own."""
    differ = experiment.decoding.differing(run_folder.decoding_of(experiment.folder))
    return [f"--gin.experiment.Decoding.{name}={value!r}" for name, value in differ.items()]


def made_by(experiment: Experiment, cache: Cache, step: int) -> dict[str, Any]:
    """Returns, as JSON, everything that decides a step's translations."""
    factors = {"length_factors": cache.length_factors} if cache.length_factors else {}
    about = {"step": step, "vocabulary": cache.vocabulary.fingerprint}
    return {**experiment.decoding.search(), **factors, **about}


def loaded(
    experiment: Experiment, step: int | None = None, job: str = "m4 decode"
) -> tuple[Translator, dict[str, Any]]:
    """Returns the model of a step (default: the latest), and all that decides its translations.

    The model is sharded over the experiment's mesh. If the devices cannot make that, it is on the
    first one, and stderr says why; with several processes, that is an error.
    """
    folder, cache = experiment.folder / "checkpoints", open_vocabulary(experiment)
    parts = build(experiment, cache)
    together = distributed.is_distributed()
    layout = parts.layout() if together else parts.layout_or_first_device(job)
    params, found, _ = restore_params(parts.model, folder, step, cache.vocabulary, layout)
    # Another run, or a mean, may have the same step.
    about = made_by(experiment, cache, found) | {"checkpoint": digest(folder, found)}
    return parts.ready(params, experiment.decoding, layout), about


def open_for(experiment: Experiment, split: str) -> Cache:
    """Returns the corpus or, for a separate test set, only the run's vocabulary."""
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
    """Returns direction -> (source, reference) per sentence, or (source, reference, fields)."""
    if portion.split in SPLITS:
        return portion.pairs(cache)
    name = portion.split
    testset = experiment.testsets[name]
    asked = portion.directions or cache.directions
    chosen = directions_for(name, testset, asked)
    say_lacking(f"testset {name}", asked, chosen, refused=bool(portion.directions))
    found = {}
    for ours, theirs in chosen.items():
        segments = segments_for(name, testset, theirs)
        rows = [(one.source, one.references[0], one.more()) for one in segments]
        found[ours] = portion.chosen(rows)
    return found


def say_lacking(what: str, asked: Sequence[str], there: Container[str], *, refused: bool) -> None:
    """Reports directions without references; raises InputError if `refused`."""
    if lacking := [direction for direction in asked if direction not in there]:
        shown = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        said = f"{what}: has no references for {shown}"
        if refused:
            raise InputError(said)
        if distributed.is_primary():
            print(f"{said} ({len(lacking)} of {len(asked)} directions)", file=sys.stderr)


def subsets(experiment: Experiment, cache: Cache, portion: Portion, within: str = "") -> Subsets:
    """Returns the subsets of a split, or for a test set which sentences training saw.

    A sentence is "seen" if its source or a reference is in the training text, up to case, width and
    spacing. The marks are saved with the translations, or in the folder `within`.
    """
    if portion.split in SPLITS:
        return portion.subsets(cache)
    pairs, name = sentences(experiment, cache, portion), portion.name
    texts = {
        direction: [[row[0], row[1], *row[2].get("references", ())] for row in rows]
        for direction, rows in pairs.items()
    }
    of = hashlib.sha256(json.dumps([cache.fingerprint, texts]).encode()).hexdigest()
    path = decodes_folder(experiment) / within / f"seen.{name}.json"
    kept = read_json(path, _MARKS) if path.is_file() else {}
    if kept.get("of") != of:
        folder = local_place(place_of(experiment)) / cache.fingerprint
        trained_on = [text_file(folder, "train", code) for code in cache.languages()]
        if not all(path.is_file() for path in trained_on):
            print(f"{name}: not compared with the training text, which is not in {folder}",
                  file=sys.stderr)  # fmt: skip
            return {}
        kept = {"of": of, "seen": _seen(texts, trained_on)}
        write_json(path, kept)
    counts = {direction: sum(marks) for direction, marks in kept["seen"].items()}
    if found := [f"{direction} {count:,}" for direction, count in counts.items() if count]:
        print(f"{name}: sentences of training text, which subset unseen leaves out: "
              f"{some(found, _SHOWN)}", file=sys.stderr)  # fmt: skip
    return {direction: {"seen": marks} for direction, marks in kept["seen"].items() if any(marks)}


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


class PortionDecoder:
    """A run's model, and the sentences to translate with one checkpoint after the other.

    The program is compiled once, with parameters as arguments. `pairs` has the (source, reference)
    of each sentence by direction.
    """

    def __init__(self, experiment: Experiment, portion: Portion) -> None:
        """Raises InputError for impossible sizes, or a direction that the corpus lacks."""
        self.experiment, self.portion = experiment, portion
        self.cache = open_for(experiment, portion.split)
        self.pairs = sentences(experiment, self.cache, portion)
        self.parts = build(experiment, self.cache)
        self._layout = self.parts.layout()  # refused before anything is translated

    def missing(self, step: int, folder: Path) -> list[str]:
        """Returns the directions without translations by this step in `folder`."""
        about = made_by(self.experiment, self.cache, step)
        return missing(folder, self.portion.name, self.pairs, about)

    def restored(self, step: int) -> Translator:
        """Returns the model with the parameters of a step."""
        at = self.experiment.folder / "checkpoints", step, self.cache.vocabulary
        params, *_ = restore_params(self.parts.model, *at, self._layout)
        decoding = self.experiment.decoding
        if decoding.prefix is not None:
            prefix = self.experiment.data.corpus.cleaning.normalise(decoding.prefix)
            decoding = dataclasses.replace(decoding, prefix=prefix)
        return self.parts.ready(params, decoding, self._layout)

    def decode(self, step: int, folder: Path, through: str | None = None) -> None:
        """Translates the directions missing in `folder` with the checkpoint of a step.

        All processes call it; the primary one writes and warns.

        Args:
            through: Pivot language: sources are translated into it and then into the target. Only
                directions whose two halves are trained are translated.
        """
        cache, pairs, split = self.cache, self.pairs, self.portion.name
        of = made_by(self.experiment, cache, step)
        if through is not None:
            of |= {"through": through}
            pairs = {direction: rows for direction, rows in pairs.items()
                     if {*halves(direction, through)} <= {*cache.directions}}  # fmt: skip
        trained, counter, batches = self.restored(step), None, BatchCounts()
        if self.parts.model.encoder_experts is not None and {*pairs} <= {*cache.directions}:
            about = {"split": split, "made_by": of, "train_pairs": train_pairs(cache)}
            path = folder / f"atlas.{split}.json"
            counter = RoutingCounter(path, cache.directions, trained, about)
        name, cut = f"decode {self.portion.split}", list[int]()
        count = sum(map(len, pairs.values())) * (1 if through is None else 2)
        numbers = {direction: number for number, direction in enumerate(cache.directions)}

        def on_batch(batch: Batch, best_BT: np.ndarray) -> None:
            batches(batch, best_BT)
            bar.update(batches.sentences, f"{batches.tokens / batches.seconds:,.0f} tokens/s")
            if counter is not None:
                counter(batch, best_BT)

        def translate(sources: Sequence[str], directions: list[str]) -> list[dict[str, Any]]:
            if counter is not None:
                counter.starting(directions)
            found = translations(
                trained, sources,
                directions=[numbers[direction] for direction in directions]
                if numbers.keys() >= {*directions} else None,
                on_cut=lambda i, *_: cut.append(i), on_batch=on_batch,
            )  # fmt: skip
            if counter is not None and distributed.is_primary():
                counter.save()
            rows = [{"hypothesis": each.texts[0]} for each in found]
            if trained.decoding.n_best == 1:
                return rows
            each = zip(rows, directions, found, strict=True)
            return [{**row, "direction": name, **as_json(one)} for row, name, one in each]

        with ProgressBar(name, count, "sentences") as bar:
            search = self._normalised(translate)
            if through is not None:
                search = pivoted(search, through)
            decode_to_files(search, folder, split, pairs, of)
            bar.update(bar.total)
        if not distributed.is_primary():
            return
        if batches.sentences:
            print(f"{name}: {batches.said()}")
        if unended := Counter(limit for _, limit in batches.unended):
            print(f"{name}: {cut_said(unended, trained.decoding, trained.factors)}")
        if cut:
            most = f"Decoding.max_source_length = {trained.decoding.max_source_length}"
            warn(f"{name}: {len(cut)} sources were cut to {most} pieces")

    def _normalised(self, translate: Translate) -> Translate:
        """Returns a decoder that first normalises text of a test set like training text."""
        if self.portion.split in SPLITS:
            return translate
        normalise = self.experiment.data.corpus.cleaning.normalise

        def translated(tagged: list[str], directions: list[str]) -> list[dict[str, Any]]:
            parts = (text.partition(" ") for text in tagged)
            return translate([f"{tag} {normalise(text)}" for tag, _, text in parts], directions)

        return translated


def halves(direction: str, through: str) -> tuple[str, str]:
    """Returns the two directions of a pivot: ("fr-wo", "en") -> ("fr-en", "en-wo")."""
    source, target = split_direction(direction)
    return f"{source}-{through}", f"{through}-{target}"


def pivoted(translate: Translate, through: str) -> Translate:
    """Returns a decoder in two passes, through the language `through`."""

    def translated(tagged: list[str], directions: list[str]) -> list[dict[str, Any]]:
        into, out_of = zip(*(halves(each, through) for each in directions), strict=True)
        texts = [text.partition(" ")[2] for text in tagged]
        between = translate([tag(text, through) for text in texts], [*into])
        texts = [row["hypothesis"] for row in between]
        targets = [split_direction(each)[1] for each in directions]
        found = translate([*map(tag, texts, targets)], [*out_of])
        return [{**row, "through": text} for row, text in zip(found, texts, strict=True)]

    return translated


def decode(
    experiment: Experiment, *, split: str = "test", step: int | None = None,
    sentences: int | None = None, t5x: bool = False,
) -> Path:  # fmt: skip
    """Translates a split in all directions; returns the folder of the translations.

    Existing translations with the same settings are kept. Several processes search together; the
    primary one writes.
    """
    folder = experiment.folder
    build(experiment, None).placed_params()  # sizes that cannot be are refused
    found = trained_step(folder, step)
    decodes = decodes_folder(experiment, step)
    portion = Portion(split, sentences, test_sentences=experiment.decoding.test_sentences)
    decoder = PortionDecoder(experiment, portion)
    decoder.decode(found, decodes)
    if t5x and distributed.is_primary():
        written = write_tasks(decodes, portion.name, decoder.pairs)
        print(f"{decodes / 't5x'}: {len(written)} files of T5X's tasks")
    return decodes


def score(experiment: Experiment, *, split: str = "test", step: int | None = None) -> None:
    """Scores the references of a split in all directions.

    A direction's file is logprob-<split>.<direction>.jsonl, with a line per sentence. Existing
    files with the same settings are kept.
    """
    build(experiment, None).placed_params()  # sizes that cannot be are refused
    found, folder = trained_step(experiment.folder, step), decodes_folder(experiment, step)
    portion = PortionDecoder(experiment, Portion(split))
    cache, pairs, trained = portion.cache, portion.pairs, portion.restored(found)
    decoding = trained.decoding
    about = {name: getattr(decoding, name) for name in ("alpha", "max_source_length")}
    about |= {"step": found, "vocabulary": cache.vocabulary.fingerprint}

    with ProgressBar(f"score {split}", sum(map(len, pairs.values())), "sentences") as bar:

        def scored(sources: list[str], directions: list[str]) -> list[dict[str, Any]]:
            chosen = dict.fromkeys(directions)
            targets = [reference for each in chosen for _, reference in pairs[each]]
            given = score_references(
                trained, sources, targets,
                directions=[cache.directions.index(each) for each in directions],
                progress=bar.update,
            )  # fmt: skip
            return [each._asdict() for each in given]

        decode_to_files(scored, folder, f"logprob-{split}", pairs, about)
        bar.update(bar.total)
    for direction in pairs if distributed.is_primary() else ():
        path = folder / f"logprob-{split}.{direction}.jsonl"
        rows = read_jsonl(path)
        tokens = sum(row["tokens"] for row in rows)
        nats = -sum(row["logprob"] for row in rows) / tokens
        print(f"{path}: {nats:.3f} nats a token, {len(rows):,} sentences of {tokens:,} tokens")


def score_files(
    experiment: Experiment, source: Path, target: Path, to: str, language: str | None = None
) -> Iterator[dict[str, Any]]:
    """Scores each line of `target` as a translation of the same line of `source`."""
    sources, targets = aligned_lines(source, target)
    ready = dataclasses.replace(loaded(experiment)[0], source=language)
    check_language(to, ready.languages)
    given = score_references(
        ready, [tag(ready.normalise(line), to) for line in sources],
        [ready.normalise(line) for line in targets],
        directions=ready.directions([to] * len(sources)),
    )  # fmt: skip
    for line, translation, each in zip(sources, targets, given, strict=True):
        yield {"source": line, "target": translation, "to": to, **each._asdict()}
