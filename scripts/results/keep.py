"""Collects from run folders what is kept of an experiment; nothing in them is written.

It may be run at any time: what is not trained or translated yet is left out, and a later call adds
it. What an earlier call kept stays, where its run folder is gone.
"""

import ast
import datetime
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.cleaning.language_id import Py3langid, installed
from m4.data.directions import languages_of, pair_of
from m4.eval.decoding.hypotheses import check_hypotheses, steps_of
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.decoding.testsets import train_pairs
from m4.eval.scoring.delta import BILINGUAL
from m4.eval.scoring.rates import rates, read_rates
from m4.eval.scoring.score import COPY, Decode, Measured, System, find_decodes, measure
from m4.jobs.decoding.evaluate import tested
from m4.settings import InputError
from m4.storage import run_folder
from m4.storage.files import read_json, write_json, write_jsonl, write_text
from m4.storage.metrics_log import read_metrics
from scripts.results import kept, zero_shot
from scripts.results.kept import Asked, Kept

# Rows of a run's metrics.jsonl that are kept, at even distances; those with dev scores are in
# addition.
_ROWS = 60


def keep(asked: Asked, base: Path) -> list[str]:
    """Keeps what there is of each system; returns a line on each.

    Paths of runs in experiment.toml are relative to `base`.

    Raises:
        InputError: translations are damaged, or of other test sentences than those kept; two
            baselines of one language.
    """
    folder = asked.folder
    sizes = kept.languages(folder)
    for run in asked.runs.values():
        if (manifest := base / run / "vocabulary" / "manifest.json").is_file():
            sizes |= train_pairs(Cache(manifest.parent))
    if not sizes:
        raise InputError(f"{base}: none of {', '.join(asked.runs.values())} has begun to train")
    kept.write_languages(folder, sizes)
    lines, found = [], []
    for name, run in asked.runs.items():
        one, line = _run(asked, name, base / run)
        lines.append(line)
        if one is not None:
            found.append(one)
        for part in zero_shot.PARTS if asked.zero_shot else ():
            decodes = base / run / "decodes" / part
            if decodes.is_dir():
                steps = steps_of(decodes, kept.SPLIT)
                system = System(f"{name}_{part}", decodes, checkpoint_step=steps)
                found.append(_score(system, sorted(steps)))
                lines.append(f"{system.name}: {len(steps)} directions")
    with tempfile.TemporaryDirectory() as temporary:
        gathered = Path(temporary)
        results = _gather(base / asked.baselines, gathered) if asked.baselines else {}
        if results:
            steps = steps_of(gathered, kept.SPLIT)
            system = System(BILINGUAL, gathered, checkpoint_step=steps)
            found.append(_score(system, sorted(results)))
            _keep_baselines(folder, results)
        _keep_scores(folder, found, sizes)
    if not asked.baselines:
        return lines
    have = len(kept.read(folder, BILINGUAL).directions)
    return [*lines, f"{BILINGUAL}: {have} of {len(sizes)} ({len(results)} found now)"]


def _score(system: System, directions: Sequence[str]) -> tuple[System, Measured]:
    return system, measure([system], DEFAULTS.metrics, kept.SPLIT, directions=directions)


def _run(asked: Asked, name: str, run: Path) -> tuple[tuple[System, Measured] | None, str]:
    """Returns a trained run, scored, and a line on it.

    Config, curve and facts are kept as soon as it has trained, translations when all directions
    have them.
    """
    if not (run / "run.json").is_file():
        there = kept.read(asked.folder, name).directions
        return None, f"{name}: {run} is not there" + (", what was kept stays" if there else "")
    place = kept.of(asked.folder, name)
    rows = read_metrics(run)
    config = run_folder.read(run)["config"]
    mixture = ast.literal_eval(config.get("corpus.CorpusSpec.mixture", "None"))
    directions = sorted(tested(Cache(run / "vocabulary", mixture)))
    translated = find_decodes(run / "decodes", kept.SPLIT) if (run / "decodes").is_dir() else {}
    write_text(place / "config.gin", without_paths((run / "config.gin").read_text("utf-8")))
    if rows:  # weights alone have none
        write_jsonl(place / "metrics.jsonl", thinned(rows, directions))
    at = steps_of(run / "decodes", kept.SPLIT).values() if translated else ()
    step = rows[-1]["step"] if rows else max(at, default=0)  # only weights, without rows
    about = {**_about(run, rows, translated), "step": step}
    write_json(place / "about.json", about, indent=1)
    if lacking := [direction for direction in directions if direction not in translated]:
        return None, f"{name}: step {step}; {len(lacking)} directions are not translated yet"
    check_hypotheses(run / "decodes", kept.SPLIT, directions, f"m4 decode --model_dir={run}")
    steps = steps_of(run / "decodes", kept.SPLIT)
    if len({steps.get(direction) for direction in directions}) > 1:
        raise InputError(
            f"{run}/decodes: translations by several checkpoints; m4 decode them again"
        )
    return _score(System(name, run / "decodes", checkpoint_step=steps), directions), (
        f"{name}: step {step}, {len(directions)} directions"
    )


