"""Puts kept bilingual models back where `m4 baselines` looks for them, to train the others alone.

These are their result.json, and their translations with the sentences of the corpus, which must be
there. Checkpoints are not kept: these models cannot be trained on or translate anything else.
"""

import hashlib
from pathlib import Path

from m4.eval.decoding.hypotheses import hypotheses_path
from m4.eval.decoding.testsets import Portion
from m4.eval.scoring.delta import BILINGUAL
from m4.experiment import Experiment
from m4.jobs.bilingual import plans_of
from m4.jobs.corpus import open_corpus
from m4.settings import InputError
from m4.storage.files import write_json, write_jsonl
from scripts.results import kept


def restore(folder: Path, experiment: Experiment) -> list[str]:
    """Writes the kept baselines of the experiment's recipe to its `Baselines.folder`.

    Returns a line on what was done. A baseline that is there is left as it is.

    Raises:
        InputError: the corpus has other test sentences than the kept translations are of.
    """
    cache = open_corpus(experiment)
    plans = {plan.folder.name: plan for plan in plans_of(experiment, cache).values()}
    pairs = Portion(kept.SPLIT, test_sentences=experiment.decoding.test_sentences).pairs(cache)
    texts = kept.read(folder, BILINGUAL).hypotheses
    others, there, written = [], 0, 0
    for row in kept.baselines(folder):
        direction, plan = row["direction"], plans.get(row["folder"])
        if plan is None:
            others.append(row["folder"])
            continue
        if (plan.folder / "result.json").is_file():
            there += 1
            continue
        lines = [
            {"source": source, "reference": reference, "hypothesis": text}
            for (source, reference, *_), text in zip(
                pairs[direction], texts[direction], strict=True
            )
        ]
        path = hypotheses_path(plan.folder / "decodes", kept.SPLIT, direction)
        write_jsonl(path, lines)
        if hashlib.sha256(path.read_bytes()).hexdigest() != row["note"]["hypotheses_sha256"]:
            path.unlink()
            raise InputError(f"{direction}: the corpus has other test sentences than those kept")
        write_json(path.with_suffix(".json"), row["note"], indent=1)
        write_json(plan.folder / "result.json", row["result"], indent=1)
        written += 1
    notes = [f"{written} baselines written, {there} were there"]
    if others:
        notes.append(f"{len(others)} of another recipe or corpus left out: {', '.join(others[:6])}")
    return notes
