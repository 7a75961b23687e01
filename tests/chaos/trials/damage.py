"""Files truncated, emptied, deleted, swapped and bit-flipped: of every kind that a run has."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.forks import Ended, in_child
from tests.chaos.trial import Trial, again, bad_end, changed, said
from tests.chaos.world import World, job, main

# State -> the job that is run on the damaged folder, and which of its files may be damaged.
JOBS = {
    "half": ("train", r"(?!baselines/|decodes/)"),
    "finished": (
        "decode",
        r"checkpoints/6|data/\w+/(text/test|[mv])|vocabulary/|run\.json|config\.gin",
    ),
    "compared": (
        "report",
        r"baselines/|decodes/|metrics|run\.json|checkpoints/6/note|data/\w+/text/test",
    ),
    "whole": ("report", r"[^/]+$|decodes/"),
    "score": ("score", r"decodes/logprob|checkpoints/6|data/\w+/(text/test|[mv])|config\.gin"),
    "text": ("text", r"checkpoints/6|vocabulary/|run\.json|config\.gin"),
    "average": ("average", r"mean/|checkpoints/[46]|vocabulary/|run\.json|config\.gin"),
}


def kind_of(name: str) -> str:
    """A file's kind: its name without languages, steps and hashes."""
    name = re.sub(r"\b[0-9a-f]{32}\b", "HASH", name)
    name = re.sub(r"^baselines/[^/]+/", "baselines/LANGUAGE/", name)
    name = re.sub(r"(?<=checkpoints/)\d+", "STEP", name)
    name = re.sub(r"(?<=decodes/)(bilingual/|logprob-)?test\.[\w-]+\.", r"\1test.DIRECTION.", name)
    return re.sub(r"(?<=text/)(train|dev|test)\.\w+\.", r"\1.LANGUAGE.", name)


def row_of(name: str) -> str:
    """The table's row: what a file is for."""
    for pattern, row in (
        (r"baselines/", "baselines"),
        (r"(mean/)?checkpoints/", "checkpoints"),
        (r"data/|vocabulary/", "corpus, token cache, vocabulary"),
        (r"decodes/", "decodes"),
        (r".*run\.json|.*\.gin$", "run.json, config.gin"),
    ):
        if re.match(pattern, name):
            return row
    return "metrics, heartbeat, scores, report"


def files_of(folder: Path, pattern: str = "") -> list[str]:
    """All files of a run but its locks, by name."""
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    return [name for name in names if "/.lock" not in f"/{name}" and re.match(pattern, name)]


def truncated(folder: Path, name: str, draw: random.Random) -> str:
    """Cuts the end off."""
    size = (folder / name).stat().st_size
    kept = draw.randrange(size) if size else 0
    os.truncate(folder / name, kept)
    return f"to {kept} of {size} bytes"


def emptied(folder: Path, name: str, _draw: random.Random) -> str:
    os.truncate(folder / name, 0)
    return ""


def deleted(folder: Path, name: str, _draw: random.Random) -> str:
    (folder / name).unlink()
    return ""


def swapped(folder: Path, name: str, draw: random.Random) -> str:
    """Exchanges it with another one of its kind, or of its name, or any."""
    whole = (folder / name).read_bytes()
    others = [one for one in files_of(folder) if (folder / one).read_bytes() != whole]
    of_kind = [one for one in others if kind_of(one) == kind_of(name)]
    of_name = [one for one in others if Path(one).name == Path(name).name]
    of_ending = [one for one in others if Path(one).suffix == Path(name).suffix]
    other = draw.choice(of_kind or of_name or of_ending or others)
    (folder / name).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(whole)
    return f"with {other}"


def flipped(folder: Path, name: str, draw: random.Random) -> str:
    """Flips one bit."""
    content = bytearray((folder / name).read_bytes())
    if not content:
        return "nothing in it"
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    return f"bit {bit}"


DAMAGES = {one.__name__: one for one in (truncated, emptied, deleted, swapped, flipped)}


