"""`m4 score`: how probable given translations are, of the test sets or of a user's files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m4.build import build
from m4.data.preprocess import tag
from m4.eval.decoding.hypotheses import decode_to_files
from m4.eval.decoding.score_references import score_references
from m4.eval.decoding.testsets import Portion
from m4.eval.decoding.translate import check_language
from m4.eval.text import aligned_lines
from m4.experiment import Experiment
from m4.jobs.decoding.testsets import PortionDecoder, decodes_folder, loaded, trained_step
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.storage.files import read_jsonl


def score(experiment: Experiment, *, split: str = "test", step: int | None = None) -> Path:
    """Scores the references of a split of all directions; returns the folder of the files.

    A direction's file is logprob-<split>.<direction>.jsonl, a line {"source", "reference",
    "logprob", "tokens", "score"} a sentence. What is there and was made with the same settings is
    left as it is. The arguments are those of `m4.jobs.decoding.testsets.decode`.
    """
    folder = experiment.folder
    build(experiment, None).check_decoding()
    found = distributed.on_primary_then_broadcast("checkpoints", lambda: trained_step(folder, step))
    portion = PortionDecoder(experiment, Portion(split))
    cache, pairs, trained = portion.cache, portion.pairs, portion.restored(found)
    decoding = trained.decoding
    made_by = {name: getattr(decoding, name) for name in ("alpha", "max_source_length")}
    made_by |= {"step": found, "vocabulary": cache.vocabulary.fingerprint}

    with ProgressBar(f"score {split}", sum(map(len, pairs.values())), "sentences") as bar:

        def scored(sources: list[str], directions: list[str]) -> list[dict[str, Any]]:
            chosen = dict.fromkeys(directions)
            targets = [reference for each in chosen for _, reference in pairs[each]]
            given = score_references(
                trained, sources, targets,
                directions=[cache.directions.index(each) for each in directions],
                progress=lambda done, *_: bar.update(done),
            )  # fmt: skip
            return [each._asdict() for each in given]

        folder = decodes_folder(experiment, step)
        decode_to_files(scored, folder, f"logprob-{split}", pairs, made_by)
        bar.update(bar.total)
    for direction in pairs if distributed.is_primary() else ():
        path = folder / f"logprob-{split}.{direction}.jsonl"
        rows = read_jsonl(path)
        tokens = sum(row["tokens"] for row in rows)
        nats = -sum(row["logprob"] for row in rows) / tokens
        print(f"{path}: {nats:.3f} nats a token, {len(rows):,} sentences of {tokens:,} tokens")
    return folder


def score_files(
    experiment: Experiment, source: Path, target: Path, to: str, language: str | None = None
) -> Iterator[dict[str, Any]]:
    """Scores each line of `target` as a translation of that line of `source` into `to`.

    Both are read and normalised as `m4 decode --input` does.
    """
    sources, targets = aligned_lines(source, target)
    ready = dataclasses.replace(loaded(experiment)[0], source=language)
    check_language(to, ready.languages)
    given = score_references(
        ready, [tag(ready.normalise(line), to) for line in sources],
        [ready.normalise(line) for line in targets], directions=ready.directions(to, len(sources)),
    )  # fmt: skip
    for line, translation, each in zip(sources, targets, given, strict=True):
        yield {"source": line, "target": translation, "to": to, **each._asdict()}