def _about(run: Path, rows: Sequence[Mapping[str, Any]], translated: Mapping[str, Path]) -> dict:
    record = run_folder.read(run)
    levels = {key.rsplit(".", 1)[1]: int(value) for key, value in record["config"].items()
              if key.startswith("experiment.ResourceLevels.")}  # fmt: skip
    newest = max((path.stat().st_mtime for path in [*translated.values(), run / "metrics.jsonl"]
                  if path.is_file()), default=None)  # fmt: skip
    return {
        "machine": record["machine"],
        "versions": record["versions"],
        "levels": levels,
        "training_hours": round(hours(rows), 2),
        "date": newest and datetime.datetime.fromtimestamp(newest, datetime.UTC).date().isoformat(),
    }


def hours(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns hours in training steps; a row has the mean of the steps since the one before."""
    total, before = 0.0, 0
    for row in rows:
        if "step_seconds" in row:
            total += (row["step"] - before) * row["step_seconds"]
            before = row["step"]
    return total / 3600


def without_paths(text: str) -> str:
    """Returns a config without the folders of this machine: last parts of absolute paths."""
    return re.sub(r"""(['"])/[^'"\n]*?([^/'"\n]+)/?\1""", r"\1\2\1", text)


def thinned(rows: Sequence[dict[str, Any]], directions: Sequence[str]) -> list[dict[str, Any]]:
    """Returns every n-th row, the last one and those with dev scores.

    Values of single directions, experts or layers are left out.
    """
    every = max(1, len(rows) // _ROWS)
    names = {*directions, *map(pair_of, directions)}

    def shown(key: str) -> bool:
        head, _, tail = key.partition("/")
        return tail not in names and head not in ("moe", "load", "share")

    return [
        {key: value for key, value in row.items() if shown(key)}
        for number, row in enumerate(rows, 1)
        if number % every == 0 or number == len(rows) or any(key.startswith("dev/") for key in row)
    ]


def _gather(baselines: Path, gathered: Path) -> dict[str, dict[str, Any]]:
    """Copies the translations of all finished baselines into one folder.

    Returns direction -> what is to be kept of its model.
    """
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(baselines.glob("*/result.json")):
        result = read_json(path, remedy=f"delete {path.parent} to train it again")
        decodes = path.parent / "decodes"
        for direction, texts in find_decodes(decodes, kept.SPLIT).items():
            if direction in results:
                raise InputError(
                    f"{path.parent}: a second baseline of {direction}, next to "
                    f"{results[direction]['folder']}; move the one away that is not of these runs"
                )
            check_hypotheses(
                decodes, kept.SPLIT, [direction], f"m4 baselines, after removing {path}"
            )
            shutil.copyfile(texts, gathered / texts.name)
            note = read_json(decodes / f"{kept.SPLIT}.{direction}.json")
            shutil.copyfile(decodes / f"{kept.SPLIT}.{direction}.json",
                            gathered / f"{kept.SPLIT}.{direction}.json")  # fmt: skip
            results[direction] = {"direction": direction, "folder": path.parent.name,
                                  "result": result, "note": note}  # fmt: skip
    return results


def _keep_baselines(folder: Path, results: Mapping[str, dict[str, Any]]) -> None:
    path = kept.of(folder, BILINGUAL) / "baselines.jsonl"
    rows = {row["direction"]: row for row in kept.baselines(folder)} | dict(results)
    write_jsonl(path, (rows[direction] for direction in sorted(rows)))


def _keep_scores(
    folder: Path, found: Sequence[tuple[System, Measured]], sizes: Mapping[str, int]
) -> None:
    """Counts, translations and rates of the systems, and the counts of the copy."""
    counted = {(row["system"], row["direction"]): row for row in read_rates(folder / "rates.jsonl")}
    copies = kept.read(folder, COPY)
    for system, one in found:
        new, copy = _kept(system, one), _kept(System(COPY, system.decodes), one)
        copies.add(copy)
        if system.name == BILINGUAL:  # one part of the languages at a time
            before = kept.read(folder, system.name)
            before.add(new)
            new = before
        kept.measured([copies, new])  # the same sentences as before, or none of it is kept
        kept.write(folder, new)
        codes = languages_of(map(pair_of, sizes))
        rows = rates(one, Py3langid() if installed() else None, counted.values(), codes)
        counted |= {(row["system"], row["direction"]): row for row in rows}
    if found:
        copies.hypotheses = {}  # the corpus's own sentences
        kept.write(folder, copies)
        write_jsonl(folder / "rates.jsonl", (counted[at] for at in sorted(counted)))


def _kept(system: System, one: Measured) -> Kept:
    """Returns the measurements of a system as they are kept."""
    new = Kept(system.name)
    steps = system.checkpoint_step if isinstance(system.checkpoint_step, Mapping) else {}
    for direction in one.directions(system.name):
        decodes = one.decodes[system.name, direction]
        new.hypotheses[direction] = [row.hypothesis for row in decodes]
        new.directions[direction] = {
            "sentences": len(decodes),
            "test_sha256": _digest(decodes),
            "step": steps.get(direction),
            "signatures": {},
        }
    for (name, direction, metric), statistics in one.statistics.items():
        if name == system.name:
            new.statistics[direction, metric] = statistics.counts
            new.directions[direction]["signatures"][metric] = statistics.signature
    return new


def _digest(decodes: Sequence[Decode]) -> str:
    """Returns the digest of test sentences, as the notes of translations have it."""
    text = json.dumps([[row.source, row.reference] for row in decodes])
    return hashlib.sha256(text.encode()).hexdigest()
