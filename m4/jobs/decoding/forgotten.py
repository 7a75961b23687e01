"""Forgetting: runs against the models that they begin from, by the translations of both."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from m4.data.directions import key_of, pair_of
from m4.eval.decoding.hypotheses import (
    hypotheses_path,
    other_search,
    same_sentences,
    search_of,
    steps_of,
)
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.scoring.delta import Delta
from m4.eval.scoring.forgetting import changes
from m4.eval.scoring.score import System
from m4.jobs.checkpoints.initial import name_and_step
from m4.settings import pasted
from m4.storage import run_folder
from m4.storage.local_copy import fetched

_SPLIT = "test"


def forgotten(
    runs: Sequence[tuple[Path, System]], train_pairs: Mapping[str, int]
) -> dict[str, list[Delta]]:
    """Returns run -> changes of the directions that it keeps; runs that keep none are left out.

    Where the old model has not translated them with the run's settings, a line on stderr says which
    command does.
    """
    found = {}
    for folder, system in runs:
        record = run_folder.read(folder) if (folder / "run.json").is_file() else {}
        about = record.get("initial") or {}
        if not (kept := about.get("kept")):
            continue
        name, step = name_and_step(about["run"])[0], about["step"]
        old = fetched(name, lambda file: file.startswith(("decodes/", "run.json")))
        places = [old / "decodes", *sorted((old / "decodes").glob("**/"))]
        at = next((place for place in places if _fits(place, system.decodes, kept, step)), None)
        if at is None:
            flags = [
                f"--gin.experiment.Decoding.{setting}={value!r}"
                for setting, value in record["decoding"].items()
                if value != run_folder.decoding_of(old).get(setting) and setting != "batch_rows"
            ]
            remedy = pasted("decode", f"--model_dir={name}", f"--step={step}", *flags)
            print(
                f"what {system.name} forgets is not known: {name} has not translated the test sets "
                f"of {', '.join(kept[:3])} as it has; `{remedy}` does (docs/initial.md)",
                file=sys.stderr,
            )
            continue
        pairs = {key: train_pairs.get(key, 0) for key in (key_of(pair_of(one)) for one in kept)}
        before = System(Path(name).name, at)
        found[system.name] = changes(before, system, kept, DEFAULTS.metrics[0], pairs)
    return found


def _fits(folder: Path, decodes: Path, directions: Sequence[str], step: int) -> bool:
    """Returns whether a step has translated the sentences of `decodes` with the same search."""
    steps = steps_of(folder, _SPLIT) if folder.is_dir() else {}
    return (
        all(steps.get(name) == step for name in directions)
        and same_sentences(folder, decodes, _SPLIT, directions)
        and all(
            other_search(folder, _SPLIT, [name], search) is None
            for name in directions
            if (search := search_of(hypotheses_path(decodes, _SPLIT, name))) is not None
        )
    )