def cases(world: World, draw: random.Random) -> list[tuple[str, str, str]]:
    """(state, file, damage): each kind of file and damage once a state, in a drawn order in which
    the table's rows take turns."""
    by_row: dict[str, list[tuple[str, str, str]]] = {}
    for state, (_, pattern) in JOBS.items():
        by_kind: dict[str, list[str]] = {}
        for name in files_of(world.state(state), pattern):
            by_kind.setdefault(kind_of(name), []).append(name)
        for names in by_kind.values():
            for damage in DAMAGES:
                name = draw.choice(names)
                by_row.setdefault(row_of(name), []).append((state, name, damage))
    for row in by_row.values():
        draw.shuffle(row)
    most = max(map(len, by_row.values()))
    return [row[turn] for turn in range(most) for row in by_row.values() if turn < len(row)]


def damage(world: World, case: tuple[str, str, str], draw: random.Random) -> Trial:
    """Damages one file and runs the job that comes next.

    Where the job is refused, the file is put back, and the same command must give the undisturbed
    result: nothing else was lost.
    """
    state, name, how = case
    job_name = JOBS[state][0]
    world.begin(state)
    detail = DAMAGES[how](world.run, name, draw)
    trial = Trial(row_of(name), how, f"{job_name}: {name} {how} {detail}".strip(), "", "", state)
    ended = job(job_name, world.run)
    names = [name, *(re.findall(r"with (\S+)$", detail) if how == "swapped" else [])]
    verdict, text = judged(world, job_name, names, ended)
    if verdict in ("named", "unnamed", "traceback") and ended.status != 0:
        for one in names:
            put_back(world, state, one)
        after = again(world, trial, job_name)
        if after.verdict != "survived":
            verdict, text = "lost", f"{text}; put back: {after.verdict}, {after.said}"
    return Trial(trial.category, how, trial.detail, verdict, text, state)


def of_programs(world: World, how: str, draw: random.Random) -> Trial:
    """Damages one of the compiled programs that training takes from its cache.

    Such a file is not the user's work: whatever is with it, training must not be wrong.
    """
    world.begin("half")
    programs = world.base / "damaged_programs"
    shutil.rmtree(programs, ignore_errors=True)
    shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], programs)
    name = draw.choice(files_of(programs, r"jit_train_step.*-cache"))
    detail = f"train: {name[:24]} {how} {DAMAGES[how](programs, name, draw)}"

    def work() -> int:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(programs))
        return main("train", world.run)

    ended = in_child(work)
    verdict, text = judged(world, "train", [name], ended)
    if ended.status is None or ended.status < 0:
        verdict = "traceback"
    return Trial("compiled programs", how, detail, verdict, text, "half")


def put_back(world: World, state: str, name: str) -> None:
    (world.run / name).parent.mkdir(parents=True, exist_ok=True)
    (world.run / name).write_bytes((world.state(state) / name).read_bytes())


def judged(world: World, job_name: str, names: Sequence[str], ended: Ended) -> tuple[str, str]:
    """(verdict, what was said or differs) of a job on a folder with damaged files."""
    if (bad := bad_end(ended)) is not None:
        return bad, said(ended)
    named = any(names_it(ended.out + ended.err, name) for name in names)
    if ended.status != 0:
        return ("named" if named else "unnamed"), said(ended)
    try:
        other = changed(world, job_name)
    except RuntimeError as error:  # what the job left cannot be read
        other = [str(error).strip().splitlines()[-1]]
    # A file that the job does not read stays as it is; its results must be right.
    other = [one for one in other if one not in names or one.endswith(".jsonl")]
    if not other:
        return "survived", said(ended) if named else ""
    return ("named" if named else "silent"), ", ".join(other[:4])


def names_it(text: str, name: str) -> bool:
    """Whether a message names the file, or the checkpoint, corpus or model that it is a part of, or
    the direction whose translations are in it."""
    text = text.replace("\n", "")  # rich breaks long lines
    wholes: list[str] = re.findall(
        r"^(?:.*/)?checkpoints/\d+|^(?:.*/)?data(?=/)|^baselines/[^/]+|^vocabulary(?=/)", name
    )
    if any(one in text for one in [name, *wholes]):
        return True
    direction = re.search(r"decodes/(?:.*/|logprob-)?test\.(\w+-\w+)\.", name)
    return direction is not None and "decodes" in text and direction[1] in text
