"""What runs forget of the models that they begin from, by the translations of both."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from m4.data.preprocess import language_of
from m4.eval.decoding.hypotheses import hypotheses_path, other_search, search_of, steps_of
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.scoring.delta import Delta
from m4.eval.scoring.forgetting import changes
from m4.eval.scoring.score import System
from m4.jobs.checkpoints.initial import name_and_step
from m4.settings import InputError, pasted
from m4.storage import run_folder
from m4.storage.local_copy import fetched

_SPLIT = "test"


def forgotten(
    runs: Sequence[tuple[Path, System]], train_pairs: Mapping[str, int]
) -> dict[str, list[Delta]]:
    """Returns run -> changes of the directions that it keeps; runs that keep none are left out.

    Where the old model has not translated them, a line on stderr says which command does.

    Args:
        runs: Run folder and translations.

    Raises:
        InputError: Translations are of other sentences or another search, or damaged.
    """
    found = {}
    for folder, system in runs:
        about = run_folder.read(folder).get("initial") if (folder / "run.json").is_file() else None
        if not about or not (kept := about.get("kept")):
            continue
        name, step = name_and_step(about["run"])[0], about["step"]
        decodes = fetched(name, lambda file: file.startswith("decodes/")) / "decodes"
        places = [decodes / str(step), decodes]
        at = next((place for place in places if _made(place, kept, step)), None)
        if at is None:
            remedy = pasted("decode", f"--model_dir={name}", f"--step={step}")
            print(
                f"what {system.name} forgets is not known: {name} has not translated "
                f"{', '.join(kept[:3])}; `{remedy}` does (docs/initial.md)",
                file=sys.stderr,
            )
            continue
        search = search_of(hypotheses_path(system.decodes, _SPLIT, kept[0])) or {}
        if search and (other := other_search(at, _SPLIT, kept, search)):
            raise InputError(f"{other}; translate both with the same settings")
        old = System(Path(name).name, at)
        pairs = {code: train_pairs.get(code, 0) for code in map(language_of, kept)}
        found[system.name] = changes(old, system, kept, DEFAULTS.metrics[0], pairs)
    return found


def _made(folder: Path, directions: Sequence[str], step: int) -> bool:
    """Returns whether a step has translated the test sets of all directions."""
    steps = steps_of(folder, _SPLIT) if folder.is_dir() else {}
    return all(steps.get(name) == step for name in directions)
